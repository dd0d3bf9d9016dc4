# mypy: ignore-errors
"""The planes of a page, one block of columns at a time (`stepquant.layout` says which bytes hold what).

A block is 8E columns of each column half (E = B / 8). Its codes are four tiles of words ``[d, l, a, e]``, z00, z01,
z10, z11, one for each slot half s and column half h, bytes in units of an 8-bit code: slot 8 (4a + d) + 4s + i for byte
i, value column h J + 8 E b + 8 e + l. Every word of a plane falls apart into these words by a shift and a mask. `N` is
the elements that a word has: 1 (int32 words) or 4 (int8 bytes, ``[d, l, a, (e, i)]``), see `words`.

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
def open_planes(p_page, p_table, N: tl.constexpr):
    """Where the planes of a head are and which rows of 8 slots they cover."""
    p_high, p_low4 = _plane(p_page, p_table, T_HIGH4, N), _plane(p_page, p_table, T_LOW4, N)
    p_low2, p_top2 = _plane(p_page, p_table, T_LOW2, N), _plane(p_page, p_table, T_TOP2, N)
    n_nibbles, n_eight = tl.load(p_table + T_NIBBLES), tl.load(p_table + T_EIGHT)
    n_six, n_two = tl.load(p_table + T_SIX), tl.load(p_table + T_TWO)
    return p_high, p_low4, p_low2, p_top2, n_nibbles, n_eight, n_six, n_two


@triton.jit
def _plane(p_page, p_table, column: tl.constexpr, N: tl.constexpr):
    element: tl.constexpr = tl.int32 if N == 1 else tl.int8
    return (p_page + table_offset(p_table, column)).to(tl.pointer_type(element))


@triton.jit
def prefetch_head(p_page, p_table, PARTS: tl.constexpr = 1, i_part=0):
    """Ask for a head's part of a page, one of PARTS programs for a share of it."""
    SHARE: tl.constexpr = 128 // PARTS
    o = 128 * SHARE * i_part
    prefetch_bytes(p_page + table_offset(p_table, T_HEAD) + o, tl.load(p_table + T_BYTES) - o, SHARE)


