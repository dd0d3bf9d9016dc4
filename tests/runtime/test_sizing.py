"""Slots for a memory: SGLang's rules in packed bytes, and what sets the cap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepquant.errors import InfeasibleError
from stepquant.memory import GIB
from stepquant.runtime.sizing import PoolArguments, SlotCost, size_pool, slots_per_request

COST = SlotCost(state=600_000, conv=70_000, window=130_000, workspace=30_000_000)
RADIX = PoolArguments(slots_per_request=5, disable_radix_cache=False)


def test_the_ratio_divides_what_is_left_between_states_and_kv() -> None:
    found = size_pool(10 * GIB, RADIX, COST)
    budget, each = 10 * GIB - COST.fixed, 600_000 + 70_000 + 26_000
    assert found.slots == int(budget * 0.9 / 1.9) // each
    assert (found.set_by, found.request_cap) == ("--mamba-full-memory-ratio", found.slots // 5)
    assert found.cap_set_by == f"{found.slots} state slots, --mamba-full-memory-ratio"
    assert found.state_bytes + found.left_bytes == 10 * GIB
    more = size_pool(10 * GIB, replace(RADIX, mamba_full_memory_ratio=2.0), COST)
    assert more.slots == int(budget * 2 / 3) // each


def test_explicit_slots_win() -> None:
    found = size_pool(10 * GIB, replace(RADIX, max_mamba_cache_size=1000, max_running_requests=500), COST)
    assert (found.slots, found.set_by, found.request_cap) == (1000, "--max-mamba-cache-size", 200)
    found = size_pool(10 * GIB, replace(RADIX, max_mamba_cache_size=1000, max_running_requests=50), COST)
    assert (found.slots, found.request_cap, found.cap_set_by) == (1000, 50, "--max-running-requests")


def test_running_requests_set_the_slots_without_a_prefix_cache() -> None:
    found = size_pool(10 * GIB, PoolArguments(max_running_requests=300), COST)
    assert (found.slots, found.set_by, found.request_cap) == (300, "--max-running-requests", 300)
    assert size_pool(10 * GIB, PoolArguments(), COST).set_by == "--mamba-full-memory-ratio"


def test_sglangs_own_limit() -> None:
    found = size_pool(1000 * GIB, PoolArguments(), COST)
    assert found.slots > 4096
    assert (found.request_cap, found.cap_set_by) == (4096, "SGLang's own limit")


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(InfeasibleError, match=r"9999 slots of 696,000 bytes .--max-mamba-cache-size. take 6\.48 GiB"):
        size_pool(2 * GIB, replace(RADIX, max_mamba_cache_size=9999), COST)
    with pytest.raises(InfeasibleError, match=r"5 of them make a request"):
        size_pool(34_000_000, RADIX, COST)
    with pytest.raises(InfeasibleError, match=r"workspace leaves nothing; 0 slots of"):
        size_pool(COST.fixed - 10**9, RADIX, COST)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((True, "auto", False), 1), ((False, "auto", False), 3), ((False, "no_buffer", True), 3),
     ((False, "extra_buffer", False), 5), ((False, "extra_buffer", True), 4)],
)  # fmt: skip
def test_slots_a_request(arguments: tuple[bool, str, bool], expected: int) -> None:
    assert slots_per_request(*arguments) == expected
