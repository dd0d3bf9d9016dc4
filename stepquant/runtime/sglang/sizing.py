"""The sizing of SGLang's state pool in packed bytes: more slots for the same memory, workspace and windows counted."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from stepquant.errors import BackendError
from stepquant.memory import GIB
from stepquant.runtime.load import RankPlan
from stepquant.runtime.sglang.hooks import MARK
from stepquant.runtime.sglang.state import WORKSPACE_STATES, current, local_plan
from stepquant.runtime.sizing import SetBy, SlotCost, check_fit

logger = logging.getLogger(__name__)


def slot_cost(plan: RankPlan, conv_bytes: int) -> SlotCost:
    """Bytes of a slot on one rank, the same on every rank; `conv_bytes` are SGLang's."""
    g = plan.plan.geometry
    dense = 4 * g.num_heads // plan.size * g.head_elements
    return SlotCost(plan.slot_bytes, conv_bytes, plan.window_bytes, WORKSPACE_STATES * dense)


def conv_bytes(params: Any) -> int:
    """Convolution states of a slot, bytes over all layers, of SGLang's cache parameters."""
    elements = sum(int(rows) * int(columns) for rows, columns in params.shape.conv)
    return elements * int(params.dtype.conv.itemsize) * len(params.layers)


def packed_bytes(params: Any) -> int:
    """`mamba_cache_per_req`: what one slot costs on this rank."""
    return slot_cost(local_plan(), conv_bytes(params)).per_slot(current().slots_per_request)


def install_slot_bytes(path: str) -> None:
    """Replace the property `mamba_cache_per_req` of the class `path`, which SGLang's hook registry cannot do.

    Raises:
        BackendError: if the class has no such property.
    """
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    if not isinstance(getattr(kind, "mamba_cache_per_req", None), property):
        raise BackendError(
            f"{path} has no property mamba_cache_per_req; this stepquant was checked with another SGLang"
        )
    setattr(packed_bytes, MARK, "mamba_cache_per_req")
    kind.mamba_cache_per_req = property(packed_bytes)  # type: ignore[union-attr]


def asked(runner: Any, name: str) -> Any:
    """A server argument that sizes the pool, as it is in effect."""
    try:
        bag = importlib.import_module("sglang.srt.runtime_context").get_schedule()
        if hasattr(bag, name):
            return getattr(bag, name)
    except (ModuleNotFoundError, AttributeError):
        pass
    return getattr(runner.server_args, name)


def size_states(original: Callable[..., float], self: Any, total_rest_memory: float) -> float:
    """`handle_max_mamba_cache`: SGLang's own rules, with what is charged once taken off first. GiB in and out.

    Raises:
        InfeasibleError: with the arithmetic, where the slots do not fit; SGLang would find that out layers later.
    """
    config = self.mambaish_config
    state = current()
    state.slots_per_request = int(self._calculate_mamba_ratio())
    explicit = asked(self, "max_mamba_cache_size") is not None
    running = asked(self, "max_running_requests")
    params = config.mamba2_cache_params
    cost = slot_cost(local_plan(), conv_bytes(params))
    left = original(self, total_rest_memory - cost.fixed / GIB)
    slots = int(asked(self, "max_mamba_cache_size"))
    set_by: SetBy
    if explicit:
        set_by = "--max-mamba-cache-size"
    elif state.slots_per_request == 1 and running is not None:
        set_by = "--max-running-requests"
    else:
        set_by = "--mamba-full-memory-ratio"
    check_fit(int(total_rest_memory * GIB), slots, set_by, state.slots_per_request, cost)
    dense = 4 * local_plan().plan.geometry.elements // local_plan().size
    cap = slots // state.slots_per_request
    state.report.update(
        set_by=set_by, slots_per_request=state.slots_per_request, state_cap=cap, max_running_requests=running,
        fixed_bytes=cost.fixed, fp32_slots=int(slots * cost.per_slot(state.slots_per_request)) // (dense + cost.conv),
    )  # fmt: skip
    logger.info(
        f"stepquant: {total_rest_memory:.2f} GiB for states and KV cache; {slots} slots set by {set_by} "
        f"({state.report['fp32_slots']} with FP32 states), {state.slots_per_request} a request: at most {cap} running "
        f"requests by their states; {cost.fixed / GIB:.2f} GiB for padding and the prefill workspace, {left:.2f} GiB "
        "left for the KV cache"
    )
    return left
