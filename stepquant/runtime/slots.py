"""Storage of packed states: one page a layer and slot, write windows of running requests, nothing in FP32.

A slot is one request's recurrent state. All its layers lie end to end in one row of `pages`, so that clearing, copying
and sending a slot to the host are one operation each, on packed bytes. Three integers stand beside each slot:

- ROW: the entry of the window buffers that its running request owns, -1 for none (a cached prefix);
- PHASE: the length of its text mod W;
- PENDING: tokens that are in the window buffers and not yet in the page.

Copying, forking and sending a slot away first folds what is pending (`flush`). Slot 0 is padding: batches that a CUDA
graph pads point at it or carry -1, and no request ever owns it. Everything a decode step does is on the device and
keeps its addresses, so that it can be captured.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepquant.errors import BackendError
from stepquant.layout import PageLayout
from stepquant.runtime.copies import advance, clear_rows, contain, copy_rows
from stepquant.runtime.window import WindowBuffers, allocate_now, bytes_per_request
from stepquant.runtime.writeback import PAIRS, WritebackStream

ROW, PHASE, PENDING = 0, 1, 2
PADDING_SLOT = 0
SPARE = 64  # places of a batch beyond the running requests, for padding


@dataclass(frozen=True)
class HostSlots:
    """Slots on the host: packed pages uint8 `[n, slot_bytes]`, and their lengths mod W int32 `[n]`."""

    pages: Tensor
    phases: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes."""
        return self.pages.nbytes + self.phases.nbytes


@dataclass
class _Step:
    """What the layers of one decode step share."""

    rows: Tensor
    phases: Tensor
    pending: Tensor
    folds: Tensor


