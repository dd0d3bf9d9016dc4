"""From the planes of a page to tiles of codes and back (`stepquant.layout` says which bytes hold what).

A head's codes are four int8 tiles ``[M, 4 * JP]``, z00, z01, z10, z11, one for each slot half s and column half h:
element (m, 4j + i) of z_sh is the code of key slot 8m + 4s + i and value column j + h * J, in units of an 8-bit code.
Every word of a plane falls apart into words of these tiles by a shift and a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.words import bytes_to_float, float_to_bytes, pick

# Columns of the per-head table, int32 [H, 16]; offsets are bytes in the layer's page.
T_HIGH4, T_LOW4, T_LOW2, T_TOP2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
T_ROW, T_COLUMN, T_PIVOT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
T_NIBBLES, T_EIGHT, T_SIX, T_TWO = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
T_PIVOTS, T_KIND, T_BITS = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)
TABLE_WIDTH = 16
KIND_PLAIN, KIND_FOUR, KIND_PIVOT = 0, 1, 2


@triton.jit
def table_offset(p_table, column: tl.constexpr):
    """A byte offset from the per-head table; all of them are multiples of 16."""
    return tl.multiple_of(tl.load(p_table + column), 16)


@triton.jit
def load_plane(p_plane, o_word, o_byte, n_begin, n_end, ROW: tl.constexpr, BYTES: tl.constexpr, PART: tl.constexpr):
    """Rows `n_begin <= word < n_end` of a plane whose rows of `ROW` bytes hold `BYTES` of this tile, others zero."""
    inside = (o_word >= n_begin) & (o_word < n_end)
    o = (o_word - n_begin)[:, None] * ROW + PART * BYTES + o_byte[None, :]
    return tl.load(p_plane + o, mask=inside[:, None] & (o_byte < BYTES)[None, :], other=0)


@triton.jit
def store_plane(
    p_plane, x, o_word, o_byte, n_begin, n_end, ROW: tl.constexpr, BYTES: tl.constexpr, PART: tl.constexpr
):
    """Inverse of `load_plane`; rows outside are not touched."""
    inside = (o_word >= n_begin) & (o_word < n_end)
    o = (o_word - n_begin)[:, None] * ROW + PART * BYTES + o_byte[None, :]
    tl.store(p_plane + o, x.to(tl.uint8, bitcast=True), mask=inside[:, None] & (o_byte < BYTES)[None, :])


@triton.jit
def load_codes(
    p_page, p_table, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The codes of a head as four int8 tiles `[M, 4 * JP]` (slot half s, column half h): z00, z01, z10, z11.

    Which planes there can be is known when the kernel is generated; which rows of this head they cover is in the table.
    """
    o_m, o_b = tl.arange(0, M), tl.arange(0, 4 * JP)
    z00 = tl.zeros([M, 4 * JP], tl.int8)
    z01, z10, z11 = z00, z00, z00
    n_nibbles = tl.load(p_table + T_NIBBLES)
    if NIBBLES and not FOUR:
        p_high = p_page + table_offset(p_table, T_HIGH4)
        high0 = load_plane(p_high, o_m, o_b, 0, n_nibbles, 8 * J, 4 * J, 0)
        high1 = load_plane(p_high, o_m, o_b, 0, n_nibbles, 8 * J, 4 * J, 1)
        z00, z01 = pick(high0, 4, 0xF0), pick(high0, 0, 0xF0)
        z10, z11 = pick(high1, 4, 0xF0), pick(high1, 0, 0xF0)
    if EIGHT and not FOUR:
        n_eight = tl.load(p_table + T_EIGHT)
        if n_eight > 0:
            p_low = p_page + table_offset(p_table, T_LOW4)
            low0 = load_plane(p_low, o_m, o_b, 0, n_eight, 8 * J, 4 * J, 0)
            low1 = load_plane(p_low, o_m, o_b, 0, n_eight, 8 * J, 4 * J, 1)
            z00, z01 = z00 | pick(low0, 0, 0x0F), z01 | pick(low0, -4, 0x0F)
            z10, z11 = z10 | pick(low1, 0, 0x0F), z11 | pick(low1, -4, 0x0F)
    if SIX and not FOUR:
        n_eight = tl.load(p_table + T_EIGHT)
        n_six = tl.load(p_table + T_SIX)
        if n_six > n_eight:
            low = load_plane(p_page + table_offset(p_table, T_LOW2), o_m, o_b, n_eight, n_six, 4 * J, 4 * J, 0)
            z00, z01 = z00 | pick(low, 2, 0x0C), z01 | pick(low, 0, 0x0C)
            z10, z11 = z10 | pick(low, -2, 0x0C), z11 | pick(low, -4, 0x0C)
    if TWO or FOUR:
        n_two = tl.load(p_table + T_TWO)
        if n_two > n_nibbles:
            top = load_plane(p_page + table_offset(p_table, T_TOP2), o_m, o_b, n_nibbles, n_two, 4 * J, 4 * J, 0)
            z00, z01 = z00 | pick(top, 6, 0xC0), z01 | pick(top, 4, 0xC0)
            z10, z11 = z10 | pick(top, 2, 0xC0), z11 | pick(top, 0, 0xC0)
    if FOUR:  # the levels lie half a step above what is stored: -96, -32, 32, 96
        inside = (o_m < tl.load(p_table + T_TWO))[:, None] & (o_b < 4 * J)[None, :]
        half = tl.where(inside, 0x20, 0).to(tl.int8)
        z00, z01, z10, z11 = z00 | half, z01 | half, z10 | half, z11 | half
    return z00, z01, z10, z11


