# mypy: ignore-errors
"""Shared building blocks of the generated kernels: gates, constants of a head, fit. See `tile` for the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.table import T_ROW, table_offset
from stepquant.codegen.tile import max_rows, spread_columns, spread_rows, sum_columns, sum_rows
from stepquant.codegen.words import ROUND, power_of_two, reciprocal, square_root, to_scale


@triton.jit
def softplus(x):
    return tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)


@triton.jit
def decay_of(p_a, p_dt_bias, a_log, o, inside):
    """exp(-exp(A_log) softplus(a + dt_bias)), the gate of a head (a scalar offset) or of its rows."""
    a = tl.load(p_a + o, mask=inside, other=0).to(tl.float32)
    dt_bias = tl.load(p_dt_bias + o, mask=inside, other=0).to(tl.float32)
    return tl.exp(-tl.exp(a_log) * softplus(a + dt_bias))


@triton.jit
def quantise(y, c, top, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr, FOUR: tl.constexpr):
    """Nearest code of `y / c` in units of z, ties to even; y is X / r and c compact, already rounded to FP16."""
    inv_c = spread_columns(reciprocal(c.to(tl.float32)), JP, E, G)
    if FOUR:
        z = four_levels(y * inv_c) * top
    else:
        shift = ROUND * (128.0 - top)  # rounds to a multiple of z of one code
        z = (y * inv_c + shift) - shift
        z = tl.minimum(tl.maximum(z, -top), top)
    return z


@triton.jit
def four_levels(t):
    """Sign and magnitude: -96, -32, 32, 96 with thresholds at 2 code units of 32; zero counts as positive."""
    size = tl.where(tl.abs(t) >= 64.0, 96.0, 32.0)
    return tl.where(t < 0, -size, size)


@triton.jit
def round_codes(y, c, top, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, FOUR: tl.constexpr):
    """The final codes as floats 1.5 * 2^23 + z; those of a uniform head (BITS > 0) are clamped when they are packed."""
    inv_c = spread_columns(reciprocal(c.to(tl.float32)), JP, E, G)
    if FOUR:
        x = four_levels(y * inv_c) * top + ROUND
    elif BITS > 0:
        x = (y * inv_c + ROUND * (128.0 - top)) - ROUND * (127.0 - top)
    else:
        shift = ROUND * (128.0 - top)
        z = (y * inv_c + shift) - shift
        x = tl.minimum(tl.maximum(z, -top), top) + ROUND
    return x


@triton.jit
def fit_codes(
    x, w, inv_w, top, inv_top, unit, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    REFITS: tl.constexpr, BITS: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """Dual-axis fit of a head held on the chip.

    Args:
        x: the state tile, FP32; zero in columns that do not exist.
        w: row weights, compact; inv_w: 1 / (n w), n the columns that share a row factor.
        top: z of the largest code, against the tile; inv_top: 1 / top. Scalars in a uniform head
            (BITS > 0, where rows that do not exist are zero anyway); otherwise rows without codes have a top and
            inv_top of 0. In four-level heads top is 1 in rows that exist.
        unit: what a stored row factor is multiplied by to be in units of z.

    Returns:
        The tile of codes as `round_codes` gives them, r and c in FP16, compact.
    """
    n: tl.constexpr = JP // G if FOUR else 2 * JP
    r = to_scale(square_root(tl.maximum(sum_columns(tl.abs(x), M, G, FOUR) * inv_w, 1e-20 * n * inv_w)))
    rho = r.to(tl.float32) * unit
    weight = rho * w
    y = x * spread_rows(reciprocal(rho), M, G, FOUR)
    if BITS > 0:
        c = to_scale(max_rows(tl.abs(y), JP, E) * inv_top)
    else:
        c = to_scale(max_rows(tl.abs(y) * inv_top, JP, E))
    for _ in tl.static_range(REFITS):
        z = quantise(y, c, top, JP, E, G, FOUR)
        part = z * spread_rows(weight * weight, M, G, FOUR)
        numerator, denominator = sum_rows(part, y, part, z, JP, E)
        refit = to_scale(numerator * reciprocal(tl.maximum(denominator, 1e-37)))
        c = tl.where(denominator > 0, refit, c)
    return round_codes(y, c, top, JP, E, G, BITS, FOUR), r, c


@triton.jit
def code_constants(p_bits, slot, K: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, FOUR: tl.constexpr):
    """z of the largest code and its reciprocal, as `fit_codes` takes them, and the unit of row factors.

    In the ``head`` codebook a code stands for q, not for z = 2^(8-b) q: the unit of its row factors is 2^(b-8).
    """
    if FOUR:
        top, inv_top, unit = 1.0, 1.0 / 96.0, 1.0 / 32.0
        if K < 8 * M:
            top = spread_rows(tl.where(slot < K, 1.0, 0.0), M, 1, False)
    elif BITS > 0:
        top: tl.constexpr = 128.0 - 2.0 ** (8 - BITS)
        inv_top, unit = 1.0 / top, 2.0 ** (BITS - 8)
    else:
        bits = tl.load(p_bits + slot, mask=slot < K, other=16).to(tl.int32)
        coded = bits < 16
        step = power_of_two(tl.where(coded, 8 - bits, 0))
        top = spread_rows(tl.where(coded, 128.0 - step, 0.0), M, 1, False)
        inv_top = spread_rows(tl.where(coded, _inverse_top(bits), 0.0), M, 1, False)
        unit = 1.0
    return top, inv_top, unit


@triton.jit
def _inverse_top(bits):
    """1 / (128 - 2^(8-bits)) for 2, 4, 6 and 8 bits, correctly rounded."""
    small = tl.where(bits == 4, 1.0 / 112.0, 1.0 / 64.0)
    return tl.where(bits == 8, 1.0 / 127.0, tl.where(bits == 6, 1.0 / 124.0, small))


@triton.jit
def row_factors(
    p_page, p_table, slot, K: tl.constexpr, KP: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, FOUR: tl.constexpr
):
    """Pointers to the stored row factors, compact, and which exist; HALF is the groups that half the columns have."""
    p_r = (p_page + table_offset(p_table, T_ROW)).to(tl.pointer_type(tl.float16))
    if FOUR:
        o = tl.arange(0, KP * 2 * G)
        g, h = (o // KP) % G, o // (KP * G)
        p_r, inside = p_r + (HALF * h + g) * K + o % KP, (o % KP < K) & (g < HALF)
    else:
        p_r, inside = p_r + slot, slot < K
    return p_r, inside


@triton.jit
def load_pivots(p_pivots, o_p, n_pivots, col, col_in, V: tl.constexpr):
    """Rows `o_p` of the FP16 rows of a head, `[PB, VP]` in FP32; rows past the last are zero."""
    inside = (o_p < n_pivots)[:, None] & col_in[None, :]
    return tl.load(p_pivots + o_p[:, None] * V + col[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V: tl.constexpr):
    """Inverse of `load_pivots`; saturates instead of overflowing."""
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    tl.store(p_pivots + o_p[:, None] * V + col[None, :], x, mask=(o_p < n_pivots)[:, None] & col_in[None, :])


@triton.jit
def pivot_vector(x, o_p, n_pivots, K: tl.constexpr, KP: tl.constexpr):
    """Entries of compact rows for pivot rows `o_p`, `[PB, 1]`, zero past the last; pivots are in the last slots."""
    slot = tl.minimum(K - n_pivots + o_p, KP - 1)
    return tl.where(o_p < n_pivots, tl.gather(x, slot, 0), 0.0)[:, None]


@triton.jit
def read_pivots(
    h_k, h_q, p_pivots, n_pivots, x_k, x_q, decay, col, col_in,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """Add the FP16 rows' share of k^T D S and q^T D S, `PB` rows at a time; `decay` is a compact vector."""
    for first in range(0, n_pivots, PB):
        o_p = first + tl.arange(0, PB)
        x = load_pivots(p_pivots, o_p, n_pivots, col, col_in, V)
        h_k += tl.sum(x * pivot_vector(decay * x_k, o_p, n_pivots, K, KP), 0)
        h_q += tl.sum(x * pivot_vector(decay * x_q, o_p, n_pivots, K, KP), 0)
    return h_k, h_q


