"""The packed pool: what it refuses, resets and counts; ranks, sizes beyond 2 GiB, copies at every point of a window."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from stepquant.errors import BackendError
from stepquant.runtime.pool import PackedPool
from stepquant.runtime.reference import ReferenceKernels
from stepquant.runtime.slots import SlotStore
from tests.runtime.plans import HEADS, LAYERS, K, V, kernels_of, layout_of, token_of


def pool_of(window: int = 1, family: Literal["gdn", "kda"] = "gdn") -> PackedPool:
    return PackedPool(layout_of(family)[0], kernels_of(family, window), 4, 2, "cpu")


def test_slots_out_of_range_are_refused() -> None:
    pool = pool_of()
    with pytest.raises(BackendError, match="slot 5 is out of range; expected 1 to 4"):
        pool.owned_index(torch.tensor([1, 5]))
    with pytest.raises(BackendError, match="slot 0 is out of range"):
        pool.owned_index(torch.tensor([0]))
    assert pool.owned_index(torch.tensor([1, 4], dtype=torch.int32)).tolist() == [1, 4]


def test_copies_name_as_many_targets_as_sources() -> None:
    pool = pool_of()
    for source, target in (([1, 2], [3]), ([1], [2, 3]), (1, 2)):
        with pytest.raises(BackendError, match="expected as many of both"):
            pool.copy(torch.tensor(source), torch.tensor(target))


def test_on_a_gpu_slots_below_zero_are_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for, and an index of -1 would be the last slot."""
    pool = pool_of(4)
    pool.pages[:] = 7
    monkeypatch.setattr(pool, "device", torch.device("cuda"))
    assert pool.owned_index(torch.tensor([-1, 3])).tolist() == [0, 3]
    pool.clear(torch.tensor([-1]))
    pool.copy(torch.tensor([-3]), torch.tensor([-1]))
    assert bool((pool.pages[1:] == 7).all())


def test_a_slot_that_is_named_twice_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU two programs would read and write the same page at the same time."""
    pool, folded = pool_of(4), []
    slots = pool.alloc(3)
    assert slots is not None
    pool.table[2, slots] = 2
    monkeypatch.setattr(pool.kernels, "flush", lambda layer, pages, targets, *_: folded.append(targets.tolist()))
    pool.flush(torch.tensor([2, -1, 1, 2, 1, 0, 0, 2, 3]))
    assert folded == [[2, -1, 1, -1, -1, -1, -1, -1, 3]] * LAYERS
    assert pool.table[2].tolist()[1:4] == [0, 0, 0]


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("before", range(5))
def test_a_copy_at_every_point_of_a_window(family: Literal["gdn", "kda"], before: int) -> None:
    """In the step whose window folds and in all others, into a request of the same batch that has tokens of its own
    pending: both sides go on as two requests with one state do, and other pages stay as they are."""
    window, g = 4, torch.Generator().manual_seed(before)
    pool = PackedPool(layout_of(family)[0], kernels_of(family, window), 5, 3, "cpu")
    slots = pool.alloc(4)
    assert slots is not None
    rows = torch.tensor([1, 2, 3, 0])
    pool.begin_extend(slots[:3], rows[:3], torch.zeros(3), torch.tensor([8, 9, 8]))
    for layer in range(LAYERS):
        pool.extend_layer(layer, slots[:3], torch.randn(3, HEADS, V, K, generator=g) * 0.1)

    def decode(which: list[int]) -> torch.Tensor:
        outs = []
        for layer in range(LAYERS):
            one = token_of(family, 1, g)
            token = {n: x.expand(len(which), *x.shape[1:]) if n in "qkvab" else x for n, x in one.items()}
            outs.append(torch.empty(len(which), HEADS, V))
            pool.decode(layer, torch.tensor(which, dtype=torch.int32), **token, scale=K**-0.5, out=outs[-1])
        return torch.stack(outs)

    for _ in range(before):
        decode([1, 2, 3])
    third = pool.pages[3].clone()
    pool.copy(torch.tensor([1]), torch.tensor([2]))
    assert pool.table[:, 2].tolist() == [-1, before % window, 0]
    assert torch.equal(pool.pages[1], pool.pages[2])
    assert torch.equal(pool.pages[3], third)
    pool.table[0, 2] = 2  # the request of the target goes on from the copy
    for _ in range(2 * window):
        outs = decode([1, 2])
        assert torch.equal(outs[:, 0], outs[:, 1])
        assert torch.equal(pool.pages[1], pool.pages[2])
    assert torch.equal(pool.pages[3], third)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_a_request_that_goes_on_in_another_row_takes_its_tokens_along(family: Literal["gdn", "kda"]) -> None:
    """Two requests with one state and one text: what is pending of the first is in its page once it has another row."""
    g = torch.Generator().manual_seed(0)
    pool = PackedPool(layout_of(family)[0], kernels_of(family, 4), 2, 3, "cpu")
    slots = torch.tensor([1, 2], dtype=torch.int32)
    pool.begin_extend(slots, torch.tensor([1, 2]), torch.zeros(2), torch.tensor([8, 8]))
    for layer in range(LAYERS):
        pool.extend_layer(layer, slots, torch.randn(1, HEADS, V, K, generator=g).expand(2, -1, -1, -1) * 0.1)
    before = pool.pages[1].clone()
    for _ in range(3):
        for layer in range(LAYERS):
            one = token_of(family, 1, g)
            token = {n: x.expand(2, *x.shape[1:]) if n in "qkvab" else x for n, x in one.items()}
            pool.decode(layer, slots, **token, scale=K**-0.5, out=torch.empty(2, HEADS, V))
    pool.flush(slots[1:])
    pool.begin_extend(slots[:1], torch.tensor([3]), torch.tensor([11]), torch.tensor([15]))
    assert not torch.equal(pool.pages[1], before)
    assert torch.equal(pool.pages[1], pool.pages[2])
    assert pool.table[:, 1].tolist() == [3, 3, 0]


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_a_fresh_request_has_nothing_of_the_owner_before(family: Literal["gdn", "kda"]) -> None:
    """A slot that was given up with tokens pending, and is copied before the new request's prefill is through."""
    pool = pool_of(4, family)
    pool.pages[1], pool.table[:, 1] = 255, torch.tensor([1, 3, 3], dtype=torch.int32)
    for buffers in pool.buffers:
        buffers.us[1], buffers.keys[1] = 5.0, 5.0
    pool.begin_extend(torch.tensor([1]), torch.tensor([2]), torch.tensor([0]), torch.tensor([9]))
    pool.copy(torch.tensor([1]), torch.tensor([2]))
    assert not pool.pages[1:3].any()
    assert pool.table[2, 1:3].tolist() == [0, 0]


