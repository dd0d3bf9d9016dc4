"""What to do when memory runs out in a pass: what was needed, what was free, what the settings' shares were.

torch's own error says how much it tried to allocate. What a setting's share of the memory was, and so which one to
lower, depends on the step: the trace grows with `data.batch`, tables of reconstruction errors with `samples.per_layer`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepquant.errors import BackendError, ModelError
from stepquant.passes.memory import GIB, host_peak

if TYPE_CHECKING:
    from stepquant.passes.context import Context
    from stepquant.recipe_sections import ModelSettings

_HOST_MARKS = ("can't allocate memory", "cannot allocate memory", "not enough memory")
_GPU_MARKS = ("cuda error: out of memory", "cublas_status_alloc_failed", "cuda out of memory")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)|you tried to allocate (\d+) bytes")
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_FREE = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE} of which {_SIZE} is free")

DELTA_RULE = 6  # the chunked delta rule's intermediates, in units of a layer's q, k and v
CODING = 6  # a codec's intermediates, in units of the states that it codes
ROLLOUT = 3  # states, their errors and the codec's intermediates, in units of the states


@dataclass(frozen=True)
class Demand:
    """What a step holds in memory: `shares` in words with GiB, and `options`, the settings that lower it."""

    shares: tuple[str, ...]
    options: tuple[str, ...]

    def __str__(self) -> str:
        remedy = f"set {' or '.join(self.options)}" if self.options else "no setting lowers it: use a larger device"
        return f"{', '.join(self.shares)}; {remedy}"


@contextlib.contextmanager
def told(doing: str, demand: Callable[[], object]) -> Iterator[None]:
    """Turn an out-of-memory error into one line that does the arithmetic and names the setting to change.

    Args:
        doing: what is going on, for the message.
        demand: says what it holds and which setting to lower; called only when memory did run out.

    Raises:
        BackendError: in place of torch's own error.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ModelError) as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error  # that a checkpoint could not be loaded
        if cause is None or (place := out_of_memory(cause)) is None:
            raise
        raise BackendError(f"out of memory in {doing}: {place}; {demand()}") from error


def explain_memory(context: Context, step: str, doing: str) -> AbstractContextManager[None]:
    """`told` for one step of a compile: ``load``, ``trace`` or a pass's name decides which settings are named."""
    return told(doing, lambda: f"{demand(context, step)}{_again(context, step)}")


def out_of_memory(error: BaseException) -> str | None:
    """What was needed and what was free, if this error says that memory ran out; None for any other error."""
    text = str(error)
    lowered = text.lower()
    if isinstance(error, torch.OutOfMemoryError) or any(mark in lowered for mark in _GPU_MARKS):
        return f"{_needed(text)} on {_gpu(text)}"
    if isinstance(error, MemoryError) or any(mark in lowered for mark in _HOST_MARKS):
        return f"{_needed(text)} of host memory, the process held {host_peak() / GIB:.2f} GiB at most"
    return None


def _needed(text: str) -> str:
    if not (found := _TRIED.search(text)):
        return "more was needed"
    amount = float(found[1]) * _UNITS[found[2]] if found[1] else float(found[3])
    return f"{gib(amount)} more were needed"


def _gpu(text: str) -> str:
    """``GPU 0, of whose 79.1 GiB 1.2 GiB were free and 70.0 GiB held here``: as torch said, or as it is now."""
    index, total, free = 0, 0.0, None
    if found := _FREE.search(text):
        index, total, free = int(found[1]), float(found[2]) * _UNITS[found[3]], float(found[4]) * _UNITS[found[5]]
    elif torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a device that is out of memory may refuse to say so
            index = torch.cuda.current_device()
            free, total = torch.cuda.mem_get_info(index)
    if free is None:
        return "the GPU"
    held = f" and {gib(torch.cuda.memory_allocated(index))} held here" if torch.cuda.is_initialized() else ""
    return f"GPU {index}, of whose {gib(total)} {gib(free)} were free{held}"


def demand(context: Context, step: str) -> Demand:
    """What a step holds, and the settings that change it."""
    recipe = context.recipe
    if step == "load":
        return Demand((weights_share(recipe.model),), _other_places(context))
    if step == "trace":
        return _trace(context)
    if step in ("distortion", "pivot_distortion"):
        return _table(context)
    if step == "rollout":
        return _rollout(context)
    return Demand((weights_share(recipe.model),), _on_cpu(context))


