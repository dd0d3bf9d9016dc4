"""SGLang's own MambaPool, its code to the letter, with packed pages beside the same pool with FP32 states.

Operation for operation: the same slots, the same convolution states, and the FP32 states as the codec reads them back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepquant.codec.packed import PackedCodec
from stepquant.errors import BackendError, InfeasibleError
from stepquant.geometry import Geometry
from stepquant.plan import LayoutPlan, WindowSpec
from stepquant.runtime.load import RankPlan
from stepquant.runtime.sglang import hooks, plugin, sizing
from stepquant.runtime.sglang.pool import HostCopy, PackedStates, cap_set_by, store_of
from stepquant.runtime.sglang.state import PluginState, activate
from stepquant.runtime.sizing import PoolArguments, size_pool
from tests.runtime.plans import HEADS, LAYERS, K, V, layout_of
from tests.runtime.sglang.sources import UTILS, fake_sglang
from tests.runtime.sglang.test_hooks import state_of

SIZE, REQUESTS = 6, 2
VERSIONS = ("0.5.12", "0.5.23")


def rank_plan(window: int = 4) -> RankPlan:
    """A two-layer plan as one rank holds it."""
    layout, w, codec = layout_of("gdn")
    geometry = Geometry("gdn", "qwen3_5_text", (0, 2), HEADS, 1, K, V, num_layers=4)
    plan = LayoutPlan(
        "test", geometry, codec, torch.from_numpy(layout.bits), w, torch.from_numpy(layout.permutation),
        granularity=8, window=WindowSpec(window, "fp32"),
    )  # fmt: skip
    return RankPlan(plan, layout, w, 1, 0, 1, int(layout.layer_bytes.sum()), None)


def cache_params() -> Any:
    """SGLang's own parameters of a model with the plan's states."""
    utils = sys.modules[UTILS]
    shape = utils.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=HEADS * V, n_groups=1, num_heads=HEADS, head_dim=V, state_size=K,
        conv_kernel=4,
    )  # fmt: skip
    return utils.Mamba2CacheParams(shape=shape, layers=[0, 2])


def pool_class() -> Any:
    return sys.modules["sglang.srt.mem_cache.memory_pool"].MambaPool


def new_pool(**more: Any) -> Any:
    arguments = {"size": SIZE, "spec_state_size": REQUESTS, "cache_params": cache_params(), "mamba_layer_ids": [0, 2],
                 "device": "cpu", "speculative_num_draft_tokens": None}  # fmt: skip
    return pool_class()(**{**arguments, **more})


@pytest.fixture(params=VERSIONS)
def pools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any, Any]]:
    """Version, SGLang's FP32 pool, and the packed one."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with fake_sglang(request.param):
        dense = new_pool()
        state = state_of(request.param)
        state.plans[0, 1] = rank_plan()
        activate(state)
        hooks.apply_hooks(state.version, plugin.functions(state))
        packed = new_pool()
        assert store_of(dense) is None
        yield request.param, dense, packed


def codecs(state: PluginState | None = None) -> list[PackedCodec]:
    layout, w, codec = layout_of("gdn")
    return [PackedCodec(layout, i, w[i], codec) for i in range(LAYERS)]


def compare(dense: Any, packed: Any, slots: list[int]) -> None:
    """Convolution states are equal, and pages read back as the FP32 states: both pools were given states that had been
    through the codec."""
    store = store_of(packed)
    assert store is not None
    assert torch.equal(dense.mamba_cache.conv[0], packed.mamba_cache.conv[0])
    for layer in range(LAYERS):
        found = torch.empty(len(slots), HEADS, V, K)
        store.kernels.unpack(layer, store.page(layer), torch.tensor(slots), found, True)
        assert torch.equal(found, dense.mamba_cache.temporal[layer, slots])