@triton.jit
def store_codes(
    p_page, p_table, z00, z01, z10, z11, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Write the codes of a head into the planes it has."""
    o_m, o_b = tl.arange(0, M), tl.arange(0, 4 * JP)
    n_nibbles = tl.load(p_table + T_NIBBLES)
    if NIBBLES and not FOUR:
        p_high = p_page + table_offset(p_table, T_HIGH4)
        high0, high1 = pick(z00, -4, 0x0F) | pick(z01, 0, 0xF0), pick(z10, -4, 0x0F) | pick(z11, 0, 0xF0)
        store_plane(p_high, high0, o_m, o_b, 0, n_nibbles, 8 * J, 4 * J, 0)
        store_plane(p_high, high1, o_m, o_b, 0, n_nibbles, 8 * J, 4 * J, 1)
    if EIGHT and not FOUR:
        n_eight = tl.load(p_table + T_EIGHT)
        if n_eight > 0:
            p_low = p_page + table_offset(p_table, T_LOW4)
            low0, low1 = pick(z00, 0, 0x0F) | pick(z01, 4, 0xF0), pick(z10, 0, 0x0F) | pick(z11, 4, 0xF0)
            store_plane(p_low, low0, o_m, o_b, 0, n_eight, 8 * J, 4 * J, 0)
            store_plane(p_low, low1, o_m, o_b, 0, n_eight, 8 * J, 4 * J, 1)
    if SIX and not FOUR:
        n_eight = tl.load(p_table + T_EIGHT)
        n_six = tl.load(p_table + T_SIX)
        if n_six > n_eight:
            low = pick(z00, -2, 0x03) | pick(z01, 0, 0x0C) | pick(z10, 2, 0x30) | pick(z11, 4, 0xC0)
            store_plane(p_page + table_offset(p_table, T_LOW2), low, o_m, o_b, n_eight, n_six, 4 * J, 4 * J, 0)
    if TWO or FOUR:
        n_two = tl.load(p_table + T_TWO)
        if n_two > n_nibbles:
            top = pick(z00, -6, 0x03) | pick(z01, -4, 0x0C) | pick(z10, -2, 0x30) | pick(z11, 0, 0xC0)
            store_plane(p_page + table_offset(p_table, T_TOP2), top, o_m, o_b, n_nibbles, n_two, 4 * J, 4 * J, 0)


@triton.jit
def codes_to_tile(z00, z01, z10, z11, M: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """The four tiles of codes as one float tile `[M, G, C, 4, 2, 2]`."""
    x0 = tl.join(bytes_to_float(z00), bytes_to_float(z10))
    x1 = tl.join(bytes_to_float(z01), bytes_to_float(z11))
    x = tl.permute(tl.join(x0, x1), (0, 1, 3, 2))  # [M, 4 JP, h, s]
    return tl.reshape(x, (M, G, C, 4, 2, 2))


@triton.jit
def tile_to_codes(x, M: tl.constexpr, JP: tl.constexpr):
    """Inverse of `codes_to_tile` for a tile of integers."""
    x0, x1 = tl.split(tl.reshape(x, (M, 4 * JP, 2, 2)))  # s = 0, s = 1
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    return float_to_bytes(x00), float_to_bytes(x01), float_to_bytes(x10), float_to_bytes(x11)