def _trace(context: Context) -> Demand:
    recipe, g = context.recipe, context.geometry
    batch, length = recipe.data.batch, recipe.data.length
    traced = 4 * batch * length * g.num_heads * (2 * g.key_dim + g.value_dim)
    shares = (
        f"data.batch={batch} x data.length={length} tokens took {gib(traced)} for one layer's q, k, v and about "
        f"{gib(DELTA_RULE * traced)} for its delta rule",
        weights_share(recipe.model),
    )
    first = f"data.batch={batch // 2}" if batch > 1 else f"data.length={max(length // 2, 2)}"
    options = [first]
    if recipe.temporal.sensitivity == "gradient":
        options.append("temporal.sensitivity=local (no backward pass through the whole model)")
    return Demand(shares, (*options, *_other_places(context)))


def _table(context: Context) -> Demand:
    from stepquant.passes.distortion import SLICES

    g, count = context.geometry, context.recipe.samples.per_layer
    states = 4 * count * g.num_heads * g.key_dim * g.value_dim
    coded = CODING * 4 * SLICES.get(context.device.type, SLICES["cuda"])
    share = f"samples.per_layer={count} took {gib(states)} for a layer's states and about {gib(coded)} for coding them"
    options = (f"samples.per_layer={count // 2}",) if count > 1 else ()
    return Demand((share,), (*options, *_on_cpu(context)))


def _rollout(context: Context) -> Demand:
    from stepquant.passes.distortion import table_candidates
    from stepquant.passes.rollout_traces import trace_fields

    g = context.geometry
    pieces, tokens = trace_fields(context.recipe, g)["beta"][1][:2]
    candidates = len(table_candidates(context))
    states = 4 * pieces * (1 + candidates) * g.num_heads * g.key_dim * g.value_dim
    inputs = 4 * pieces * tokens * g.num_heads * (3 * g.key_dim + g.value_dim)
    shares = (
        f"{pieces} texts at {candidates} precisions took about {gib(ROLLOUT * states)} for their states",
        f"data.length={context.recipe.data.length} took about {gib(inputs)} for {tokens} tokens of each",
    )
    return Demand(shares, (f"data.length={max(tokens // 2, 2)}", *_on_cpu(context)))


def _other_places(context: Context) -> tuple[str, ...]:
    """Settings that put the weights elsewhere."""
    recipe, options = context.recipe, []
    if recipe.model.loading == "whole" and recipe.temporal.sensitivity != "gradient":
        options.append("model.loading=layerwise (one layer on the device at a time)")
    if recipe.model.loading == "whole" and recipe.model.device_map is None and torch.cuda.device_count() > 1:
        options.append("model.device_map=auto")
    return (*options, *_on_cpu(context))


def _on_cpu(context: Context) -> tuple[str, ...]:
    return () if context.device.type == "cpu" else ("model.device=cpu",)


def weights_share(model: ModelSettings) -> str:
    """What the weights take, in words."""
    size = weights_bytes(model)
    found = f"weights took {gib(size)}" if size else "weights of unknown size"
    return f"{found} (one layer of them at a time)" if model.loading == "layerwise" else found


def _again(context: Context, step: str) -> str:
    """What a second run finds."""
    if step == "load" or not context.recipe.cache.enabled:
        return ""
    if step == "trace":
        return ". What was traced is kept: the next run goes on from there"
    if context.model_loaded:
        return (
            ". Products are kept: the same command again leaves the model out, and may fit; other settings trace again"
        )
    return ". Other settings trace again"


def weights_bytes(model: ModelSettings) -> int:
    """Bytes of the checkpoint's weights; 0 where they are random or cannot be counted."""
    if model.path is None or model.weights_seed is not None:
        return 0
    from stepquant.models.checkpoint import resolve_checkpoint
    from stepquant.models.fingerprint import checkpoint_tensors

    try:
        return sum(entry.size for entry in checkpoint_tensors(resolve_checkpoint(model.path)).values())
    except ModelError:
        return 0


def gib(size: float) -> str:
    """Two digits after the point, more where there would be none before."""
    gib = size / GIB
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{size / (1 << 20):.2f} MiB"
