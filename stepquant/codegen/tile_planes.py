# mypy: ignore-errors
"""From the planes of a page to the float tile of a head and back (`tile` names the axes).

Eight int8 tiles ``[m, c, (e, i)]``, in units of an 8-bit code, one for each low bit of l, slot half and column half.
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
from stepquant.codegen.words import bytes_to_float, merge, pick, set_bits, to_bytes, to_codes


@triton.jit
def nibble_pointers(p_plane, n_rows, L, S, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr):
    """Where the bytes of low bit `L` of l and slot half `S` of a nibble plane are, and which exist."""
    m, c = tl.arange(0, M)[:, None, None], tl.arange(0, JP // (2 * E))[None, :, None]
    p = p_plane + m * (8 * J) + (2 * c + L) * (8 * E) + S * (4 * E) + tl.arange(0, 4 * E)[None, None, :]
    return p, (m < n_rows) & (2 * c < J // E)


@triton.jit
def crumb_pointers(p_plane, n_begin, n_end, L, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr):
    """The same of a two-bit plane that covers rows `n_begin <= m < n_end`."""
    m, c = tl.arange(0, M)[:, None, None], tl.arange(0, JP // (2 * E))[None, :, None]
    p = p_plane + (m - n_begin) * (4 * J) + (2 * c + L) * (4 * E) + tl.arange(0, 4 * E)[None, None, :]
    return p, (m >= n_begin) & (m < n_end) & (2 * c < J // E)


@triton.jit
def load_half(
    p_page, p_table, L: tl.constexpr, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Codes z_sh of the columns with low bit `L` of l; all loads before the first use."""
    n_nibbles, n_two = tl.load(p_table + T_NIBBLES), tl.load(p_table + T_TWO)
    n_eight, n_six = tl.load(p_table + T_EIGHT), tl.load(p_table + T_SIX)
    if FOUR:
        p, inside = crumb_pointers(p_page + table_offset(p_table, T_TOP2), 0, n_two, L, J, M, JP, E)
        top = tl.load(p, mask=inside, other=0)
        z00, z01 = set_bits(pick(top, 6, 0xC0), 0x20), set_bits(pick(top, 4, 0xC0), 0x20)  # levels -96, -32, 32, 96
        z10, z11 = set_bits(pick(top, 2, 0xC0), 0x20), set_bits(pick(top, 0, 0xC0), 0x20)
    else:
        if NIBBLES:
            p_high = p_page + table_offset(p_table, T_HIGH4)
            p0, inside = nibble_pointers(p_high, n_nibbles, L, 0, J, M, JP, E)
            p1, inside = nibble_pointers(p_high, n_nibbles, L, 1, J, M, JP, E)
            high0, high1 = tl.load(p0, mask=inside, other=0), tl.load(p1, mask=inside, other=0)
        if EIGHT:
            p_low = p_page + table_offset(p_table, T_LOW4)
            p0, inside = nibble_pointers(p_low, n_eight, L, 0, J, M, JP, E)
            p1, inside = nibble_pointers(p_low, n_eight, L, 1, J, M, JP, E)
            low0, low1 = tl.load(p0, mask=inside, other=0), tl.load(p1, mask=inside, other=0)
        if SIX:
            p, inside = crumb_pointers(p_page + table_offset(p_table, T_LOW2), n_eight, n_six, L, J, M, JP, E)
            low = tl.load(p, mask=inside, other=0)
        if TWO:
            p, inside = crumb_pointers(p_page + table_offset(p_table, T_TOP2), n_nibbles, n_two, L, J, M, JP, E)
            top = tl.load(p, mask=inside, other=0)
        z00 = tl.zeros([M, JP // (2 * E), 4 * E], tl.int8)
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
    x0 = tl.join(bytes_to_float(z00), bytes_to_float(z10))
    x1 = tl.join(bytes_to_float(z01), bytes_to_float(z11))
    return tl.join(x0, x1)  # [m, c, (e, i), s, h]


@triton.jit
def load_tile(
    p_page, p_table, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The codes of a head, in units of an 8-bit code, as a float tile.

    Which planes there can be is known when the kernel is generated; which rows of this head they cover is in the table.
    """
    x0 = load_half(p_page, p_table, 0, J, M, JP, E, FOUR, NIBBLES, EIGHT, SIX, TWO)
    x1 = load_half(p_page, p_table, 1, J, M, JP, E, FOUR, NIBBLES, EIGHT, SIX, TWO)
    x = tl.permute(tl.join(x0, x1), (0, 1, 2, 5, 4, 3))  # [m, c, (e, i), low l, h, s]
    return tl.reshape(x, (M, G, JP // (2 * E * G), E, 4, 2, 2, 2))


@triton.jit
def store_half(
    p_page, p_table, x, L: tl.constexpr, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr,
    BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Clamp, pack and write the integers `x` ``[m, c, (e, i), h, s]`` of the columns with low bit `L` of l."""
    x0, x1 = tl.split(x)
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    if BITS > 2:  # the others are clamped already
        z00, z01, z10, z11 = (
            to_codes(x00, BITS, ARCH),
            to_codes(x01, BITS, ARCH),
            to_codes(x10, BITS, ARCH),
            to_codes(x11, BITS, ARCH),
        )
    else:
        z00, z01, z10, z11 = to_bytes(x00), to_bytes(x01), to_bytes(x10), to_bytes(x11)
    n_nibbles, n_two = tl.load(p_table + T_NIBBLES), tl.load(p_table + T_TWO)
    n_eight, n_six = tl.load(p_table + T_EIGHT), tl.load(p_table + T_SIX)
    if NIBBLES:
        p_high = p_page + table_offset(p_table, T_HIGH4)
        p0, inside = nibble_pointers(p_high, n_nibbles, L, 0, J, M, JP, E)
        p1, inside = nibble_pointers(p_high, n_nibbles, L, 1, J, M, JP, E)
        store_words(p0, merge(pick(z00, -4, 0x0F), z01, 0, 0xF0), inside)
        store_words(p1, merge(pick(z10, -4, 0x0F), z11, 0, 0xF0), inside)
    if EIGHT:
        p_low = p_page + table_offset(p_table, T_LOW4)
        p0, inside = nibble_pointers(p_low, n_eight, L, 0, J, M, JP, E)
        p1, inside = nibble_pointers(p_low, n_eight, L, 1, J, M, JP, E)
        store_words(p0, merge(pick(z00, 0, 0x0F), z01, 4, 0xF0), inside)
        store_words(p1, merge(pick(z10, 0, 0x0F), z11, 4, 0xF0), inside)
    if SIX:
        p, inside = crumb_pointers(p_page + table_offset(p_table, T_LOW2), n_eight, n_six, L, J, M, JP, E)
        store_words(p, merge(merge(merge(pick(z00, -2, 0x03), z01, 0, 0x0C), z10, 2, 0x30), z11, 4, 0xC0), inside)
    if TWO:
        p, inside = crumb_pointers(p_page + table_offset(p_table, T_TOP2), n_nibbles, n_two, L, J, M, JP, E)
        store_words(p, merge(merge(merge(pick(z00, -6, 0x03), z01, -4, 0x0C), z10, -2, 0x30), z11, 0, 0xC0), inside)


@triton.jit
def store_words(p, z, inside):
    tl.store(p, z.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def store_tile(
    p_page, p_table, x, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr,
    BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Pack and write a tile of integers, as `round_codes` gives it; what the head lacks is not touched."""
    x = tl.reshape(x, (M, JP // (2 * E), 4 * E, 2, 2, 2))
    x0, x1 = tl.split(tl.permute(x, (0, 1, 2, 4, 5, 3)))
    store_half(p_page, p_table, x0, 0, J, M, JP, E, BITS, ARCH, NIBBLES, EIGHT, SIX, TWO)
    store_half(p_page, p_table, x1, 1, J, M, JP, E, BITS, ARCH, NIBBLES, EIGHT, SIX, TWO)


@triton.jit
def dense_pointers(
    p_state, p_order, stride_row, stride_col, L: tl.constexpr, S: tl.constexpr, HALF: tl.constexpr, n_rows,
    J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Where one eighth of a tile, ``[m, c, (e, i)]``, is in a dense head, and which of it exists."""
    m, c, o = (
        tl.arange(0, M)[:, None, None],
        tl.arange(0, JP // (2 * E))[None, :, None],
        tl.arange(0, 4 * E)[None, None, :],
    )
    slot, chunk = 8 * m + 4 * S + o % 4, 2 * c + L
    j = 8 * E * (chunk // 8) + 8 * (o // 4) + chunk % 8
    row = slot
    if PERMUTED:
        row = tl.load(p_order + slot, mask=slot < K, other=0)
    return p_state + row * stride_row + (HALF * J + j) * stride_col, (slot < n_rows) & (j < J)


@triton.jit
def load_dense(
    p_state, p_order, stride_row, stride_col, n_rows, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr,
    E: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """A dense FP32 head as a tile; an eighth at a time, so that changing layouts takes little room."""
    x0 = _load_columns(p_state, p_order, stride_row, stride_col, 0, n_rows, J, M, JP, E, K, PERMUTED)
    x1 = _load_columns(p_state, p_order, stride_row, stride_col, 1, n_rows, J, M, JP, E, K, PERMUTED)
    x = tl.permute(tl.join(x0, x1), (0, 1, 2, 5, 4, 3))
    return tl.reshape(x, (M, G, JP // (2 * E * G), E, 4, 2, 2, 2))


@triton.jit
def _load_columns(
    p_state, p_order, stride_row, stride_col, L: tl.constexpr, n_rows, J: tl.constexpr, M: tl.constexpr,
    JP: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 0, 0, n_rows, J, M, JP, E, K, PERMUTED)
    x00 = tl.load(p, mask=inside, other=0).to(tl.float32)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 1, 0, n_rows, J, M, JP, E, K, PERMUTED)
    x10 = tl.load(p, mask=inside, other=0).to(tl.float32)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 0, 1, n_rows, J, M, JP, E, K, PERMUTED)
    x01 = tl.load(p, mask=inside, other=0).to(tl.float32)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 1, 1, n_rows, J, M, JP, E, K, PERMUTED)
    x11 = tl.load(p, mask=inside, other=0).to(tl.float32)
    return tl.join(tl.join(x00, x10), tl.join(x01, x11))  # [m, c, (e, i), s, h]


@triton.jit
def store_dense(
    p_state, p_order, stride_row, stride_col, x, n_rows, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Inverse of `load_dense`."""
    x = tl.reshape(x, (M, JP // (2 * E), 4 * E, 2, 2, 2))
    x0, x1 = tl.split(tl.permute(x, (0, 1, 2, 4, 5, 3)))
    _store_columns(p_state, p_order, stride_row, stride_col, x0, 0, n_rows, J, M, JP, E, K, PERMUTED)
    _store_columns(p_state, p_order, stride_row, stride_col, x1, 1, n_rows, J, M, JP, E, K, PERMUTED)


@triton.jit
def _store_columns(
    p_state, p_order, stride_row, stride_col, x, L: tl.constexpr, n_rows, J: tl.constexpr, M: tl.constexpr,
    JP: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    x0, x1 = tl.split(x)
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 0, 0, n_rows, J, M, JP, E, K, PERMUTED)
    tl.store(p, x00, mask=inside)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 1, 0, n_rows, J, M, JP, E, K, PERMUTED)
    tl.store(p, x10, mask=inside)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 0, 1, n_rows, J, M, JP, E, K, PERMUTED)
    tl.store(p, x01, mask=inside)
    p, inside = dense_pointers(p_state, p_order, stride_row, stride_col, L, 1, 1, n_rows, J, M, JP, E, K, PERMUTED)
    tl.store(p, x11, mask=inside)
