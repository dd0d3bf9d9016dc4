# mypy: ignore-errors
"""The planes of a page, one block of columns at a time (`stepquant.layout` says which bytes hold what).

A block is 8E columns of each column half (E = B / 8). Its codes are four int8 tiles ``[d, l, a, (e, i)]``, z00, z01,
z10, z11, one for each slot half s and column half h, in units of an 8-bit code: slot 8 (4a + d) + 4s + i, value column
h J + 8 E b + 8 e + l. Every word of a plane falls apart into words of these tiles by a shift and a mask.

The order of the axes is not free: Triton deals threads out along the first axes, so that thread 4 l + d holds what the
operands of a matrix instruction want of it, and a warp reads whole 128-byte lines, 16 bytes a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.table import (
    T_BYTES,
    T_EIGHT,
    T_HEAD,
    T_HIGH4,
    T_LOW2,
    T_LOW4,
    T_NIBBLES,
    T_SIX,
    T_TOP2,
    T_TWO,
    table_offset,
)
from stepquant.codegen.words import PLAIN, blend, merge, pick, set_bits


@triton.jit
def open_planes(p_page, p_table):
    """Where the planes of a head are and which rows of 8 slots they cover."""
    p_high, p_low4 = p_page + table_offset(p_table, T_HIGH4), p_page + table_offset(p_table, T_LOW4)
    p_low2, p_top2 = p_page + table_offset(p_table, T_LOW2), p_page + table_offset(p_table, T_TOP2)
    n_nibbles, n_eight = tl.load(p_table + T_NIBBLES), tl.load(p_table + T_EIGHT)
    n_six, n_two = tl.load(p_table + T_SIX), tl.load(p_table + T_TWO)
    return p_high, p_low4, p_low2, p_top2, n_nibbles, n_eight, n_six, n_two


@triton.jit
def prefetch_head(p_page, p_table):
    """Ask for a head's part of a page, so that it is in the L2 cache by the time it is loaded; no threads wait."""
    if not PLAIN:
        o = 128 * tl.arange(0, 128)
        p = (p_page + table_offset(p_table, T_HEAD) + o).to(tl.int64)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r,r", [p, o, tl.load(p_table + T_BYTES)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def nibble_place(p_plane, n_rows, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Pointers to the bytes of block `b` of a nibble plane, ``[d, l, a, (s, e, i)]``, and which exist."""
    d, lane = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    m = 4 * tl.arange(0, M // 4)[None, None, :, None] + d
    o = b * (64 * E) + m * (8 * J) + lane * (8 * E) + tl.arange(0, 8 * E)[None, None, None, :]
    p = p_plane + o
    return p, m < n_rows


@triton.jit
def crumb_place(p_plane, n_begin, n_end, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """The same of a two-bit plane that covers rows `n_begin <= m < n_end`, ``[d, l, a, (e, i)]``."""
    d, lane = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    m = 4 * tl.arange(0, M // 4)[None, None, :, None] + d
    o = b * (32 * E) + (m - n_begin) * (4 * J) + lane * (4 * E) + tl.arange(0, 4 * E)[None, None, None, :]
    p = p_plane + o
    return p, (m >= n_begin) & (m < n_end)


@triton.jit
def load_words(p, inside, FULL: tl.constexpr):
    """Words of a plane; where every row and column is there (FULL), no test and no zeros are needed."""
    if FULL:
        x = tl.load(p)
    else:
        x = tl.load(p, mask=inside, other=0)
    return x


@triton.jit
def split_slots(x, M: tl.constexpr, E: tl.constexpr):
    """``[d, l, a, (s, e, i)]`` as two tiles, one for each slot half."""
    return tl.split(tl.permute(tl.reshape(x, (4, 8, M // 4, 2, 4 * E)), (0, 1, 2, 4, 3)))


@triton.jit
def load_block(
    planes, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The words of block `b`, as they lie in the planes: upper and lower nibbles, the two bits of 6- and 2-bit rows.

    Which planes there can be is known when the kernel is generated; which rows of this head they cover is in `planes`.
    FULL: all of them. Planes that cannot be there come back as a scalar.
    """
    p_high, p_low4, p_low2, p_top2, n_nibbles, n_eight, n_six, n_two = planes
    high, low4, low2, top2 = 0, 0, 0, 0
    if NIBBLES:
        p, inside = nibble_place(p_high, n_nibbles, b, J, M, E)
        high = load_words(p, inside, FULL)
    if EIGHT:
        p, inside = nibble_place(p_low4, n_eight, b, J, M, E)
        low4 = load_words(p, inside, FULL)
    if SIX:
        p, inside = crumb_place(p_low2, n_eight, n_six, b, J, M, E)
        low2 = load_words(p, inside, FULL)
    if TWO or FOUR:
        p, inside = crumb_place(p_top2, n_nibbles, n_two, b, J, M, E)
        top2 = load_words(p, inside, FULL)
    return high, low4, low2, top2


@triton.jit
def unpack_block(
    words, M: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The codes of a block as tiles z00, z01, z10, z11."""
    high, low4, low2, top2 = words
    if FOUR:  # levels -96, -32, 32, 96
        z00, z01 = set_bits(pick(top2, 6, 0xC0), 0x20), set_bits(pick(top2, 4, 0xC0), 0x20)
        z10, z11 = set_bits(pick(top2, 2, 0xC0), 0x20), set_bits(pick(top2, 0, 0xC0), 0x20)
    else:
        if NIBBLES:
            high0, high1 = split_slots(high, M, E)
            if EIGHT:
                low0, low1 = split_slots(low4, M, E)
                z00, z01 = blend(high0, 4, low0, 0), blend(high0, 0, low0, -4)
                z10, z11 = blend(high1, 4, low1, 0), blend(high1, 0, low1, -4)
            else:
                z00, z01 = pick(high0, 4, 0xF0), pick(high0, 0, 0xF0)
                z10, z11 = pick(high1, 4, 0xF0), pick(high1, 0, 0xF0)
        else:
            z00 = tl.zeros([4, 8, M // 4, 4 * E], tl.int8)
            z01, z10, z11 = z00, z00, z00
        if SIX:
            z00, z01 = merge(z00, low2, 2, 0x0C), merge(z01, low2, 0, 0x0C)
            z10, z11 = merge(z10, low2, -2, 0x0C), merge(z11, low2, -4, 0x0C)
        if TWO:
            z00, z01 = merge(z00, top2, 6, 0xC0), merge(z01, top2, 4, 0xC0)
            z10, z11 = merge(z10, top2, 2, 0xC0), merge(z11, top2, 0, 0xC0)
    return z00, z01, z10, z11
