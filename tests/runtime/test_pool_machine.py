"""The packed pool against a plain pool of FP32 states with the same codec, under every order of operations.

Three machines (rows and heads, with and without a write window) make 10,000 steps in all; slots and window rows that
nobody owns are full of garbage after every step that gives one up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stepquant.codec.packed import PackedCodec
from stepquant.codec.window import WriteWindow
from stepquant.errors import BackendError
from stepquant.runtime.pool import PackedPool
from stepquant.runtime.slots import HostSlots
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
    steps: ClassVar[int] = 0

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
            self.pool.table[:, slot] = 1
        rows = {plain.row for plain in self.plain.values()}
        for buffers in self.pool.buffers:
            for row in set(range(REQUESTS + 1)) - rows:
                for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios):
                    x[row] = torch.nan

    def pick(self, data: st.DataObject, slots: list[int] | None = None) -> int:
        return data.draw(st.sampled_from(sorted(self.plain if slots is None else slots)))

    def some(self, data: st.DataObject, most: int = 3) -> list[int]:
        """Different slots that somebody owns, in any order."""
        return data.draw(st.lists(st.sampled_from(sorted(self.plain)), unique=True, min_size=1, max_size=most))

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
            assert self.pool.table[:, int(slots)].tolist() == [-1, 0, 0]
            self.check(int(slots))

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Also of requests that run and have tokens pending: their slots and rows go to others as they are."""
        slots = self.some(data)
        for wrong in ([*slots, slots[0]], [*slots, SLOTS + 1], [*slots, 0]):  # all or nothing
            with pytest.raises(BackendError, match=f"slot {wrong[-1]} is freed but nobody owns it"):
                self.pool.free(self.tensor(*wrong))
        self.pool.free(self.tensor(*slots))
        for slot in slots:
            del self.plain[slot]
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

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        """What is pending goes into the pages of some slots, padding and repetitions among them; requests go on."""
        slots = self.some(data)
        self.pool.flush(self.tensor(-1, *slots, 0, slots[0]))
        for slot in slots:
            self.plain[slot].flush(self.codecs)
            self.plain[slot].windows = fresh(self.window, self.plain[slot].length)
            self.check(slot)
            row = self.plain[slot].row
            assert self.pool.table[:, slot].tolist()[1:] == [self.plain[slot].length % self.window, 0]
            assert row is None or int(self.pool.table[0, slot]) == row

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Into slots that exist, several at once, one source twice; a target is no source and named once."""
        targets = self.some(data, SLOTS)
        others = sorted(set(self.plain) - set(targets))
        refused = [(targets, targets), (targets[:1] * 2, [*targets[:1] * 2])]
        refused += [([*others, targets[0]], [*targets[:1], *others])] if others else []
        for sources, wrong in refused:
            with pytest.raises(BackendError, match="is copied to and is also a source or copied to twice"):
                self.pool.copy(self.tensor(*sources), self.tensor(*wrong))
        if not others:
            return
        sources = data.draw(st.lists(st.sampled_from(others), min_size=len(targets), max_size=len(targets)))
        self.pool.copy(self.tensor(*sources), self.tensor(*targets))
        for slot in set(sources):
            self.plain[slot].flush(self.codecs)
            self.plain[slot].windows = fresh(self.window, self.plain[slot].length)
        copies = [self.plain[slot].copy(self.window) for slot in sources]
        self.plain.update(zip(targets, copies, strict=True))
        for slot in {*sources, *targets}:
            self.check(slot)
        self.poison()

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def track(self, data: st.DataObject) -> None:
        """Inside a decode step: states at whole windows, under a mask, into slots that are no sources."""
        whole = [s for s, p in self.plain.items() if p.row is not None and p.length % self.window == 0]
        targets = [s for s in self.plain if s not in whole]
        count = min(len(whole), len(targets))
        mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        pairs = list(zip(whole, targets, strict=False))
        sources, places = ([pair[i] for pair in pairs] for i in (0, 1))
        assert not self.pool.table[2, self.tensor(*sources)].any()
        self.pool.track(self.tensor(-1, *sources), self.tensor(1, *places), torch.tensor([True, *mask]))
        for source, target in (pair for pair, taken in zip(pairs, mask, strict=True) if taken):
            self.plain[target] = Plain(self.plain[source].base.clone(), fresh(self.window, 0), 0)
            assert torch.equal(self.pool.pages[source], self.pool.pages[target])
            self.check(target)
        self.poison()

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        """States of whole chunks of a prefill, kept for the prefix cache."""
        slots = self.some(data)
        for layer, codec in enumerate(self.codecs):
            states = torch.randn(len(slots), HEADS, K, V, generator=self.generator) * 0.1
            dense = states.transpose(-1, -2).contiguous()
            self.pool.write_snapshots(layer, self.tensor(*slots), dense, layer == LAYERS - 1)
            for slot, state in zip(slots, states, strict=True):
                self.plain[slot].base[layer] = codec.unpack(codec.pack(state[None]))[0]
        for slot in slots:
            self.plain[slot] = Plain(self.plain[slot].base, fresh(self.window, 0), 0)
            self.check(slot)
        self.poison()

    @rule(data=st.data(), wrong=st.sampled_from([-1, 0, SLOTS + 1, 2**31]))
    def refuse(self, data: st.DataObject, wrong: int) -> None:
        """A slot that is none: nothing changes."""
        before, table = self.pool.pages.clone(), self.pool.table.clone()
        good = self.pick(data, list(range(1, SLOTS + 1)))
        bad, fine = self.tensor(good, wrong), self.tensor(good, good % SLOTS + 1)
        for call in (
            lambda: self.pool.clear(bad), lambda: self.pool.copy(bad, fine), lambda: self.pool.copy(fine, bad),
            lambda: self.pool.save(bad), lambda: self.pool.release(bad),
            lambda: self.pool.load(HostSlots(self.pool.pages[:2], self.pool.table[1, :2]), bad),
        ):  # fmt: skip
            with pytest.raises(BackendError, match=f"slot {wrong} is out of range; expected 1 to {SLOTS}"):
                call()
        assert torch.equal(self.pool.pages, before)
        assert torch.equal(self.pool.table, table)

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
        type(self).steps += 1
        if hasattr(self, "pool"):
            assert self.pool.available == SLOTS - len(self.plain)
            assert self.pool.nonfinite == 0


class GdnWindowMachine(PoolMachine):
    window = 4


class KdaWindowMachine(PoolMachine):
    family, window = "kda", 4


@pytest.mark.parametrize("machine", [PoolMachine, GdnWindowMachine, KdaWindowMachine])
def test_every_order_of_operations(machine: type[PoolMachine]) -> None:
    machine.steps = 0
    some = settings(max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
    while machine.steps < 10_000 / 3:
        run_state_machine_as_test(machine, settings=some)
