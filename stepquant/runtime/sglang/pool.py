"""SGLang's MambaPool on packed pages: convolution states stay SGLang's, the temporal state becomes a `SlotStore`.

The pool is built with a temporal state of no elements, so that no FP32 copy ever exists; everything that SGLang does
with slots (clear, copy and fork, host copies) goes on in its own code for the convolution states, and here for the
pages. What the attention backends get as a layer's temporal state is a `PackedStates`, which no FP32 kernel takes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepquant.errors import BackendError
from stepquant.memory import GIB
from stepquant.runtime.load import RankPlan
from stepquant.runtime.sglang.state import TUNE_VARIABLE, current, local_plan
from stepquant.runtime.slots import HostSlots, SlotStore
from stepquant.runtime.tuning import tuned_launches

logger = logging.getLogger(__name__)
STORE = "stepquant_store"  # attribute of a MambaPool that is packed


@dataclass(frozen=True)
class PackedStates:
    """A layer's temporal state as the backends see it: it says what an FP32 state would, and is no tensor.

    Attributes:
        store, layer: where the pages are. shape: `[slots + 1, H, V, K]`, of the states that the pages stand for.
    """

    store: SlotStore
    layer: int
    shape: torch.Size
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Of the pages."""
        return self.store.device

    @property
    def last(self) -> bool:
        """The last delta-rule layer of a forward."""
        return self.layer == self.store.layout.num_layers - 1

    def is_contiguous(self) -> bool:
        """SGLang gathers states of a pool that is not; here the kernels find the slots."""
        return True

    def stride(self, dim: int) -> int:
        """Elements between slots, as the FP32 states would have them (SGLang checks the layout by it)."""
        return int(torch.Size(self.shape[dim + 1 :]).numel())


@dataclass(frozen=True)
class HostCopy:
    """SGLang's host copy of the convolution states, and the packed pages beside it."""

    native: Any
    packed: HostSlots


def store_of(pool: Any) -> SlotStore | None:
    """The packed store of a MambaPool; None for the pool of another kind of model."""
    found: SlotStore | None = getattr(pool, STORE, None)
    return found


