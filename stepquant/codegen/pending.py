# mypy: ignore-errors
"""Pending tokens of a write window: reading them beside the packed state, appending, and folding them in.

A running request owns a buffer of W - 1 entries a head: the residual u and the key of each token since the last fold
(`stepquant.codec.window` has the algebra). KDA keys have all later gates folded in and lie in slot order; GDN keys are
raw, in the model's order, shared by the value heads of a group, beside one FP32 ratio a head and entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.blocks import load_pivots, split_half, store_pivots
from stepquant.codegen.tile import block_columns, tile_slots
from stepquant.codegen.words import SCALE_MAX, SCALE_MIN


@triton.jit
def store_entry(
    p, p_scale, x, i_entry, n_pending, o, inside, N: tl.constexpr, INT8: tl.constexpr, WITHIN: tl.constexpr = False
):
    """Store one vector as entry `i_entry`, rounded to the buffer's dtype, if it is below `n_pending`.

    WITHIN: it is known to be within what the dtype holds.
    """
    if INT8:
        scale = tl.max(tl.abs(x), 0) * (1.0 / 127.0)
        scale = tl.minimum(tl.maximum(scale, SCALE_MIN), SCALE_MAX).to(tl.float16)
        tl.store(p_scale + i_entry, scale, mask=i_entry < n_pending)
        x = round_even(x / scale.to(tl.float32))
    elif not WITHIN:
        x = saturate(x, p)
    tl.store(p + i_entry * N + o, x.to(p.dtype.element_ty), mask=inside & (o < N * (n_pending - i_entry)))


@triton.jit
def load_four(p, i, n_pending, o, inside, N: tl.constexpr):
    """Entries i to i + 3 as the buffer holds them; zero from entry `n_pending` on."""
    q, n = p + i * N + o, N * (n_pending - i)
    x0, x1 = tl.load(q, mask=inside & (o < n), other=0), tl.load(q + N, mask=inside & (o < n - N), other=0)
    x2 = tl.load(q + 2 * N, mask=inside & (o < n - 2 * N), other=0)
    return x0, x1, x2, tl.load(q + 3 * N, mask=inside & (o < n - 3 * N), other=0)


@triton.jit
def load_entries(p_keys, p_us, i, n_pending, o_key, row_in, col, col_in, K: tl.constexpr, V: tl.constexpr):
    """Keys and residuals of four entries."""
    return load_four(p_keys, i, n_pending, o_key, row_in, K), load_four(p_us, i, n_pending, col, col_in, V)


@triton.jit
def to_float(x, p_scale, i_entry, n_pending, INT8: tl.constexpr):
    """A vector of the buffer in FP32."""
    x = x.to(tl.float32)
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
    h_k, h_q, x_k, x_q, decay, entries, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending,
    o_key, row_in, col, col_in, K: tl.constexpr, V: tl.constexpr, SHARED_KEYS: tl.constexpr, INT8: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Add sum_i (k . D kbar_i) u_i and sum_i (q . D kbar_i) u_i, four entries at a time.

    The gate `decay` (compact rows) is folded into ratios (GDN: by the caller) or into the stored keys (KDA: here with
    GATE, otherwise by `gate_entries`).
    entries: the first four, loaded by the caller ahead of everything that takes time.
    """
    gated_k, gated_q = x_k * decay, x_q * decay
    for i in range(0, n_pending, 4):
        keys, us = entries
        entries = load_entries(p_keys, p_us, i + 4, n_pending, o_key, row_in, col, col_in, K, V)
        k0, k1 = (
            to_float(keys[0], p_key_scale, i, n_pending, INT8),
            to_float(keys[1], p_key_scale, i + 1, n_pending, INT8),
        )
        k2 = to_float(keys[2], p_key_scale, i + 2, n_pending, INT8)
        k3 = to_float(keys[3], p_key_scale, i + 3, n_pending, INT8)
        u0, u1 = to_float(us[0], p_u_scale, i, n_pending, INT8), to_float(us[1], p_u_scale, i + 1, n_pending, INT8)
        u2, u3 = to_float(us[2], p_u_scale, i + 2, n_pending, INT8), to_float(us[3], p_u_scale, i + 3, n_pending, INT8)
        if GATE and not SHARED_KEYS:
            store_entry(p_keys, p_key_scale, k0 * decay, i, n_pending, o_key, row_in, K, INT8, True)
            store_entry(p_keys, p_key_scale, k1 * decay, i + 1, n_pending, o_key, row_in, K, INT8, True)
            store_entry(p_keys, p_key_scale, k2 * decay, i + 2, n_pending, o_key, row_in, K, INT8, True)
            store_entry(p_keys, p_key_scale, k3 * decay, i + 3, n_pending, o_key, row_in, K, INT8, True)
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
def gate_entries(p_keys, decay, n_pending, o_key, row_in, K: tl.constexpr):
    """Fold a gate into stored keys (KDA) where `read_pending` left that to the last of a head's programs."""
    for i in range(0, n_pending, 4):
        keys = load_four(p_keys, i, n_pending, o_key, row_in, K)
        for n in tl.static_range(4):
            store_entry(p_keys, p_keys, keys[n].to(tl.float32) * decay, i + n, n_pending, o_key, row_in, K, False, True)


