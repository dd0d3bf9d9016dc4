# mypy: ignore-errors
"""Dense states at the prefill boundary: blocks in and out of pages by whole lines. See `tile` for the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.blocks import saturate_half, store_pivots
from stepquant.codegen.planes import unpack_block
from stepquant.codegen.tile import block_columns, line_floats, line_words
from stepquant.codegen.words import scale_raw


@triton.jit
def row_place(p_rows, stride_col: tl.constexpr, b, slot_in, J: tl.constexpr, E: tl.constexpr):
    """Pointers to a block of a dense head, ``[slot, h, (e, l)]``, from those to rows in slot order; which exist.

    With slots in front, neighbours among threads have neighbouring slots even where Triton cannot see what is
    contiguous: rows in an order of their own then still come from the same few lines.
    """
    p = p_rows[:, None, None] + tl.expand_dims(block_columns(b, J, E) * stride_col, 0)
    return p, slot_in[:, None, None]


@triton.jit
def line_tile(
    words, c, p_r, slot, g, UNIT: tl.constexpr, K: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    GROUPS: tl.constexpr, FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """The words of a block of column group `g` as floats in the model's order of rows, ``[l, (h, e), row]``.

    Args:
        c: column scales, ``[l, (h, e)]``; p_r: row factors of all groups; slot: slots of the rows.
    """
    z00, z01, z10, z11 = unpack_block(words, M, E, 1, FOUR, NIBBLES, EIGHT, SIX, TWO)
    x = line_floats(line_words(z00, z01, z10, z11, slot, M, E), M, E)
    o = (tl.arange(0, 2 * E if FOUR else 1) // E * GROUPS + g) * K
    r = tl.load(p_r + o[:, None] + slot[None, :], mask=(slot < K)[None, :], other=0).to(tl.float32)
    return scale_raw(x, tl.expand_dims(c, 2).to(tl.float32)) * tl.expand_dims(r * UNIT, 0)


@triton.jit
def pack_pivots(
    p_pivots, n_pivots, p_state, p_order, col, col_in, stride_row: tl.constexpr, stride_col: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, PB: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Copy the pivot rows of a dense FP32 head into its page."""
    for first in range(0, n_pivots, PB):
        o_p = first + tl.arange(0, PB)
        row = K - n_pivots + o_p
        if PERMUTED:
            row = tl.load(p_order + row, mask=o_p < n_pivots, other=0)
        o = row[:, None] * stride_row + col[None, :] * stride_col
        x = tl.load(p_state + o, mask=(o_p < n_pivots)[:, None] & col_in[None, :], other=0)
        store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V)


@triton.jit
def pack_pivot_head(
    p_pivots, p_rows, stride_col: tl.constexpr, slot, slot_in,
    V: tl.constexpr, J: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Copy a dense FP32 head that is kept in FP16 into its page, a block of columns at a time."""
    for b in tl.range(0, J // (8 * E), num_stages=1):
        p, inside = row_place(p_rows, stride_col, b, slot_in, J, E)
        q, _ = row_place(p_pivots + slot * V, 1, b, slot_in, J, E)
        tl.store(q, saturate_half(tl.load(p, mask=inside, other=0)), mask=inside)


@triton.jit
def pivot_lines(p_pivots, o_p, inside, col, V: tl.constexpr):
    """FP16 rows `o_p` of a head in columns `col` ``[l, (h, e)]``, FP32 ``[l, (h, e), row]``."""
    p = p_pivots + tl.expand_dims(col, 2) + (o_p * V)[None, None, :]
    return tl.load(p, mask=inside[None, None, :], other=0).to(tl.float32)