def _asks(version: str, action: str, pool: object, done: list[object]) -> None:
    """SGLang's scheduler does something with slot 3."""
    from stepquant.runtime.sglang import pool as hooks
    from stepquant.runtime.sglang.state import Accept, PluginState, activate
    from stepquant.runtime.sglang.versions import VERSIONS

    activate(PluginState(Path("nowhere"), Accept(), VERSIONS[version]))
    cache = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    slot = torch.tensor(3)
    own = SimpleNamespace(mamba_pool_idx=slot)
    req = SimpleNamespace(mamba_pool_idx=slot, kv=own, finished=lambda: action == "release")

    def native(*_: object) -> None:
        done.append("native")

    if action == "copy":
        hooks.copy(native, pool, slot, slot)
    elif action == "save":
        hooks.save(native, pool, slot)
    elif action == "load":
        hooks.load(native, pool, hooks.HostCopy(None, None), slot)  # type: ignore[arg-type]
    elif version == "0.5.12":
        hooks.finished(native, cache, req)
    else:
        hooks.checkpoint(native, cache, req)


@pytest.mark.parametrize(
    ("version", "action"),
    [("0.5.12", "copy"), ("0.5.12", "save"), ("0.5.12", "load"), ("0.5.12", "release"), ("0.5.23", "release"),
     ("0.5.23", "flush")],
)  # fmt: skip
def test_slots_wait_for_the_forward_that_may_still_write(
    version: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler handles slots on a stream of its own, beside a forward whose last layers may not have run.
    On an H200 pages come out wrong without the wait (benchmarks/results/serving_h200.json, slots_beside_a_forward)."""
    from stepquant.runtime.sglang import pool as hooks

    done: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            done.append(("waits for", other))

    def pages(*_: object) -> None:
        done.append("pages")

    forward, scheduler = object(), Stream()
    store = SimpleNamespace(
        window=4, device="cpu", copy=pages, save=pages, load=pages, release=pages, flush=pages
    )  # fmt: skip
    pool = SimpleNamespace(**{hooks.STORE: store, "stepquant_stream": forward})
    monkeypatch.setattr(hooks.torch.cuda, "current_stream", lambda: scheduler)
    _asks(version, action, pool, done)
    assert done[0] == ("waits for", forward)
    assert sorted(map(str, done[1:])) == ["native", "pages"]
    done.clear()
    pool.stepquant_stream = scheduler  # the same stream: nothing to wait for
    _asks(version, action, pool, done)
    assert sorted(map(str, done)) == ["native", "pages"]


def test_a_pool_that_finds_less_memory_than_the_sizing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepquant.runtime.sglang import pool as hooks

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hooks, "SlotStore", full)
    monkeypatch.setattr(hooks.torch.cuda, "mem_get_info", lambda _: (1 << 29, 1 << 33))
    plan = SimpleNamespace(layout=None, slot_bytes=1 << 20, window_bytes=1 << 19)
    with pytest.raises(
        BackendError, match=r"1023 slots take 1\.00 GiB, .* of 511 requests 0\.25 GiB, and 0\.50 GiB are"
    ):
        hooks.new_store(plan, None, 1023, 511, "cuda")  # type: ignore[arg-type]


def test_counts_and_copies_of_another_plan_are_refused() -> None:
    layout, kernels = layout_of("gdn")[0], kernels_of("gdn")
    with pytest.raises(BackendError, match="at least 1 slot"):
        PackedPool(layout, kernels, 0, 1, "cpu")
    pool, other = pool_of(), pool_of(family="kda")
    saved = other.save(torch.tensor([1]))
    with pytest.raises(BackendError, match="made with another plan"):
        pool.load(saved, torch.tensor([1]))


@pytest.mark.parametrize("window", [1, 4])
def test_a_state_that_is_not_finite_is_reset_and_no_other_is_touched(window: int) -> None:
    pool, g = pool_of(window), torch.Generator().manual_seed(0)
    slots = pool.alloc(2)
    assert slots is not None
    pool.begin_extend(slots, torch.tensor([1, 2]), torch.zeros(2), torch.tensor([4, 4]))
    for layer in range(LAYERS):
        states = torch.randn(2, HEADS, V, K, generator=g)
        states[1, 0, 3, 3] = torch.nan if layer == 0 else 1.0
        pool.extend_layer(layer, slots, states)
    assert pool.nonfinite == 1
    assert bool((pool.page(0)[slots[1]] == 0).all())
    assert bool((pool.page(1)[slots[1]] != 0).any())
    kept = pool.pages[slots[0]].clone()
    for layer in range(LAYERS):
        token = token_of("gdn", 1, g)
        token["v"][0, 0, 0] = torch.inf
        pool.decode(layer, slots[1:].int(), **token, scale=1.0, out=torch.empty(1, HEADS, V))
    assert pool.nonfinite == 2
    assert bool((pool.pages[slots[1]] == 0).all())
    assert int(pool.table[2, slots[1]]) == 0
    assert torch.equal(pool.pages[slots[0]], kept)


def test_tracked_copies_follow_the_mask() -> None:
    pool = pool_of(4)
    pool.pages[1], pool.pages[2], pool.pages[3] = 11, 22, 33
    pool.track(torch.tensor([1, 2, -1]), torch.tensor([3, 4, 3]), torch.tensor([True, False, True]))
    assert [int(pool.pages[i, 0]) for i in range(1, 5)] == [11, 22, 11, 0]
    assert pool.table[0].tolist() == [0, -1, -1, -1, -1]


def test_padding_among_tracked_slots_and_snapshots_touches_no_slot() -> None:
    pool = pool_of(4)
    pool.pages[:], pool.table[:, 1:] = torch.arange(5).unsqueeze(1), 3
    pages, table = pool.pages.clone(), pool.table.clone()
    live = torch.ones(4, dtype=torch.bool)
    pool.track(torch.tensor([1, 2, -1, 0]), torch.tensor([4, -1, 3, 3]), live)
    assert torch.equal(pool.pages[4], pages[1])
    assert pool.table[:, 4].tolist() == [-1, 0, 0]
    states = torch.zeros(2, HEADS, V, K)
    for layer in range(LAYERS):
        pool.write_snapshots(layer, torch.tensor([-1, 2]), states, layer == LAYERS - 1)
    assert pool.table[:, 2].tolist() == [-1, 0, 0]
    assert not torch.equal(pool.pages[2], pages[2])
    others = [slot for slot in range(1, 5) if slot not in (2, 4)]
    assert torch.equal(pool.pages[others], pages[others])
    assert torch.equal(pool.table[:, others], table[:, others])
    assert int(pool.table[0, 0]) == 0


def test_bytes() -> None:
    pool = pool_of(4)
    assert pool.pages.nbytes == 5 * pool.slot_bytes
    own = sum(
        x.nbytes for b in pool.buffers for x in (b.keys, b.us, b.ratios, b.gammas)
    )  # fp32 buffers have no scales; k_now and u_now are shared
    shared = sum(b.k_now.nbytes + b.u_now.nbytes for b in pool.buffers[:2])
    assert pool.window_bytes == own + shared
    assert pool.nbytes == pool.pages.nbytes + pool.table.nbytes + pool.window_bytes


def test_the_heads_of_two_ranks_are_the_heads_of_one() -> None:
    """Tensor parallelism: pages, outputs and folds of the ranks lie end to end."""
    (layout, w, codec), size = layout_of("kda"), HEADS
    parts = [
        ReferenceKernels(layout.rank(i, size), w[:, i : i + 1].contiguous(), codec, "kda", 1, 4, "fp32")
        for i in range(size)
    ]
    whole = PackedPool(layout, kernels_of("kda", 4), 3, 3, "cpu")
    ranks = [PackedPool(layout.rank(i, size), parts[i], 3, 3, "cpu") for i in range(size)]
    g = torch.Generator().manual_seed(0)
    states = torch.randn(LAYERS, 2, HEADS, V, K, generator=g) * 0.1
    for rank, pool in enumerate([whole, *ranks]):
        slots = pool.alloc(2)
        assert slots is not None
        pool.begin_extend(slots, slots, torch.zeros(2), torch.tensor([2, 3]))
        for layer in range(LAYERS):
            pool.extend_layer(layer, slots, states[layer] if rank == 0 else states[layer, :, rank - 1 : rank])
    for _ in range(5):
        for layer in range(LAYERS):
            token = token_of("kda", 2, g)
            outs = []
            for rank, pool in enumerate([whole, *ranks]):
                own = dict(token)
                if rank:
                    head, rows = slice(rank - 1, rank), slice((rank - 1) * K, rank * K)
                    own = {n: x[:, head] for n, x in token.items() if n in ("q", "k", "v", "b")}
                    own |= {"a": token["a"][:, rows], "A_log": token["A_log"][head], "dt_bias": token["dt_bias"][rows]}
                outs.append(torch.empty(2, HEADS if rank == 0 else 1, V))
                pool.decode(layer, torch.tensor([1, 2], dtype=torch.int32), **own, scale=K**-0.5, out=outs[-1])
            assert torch.allclose(outs[0], torch.cat(outs[1:], 1), atol=1e-6)
    for layer in range(LAYERS):
        found = [
            pool.kernels.unpack(layer, pool.page(layer), torch.tensor([1, 2]), torch.zeros(2, 1, K, V))
            for pool in ranks
        ]
        expected = whole.kernels.unpack(layer, whole.page(layer), torch.tensor([1, 2]), torch.zeros(2, HEADS, K, V))
        assert torch.allclose(torch.cat(found, 1), expected, atol=1e-5)


def test_a_pool_beyond_2_gib() -> None:
    """Bytes and 8-byte words of the last slots lie beyond 2^31; memory that is not touched is not taken."""
    layout = layout_of("gdn")[0]
    slot_bytes = int(layout.layer_bytes.sum())
    count = 2**31 // slot_bytes + 10
    store = SlotStore(layout, kernels_of("gdn"), count, 1, "cpu")
    assert store.pages.numel() > 2**31
    last, first = torch.tensor([count]), torch.tensor([1])
    g = torch.Generator().manual_seed(0)
    store.begin_extend(last, torch.tensor([1]), torch.tensor([0]), torch.tensor([5]))
    for layer in range(LAYERS):
        store.extend_layer(layer, last, torch.randn(1, HEADS, V, K, generator=g))
    store.copy(last, first)
    assert bool((store.pages[1] != 0).any())
    assert torch.equal(store.pages[1], store.pages[count])
    store.load(store.save(first), last - 1)
    store.clear(last)
    assert torch.equal(store.pages[count - 1], store.pages[1])
    assert not bool(store.pages[count].any())
    store.track(first, last, torch.tensor([True]))
    assert torch.equal(store.pages[count], store.pages[1])


def test_a_batch_beyond_the_running_requests_is_refused() -> None:
    pool, g = pool_of(4), torch.Generator().manual_seed(0)
    slots = torch.full((pool.requests + 65,), -1, dtype=torch.int32)
    token = token_of("gdn", len(slots), g)
    with pytest.raises(BackendError, match="a batch of 67 for 2 running requests"):
        pool.decode(0, slots, **token, scale=1.0, out=torch.empty(len(slots), HEADS, V))
    token = {n: x[:66] if x.shape[0] == 67 else x for n, x in token.items()}
    pool.decode(0, slots[:66], **token, scale=1.0, out=torch.empty(66, HEADS, V))