@triton.jit
def arrive(p_count):
    """Say that this program has read all that the last of a head's programs replaces.

    Without a fence: what has been read, and used, cannot change any more, and nothing written here is read there.
    """
    tl.debug_barrier()
    tl.atomic_add(p_count, 1, sem="relaxed")


@triton.jit
def await_parts(p_count, N: tl.constexpr):
    """Wait for `arrive` of N programs, which all were started before this one, and set the count back."""
    while tl.atomic_add(p_count, 0, sem="relaxed") < N:
        pass
    tl.store(p_count, 0)
    tl.debug_barrier()


@triton.jit
def load_with_now(p, p_now, e, o, n_pending, inside, N: tl.constexpr, EN: tl.constexpr, NOW: tl.constexpr):
    """Entries `e` of a buffer of vectors, entry EN - 1 from `p_now`; zero from entry `n_pending` on.

    INT8 buffers come as FP16, in units of 128: so products with their scales stay normal numbers (`key_operands`).
    """
    there = (e < n_pending) & inside
    if p.dtype == p_now.dtype:
        q = p + e * N + o
        if NOW:
            q, there = tl.where(e == EN - 1, p_now + o, q), (there | (e == EN - 1)) & inside
        x = tl.load(q, mask=there, other=0)
    else:
        x = tl.load(p + e * N + o, mask=there, other=0)
    if p.dtype.element_ty == tl.int8:
        x = x.to(tl.float16) * 0.0078125
    if p.dtype != p_now.dtype:
        x = x.to(p_now.dtype.element_ty)
        if NOW:
            x = tl.where(e == EN - 1, tl.load(p_now + o, mask=inside, other=0), x)
    return x