class SlotStore:
    """Pages of `slots` slots and the padding slot, on one device.

    Args:
        layout: pages of this rank.
        kernels: `PackedKernels` or `ReferenceKernels` for the same layout.
        slots: slots that requests and cached prefixes can own, numbered from 1.
        requests: running requests at once, rows 1 to `requests` of the window buffers (row 0 is padding).
        device: where pages and buffers live.

    Raises:
        BackendError: on counts below 1.
    """

    def __init__(self, layout: PageLayout, kernels: Any, slots: int, requests: int, device: torch.device | str) -> None:
        if slots < 1 or requests < 1:
            raise BackendError(f"a packed pool needs at least 1 slot and 1 request; got {slots} and {requests}")
        self.layout, self.kernels, self.slots, self.requests = layout, kernels, slots, requests
        self.device = torch.device(device)
        self.window = int(kernels.spec.window)
        self.slot_bytes = int(layout.layer_bytes.sum())
        self.pages = torch.zeros(slots + 1, self.slot_bytes, dtype=torch.uint8, device=self.device)
        self.table = torch.zeros(3, slots + 1, dtype=torch.int32, device=self.device)
        self.table[ROW, 1:] = -1
        ends = (layout.layer_offsets + layout.layer_bytes).tolist()
        self._layers = [self.pages[:, i:j] for i, j in zip(layout.layer_offsets.tolist(), ends, strict=True)]
        self.buffers: list[WindowBuffers] = []
        self.aside: WritebackStream | None = None
        if self.window > 1:
            if self.device.type == "cuda":
                self.aside = WritebackStream(self.device)
            shared = [allocate_now(kernels.spec, requests + SPARE, self.device) for _ in range(PAIRS)]
            self.buffers = [
                WindowBuffers.allocate(kernels.spec, requests + 1, self.device, shared[i % PAIRS])
                for i in range(len(self._layers))
            ]
        self._step: _Step | None = None
        self._lengths: Tensor | None = None
        self._bad = torch.zeros(0, dtype=torch.bool, device=self.device)
        self._nonfinite = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool: pages of all slots and the padding slot, table and window buffers."""
        return self.pages.nbytes + self.table.nbytes + self.window_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of the window buffers of all running requests and the padding row."""
        if self.window == 1:
            return 0
        own = bytes_per_request(self.kernels.spec) * len(self.buffers) * (self.requests + 1)
        return own + sum(b.k_now.nbytes + b.u_now.nbytes for b in self.buffers[:PAIRS])

    @property
    def nonfinite(self) -> int:
        """States that were not finite, and were reset to zero, so far; waits for the device."""
        return int(self._nonfinite)

    def page(self, layer: int) -> Tensor:
        """Pages of one layer, uint8 `[slots + 1, layer_bytes]`, a view with the slot's stride."""
        return self._layers[layer]

    def owned_index(self, slots: Tensor) -> Tensor:
        """Slots that somebody may own, as an index. A GPU is not waited for: there negative ones become padding, and
        torch's own kernels stop at those beyond the pool.

        Raises:
            BackendError: naming the first one that is out of range (on a CPU).
        """
        if self.device.type == "cpu" and (bad := slots[(slots < 1) | (slots > self.slots)]).numel():
            raise BackendError(f"slot {int(bad.flatten()[0])} is out of range; expected 1 to {self.slots}")
        return slots.long().clamp(min=PADDING_SLOT)

    # Slots that change owner

    def clear(self, slots: Tensor) -> None:
        """Make slots `[n]` what fresh ones are: a zero state, length 0, nothing pending, no running request."""
        slots = self.owned_index(slots)
        clear_rows(self.pages, slots)
        self.table[ROW].index_fill_(0, slots, -1)
        self.table[PHASE:].index_fill_(1, slots, 0)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy states `source [n]` to slots `target [n]`, which are distinct and no sources: pages are read and written
        once, in no order. Targets belong to no running request afterwards.

        Raises:
            BackendError: as many targets as sources are expected; or naming a target that is named twice or is a source
                too (on a CPU; a GPU is not waited for).
        """
        if source.dim() != 1 or source.shape != target.shape:
            raise BackendError(
                f"slots {list(source.shape)} are copied to slots {list(target.shape)}; expected as many of both, [n]"
            )
        source, target = self.owned_index(source), self.owned_index(target)
        if self.device.type == "cpu":
            self._check_targets(source, target)
        self.flush(source)
        phases = self.table[PHASE, source]
        copy_rows(self.pages, source, target, torch.ones_like(source, dtype=torch.bool))
        self.table[ROW].index_fill_(0, target, -1)
        self.table[PENDING].index_fill_(0, target, 0)
        self.table[PHASE, target] = phases

    @staticmethod
    def _check_targets(source: Tensor, target: Tensor) -> None:
        given, seen = target.tolist(), set(source.tolist())
        for slot in given:
            if slot in seen:
                raise BackendError(f"slot {slot} is copied to and is also a source or copied to twice; copy it apart")
            seen.add(slot)

    def save(self, slots: Tensor) -> HostSlots:
        """Packed copies of slots on the host; waits for the device."""
        slots = self.owned_index(slots)
        self.flush(slots)
        return HostSlots(self.pages[slots].cpu(), self.table[PHASE, slots].cpu())

    def load(self, saved: HostSlots, slots: Tensor) -> None:
        """Put `save`'s copies into slots, which belong to no running request afterwards.

        Raises:
            BackendError: if the copies are of another layout or another number of slots.
        """
        slots = self.owned_index(slots)
        if tuple(saved.pages.shape) != (slots.numel(), self.slot_bytes):
            raise BackendError(
                f"a host copy of {list(saved.pages.shape)} bytes cannot fill {slots.numel()} slots of "
                f"{self.slot_bytes} bytes; it was made with another plan"
            )
        self.pages[slots] = saved.pages.to(self.device)
        self.table[ROW].index_fill_(0, slots, -1)
        self.table[PENDING].index_fill_(0, slots, 0)
        self.table[PHASE, slots] = saved.phases.to(self.device)

    def flush(self, slots: Tensor) -> None:
        """Fold everything pending into the pages of `slots` (-1 and 0: padding); the requests go on afterwards with the
        same phase. A slot that is named twice is folded once: two programs would get into each other's way."""
        if self.window == 1:
            return
        index = slots.long().clamp(min=0)
        state = self.table[:, index]
        again = (index == index.unsqueeze(1)).tril(-1).any(1)
        pending = torch.where((slots > 0) & ~again, state[PENDING], 0)
        targets = torch.where(pending > 0, slots.int(), -1)
        rows = state[ROW].clamp(min=0)
        for layer, buffers in enumerate(self.buffers):
            self.kernels.flush(layer, self.page(layer), targets, buffers, rows, state[PHASE], pending)
        self.table[PENDING].index_fill_(0, index, 0)

    def release(self, slots: Tensor) -> None:
        """Take slots from their running requests, the state flushed: what stays is a cached prefix or free."""
        slots = self.owned_index(slots)
        self.flush(slots)
        self.table[ROW].index_fill_(0, slots, -1)

    # Prefill

    def begin_extend(self, slots: Tensor, rows: Tensor, prefixes: Tensor, lengths: Tensor) -> None:
        """Before the layers of a prefill: requests take their window rows, fresh ones start from a zero state.

        Args:
            slots: int `[B]`, -1 or 0 for padding.
            rows: int `[B]`, the running request's row, 1 to `requests`.
            prefixes: int `[B]`, tokens that are in the state already (0: whatever the slot holds is another's).
            lengths: int `[B]`, tokens after this prefill.
        """
        self.flush(torch.where(prefixes > 0, slots, -1))  # before a request takes another row
        index = slots.long().clamp(min=0)
        fresh = torch.where(prefixes == 0, index, PADDING_SLOT)
        clear_rows(self.pages, torch.where(prefixes == 0, index, -1))
        self.table[PENDING].index_fill_(0, fresh, 0)
        self.table[ROW, index] = torch.where(index > 0, rows.int(), 0)
        self._lengths = torch.where(index > 0, lengths.int() % self.window, 0)
        self._bad = torch.zeros(len(slots), dtype=torch.bool, device=self.device)

    def read_states(self, layer: int, slots: Tensor, workspace: Tensor, v_first: bool = True) -> Tensor:
        """States of the slots of `begin_extend` as FP32 `[B, H, V, K]` (`[B, H, K, V]` without `v_first`)."""
        return self.kernels.unpack(layer, self.page(layer), slots, workspace, v_first)

    def write_states(self, layer: int, slots: Tensor, states: Tensor, v_first: bool = True) -> Tensor:
        """Quantise dense states of any float dtype into slots. A state that is not finite becomes zero, so that nothing
        of it gets into a page; the result `[B]` bool says which."""
        states = states.float()
        self.kernels.pack(layer, self.page(layer), slots, states, v_first)
        bad = ~states.sum((1, 2, 3)).isfinite() & (slots > 0)
        clear_rows(self.page(layer), torch.where(bad, slots, -1))
        return bad

    def extend_layer(self, layer: int, slots: Tensor, states: Tensor, first: int = 0, v_first: bool = True) -> None:
        """Keep what a prefill made of the states of one layer; after the last layer lengths are those of
        `begin_extend` and nothing is pending.

        Args:
            slots: int `[n]`, a run of those of `begin_extend` from place `first` on.
            states: FP32 `[n, H, V, K]`, or `[n, H, K, V]` without `v_first`.
        """
        if self._lengths is None:
            raise BackendError("extend_layer without begin_extend")
        here = slice(first, first + len(slots))
        self._bad[here] |= self.write_states(layer, slots, states, v_first)
        if layer == self.layout.num_layers - 1:
            index = slots.long().clamp(min=0)
            self.table[PHASE, index] = self._lengths[here]
            self.table[PENDING].index_fill_(0, index, 0)
            self._nonfinite += self._bad[here].sum().int()

    def failed(self, first: int, count: int) -> Tensor:
        """Which requests at places `first` on of `begin_extend` had a state that was not finite so far, bool `[n]`."""
        return self._bad[first : first + count]

    def write_snapshots(self, layer: int, slots: Tensor, states: Tensor, last: bool) -> None:
        """States `[n, H, V, K]` of whole chunks, kept for the prefix cache; `last` after the last layer. Chunks are
        multiples of every window length, so a snapshot's phase is 0."""
        self.write_states(layer, slots, states)
        if last:
            index = slots.long().clamp(min=PADDING_SLOT)
            self.table[ROW].index_fill_(0, index, -1)
            self.table[PHASE:].index_fill_(1, index, 0)
            self.table[ROW, PADDING_SLOT].zero_()

    # Decode

    def decode(
        self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor,
        dt_bias: Tensor, scale: float, out: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """One decode step of one layer; layers are called in order, the first and the last frame the step.

        Arguments as `PackedKernels.step`; pages, window buffers and the table are updated, `out` is filled.
        """
        token, last = (q, k, v, a, b, A_log, dt_bias, scale, out), layer == self.layout.num_layers - 1
        if self.window == 1:
            self.kernels.step(layer, self.page(layer), slots, *token, l2norm=l2norm)
            if last:
                contain(out, slots, self.pages, self.table, self._nonfinite)
            return out
        if layer == 0:
            if len(slots) > self.requests + SPARE:
                raise BackendError(f"a batch of {len(slots)} for {self.requests} running requests")
            state = self.table[:, slots.long().clamp(min=0)]
            phases = state[PHASE]
            self._step = _Step(state[ROW].clamp(min=0), phases, state[PENDING], self.kernels.list_folds(phases))
        step = self._step
        if step is None:
            raise BackendError(f"layer {layer} decodes before layer 0")
        buffers = self.buffers[layer]
        if self.aside is not None:
            self.aside.before_read(layer)
        self.kernels.read(
            layer, self.page(layer), slots, *token, buffers=buffers, rows=step.rows, phases=step.phases,
            pending=step.pending, l2norm=l2norm,
        )  # fmt: skip
        with nullcontext() if self.aside is None else self.aside.fold(layer):
            self.kernels.fold(
                layer, self.page(layer), slots, buffers, step.rows, step.phases, step.pending, step.folds
            )  # fmt: skip
        if last and self.aside is not None:
            self.aside.join()
        if last:
            advance(self.table, slots, step.phases, step.pending, self.window)
            contain(out, slots, self.pages, self.table, self._nonfinite)
        return out

    def track(self, source: Tensor, target: Tensor, mask: Tensor) -> None:
        """Copy states `source[i]` to slots `target[i]` where `mask[i]`, inside a decode step and its CUDA graph.

        Whole windows only: the caller tracks at lengths that are multiples of W, where nothing is pending.
        """
        live = mask & (source > 0) & (target > 0)
        copy_rows(self.pages, source, target, live)
        where = torch.where(live, target.long(), PADDING_SLOT)
        self.table[PHASE:].index_fill_(1, where, 0)
        self.table[ROW].index_fill_(0, where, -1)
        self.table[ROW, PADDING_SLOT].zero_()
