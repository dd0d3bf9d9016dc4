"""The packed pool against a plain pool of FP32 states with the same codec, under every order of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepquant.codec.packed import PackedCodec
from stepquant.codec.window import WriteWindow
from stepquant.errors import BackendError
from stepquant.runtime.pool import PackedPool
from stepquant.runtime.reference import ReferenceKernels
from stepquant.runtime.slots import HostSlots, SlotStore
from tests.runtime.plans import HEADS, LAYERS, K, V, kernels_of, layout_of, token_of
from tests.runtime.test_reference import exact

SLOTS, REQUESTS = 6, 3


@dataclass
class Plain:
    """A request's state as a pool of FP32 states would have it: what the pages read back as, and its own windows."""

    base: torch.Tensor  # [L, H, K, V]
    windows: list[WriteWindow]
    length: int
    row: int | None = None

    def flush(self, codecs: list[PackedCodec]) -> None:
        for layer, window in enumerate(self.windows):
            if window.decay is not None:
                self.base[layer] = codecs[layer].unpack(codecs[layer].pack(window.fold(self.base[layer])[None]))[0]

    def copy(self, window: int) -> Plain:
        return Plain(self.base.clone(), fresh(window, self.length), self.length)


def fresh(window: int, length: int) -> list[WriteWindow]:
    return [WriteWindow(window, "fp32", length) for _ in range(LAYERS)]