@triton.jit
def load_keys(
    p_keys, p_key_scale, p_u_scale, p_ratio, p_now, n_pending, o, o_key, inside,
    K: tl.constexpr, EN: tl.constexpr, NOW: tl.constexpr, SHARED_KEYS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """What `gated_keys` is made of: keys, and ratios and scales of entries; scalars where a plan has none."""
    e = o % EN
    k = load_with_now(p_keys, p_now, e, o_key, n_pending, inside, K, EN, NOW)
    ratio, k_scale, u_scale = 1.0, 1.0, 1.0
    if SHARED_KEYS:
        ratio = tl.load(p_ratio + e, mask=e < n_pending, other=0.0)
    if INT8:
        k_scale = tl.load(p_key_scale + e, mask=e < n_pending, other=0)
        u_scale = tl.load(p_u_scale + e, mask=e < n_pending, other=0)
    return k, ratio, k_scale, u_scale


@triton.jit
def gated_keys(
    parts, o, WITHIN: tl.constexpr, EN: tl.constexpr, SHARED_KEYS: tl.constexpr, INT8: tl.constexpr
):  # fmt: skip
    """Rows of the keys of everything pending, f16, this token's as entry EN - 1: halves in places e and EN + e.

    All gates and scales are in them, so that the residuals go to the matrix units as they are stored.
    WITHIN: keys are FP16, and gates at most one.
    """
    k, ratio, k_scale, u_scale = parts
    e = o % EN
    factor = tl.where(e >= 0, 1.0, 0.0)
    if SHARED_KEYS:
        factor = ratio
    if INT8:  # each scale once and each 128 of `load_with_now` once
        factor = factor * (k_scale.to(tl.float32) * 128.0)
        factor = factor * (u_scale.to(tl.float32) * 128.0)
    high, low = split_half(k.to(tl.float32) * tl.where(e == EN - 1, 1.0, factor), WITHIN)
    # No join of the halves: it is stored two bytes a thread, sixteen threads on a bank, and of INT8 buffers it makes
    # Triton take more entries a thread than there are.
    return tl.where(o < EN, high, low)


@triton.jit
def load_operands(
    p_keys, p_key_scale, p_u_scale, p_ratio, p_now, n_pending, p_order,
    K: tl.constexpr, M: tl.constexpr, EN: tl.constexpr, NOW: tl.constexpr, SHARED_KEYS: tl.constexpr,
    PERMUTED: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """What `key_operands` is made of."""
    slot = tile_slots(M)
    o_key = slot
    if PERMUTED and SHARED_KEYS:
        o_key = tl.load(p_order + slot, mask=slot < K, other=0)
    return load_keys(
        p_keys, p_key_scale, p_u_scale, p_ratio, p_now, n_pending, tl.arange(0, 2 * EN)[:, None], o_key[None, :],
        (slot < K)[None, :], K, EN, NOW, SHARED_KEYS, INT8,
    )  # fmt: skip


@triton.jit
def key_operands(parts, WITHIN: tl.constexpr, EN: tl.constexpr, SHARED_KEYS: tl.constexpr, INT8: tl.constexpr):
    """Keys of everything pending as right operand of the fold, f16 `[2 EN, 8 M]` (`gated_keys`)."""
    return gated_keys(parts, tl.arange(0, 2 * EN)[:, None], WITHIN, EN, SHARED_KEYS, INT8)


@triton.jit
def value_operands(
    p_us, p_now, n_pending, b,
    V: tl.constexpr, J: tl.constexpr, E: tl.constexpr, EN: tl.constexpr, NOW: tl.constexpr,
):  # fmt: skip
    """Residuals of the pending tokens and of this one in a block's columns, as left operands: f16 `[16 E, 2 EN]`.

    The second is what halves leave of FP32 buffers, a scalar for all others.
    """
    col = tl.reshape(block_columns(b, J, E), (16 * E, 1))
    e = (tl.arange(0, 2 * EN) % EN)[None, :]
    u, low = load_with_now(p_us, p_now, e, col, n_pending, col >= 0, V, EN, NOW), 0
    if u.dtype == tl.float32:
        u, low = split_half(u)
    return u.to(tl.float16), low


@triton.jit
def add_window(x, u, k, M: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    """The tile plus everything pending; u is a pair of operands, of which FP32 buffers (WIDE) need the second."""
    u0, u1 = u
    x = tl.dot(u0, k, tl.reshape(x, (16 * E, 8 * M)))
    if WIDE:
        x = tl.dot(u1, k, x)
    return tl.reshape(x, (2, 8 * E, 8 * M))


@triton.jit
def fold_pivots(
    p_pivots, n_pivots, p_gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, p_k_now, p_u_now, n_pending, p_order,
    col, col_in, K: tl.constexpr, V: tl.constexpr, EN: tl.constexpr, NOW: tl.constexpr, SHARED_KEYS: tl.constexpr,
    PERMUTED: tl.constexpr, INT8: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fold the window into the FP16 rows of a head on the matrix units, sixteen rows at a time."""
    o = tl.arange(0, 2 * EN)
    for first in tl.range(0, n_pivots, 16, num_stages=1):
        o_p = first + tl.arange(0, 16)
        u = load_with_now(p_us, p_u_now, (o % EN)[:, None], col[None, :], n_pending, col_in[None, :], V, EN, NOW)
        slot, inside = tl.minimum(K - n_pivots + o_p, K - 1), o_p < n_pivots  # pivots are in the last slots
        o_key, gate = slot, tl.load(p_gamma + (0 if SHARED_KEYS else slot))
        if PERMUTED and SHARED_KEYS:
            o_key = tl.load(p_order + slot)
        parts = load_keys(
            p_keys, p_key_scale, p_u_scale, p_ratio, p_k_now, n_pending, o[None, :], o_key[:, None],
            inside[:, None], K, EN, NOW, SHARED_KEYS, INT8,
        )  # fmt: skip
        WITHIN: tl.constexpr = p_keys.dtype.element_ty == tl.float16
        keys = gated_keys(parts, o[None, :], WITHIN, EN, SHARED_KEYS, INT8)
        x = load_pivots(p_pivots, o_p, n_pivots, col, col_in, V)
        x = x * (gate + tl.zeros([16], tl.float32))[:, None]
        if WIDE:
            whole, rest = split_half(u)
            x = tl.dot(keys, rest, tl.dot(keys, whole, x))
        else:
            x = tl.dot(keys, u.to(tl.float16), x)
        store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V)
