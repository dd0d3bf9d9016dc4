"""Run a model whose weights do not fit the device: one decoder layer there at a time, every segment through it.

The model's own forward is run once over all segments; each decoder layer, when it is called, is materialised, applied
in micro-batches and freed again. Hidden states wait between layers on the host (or stay on the device). Weights are
read once, whatever the number of segments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from stepquant.errors import ModelError
from stepquant.files import replacing
from stepquant.models.adapter import (
    LoadedModel,
    check_layers,
    checked_device,
    load_tokenizer,
    parse_weights,
    resolve_dtype,
)
from stepquant.models.capture import find_delta_layers
from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
from stepquant.models.families import check_transformers, find_family, geometry_from_config
from stepquant.models.layer_source import LayerSource
from stepquant.models.random_weights import build_meta

PROGRESS_FILE = "layerwise.safetensors"


@dataclass(frozen=True)
class LayerDone:
    """A decoder layer has been applied to all segments: `layer` of `layers` (whole model, from 0), in `seconds`."""

    layer: int
    layers: int
    seconds: float


class _Stop(Exception):
    """The last layer that was asked for has run."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass
class LayerwiseModel:
    """A model with its weights still in the checkpoint. `loaded.model` is there for `capture_delta_rule` only."""

    loaded: LoadedModel
    source: LayerSource
    rows: range = range(0)
    """Segments of the micro-batch that is running, for observers."""

    def run(
        self,
        ids: Tensor,
        *,
        batch: int,
        activations: str = "host",
        last_layer: int | None = None,
        on_layer: Callable[[LayerDone], None] | None = None,
        directory: Path | None = None,
        key: str = "",
        save_every: int = 8,
    ) -> Tensor:
        """Apply the decoder layers to all segments, layer by layer.

        Within `capture_delta_rule` the observer sees, for each delta-rule layer, every micro-batch in order of
        segments, before the next layer starts.

        Args:
            ids: token ids ``[n, T]``.
            batch: segments of a micro-batch.
            activations: where hidden states wait between layers, ``host`` or ``device``.
            last_layer: decoder layer after which to stop; by default the last delta-rule layer.
            on_layer: called after each layer, before the progress file is written.
            directory: where to keep hidden states so that an interrupted run resumes; None keeps nothing.
            key: what the run is made from; a progress file under another key is ignored.
            save_every: layers between two writes of the progress file.

        Returns:
            Hidden states ``[n, T, ...]`` after the last layer that ran, before the final norm.

        Raises:
            ModelError: tensors missing from the checkpoint, or of other shapes.
        """
        layers = self.source.layers
        last = self.loaded.geometry.layers[-1] if last_layer is None else last_layer
        start, saved = load_progress(directory, key) if directory is not None else (0, None)

        def make(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if index < start:
                    output = saved
                else:
                    began = time.monotonic()
                    output = self._apply(index, original, args, kwargs, len(ids), batch, activations)
                    if on_layer is not None:
                        on_layer(LayerDone(index, len(layers), time.monotonic() - began))
                    if directory is not None and ((index + 1) % save_every == 0 or index == last):
                        save_progress(directory, key, index + 1, output)
                if index == last:
                    raise _Stop(output)
                return output

            return forward

        originals = [layer.forward for layer in layers]
        try:
            for index, layer in enumerate(layers):
                layer.forward = make(index, originals[index])
            with torch.no_grad():
                self.source.text_model(input_ids=ids.to(self.source.device), use_cache=False)
        except _Stop as stop:
            return stop.output[0] if isinstance(stop.output, tuple) else stop.output
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)
        raise ModelError(f"layer {last} was never reached; the model has {len(layers)} decoder layers")

    def _apply(
        self, index: int, original: Callable[..., Any], args: Any, kwargs: Any, rows: int, batch: int, activations: str
    ) -> Any:
        """One layer over all micro-batches: tensors whose first dimension is the batch are cut, the rest are shared."""
        device = self.source.device
        self.source.load_layer(index)
        self.source.prefetch_layer(index + 1)
        outputs: list[Any] = []
        for first in range(0, rows, batch):
            self.rows = range(first, min(first + batch, rows))

            def cut(item: Any, first: int = first) -> Any:
                if not isinstance(item, Tensor):
                    return item
                whole = item.ndim >= 2 and item.shape[0] == rows
                return (item[first : first + batch] if whole else item).to(device)

            own_args, own_kwargs = pytree.tree_map(cut, (args, kwargs))
            output = original(*own_args, **own_kwargs)
            if activations == "host":
                output = pytree.tree_map(lambda item: item.cpu() if isinstance(item, Tensor) else item, output)
            outputs.append(output)
        self.source.free_layer(index)
        return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)


def load_layerwise(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    weights: str = "checkpoint",
    tokenizer: bool = True,
    attn_implementation: str | None = None,
) -> LayerwiseModel:
    """Prepare a checkpoint for layer-by-layer runs: structure on the meta device, embedding and norms on the device.

    Args:
        path: as in `load_model`; the checkpoint must be unquantised safetensors.
        device: where layers are materialised.
        dtype: see `resolve_dtype`.
        weights: ``checkpoint`` or ``random:SEED``: the same values as `load_model` gives for that seed.
        tokenizer: load the tokenizer too, where there is one.
        attn_implementation: passed to transformers.

    Raises:
        ModelError: as `load_model`; also already-quantised weights.
        BackendError: a transformers too old for it.
    """
    directory, seed = resolve_checkpoint(path), parse_weights(weights)
    config = read_config(directory)
    family, geometry, kind = find_family(config), geometry_from_config(config), weight_format(config)
    if kind != "unquantised" and seed is None:
        raise ModelError(
            f"{directory} holds {kind} weights; model.loading=layerwise takes unquantised ones, use model.loading=whole"
        )
    check_transformers(family)
    target = checked_device(device)
    model = build_meta(directory, family, resolve_dtype(dtype, target), attn_implementation=attn_implementation)
    model.eval().requires_grad_(requires_grad=False)
    modules = find_delta_layers(model)
    check_layers(modules, geometry, config)
    source = LayerSource(model, directory, target, seed)
    source.load_trunk()
    found = load_tokenizer(directory) if tokenizer else None
    loaded = LoadedModel(model, found, geometry, family, modules, config, directory, weights, kind, target)
    return LayerwiseModel(loaded, source)


def save_progress(directory: Path, key: str, next_layer: int, output: Any) -> None:
    """Write the output of the layer before `next_layer` (a tensor, or a tuple of tensors and None) atomically."""
    items = output if isinstance(output, tuple) else (output,)
    tensors = {str(i): item.contiguous().cpu() for i, item in enumerate(items) if isinstance(item, Tensor)}
    facts = {"key": key, "next_layer": next_layer, "items": len(items), "tuple": isinstance(output, tuple)}
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / PROGRESS_FILE) as temporary:
        save_file(tensors, temporary, metadata={"facts": json.dumps(facts)})


def load_progress(directory: Path, key: str) -> tuple[int, Any]:
    """(first layer still to run, output of the one before it); ``(0, None)`` where there is nothing to resume."""
    try:
        with safe_open(directory / PROGRESS_FILE, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            if facts["key"] != key:
                return 0, None
            names = set(file.keys())
            items = tuple(file.get_tensor(str(i)) if str(i) in names else None for i in range(facts["items"]))
            return int(facts["next_layer"]), items if facts["tuple"] else items[0]
    except (OSError, SafetensorError, KeyError, ValueError):
        return 0, None
