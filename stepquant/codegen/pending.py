# mypy: ignore-errors
"""Pending tokens of a write window: reading them beside the packed state, appending, and folding them in.

A running request owns a buffer of W - 1 entries a head: the residual u and the key of each token since the last fold
(`stepquant.codec.window` has the algebra). KDA keys have all later gates folded in and lie in slot order; GDN keys are
raw, in the model's order, shared by the value heads of a group, beside one FP32 ratio a head and entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.blocks import load_pivots, pivot_vector, store_pivots
from stepquant.codegen.tile import tile_column_index, tile_slots
from stepquant.codegen.words import SCALE_MAX, SCALE_MIN


@triton.jit
def store_entry(p, p_scale, x, i_entry, n_pending, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """Store one vector as entry `i_entry`, rounded to the buffer's dtype, if it is below `n_pending`."""
    if INT8:
        scale = tl.max(tl.abs(x), 0) * (1.0 / 127.0)
        scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX).to(tl.float16)
        tl.store(p_scale + i_entry, scale, mask=i_entry < n_pending)
        x = round_even(x / scale.to(tl.float32))
    else:
        x = saturate(x, p)
    tl.store(p + i_entry * N + o, x.to(p.dtype.element_ty), mask=inside & (o < N * (n_pending - i_entry)))


@triton.jit
def load_entry(p, p_scale, i_entry, n_pending, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """One vector of the buffer in FP32; zero from entry `n_pending` on."""
    x = tl.load(p + i_entry * N + o, mask=inside & (o < N * (n_pending - i_entry)), other=0).to(tl.float32)
    if INT8:
        x = x * tl.load(p_scale + i_entry, mask=i_entry < n_pending, other=0).to(tl.float32)
    return x


@triton.jit
def round_even(x):
    """Nearest integer within -127..127, ties to even."""
    return tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)


@triton.jit
def saturate(x, p):
    """Keep FP16 from overflowing."""
    if p.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x


@triton.jit
def add_eight(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):  # noqa: E741
    """Combine function of a reduction that takes eight sums at once."""
    return a + i, b + j, c + k, d + l, e + m, f + n, g + o, h + p


@triton.jit
def read_pending(
    h_k, h_q, x_k, x_q, decay, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, keep,
    o_key, row_in, col, col_in, K: tl.constexpr, V: tl.constexpr, SHARED_KEYS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add sum_i (k . D kbar_i) u_i and sum_i (q . D kbar_i) u_i, four entries at a time.

    The gate `decay` (compact rows) is folded into ratios (GDN: by the caller) or into the stored keys (here, for KDA,
    where `keep` is set).
    """
    gated_k, gated_q = x_k * decay, x_q * decay
    for i in range(0, n_pending, 4):
        k0 = load_entry(p_keys, p_key_scale, i, n_pending, o_key, row_in, K, INT8)
        k1 = load_entry(p_keys, p_key_scale, i + 1, n_pending, o_key, row_in, K, INT8)
        k2 = load_entry(p_keys, p_key_scale, i + 2, n_pending, o_key, row_in, K, INT8)
        k3 = load_entry(p_keys, p_key_scale, i + 3, n_pending, o_key, row_in, K, INT8)
        u0 = load_entry(p_us, p_u_scale, i, n_pending, col, col_in, V, INT8)
        u1 = load_entry(p_us, p_u_scale, i + 1, n_pending, col, col_in, V, INT8)
        u2 = load_entry(p_us, p_u_scale, i + 2, n_pending, col, col_in, V, INT8)
        u3 = load_entry(p_us, p_u_scale, i + 3, n_pending, col, col_in, V, INT8)
        if not SHARED_KEYS:  # noqa: SIM102
            if keep:
                store_entry(p_keys, p_key_scale, k0 * decay, i, n_pending, o_key, row_in, K, INT8)
                store_entry(p_keys, p_key_scale, k1 * decay, i + 1, n_pending, o_key, row_in, K, INT8)
                store_entry(p_keys, p_key_scale, k2 * decay, i + 2, n_pending, o_key, row_in, K, INT8)
                store_entry(p_keys, p_key_scale, k3 * decay, i + 3, n_pending, o_key, row_in, K, INT8)
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.reduce(
            (
                gated_k * k0,
                gated_k * k1,
                gated_k * k2,
                gated_k * k3,
                gated_q * k0,
                gated_q * k1,
                gated_q * k2,
                gated_q * k3,
            ),
            0,
            add_eight,
        )
        if SHARED_KEYS:
            r0, r1 = tl.load(p_ratio + i), tl.load(p_ratio + i + 1, mask=i + 1 < n_pending, other=0.0)
            r2 = tl.load(p_ratio + i + 2, mask=i + 2 < n_pending, other=0.0)
            r3 = tl.load(p_ratio + i + 3, mask=i + 3 < n_pending, other=0.0)
            a0, a1, a2, a3 = a0 * r0, a1 * r1, a2 * r2, a3 * r3
            b0, b1, b2, b3 = b0 * r0, b1 * r1, b2 * r2, b3 * r3
        h_k += (u0 * a0 + u1 * a1) + (u2 * a2 + u3 * a3)
        h_q += (u0 * b0 + u1 * b1) + (u2 * b2 + u3 * b3)
    return h_k, h_q


@triton.jit
def fold_pending(
    x, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay, p_order,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, J: tl.constexpr, JP: tl.constexpr, E: tl.constexpr,
    G: tl.constexpr, SHARED_KEYS: tl.constexpr, PERMUTED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add kbar_i u_i^T of every entry to the tile; entries are read against the tile (neighbours share cache lines).

    `decay` is against the tile, or a scalar; `p_order` gives the model's order of the slots where keys are in it.
    """
    o_key, row_in = tile_slots(M), tile_slots(M) < K
    if PERMUTED and SHARED_KEYS:
        o_key = tl.load(p_order + o_key, mask=row_in, other=0)
    col, col_in = tile_column_index(J, JP, E, G)
    for i in range(n_pending):
        key = tl.load(p_keys + i * K + o_key, mask=row_in, other=0).to(tl.float32)
        factor = 1.0
        if SHARED_KEYS:
            factor = tl.load(p_ratio + i)
        if INT8:
            factor = factor * tl.load(p_key_scale + i).to(tl.float32) * tl.load(p_u_scale + i).to(tl.float32)
        u = tl.load(p_us + i * V + col, mask=col_in, other=0).to(tl.float32) * factor
        x += (key * decay) * u
    return x


@triton.jit
def fold_pivots(
    p_pivots, n_pivots, gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay, x_k, u,
    o_key, row_in, col, col_in, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, PB: tl.constexpr,
    SHARED_KEYS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Fold the window into the FP16 rows of a head."""
    for first in range(0, n_pivots, PB):
        o_p = first + tl.arange(0, PB)
        x = load_pivots(p_pivots, o_p, n_pivots, col, col_in, V) * pivot_vector(gamma * decay, o_p, n_pivots, K, KP)
        for i in range(n_pending):
            key = load_entry(p_keys, p_key_scale, i, n_pending, o_key, row_in, K, INT8) * decay
            if SHARED_KEYS:
                key = key * tl.load(p_ratio + i)
            u_i = load_entry(p_us, p_u_scale, i, n_pending, col, col_in, V, INT8)
            x += pivot_vector(key, o_p, n_pivots, K, KP) * u_i[None, :]
        x += pivot_vector(x_k, o_p, n_pivots, K, KP) * u[None, :]
        store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V)