class Operations:
    """What SGLang does with slots in both versions, on both pools."""

    def __init__(self, version: str, dense: Any, packed: Any) -> None:
        self.version, self.dense, self.packed = version, dense, packed
        self.free, self.owned = list(range(1, SIZE + 1)), []
        self.generator, self.codecs = torch.Generator().manual_seed(0), codecs()

    def alloc(self) -> int | None:
        """One slot, from SGLang's own free list where the pool has it (0.5.12)."""
        if self.version == "0.5.12":
            a, b = self.dense.alloc(1), self.packed.alloc(1)
            assert (a is None) == (b is None) == (not self.free)
            if a is None:
                return None
            assert torch.equal(a, b)
            slot = int(a)
            self.free.remove(slot)
        else:
            if not self.free:
                return None
            slot = self.free.pop(0)
            for pool in (self.dense, self.packed):
                pool.clear_slots(torch.tensor([slot]))
        self.owned.append(slot)
        return slot

    def release(self, slot: int) -> None:
        self.owned.remove(slot)
        self.free.append(slot)
        if self.version == "0.5.12":
            for pool in (self.dense, self.packed):
                pool.free(torch.tensor([slot]))
        store = store_of(self.packed)
        assert store is not None
        self.dense.mamba_cache.temporal[:, slot] = 0  # whatever is left in a free slot is cleared when it is handed out
        store.pages[slot] = 0

    def write(self, slot: int) -> None:
        """A forward: both pools get the same convolution state and a state that has been through the codec."""
        store = store_of(self.packed)
        assert store is not None
        conv = torch.randn(LAYERS, *self.dense.mamba_cache.conv[0].shape[2:], generator=self.generator).bfloat16()
        for pool in (self.dense, self.packed):
            pool.mamba_cache.conv[0][:, slot] = conv
        slots = torch.tensor([slot])
        store.begin_extend(slots, torch.tensor([1]), torch.tensor([0]), torch.tensor([7]))
        for layer, codec in enumerate(self.codecs):
            page = codec.pack(torch.randn(1, HEADS, K, V, generator=self.generator))
            state = codec.unpack(page)
            self.dense.mamba_cache.temporal[layer, slot] = state[0].transpose(-1, -2)
            store.page(layer)[slot] = page[0]

    def copy(self, source: int, target: int) -> None:
        for pool in (self.dense, self.packed):
            pool.copy_from(torch.tensor([source]), torch.tensor([target]))

    def fork(self, source: int) -> None:
        if self.version == "0.5.12":
            a, b = (pool.fork_from(torch.tensor([source])) for pool in (self.dense, self.packed))
            assert (a is None) == (b is None) == (not self.free)
            if a is not None:
                assert torch.equal(a, b)
                self.free.remove(int(a))
                self.owned.append(int(a))
        else:
            target = self.alloc()
            if target is not None:
                self.copy(source, target)

    def host(self, source: int, target: int) -> None:
        for pool in (self.dense, self.packed):
            saved = pool.get_cpu_copy(torch.tensor([source]))
            assert isinstance(saved, HostCopy) == (pool is self.packed)
            pool.load_cpu_copy(saved, torch.tensor([target]))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=st.lists(st.tuples(st.sampled_from("afwwckh"), st.integers(0, 99), st.integers(0, 99)), max_size=40))
def test_operation_for_operation(pools: tuple[str, Any, Any], script: list[tuple[str, int, int]]) -> None:
    """a: alloc, f: free, w: a forward, c: copy, k: fork, h: to the host and back into another slot."""
    version, dense, packed = pools
    for pool in (dense, packed):
        if version == "0.5.12":
            pool.clear()
        for x in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
            x.zero_()
    store = store_of(packed)
    assert store is not None
    store.pages.zero_()
    run = Operations(version, dense, packed)
    for what, x, y in script:
        if what == "a":
            run.alloc()
        elif run.owned:
            a, b = run.owned[x % len(run.owned)], run.owned[y % len(run.owned)]
            if what == "f":
                run.release(a)
            elif what == "w":
                run.write(a)
            elif what == "k":
                run.fork(a)
            elif what == "c" and a != b:
                run.copy(a, b)
            elif what == "h":
                run.host(a, b)
        compare(dense, packed, run.owned)
    if version == "0.5.12":
        assert dense.available_size() == packed.available_size() == len(run.free)


def test_no_fp32_state_exists_beside_the_pages(pools: tuple[str, Any, Any]) -> None:
    _, dense, packed = pools
    store = store_of(packed)
    assert store is not None
    assert packed.mamba_cache.temporal.numel() == 0
    assert dense.mamba_cache.temporal.nbytes == LAYERS * (SIZE + 1) * HEADS * K * V * 4
    held = {id(x): x.nbytes for x in vars(packed).values() if isinstance(x, torch.Tensor)}
    assert sum(held.values()) <= 8 * (SIZE + 1)  # the free list


def test_a_layer_is_handed_out_as_packed_states(pools: tuple[str, Any, Any]) -> None:
    _, dense, packed = pools
    states = packed.mamba2_layer_cache(1).temporal
    assert isinstance(states, PackedStates)
    assert (states.layer, states.last) == (1, True)
    assert states.shape == dense.mamba2_layer_cache(1).temporal.shape
    assert [states.stride(i) for i in range(4)] == list(dense.mamba2_layer_cache(1).temporal.stride())
    assert torch.equal(packed.mamba2_layer_cache(1).conv[0], dense.mamba2_layer_cache(1).conv[0])


