"""What the commands that run a model over text hold in memory, and which of their settings lower it.

The frame is the compile's own (`stepquant.passes.out_of_memory`); these are the shares and settings of `evaluate`,
`analyse` and `harness`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from stepquant.errors import RecipeError
from stepquant.evaluation.settings import AnalyseSettings, EvaluateSettings, HarnessSettings
from stepquant.passes.out_of_memory import Demand, gib, weights_share

if TYPE_CHECKING:
    from stepquant.geometry import Geometry
    from stepquant.models.adapter import LoadedModel
    from stepquant.recipe_sections import ModelSettings


def trace_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of one layer's q, k and v of `tokens` tokens, as they are captured."""
    return 4 * tokens * geometry.num_heads * (2 * geometry.key_dim + geometry.value_dim)


def loading(model: ModelSettings, path: str, device: torch.device) -> Demand:
    """Of a model's weights: they lie somewhere else, or on several GPUs."""
    return Demand((weights_share(replace(model, path=path)),), _places(model, device))


def drift(loaded: LoadedModel, batch: int, length: int) -> Demand:
    """Of `batch` streams in one forward."""
    share = f"batch={batch} streams of {length} tokens took {gib(trace_bytes(loaded.geometry, batch * length))} "
    smaller = f"batch={batch // 2}" if batch > 1 else "fewer tokens with prefill=N and decode=N"
    return Demand((f"{share}for one layer's q, k, v",), (smaller, *_on_cpu(loaded.device)))


def greedy(settings: EvaluateSettings, loaded: LoadedModel) -> Demand:
    """Of greedy generation, which continues all streams at once."""
    streams, prefill = settings.streams, settings.prefill
    traced = gib(trace_bytes(loaded.geometry, streams * prefill))
    share = f"streams={streams} prompts of prefill={prefill} tokens took {traced} for one layer's q, k, v"
    smaller = f"streams={streams // 2}" if streams > 1 else f"prefill={max(prefill // 2, 1)}"
    return Demand((share,), (smaller, *_places(settings.model, loaded.device)))


def analysis(name: str, settings: AnalyseSettings, loaded: LoadedModel, length: int) -> Demand:
    """Of an analysis that watches one stream at a time; a setting that it would refuse is not advised."""
    share = f"a stream of {length} tokens took {gib(trace_bytes(loaded.geometry, length))} for one layer's q, k, v"
    return Demand((share,), (*_shorter(name, settings), *_places(settings.model, loaded.device)))


def _shorter(name: str, settings: AnalyseSettings) -> tuple[str, ...]:
    from stepquant.evaluation.analyses import check_settings

    for key in ("decode", "prefill"):
        value = getattr(settings, key) // 2
        try:
            if value:
                check_settings(name, replace(settings, **{key: value}))
                return (f"{key}={value}",)
        except RecipeError:
            continue
    return ()


def tasks(settings: HarnessSettings, loaded: LoadedModel, tokens: int) -> Demand:
    """Of the request in hand, whose prompt is read in one forward."""
    share = f"a prompt of {tokens} tokens took {gib(trace_bytes(loaded.geometry, tokens))} for one layer's q, k, v"
    shots = settings.num_fewshot
    smaller = () if shots == 0 else (f"num_fewshot={(shots or 0) // 2} (fewer examples in the prompt)",)
    return Demand((share,), (*smaller, *_places(settings.model, loaded.device)))


def _places(model: ModelSettings, device: torch.device) -> tuple[str, ...]:
    """Settings that put the weights elsewhere."""
    spread = model.device_map is None and torch.cuda.device_count() > 1
    return (*(("model.device_map=auto",) if spread else ()), *_on_cpu(device))


def _on_cpu(device: torch.device) -> tuple[str, ...]:
    return () if device.type == "cpu" else ("model.device=cpu",)