@triton.jit
def update_pivots(
    p_pivots, n_pivots, x_k, u, decay, col, col_in,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, PB: tl.constexpr,
):  # fmt: skip
    """Replace the FP16 rows by D S + k u^T."""
    for first in range(0, n_pivots, PB):
        o_p = first + tl.arange(0, PB)
        x = load_pivots(p_pivots, o_p, n_pivots, col, col_in, V) * pivot_vector(decay, o_p, n_pivots, K, KP)
        x += pivot_vector(x_k, o_p, n_pivots, K, KP) * u[None, :]
        store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V)


@triton.jit
def pack_pivots(
    p_pivots, n_pivots, p_state, p_order, col, col_in, stride_row, stride_col,
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
def unpack_pivots(
    p_pivots, n_pivots, p_state, p_order, col, col_in, stride_row, stride_col,
    K: tl.constexpr, V: tl.constexpr, PB: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Copy the pivot rows of a page into a dense FP32 head."""
    for first in range(0, n_pivots, PB):
        o_p = first + tl.arange(0, PB)
        row = K - n_pivots + o_p
        if PERMUTED:
            row = tl.load(p_order + row, mask=o_p < n_pivots, other=0)
        o = row[:, None] * stride_row + col[None, :] * stride_col
        x = load_pivots(p_pivots, o_p, n_pivots, col, col_in, V)
        tl.store(p_state + o, x, mask=(o_p < n_pivots)[:, None] & col_in[None, :])
