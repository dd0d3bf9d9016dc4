# mypy: ignore-errors
"""Codes of a head as operands of the matrix units (`stepquant.layout` says which bytes hold what).

Four int8 tiles ``[a, b, l, d, (e, i)]``, z00, z01, z10, z11, one for each slot half s and column half h, in units of
an 8-bit code: slot 8 (4a + d) + 4s + i, value column h J + 8 E b + 8 e + l with E = B / 8. Every word of a plane falls
apart into words of these tiles by a shift and a mask. All loads are issued before the first of them is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.table import (
    T_EIGHT,
    T_HIGH4,
    T_LOW2,
    T_LOW4,
    T_NIBBLES,
    T_SIX,
    T_TOP2,
    T_TWO,
    table_offset,
)
from stepquant.codegen.words import merge, pick, set_bits


@triton.jit
def _plane_index(M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr):
    """Row (of 8 slots), chunk of columns and byte within a chunk of every byte of a tile."""
    a, d = tl.arange(0, M // 4)[:, None, None, None, None], tl.arange(0, 4)[None, None, None, :, None]
    b, lane = tl.arange(0, JP // (8 * E))[None, :, None, None, None], tl.arange(0, 8)[None, None, :, None, None]
    return 4 * a + d, 8 * b + lane, tl.arange(0, 4 * E)[None, None, None, None, :]


@triton.jit
def load_nibbles(
    p_plane, n_rows, HALF: tl.constexpr, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr
):
    """Bytes of slot half `HALF` of the first `n_rows` rows of a nibble plane, others zero."""
    m, chunk, o = _plane_index(M, JP, E)
    p = p_plane + m * (8 * J) + chunk * (8 * E) + HALF * (4 * E) + o
    return tl.load(p, mask=(m < n_rows) & (chunk < J // E), other=0)


@triton.jit
def load_crumbs(p_plane, n_begin, n_end, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr):
    """A two-bit plane that covers rows `n_begin <= m < n_end`, others zero."""
    m, chunk, o = _plane_index(M, JP, E)
    p = p_plane + (m - n_begin) * (4 * J) + chunk * (4 * E) + o
    return tl.load(p, mask=(m >= n_begin) & (m < n_end) & (chunk < J // E), other=0)


@triton.jit
def load_codes(
    p_page, p_table, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The codes of a head as four tiles z00, z01, z10, z11.

    Which planes there can be is known when the kernel is generated; which rows of this head they cover is in the table.
    """
    n_nibbles, n_two = tl.load(p_table + T_NIBBLES), tl.load(p_table + T_TWO)
    n_eight, n_six = tl.load(p_table + T_EIGHT), tl.load(p_table + T_SIX)
    if FOUR:
        top = load_crumbs(p_page + table_offset(p_table, T_TOP2), 0, n_two, J, M, JP, E)
        z00, z01 = set_bits(pick(top, 6, 0xC0), 0x20), set_bits(pick(top, 4, 0xC0), 0x20)  # levels -96, -32, 32, 96
        z10, z11 = set_bits(pick(top, 2, 0xC0), 0x20), set_bits(pick(top, 0, 0xC0), 0x20)
    else:
        if NIBBLES:
            p_high = p_page + table_offset(p_table, T_HIGH4)
            high0 = load_nibbles(p_high, n_nibbles, 0, J, M, JP, E)
            high1 = load_nibbles(p_high, n_nibbles, 1, J, M, JP, E)
        if EIGHT:
            p_low = p_page + table_offset(p_table, T_LOW4)
            low0 = load_nibbles(p_low, n_eight, 0, J, M, JP, E)
            low1 = load_nibbles(p_low, n_eight, 1, J, M, JP, E)
        if SIX:
            low = load_crumbs(p_page + table_offset(p_table, T_LOW2), n_eight, n_six, J, M, JP, E)
        if TWO:
            top = load_crumbs(p_page + table_offset(p_table, T_TOP2), n_nibbles, n_two, J, M, JP, E)
        z00 = tl.zeros([M // 4, JP // (8 * E), 8, 4, 4 * E], tl.int8)
        z01, z10, z11 = z00, z00, z00
        if NIBBLES:
            z00, z01 = pick(high0, 4, 0xF0), pick(high0, 0, 0xF0)
            z10, z11 = pick(high1, 4, 0xF0), pick(high1, 0, 0xF0)
        if EIGHT:
            z00, z01 = merge(z00, low0, 0, 0x0F), merge(z01, low0, -4, 0x0F)
            z10, z11 = merge(z10, low1, 0, 0x0F), merge(z11, low1, -4, 0x0F)
        if SIX:
            z00, z01 = merge(z00, low, 2, 0x0C), merge(z01, low, 0, 0x0C)
            z10, z11 = merge(z10, low, -2, 0x0C), merge(z11, low, -4, 0x0C)
        if TWO:
            z00, z01 = merge(z00, top, 6, 0xC0), merge(z01, top, 4, 0xC0)
            z10, z11 = merge(z10, top, 2, 0xC0), merge(z11, top, 0, 0xC0)
    return z00, z01, z10, z11
