"""How many slots a server gets for its memory, and what caps its running requests: SGLang's rules with packed bytes.

Used by the plugin's log line and by ``serve dry_run=true``, so that both say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepquant.errors import InfeasibleError
from stepquant.memory import GIB, SLOTS_PER_REQUEST

SetBy = Literal["--max-mamba-cache-size", "--max-running-requests", "--mamba-full-memory-ratio"]
MOST_REQUESTS = 4096  # that SGLang runs at once, whatever the memory


@dataclass(frozen=True)
class PoolArguments:
    """SGLang's arguments that size the state pool, by their names there.

    Attributes:
        slots_per_request: 1 without the prefix cache, 3 with no_buffer, 5 with extra_buffer, 4 without overlap too.
    """

    max_mamba_cache_size: int | None = None
    max_running_requests: int | None = None
    mamba_full_memory_ratio: float = 0.9
    slots_per_request: int = 1
    disable_radix_cache: bool = True


@dataclass(frozen=True)
class SlotCost:
    """Bytes on one rank.

    Attributes:
        state: packed pages of a slot; conv: its convolution states. window: buffers of one running request.
        workspace: dense FP32 states that a prefill holds at once.
    """

    state: int
    conv: int
    window: int = 0
    workspace: int = 0

    def per_slot(self, slots_per_request: int) -> int:
        """What a slot is charged: its pages and its share of a running request's window buffers."""
        return self.state + self.conv + -(-self.window // slots_per_request)

    @property
    def fixed(self) -> int:
        """Charged once: the padding slot, the padding row of the windows, the workspace."""
        return self.state + self.conv + self.window + self.workspace


@dataclass(frozen=True)
class PoolSize:
    """Slots of the pool, what set their number, the cap that they put on running requests, and bytes on one rank."""

    slots: int
    set_by: SetBy
    request_cap: int
    cap_set_by: str
    state_bytes: int
    left_bytes: int


def size_pool(available: int, arguments: PoolArguments, cost: SlotCost) -> PoolSize:
    """Slots for `available` bytes (what the weights leave of the static memory of one rank).

    Raises:
        InfeasibleError: with the arithmetic, where not one request fits.
    """
    set_by: SetBy = "--max-mamba-cache-size"
    each, budget = cost.per_slot(arguments.slots_per_request), available - cost.fixed
    if arguments.max_mamba_cache_size is not None:
        slots = arguments.max_mamba_cache_size
    elif arguments.disable_radix_cache and arguments.max_running_requests is not None:
        slots, set_by = arguments.max_running_requests, "--max-running-requests"
    else:
        ratio = arguments.mamba_full_memory_ratio
        slots, set_by = max(0, int(budget * ratio / (1 + ratio)) // each), "--mamba-full-memory-ratio"
    cap, cap_set_by = slots // arguments.slots_per_request, f"{slots} state slots, {set_by}"
    if arguments.max_running_requests is not None and arguments.max_running_requests <= cap:
        cap, cap_set_by = arguments.max_running_requests, "--max-running-requests"
    if cap > MOST_REQUESTS:
        cap, cap_set_by = MOST_REQUESTS, "SGLang's own limit"
    left = check_fit(available, slots if cap else 0, set_by, arguments.slots_per_request, cost)
    return PoolSize(slots, set_by, cap, cap_set_by, slots * each + cost.fixed, left)


def check_fit(available: int, slots: int, set_by: SetBy, slots_per_request: int, cost: SlotCost) -> int:
    """Bytes that `slots` slots leave of `available`.

    Raises:
        InfeasibleError: with the arithmetic, where they do not fit or make less than one request.
    """
    each, budget = cost.per_slot(slots_per_request), available - cost.fixed
    left = budget - slots * each
    if slots < slots_per_request or left < 0:
        leaves = f"leaves {budget / GIB:.2f} GiB" if budget >= 0 else "leaves nothing"
        raise InfeasibleError(
            f"{available / GIB:.2f} GiB less {cost.fixed / GIB:.2f} GiB for padding and workspace {leaves}; "
            f"{slots} slots of {each:,} bytes ({set_by}) take {slots * each / GIB:.2f} GiB and "
            f"{slots_per_request} of them make a request: raise --mem-fraction-static, or lower "
            "--max-mamba-cache-size or --max-running-requests"
        )
    return left


def slots_per_request(disable_radix_cache: bool, strategy: str, disable_overlap: bool) -> int:
    """SGLang's ratio of slots to running requests for a prefix-cache strategy (``auto`` is ``no_buffer``)."""
    if disable_radix_cache:
        return SLOTS_PER_REQUEST["off"]
    if strategy != "extra_buffer":
        return SLOTS_PER_REQUEST["no_buffer"]
    return SLOTS_PER_REQUEST["extra_buffer_no_overlap" if disable_overlap else "extra_buffer"]
