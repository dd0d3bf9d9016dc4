"""Pending tokens of a write window: reading them beside the packed state, appending, and folding them in.

A running request owns a buffer of W - 1 entries a head: the residual u and the key of each token since the last fold
(`stepquant.codec.window` has the algebra). KDA keys have all later gates folded in and lie in tile order; GDN keys are
raw, in the model's order, shared by the value heads of a group, beside one FP32 ratio a head and entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.blocks import load_pivots, pivot_vector, store_pivots
from stepquant.codegen.tile import spread_columns, spread_rows
from stepquant.codegen.words import SCALE_MAX, SCALE_MIN


@triton.jit
def load_entries(p, p_scale, o_w, n_pending, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """Vectors of entries `o_w`, `[W, len(o)]` in FP32; zero from entry `n_pending` on."""
    some = o_w < n_pending
    x = tl.load(p + o_w[:, None] * N + o[None, :], mask=some[:, None] & inside[None, :], other=0).to(tl.float32)
    if INT8:
        x = x * tl.load(p_scale + o_w, mask=some, other=0).to(tl.float32)[:, None]
    return x


@triton.jit
def store_entries(p, p_scale, x, o_w, n_pending, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """Inverse of `load_entries`, rounding to the buffer's dtype."""
    some = o_w < n_pending
    if INT8:
        scale = tl.max(tl.abs(x), 1) * (1.0 / 127.0)
        scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX).to(tl.float16)
        tl.store(p_scale + o_w, scale, mask=some)
        x = round_even(x / scale.to(tl.float32)[:, None])
    else:
        x = saturate(x, p)
    tl.store(p + o_w[:, None] * N + o[None, :], x.to(p.dtype.element_ty), mask=some[:, None] & inside[None, :])


@triton.jit
def store_entry(p, p_scale, x, i_entry, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """Append one vector as entry `i_entry`."""
    if INT8:
        scale = tl.max(tl.abs(x), 0) * (1.0 / 127.0)
        scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX).to(tl.float16)
        tl.store(p_scale + i_entry, scale)
        x = round_even(x / scale.to(tl.float32))
    else:
        x = saturate(x, p)
    tl.store(p + i_entry * N + o, x.to(p.dtype.element_ty), mask=inside)


@triton.jit
def load_entry(p, p_scale, i_entry, o, inside, N: tl.constexpr, INT8: tl.constexpr):
    """One vector of the buffer in FP32."""
    x = tl.load(p + i_entry * N + o, mask=inside, other=0).to(tl.float32)
    if INT8:
        x = x * tl.load(p_scale + i_entry).to(tl.float32)
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
def read_pending(h_k, h_q, keys, us, x_k, x_q):
    """Add sum_i (k . kbar_i) u_i and sum_i (q . kbar_i) u_i; keys `[W, KP]` with all gates in, us `[W, VP]`."""
    h_k += tl.sum(tl.sum(keys * x_k[None, :], 1)[:, None] * us, 0)
    h_q += tl.sum(tl.sum(keys * x_q[None, :], 1)[:, None] * us, 0)
    return h_k, h_q


@triton.jit
def fold_pending(
    x, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay, o_key, row_in, col, col_in,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    SHARED_KEYS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Add kbar_i u_i^T of every entry to the tile."""
    for i in range(n_pending):
        key = load_entry(p_keys, p_key_scale, i, o_key, row_in, K, INT8) * decay
        if SHARED_KEYS:
            key = key * tl.load(p_ratio + i)
        u = load_entry(p_us, p_u_scale, i, col, col_in, V, INT8)
        x += spread_rows(key, M, 1, False) * spread_columns(u, G, C)
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
            key = load_entry(p_keys, p_key_scale, i, o_key, row_in, K, INT8) * decay
            if SHARED_KEYS:
                key = key * tl.load(p_ratio + i)
            u_i = load_entry(p_us, p_u_scale, i, col, col_in, V, INT8)
            x += pivot_vector(key, o_p, n_pivots, K, KP) * u_i[None, :]
        x += pivot_vector(x_k, o_p, n_pivots, K, KP) * u[None, :]
        store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V)