def test_slot_bytes_are_packed_bytes(pools: tuple[str, Any, Any]) -> None:
    version, _, packed = pools
    state = state_of(version)
    state.plans[0, 1], state.slots_per_request = rank_plan(), 3
    activate(state)
    params = cache_params()
    before = params.mamba_cache_per_req
    conv = sum(a * b for a, b in params.shape.conv) * 2 * LAYERS
    assert before == conv + LAYERS * HEADS * K * V * 4
    sizing.install_slot_bytes(state.version.state_params)
    window = rank_plan().window_bytes
    assert params.mamba_cache_per_req == rank_plan().slot_bytes + conv + -(-window // 3)
    assert packed.mem_usage * 2**30 == pytest.approx(conv * (SIZE + 1) + store_of(packed).nbytes)  # type: ignore[union-attr]


def test_speculation_and_another_models_states_are_refused(pools: tuple[str, Any, Any]) -> None:
    with pytest.raises(BackendError, match="speculative decoding"):
        new_pool(speculative_num_draft_tokens=4)
    with pytest.raises(BackendError, match=r"in layers \[0, 3\]; the plan is for .* in layers \[0, 2\]"):
        new_pool(mamba_layer_ids=[0, 3])


def test_a_copy_without_pages_is_refused(pools: tuple[str, Any, Any]) -> None:
    _, dense, packed = pools
    with pytest.raises(BackendError, match="holds no packed pages"):
        packed.load_cpu_copy(dense.get_cpu_copy(torch.tensor([1])), torch.tensor([1]))


def test_what_caps_the_running_requests() -> None:
    report = {"max_running_requests": 48, "state_cap": 60, "set_by": "--mamba-full-memory-ratio"}
    assert cap_set_by(report, 48) == "--max-running-requests"
    assert cap_set_by(report, 60) == "the state slots (--mamba-full-memory-ratio)"
    assert cap_set_by(report, 40) == "the KV cache or SGLang's own limits"


class Runner:
    """SGLang's model runner as the sizing sees it: 3 slots a request, 2 GiB at first, the ratio rule."""

    def __init__(self) -> None:
        self.mambaish_config = SimpleNamespace(mamba2_cache_params=cache_params())
        self.server_args = SimpleNamespace(max_mamba_cache_size=None, max_running_requests=None)

    def _calculate_mamba_ratio(self) -> int:
        return 3

    def original(self, total_rest_memory: float) -> float:
        """The ratio branch of SGLang's handle_max_mamba_cache, in GiB."""
        each = self.mambaish_config.mamba2_cache_params.mamba_cache_per_req
        share = total_rest_memory * 0.9 / 1.9 * 2**30
        self.server_args.max_mamba_cache_size = int(share // each)
        return total_rest_memory - self.server_args.max_mamba_cache_size * each / 2**30


def test_sizing_charges_what_is_fixed_and_fills_the_rest_with_packed_slots(pools: tuple[str, Any, Any]) -> None:
    version, _, _ = pools
    state = state_of(version)
    state.plans[0, 1] = rank_plan()
    activate(state)
    runner = Runner()
    dense_slots = int(2 * 0.9 / 1.9 * 2**30 // runner.mambaish_config.mamba2_cache_params.mamba_cache_per_req)
    sizing.install_slot_bytes(state.version.state_params)
    left = sizing.size_states(Runner.original, runner, 2.0)
    cost = sizing.slot_cost(rank_plan(), sizing.conv_bytes(cache_params()))
    slots = runner.server_args.max_mamba_cache_size
    expected = size_pool(2 * 2**30, PoolArguments(slots_per_request=3, disable_radix_cache=False), cost)
    assert abs(slots - expected.slots) <= 1
    assert slots > 1.8 * dense_slots  # convolution states and windows weigh much beside states this small
    assert left * 2**30 == pytest.approx(expected.left_bytes, rel=1e-3)
    assert (state.report["set_by"], state.report["state_cap"]) == ("--mamba-full-memory-ratio", slots // 3)


@pytest.mark.parametrize(("asked", "says"), [(40_000_000, "--max-mamba-cache-size"), (2, "3 of them make a request")])
def test_slots_that_do_not_fit_are_refused_with_the_arithmetic(
    asked: int, says: str, pools: tuple[str, Any, Any]
) -> None:
    version, _, _ = pools
    state = state_of(version)
    state.plans[0, 1] = rank_plan()
    activate(state)
    runner = Runner()
    sizing.install_slot_bytes(state.version.state_params)
    runner.server_args.max_mamba_cache_size = asked
    with pytest.raises(InfeasibleError, match=rf"2\.00 GiB less .* {asked} slots of .*{says}.* lower"):
        sizing.size_states(lambda self, rest: rest, runner, 2.0)