def build(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`MambaPool.__init__`: convolution states by SGLang, pages here."""
    params, layers = kwargs["cache_params"], kwargs["mamba_layer_ids"]
    plan = local_plan()
    check_geometry(plan, params, layers)
    if kwargs.get("speculative_num_draft_tokens") is not None:
        raise BackendError("speculative decoding keeps unpacked states for its drafts; stepquant does not serve it")
    heads, value_dim, key_dim = params.shape.temporal
    shape = dataclasses.replace(params.shape, temporal=(heads, 0, key_dim))
    original(self, *args, **{**kwargs, "cache_params": dataclasses.replace(params, shape=shape)})
    requests = max(1, int(kwargs["spec_state_size"]))
    kernels = plan.kernels(self.device)
    if torch.device(self.device).type == "cuda" and os.environ.get(TUNE_VARIABLE) == "1":
        kernels.tuned = tuned_launches(kernels, current().directory)
    store = new_store(plan, kernels, self.size, requests, self.device)
    setattr(self, STORE, store)
    dense = torch.Size((self.size + 1, heads, value_dim, key_dim))
    self.stepquant_layers = [PackedStates(store, i, dense) for i in range(plan.layout.num_layers)]
    self.mem_usage += store.nbytes / GIB
    conv = sum(c.nbytes for c in self.mamba_cache.conv)
    fp32 = 4 * plan.layout.num_layers * heads * value_dim * key_dim
    capped = cap_set_by(current().report, requests)
    current().report.update(
        slots=self.size, requests=requests, slot_bytes=store.slot_bytes, fp32_slot_bytes=fp32,
        compression=round(fp32 / store.slot_bytes, 3), pool_bytes=store.nbytes, window_bytes=store.window_bytes,
        conv_bytes=conv, cap_set_by=capped,
    )  # fmt: skip
    logger.info(
        f"stepquant: packed state pool of {self.size} slots and 1 for padding, {store.slot_bytes:,} bytes each instead "
        f"of {fp32:,} ({fp32 / store.slot_bytes:.2f}x), window W={store.window}; at most {requests} running "
        f"requests, set by {capped}; {store.nbytes / GIB:.2f} GiB and {conv / GIB:.2f} GiB of convolution states"
    )


def new_store(plan: RankPlan, kernels: Any, slots: int, requests: int, device: str) -> SlotStore:
    """The packed pages and window buffers of a pool.

    Raises:
        BackendError: with the arithmetic, where the GPU has less left than the sizing was told.
    """
    try:
        return SlotStore(plan.layout, kernels, slots, requests, device)
    except torch.OutOfMemoryError:
        pages, windows = (slots + 1) * plan.slot_bytes, (requests + 1) * plan.window_bytes
        free = torch.cuda.mem_get_info(device)[0]
        raise BackendError(
            f"the packed pool did not fit on {device}: {slots} slots take {pages / GIB:.2f} GiB, window buffers of "
            f"{requests} requests {windows / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free now, less than the sizing "
            "found: end what else came onto this GPU, or lower --mem-fraction-static, --max-mamba-cache-size or "
            "--max-running-requests"
        ) from None


def cap_set_by(report: Mapping[str, Any], requests: int) -> str:
    """What the number of running requests follows from, of the sizing's figures."""
    if requests == report.get("max_running_requests"):
        return "--max-running-requests"
    if requests == report.get("state_cap"):
        return f"the state slots ({report['set_by']})"
    return "the KV cache or SGLang's own limits"


def check_geometry(plan: RankPlan, params: Any, layers: list[int]) -> None:
    """Raises BackendError if the model's states are not those that the plan was made for."""
    g = plan.plan.geometry
    found = (tuple(params.shape.temporal), tuple(layers))
    expected = ((g.num_heads // plan.size, g.value_dim, g.key_dim), g.layers)
    if found != expected:
        raise BackendError(
            f"the model keeps states {list(found[0])} in layers {list(found[1])}; the plan is for "
            f"{list(expected[0])} in layers {list(expected[1])}: compile a plan for this checkpoint"
        )


def layer_cache(original: Callable[..., Any], self: Any, layer_id: int) -> Any:
    """`MambaPool.mamba2_layer_cache`: the layer's pages instead of the empty temporal state."""
    found = original(self, layer_id)
    if store_of(self) is None:
        return found
    return dataclasses.replace(found, temporal=self.stepquant_layers[layer_id])


def clear_allocated(original: Callable[..., Any], self: Any, need_size: int) -> Any:
    """`MambaPool.alloc` of 0.5.12, which clears what it hands out."""
    slots = original(self, need_size)
    store = store_of(self)
    if store is not None and slots is not None:
        store.clear(slots)
    return slots


def clear_slots(original: Callable[..., Any], self: Any, indices: Tensor) -> Any:
    """`MambaPool.clear_slots` of 0.5.23."""
    result = original(self, indices)
    store = store_of(self)
    if store is not None:
        store.clear(indices)
    return result


def copy(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`MambaPool.copy_from`, and through it `fork_from`.

    The copy waits for the last forward: a batch in flight may still write to a slot that was freed a moment ago.
    """
    source, target = [*args, *kwargs.values()]
    store = store_of(self)
    after_forwards(self)
    result = original(self, *args, **kwargs)
    if store is not None:
        store.copy(source, target)
    return result


def after_forwards(pool: Any) -> None:
    """What the current stream is given from now on comes after all forwards so far, the folds of their writeback stream
    included. With overlap scheduling SGLang handles slots on a stream of its own while a batch still runs, and a page
    may not be folded, copied or read in the middle of that. The next forward waits for this stream in any case."""
    stream = getattr(pool, "stepquant_stream", None)
    if stream is not None and stream != torch.cuda.current_stream():
        torch.cuda.current_stream().wait_stream(stream)


def save(original: Callable[..., Any], self: Any, indices: Any) -> Any:
    """`MambaPool.get_cpu_copy`."""
    store = store_of(self)
    if store is None:
        return original(self, indices)
    after_forwards(self)
    slots = torch.as_tensor(indices, device=store.device)
    return HostCopy(original(self, indices), store.save(slots))


def load(original: Callable[..., Any], self: Any, mamba_cache_cpu: Any, indices: Any) -> Any:
    """`MambaPool.load_cpu_copy`."""
    store = store_of(self)
    if store is None:
        return original(self, mamba_cache_cpu, indices)
    if not isinstance(mamba_cache_cpu, HostCopy):
        raise BackendError(f"a host copy of type {type(mamba_cache_cpu).__name__} holds no packed pages")
    after_forwards(self)
    original(self, mamba_cache_cpu.native, indices)
    store.load(mamba_cache_cpu.packed, torch.as_tensor(indices, device=store.device))
    return None


def finished(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """`cache_finished_req` of 0.5.12's prefix cache.

    The request's slot may stay as a cached prefix: nothing of it may be left in the window buffers, which the next
    request takes over.
    """
    _settle(self, req, done=True)
    return original(self, req, *args, **kwargs)


def checkpoint(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """`checkpoint` of 0.5.23's prefix cache, for requests that end and for those that go on."""
    _settle(self, req, done=bool(req.finished()))
    return original(self, req, *args, **kwargs)


def _settle(cache: Any, req: Any, done: bool) -> None:
    """Fold a request's pending tokens into its slot, and take its window row if it is done."""
    pool = getattr(cache.req_to_token_pool, "mamba_pool", None)
    store, slot = store_of(pool), req
    for name in current().version.request:
        slot = getattr(slot, name, None)
    if store is None or store.window == 1 or slot is None:
        return
    after_forwards(pool)
    if done:
        store.release(slot.reshape(1))
    else:
        store.flush(slot.reshape(1))
