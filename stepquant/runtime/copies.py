"""Copies, counters and containment inside a decode step: masked, with 64-bit offsets, and free of host reads."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepquant.errors import BackendError

PROGRAMS = 32  # that share the copy of one row
WORDS = 1024  # 8-byte words that a program moves at a time
CLEARED = 8 * WORDS  # that a program clears


@triton.jit
def _copy_rows(
    base, stride_piece, stride_row, source, target, mask, piece_words, row_words, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (piece, i) copies a piece of row source[i] to row target[i] where mask[i]."""
    piece, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(mask + i) == 0:
        return
    from_row, to_row = tl.load(source + i).to(tl.int64), tl.load(target + i).to(tl.int64)
    if from_row < 0 or to_row < 0:
        return
    start = base + piece * stride_piece
    left = tl.minimum(piece_words, row_words - piece * piece_words)
    for first in range(0, left, WORDS):
        word = first + tl.arange(0, WORDS)
        value = tl.load(start + from_row * stride_row + word, mask=word < left)
        tl.store(start + to_row * stride_row + word, value, mask=word < left)


def copy_rows(rows: Tensor, source: Tensor, target: Tensor, mask: Tensor) -> None:
    """Copy rows `source[i]` to rows `target[i]` where `mask[i]`; targets are distinct and no sources.

    Args:
        rows: `[N, bytes]`, or `[L, N, a, b]` with a layer in front; rows are contiguous, of a multiple of 8 bytes.
        source, target: int `[B]`; negative ones are left out. mask: bool `[B]`.

    Raises:
        BackendError: if a row is no multiple of 8 bytes.
    """
    layers, rows = (1, rows) if rows.dim() == 2 else (rows.shape[0], rows)
    one = rows if rows.dim() == 2 else rows[0]
    size, stride = one[0].numel() * rows.element_size(), one.stride(0) * rows.element_size()
    if size % 8 or stride % 8:
        raise BackendError(f"rows of {size} bytes, {stride} apart, cannot be copied in words of 8 bytes")
    if not rows.is_cuda:
        some = mask & (source >= 0) & (target >= 0)
        index = (slice(None),) if layers > 1 else ()
        rows[(*index, target[some].long())] = rows[(*index, source[some].long())]
        return
    words = rows.view(torch.int64) if rows.dim() == 2 else rows.flatten(2).view(torch.int64)
    if layers > 1:
        piece, pieces, total, apart = size // 8, layers, layers * size // 8, words.stride(0)
    else:
        piece = -(-size // 8 // PROGRAMS)
        pieces, total, apart = PROGRAMS, size // 8, piece
    _copy_rows[(pieces, len(source))](
        words, apart, stride // 8, source, target, mask, piece, total, WORDS=WORDS, num_warps=8
    )


@triton.jit
def _clear_rows(base, stride_row, index, row_words, CLEARED: tl.constexpr, WORDS: tl.constexpr):
    """Program (piece, i) fills a piece of row index[i] with zeros."""
    piece, row = tl.program_id(0), tl.load(index + tl.program_id(1)).to(tl.int64)
    if row < 0:
        return
    start = base + row * stride_row
    for first in tl.static_range(0, CLEARED, WORDS):
        word = piece.to(tl.int64) * CLEARED + first + tl.arange(0, WORDS)
        tl.store(start + word, tl.full([WORDS], 0, tl.int64), mask=word < row_words)


def clear_rows(rows: Tensor, index: Tensor) -> None:
    """Fill rows `index[i]` of `rows` `[N, bytes]` with zeros; negative ones are left out.

    Args:
        rows: contiguous rows of a multiple of 8 bytes, any such stride. index: int `[B]`.
    """
    if not rows.is_cuda:
        rows[index[index >= 0].long()] = 0
        return
    words = rows.view(torch.int64)
    _clear_rows[(-(-words.shape[1] // CLEARED), len(index))](
        words, words.stride(0), index, words.shape[1], CLEARED=CLEARED, WORDS=WORDS, num_warps=8
    )


@triton.jit
def _advance(table, stride, slots, phases, pending, W: tl.constexpr):
    """Count one token of request i: its phase moves on, a fold empties its window."""
    i = tl.program_id(0)
    slot = tl.load(slots + i).to(tl.int64)
    if slot <= 0:
        return
    phase, count = tl.load(phases + i), tl.load(pending + i)
    tl.store(table + stride + slot, (phase + 1) % W)
    tl.store(table + 2 * stride + slot, tl.where(phase == W - 1, 0, count + 1))


def advance(table: Tensor, slots: Tensor, phases: Tensor, pending: Tensor, window: int) -> None:
    """Count one decoded token of every request: table `[3, slots + 1]` of `SlotStore`; `phases` and `pending` `[B]`
    are those before the token. Padding (slots below 1) is left alone."""
    if table.is_cuda:
        _advance[(len(slots),)](table, table.stride(0), slots, phases, pending, W=window, num_warps=1)
        return
    live = slots > 0
    index = slots[live].long()
    table[1, index] = (phases[live] + 1) % window
    table[2, index] = torch.where(phases[live] == window - 1, 0, pending[live] + 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _contain(
    out, slots, pages, stride_page, page_words, table, stride_table, counter, count, WORDS: tl.constexpr,
):  # fmt: skip
    """Reset the slot of request i if its output, and so its state, is not finite."""
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    if slot <= 0:
        return
    bad = tl.full([WORDS], 0, tl.int32)
    for first in range(0, count, WORDS):
        o = first + tl.arange(0, WORDS)
        x = tl.load(out + i * count + o, mask=o < count, other=0).to(tl.float32)
        bad = tl.maximum(bad, ((x - x) != 0.0).to(tl.int32))  # NaN and infinities
    if tl.reduce(bad, 0, _larger) == 0:
        return
    tl.atomic_add(counter, 1)
    tl.store(table + 2 * stride_table + slot, 0)
    for first in range(0, page_words, WORDS):
        o = first + tl.arange(0, WORDS)
        tl.store(pages + slot * stride_page + o, tl.full([WORDS], 0, tl.int64), mask=o < page_words)


def contain(out: Tensor, slots: Tensor, pages: Tensor, table: Tensor, counter: Tensor) -> None:
    """Reset slots whose output `out [B, H, V]` (contiguous) is not finite to a zero state with nothing pending.

    `counter` int32 `[1]` counts them; padding is left alone.
    """
    if pages.is_cuda:
        words = pages.view(torch.int64)
        _contain[(len(slots),)](
            out, slots, words, words.stride(0), words.shape[1], table, table.stride(0), counter, out[0].numel(),
            WORDS=WORDS, num_warps=4,
        )  # fmt: skip
        return
    bad = slots[~out.flatten(1).isfinite().all(1) & (slots > 0)].long()
    pages[bad] = 0
    table[2, bad] = 0
    counter += len(bad)


@triton.jit
def _quiet_rows(rows, stride, columns, flags, BLOCK: tl.constexpr):
    """Flag row i if its first value is NaN, and fill it with zeros."""
    i = tl.program_id(0).to(tl.int64)
    first = tl.load(rows + i * stride).to(tl.float32)
    bad = first != first
    tl.store(flags + i, bad)
    if bad:
        for start in range(0, columns, BLOCK):
            o = start + tl.arange(0, BLOCK)
            tl.store(rows + i * stride + o, tl.full([BLOCK], 0, rows.dtype.element_ty), mask=o < columns)


def quiet_rows(logits: Tensor) -> Tensor:
    """Fill rows of logits `[B, V]` (contiguous rows) that begin with NaN with zeros; bool `[B]` says which."""
    if not logits.is_cuda:
        bad = logits[:, 0].isnan()
        logits[bad] = 0
        return bad
    flags = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if len(logits):
        _quiet_rows[(len(logits),)](logits, logits.stride(0), logits.shape[1], flags, BLOCK=1024, num_warps=4)
    return flags