@triton.jit
def prefetch_bytes(p, n_bytes, LINES: tl.constexpr):
    """Ask for up to LINES lines of 128 bytes: they are in the L2 cache when they are loaded, and no thread waits."""
    if not PLAIN:
        o = 128 * tl.arange(0, LINES)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r,r", [p.to(tl.int64) + o, o, n_bytes], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def nibble_place(p_plane, n_rows, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, N: tl.constexpr):
    """Pointers to the words of block `b` of a nibble plane, ``[d, l, a, (s, e)]``, and which exist."""
    d, lane = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    m = 4 * tl.arange(0, M // 4)[None, None, :, None] + d
    o = (
        b * (16 * E * N)
        + m * (2 * J * N)
        + (lane ^ (2 * d)) * (2 * E * N)
        + tl.arange(0, 2 * E * N)[None, None, None, :]
    )
    p = p_plane + o
    return p, m < n_rows


@triton.jit
def crumb_place(p_plane, n_begin, n_end, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, N: tl.constexpr):
    """The same of a two-bit plane that covers rows `n_begin <= m < n_end`, ``[d, l, a, e]``."""
    d, lane = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    m = 4 * tl.arange(0, M // 4)[None, None, :, None] + d
    if (J // (8 * E)) % 2 == 0:
        b = b ^ (d // 2)
    o = b * (8 * E * N) + (m - n_begin) * (J * N) + (lane ^ (4 * (d % 2))) * (E * N)
    o = o + tl.arange(0, E * N)[None, None, None, :]
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
def split_slots(x, M: tl.constexpr, EN: tl.constexpr):
    """``[d, l, a, (s, e)]`` as two tiles, one for each slot half."""
    return tl.split(tl.permute(tl.reshape(x, (4, 8, M // 4, 2, EN)), (0, 1, 2, 4, 3)))


@triton.jit
def load_block(
    planes, b, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The words of block `b`, as they lie in the planes: upper and lower nibbles, the two bits of 6- and 2-bit rows.

    Which planes there can be is known when the kernel is generated; which rows of this head they cover is in `planes`.
    FULL: all of them. Planes that cannot be there come back as a scalar.
    """
    p_high, p_low4, p_low2, p_top2, n_nibbles, n_eight, n_six, n_two = planes
    high, low4, low2, top2 = 0, 0, 0, 0
    if NIBBLES:
        p, inside = nibble_place(p_high, n_nibbles, b, J, M, E, N)
        high = load_words(p, inside, FULL)
    if EIGHT:
        p, inside = nibble_place(p_low4, n_eight, b, J, M, E, N)
        low4 = load_words(p, inside, FULL)
    if SIX:
        p, inside = crumb_place(p_low2, n_eight, n_six, b, J, M, E, N)
        low2 = load_words(p, inside, FULL)
    if TWO or FOUR:
        p, inside = crumb_place(p_top2, n_nibbles, n_two, b, J, M, E, N)
        top2 = load_words(p, inside, FULL)
    return high, low4, low2, top2


@triton.jit
def unpack_block(
    words, M: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The codes of a block as tiles z00, z01, z10, z11."""
    high, low4, low2, top2 = words
    if FOUR:  # levels -96, -32, 32, 96
        z00, z01 = set_bits(pick(top2, 6, 0xC0), 0x20), set_bits(pick(top2, 4, 0xC0), 0x20)
        z10, z11 = set_bits(pick(top2, 2, 0xC0), 0x20), set_bits(pick(top2, 0, 0xC0), 0x20)
    else:
        if NIBBLES:
            high0, high1 = split_slots(high, M, E * N)
            if EIGHT:
                low0, low1 = split_slots(low4, M, E * N)
                z00, z01 = blend(high0, 4, low0, 0), blend(high0, 0, low0, -4)
                z10, z11 = blend(high1, 4, low1, 0), blend(high1, 0, low1, -4)
            else:
                z00, z01 = pick(high0, 4, 0xF0), pick(high0, 0, 0xF0)
                z10, z11 = pick(high1, 4, 0xF0), pick(high1, 0, 0xF0)
        else:
            z00 = tl.zeros([4, 8, M // 4, E * N], tl.int32 if N == 1 else tl.int8)
            z01, z10, z11 = z00, z00, z00
        if SIX:
            z00, z01 = merge(z00, low2, 2, 0x0C), merge(z01, low2, 0, 0x0C)
            z10, z11 = merge(z10, low2, -2, 0x0C), merge(z11, low2, -4, 0x0C)
        if TWO:
            z00, z01 = merge(z00, top2, 6, 0xC0), merge(z01, top2, 4, 0xC0)
            z10, z11 = merge(z10, top2, 2, 0xC0), merge(z11, top2, 0, 0xC0)
    return z00, z01, z10, z11


@triton.jit
def store_block(
    planes, b, z00, z01, z10, z11, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    SHIFT: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Inverse of `load_block` and `unpack_block`, for codes z >> SHIFT; what the head lacks is not touched."""
    p_high, p_low4, p_low2, _, n_nibbles, n_eight, n_six, _ = planes
    if NIBBLES:
        high0 = pick(z00, SHIFT - 4, 0x0F) | pick(z01, SHIFT, 0xF0)
        high1 = pick(z10, SHIFT - 4, 0x0F) | pick(z11, SHIFT, 0xF0)
        p, inside = nibble_place(p_high, n_nibbles, b, J, M, E, 1)
        store_words(p, join_slots(high0, high1, M, E), inside, FULL)
    if EIGHT:
        low0 = pick(z00, SHIFT, 0x0F) | pick(z01, SHIFT + 4, 0xF0)
        low1 = pick(z10, SHIFT, 0x0F) | pick(z11, SHIFT + 4, 0xF0)
        p, inside = nibble_place(p_low4, n_eight, b, J, M, E, 1)
        store_words(p, join_slots(low0, low1, M, E), inside, FULL)
    if SIX:
        low = pick(z00, SHIFT - 2, 0x03) | pick(z01, SHIFT, 0x0C)
        low = low | pick(z10, SHIFT + 2, 0x30) | pick(z11, SHIFT + 4, 0xC0)
        p, inside = crumb_place(p_low2, n_eight, n_six, b, J, M, E, 1)
        store_words(p, low, inside, FULL)
    if TWO:
        top = pick(z00, SHIFT - 6, 0x03) | pick(z01, SHIFT - 4, 0x0C)
        top = top | pick(z10, SHIFT - 2, 0x30) | pick(z11, SHIFT, 0xC0)
        store_crumbs(planes, b, top, J, M, E, FULL)


@triton.jit
def store_crumbs(planes, b, words, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr):
    """Words of the upper two-bit plane: two-bit rows, or a whole four-level head."""
    p, inside = crumb_place(planes[3], planes[4], planes[7], b, J, M, E, 1)
    store_words(p, words, inside, FULL)


@triton.jit
def join_slots(x0, x1, M: tl.constexpr, E: tl.constexpr):
    """Inverse of `split_slots`."""
    return tl.reshape(tl.permute(tl.join(x0, x1), (0, 1, 2, 4, 3)), (4, 8, M // 4, 2 * E))


@triton.jit
def store_words(p, z, inside, FULL: tl.constexpr):
    if FULL:
        tl.store(p, z)
    else:
        tl.store(p, z, mask=inside)


@triton.jit
def load_limits(p_limits, S: tl.constexpr, K: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Largest codes of the slots of half `S`, as `to_word` takes them, words ``[d, l, a, e]``."""
    d, a = tl.arange(0, 4)[:, None, None, None], tl.arange(0, M // 4)[None, None, :, None]
    o = 8 * a + 2 * d + S + 0 * (tl.arange(0, 8)[None, :, None, None] + tl.arange(0, E)[None, None, None, :])
    return tl.load(p_limits.to(tl.pointer_type(tl.int32)) + o, mask=o < K // 4, other=0x01010101)