class PoolMachine(RuleBasedStateMachine):
    """Slots, cached prefixes, running requests and host copies; free slots and window rows are poisoned."""

    family: Literal["gdn", "kda"] = "gdn"
    window = 1

    @initialize()
    def build(self) -> None:
        layout, w, codec = layout_of(self.family)
        self.codecs = [PackedCodec(layout, i, w[i], codec) for i in range(LAYERS)]
        self.pool = PackedPool(layout, kernels_of(self.family, self.window), SLOTS, REQUESTS, "cpu")
        self.plain: dict[int, Plain] = {}
        self.saved: list[tuple[HostSlots, Plain]] = []
        self.generator = torch.Generator().manual_seed(0)
        self.poison()

    def poison(self) -> None:
        """Whatever nobody owns is full of garbage."""
        owned = set(self.plain)
        for slot in set(range(1, SLOTS + 1)) - owned:
            self.pool.pages[slot] = 255
            self.pool.table[2, slot] = 1
        rows = {plain.row for plain in self.plain.values()}
        for buffers in self.pool.buffers:
            for row in set(range(REQUESTS + 1)) - rows:
                for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios):
                    x[row] = torch.nan

    def pick(self, data: st.DataObject, slots: list[int] | None = None) -> int:
        return data.draw(st.sampled_from(sorted(self.plain if slots is None else slots)))

    def tensor(self, *slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64)

    def check(self, slot: int) -> None:
        """A page reads back as the plain state, which then takes over the page's own rounding."""
        for layer, codec in enumerate(self.codecs):
            found = codec.unpack(self.pool.page(layer)[slot][None])[0]
            assert torch.allclose(found, self.plain[slot].base[layer], atol=0.02), (slot, layer)
            self.plain[slot].base[layer] = found

    @rule()
    def alloc(self) -> None:
        slots = self.pool.alloc(1)
        assert (slots is None) == (len(self.plain) == SLOTS)
        if slots is not None:
            assert int(slots) not in self.plain
            self.plain[int(slots)] = Plain(torch.zeros(LAYERS, HEADS, K, V), fresh(self.window, 0), 0)
            assert bool((self.pool.pages[slots] == 0).all())
            self.check(int(slots))

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        self.pool.free(self.tensor(slot))
        del self.plain[slot]
        with pytest.raises(BackendError, match=f"slot {slot} is freed but nobody owns it"):
            self.pool.free(self.tensor(slot))
        self.poison()

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), tokens=st.integers(1, 9), again=st.booleans())
    def extend(self, data: st.DataObject, tokens: int, again: bool) -> None:
        """A prefill of one request, from nothing or from where its state is (also in the middle of a decode)."""
        slot = self.pick(data)
        plain = self.plain[slot]
        free_rows = set(range(1, REQUESTS + 1)) - {p.row for p in self.plain.values()}
        row = min(free_rows, default=plain.row)  # also one that runs goes on in another row, if there is one
        if row is None:
            return
        prefix = plain.length if again else 0
        if not prefix:
            plain.base, plain.windows = torch.zeros_like(plain.base), fresh(self.window, 0)
        plain.flush(self.codecs)
        slots, length = torch.tensor([slot, -1]), prefix + tokens
        self.pool.begin_extend(slots, torch.tensor([row, 0]), torch.tensor([prefix, 5]), torch.tensor([length, 5]))
        for layer, codec in enumerate(self.codecs):
            workspace = torch.full((2, HEADS, V, K), torch.nan)
            self.pool.read_states(layer, slots, workspace)
            assert torch.allclose(workspace[0].transpose(-1, -2), plain.base[layer], atol=0.02)
            state = torch.randn(HEADS, K, V, generator=self.generator) * 0.1
            self.pool.extend_layer(layer, slots, torch.stack([state.transpose(-1, -2), workspace[1]]))
            plain.base[layer] = codec.unpack(codec.pack(state[None]))[0]
        plain.row, plain.length, plain.windows = row, length, fresh(self.window, length)
        self.check(slot)

    @precondition(lambda self: any(p.row is not None for p in self.plain.values()))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One token of some running requests, in any order, with padding between them."""
        running = [slot for slot, plain in self.plain.items() if plain.row is not None]
        chosen = data.draw(st.lists(st.sampled_from(running), unique=True, min_size=1))
        slots = torch.tensor([-1, *chosen, 0], dtype=torch.int32)
        before = {s: self.pool.pages[s].clone() for s in range(1, SLOTS + 1) if s not in chosen}
        for layer in range(LAYERS):
            token = token_of(self.family, len(slots), self.generator)
            out = torch.full((len(slots), HEADS, V), torch.nan)
            self.pool.decode(layer, slots, **token, scale=K**-0.5, out=out)
            inputs = exact(self.family, token)
            for place, slot in enumerate(chosen, 1):
                plain = self.plain[slot]
                state, y, new = plain.windows[layer].step(plain.base[layer], *(x[place] for x in inputs))
                assert torch.allclose(out[place], y, rtol=1e-3, atol=1e-4), slot
                if new:
                    codec = self.codecs[layer]
                    state = codec.unpack(codec.pack(state[None]))[0]
                plain.base[layer] = state
        for slot in chosen:
            self.plain[slot].length += 1
            self.check(slot)
            assert int(self.pool.table[1, slot]) == self.plain[slot].length % self.window
        assert all(torch.equal(self.pool.pages[s], page) for s, page in before.items())

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A request ends and its slot stays as a cached prefix; its row goes to the next one."""
        slot = self.pick(data)
        self.pool.release(self.tensor(slot))
        self.plain[slot].flush(self.codecs)
        self.plain[slot].row = None
        self.plain[slot].windows = fresh(self.window, self.plain[slot].length)
        self.check(slot)
        self.poison()

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        made = self.pool.fork(self.tensor(slot))
        assert (made is None) == (len(self.plain) == SLOTS)
        if made is not None:
            self.copied(slot, int(made))

    def copied(self, source: int, target: int) -> None:
        self.plain[source].flush(self.codecs)
        self.check(source)
        self.plain[target] = self.plain[source].copy(self.window)
        self.check(target)
        assert torch.equal(self.pool.pages[source], self.pool.pages[target])

    @precondition(lambda self: len(self.plain) > 1)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Into slots that exist, two at once: a rotation, where sources and targets overlap."""
        a, b = data.draw(st.lists(st.sampled_from(sorted(self.plain)), unique=True, min_size=2, max_size=2))
        self.pool.copy(self.tensor(a, b), self.tensor(b, a))
        for slot in (a, b):
            self.plain[slot].flush(self.codecs)
        self.plain[a], self.plain[b] = self.plain[b].copy(self.window), self.plain[a].copy(self.window)
        self.check(a)
        self.check(b)
        self.poison()

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        saved = self.pool.save(self.tensor(slot))
        self.plain[slot].flush(self.codecs)
        self.check(slot)
        assert saved.nbytes == self.pool.slot_bytes + 4
        self.saved.append((saved, self.plain[slot].copy(self.window)))

    @precondition(lambda self: self.plain and self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        slot, (saved, plain) = self.pick(data), data.draw(st.sampled_from(self.saved))
        self.pool.load(saved, self.tensor(slot))
        self.plain[slot] = plain.copy(self.window)
        self.check(slot)
        self.poison()

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.available == SLOTS - len(self.plain)
            assert self.pool.nonfinite == 0


class GdnWindowMachine(PoolMachine):
    window = 4


class KdaWindowMachine(PoolMachine):
    family, window = "kda", 4


for machine in (PoolMachine, GdnWindowMachine, KdaWindowMachine):
    machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestPlainPool = PoolMachine.TestCase
TestGdnWindow = GdnWindowMachine.TestCase
TestKdaWindow = KdaWindowMachine.TestCase


def pool_of(window: int = 1, family: Literal["gdn", "kda"] = "gdn") -> PackedPool:
    return PackedPool(layout_of(family)[0], kernels_of(family, window), 4, 2, "cpu")


def test_slots_out_of_range_are_refused() -> None:
    pool = pool_of()
    with pytest.raises(BackendError, match="slot 5 is out of range; expected 1 to 4"):
        pool.check(torch.tensor([1, 5]))
    with pytest.raises(BackendError, match="slot 0 is out of range"):
        pool.check(torch.tensor([0]))
    pool.check(torch.tensor([1, 4]))


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


def test_bytes() -> None:
    pool = pool_of(4)
    assert pool.pages.nbytes == 5 * pool.slot_bytes
    own = sum(
        x.nbytes for b in pool.buffers for x in (b.keys, b.us, b.ratios, b.gammas)
    )  # fp32 buffers have no scales; u_now is shared
    assert pool.window_bytes == own + pool.buffers[0].u_now.nbytes
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
