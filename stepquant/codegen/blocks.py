# mypy: ignore-errors
"""Building blocks of the generated kernels: gates, constants of a head, fit, FP16 rows. See `tile` for the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.planes import load_block, load_limits, store_block, store_crumbs, unpack_block
from stepquant.codegen.tile import (
    block_columns,
    crumbs_from_tile,
    max_slots,
    spread_rows,
    sum_slots,
    tile_from_words,
    tile_slots,
    total_sums,
    words_from_tile,
)
from stepquant.codegen.words import (
    REACH,
    ROUND,
    code_bits,
    exponential,
    four_code,
    four_size,
    reciprocal,
    scale_raw,
    square_root,
    to_scale,
)


@triton.jit
def issue_loads():
    """Loads above this line are asked for before anything below it starts.

    The compiler moves a load down to where its value is used, behind what the program waits for in between.
    """
    tl.debug_barrier()


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + e) for e = exp(-|x|), and log(1 + e) = 2 artanh(e / (2 + e)).

    The series of artanh, within 1e-8, takes a third of the instructions of a logarithm, and small e keep their bits.
    """
    e = exponential(-tl.abs(x))
    s = e * reciprocal(2.0 + e)
    z = s * s
    series = 1.0 + z * (0.3333312 + z * (0.20013224 + z * (0.13976503 + z * 0.14082729)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def load_factors(p_r, i_group, slot, K: tl.constexpr, GROUPS: tl.constexpr, HG: tl.constexpr):
    """Pointers to the stored row factors of a group of columns, compact ``[HG, slots]``, and which exist."""
    o = tl.arange(0, HG)[:, None] * (GROUPS * K) + i_group * K + slot[None, :]
    return p_r + o, (slot < K)[None, :] & (tl.arange(0, HG) >= 0)[:, None]


@triton.jit
def load_constants(p_w, slot, H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr):
    """Row weights w, 1 / (n w), step of a code and 1 / its reach, compact (`spec.head_tables`).

    In the ``head`` codebook a stored row factor stands for code units, in the ``shared`` one for units of 8-bit codes.
    """
    inside = slot < K
    w, inv_w = tl.load(p_w + slot, mask=inside, other=0.0), tl.load(p_w + H * K + slot, mask=inside, other=1.0)
    step, inv_top = tl.full([8 * M], 1.0, tl.float32), tl.full([8 * M], 1.0, tl.float32)
    if BITS == 0:
        step = tl.load(p_w + 2 * H * K + slot, mask=inside, other=1.0)
        inv_top = tl.load(p_w + 3 * H * K + slot, mask=inside, other=0.0)
    return w, inv_w, step, inv_top


@triton.jit
def fit_rows(total, constants, M: tl.constexpr, HG: tl.constexpr, COLUMNS: tl.constexpr, MIXED: tl.constexpr):
    """Row factors from the sums of |X| of a group of columns; constants are `load_constants`'.

    Returns:
        r in FP16, compact ``[HG, slots]``; then against the tile: 1 / (r step), the squared weight of a row in the
        refit, and 1 / reach and step of a code (scalars where heads have one precision).
    """
    w, inv_w, step, inv_top = constants
    w, inv_w, step, inv_top = w[None, :], inv_w[None, :], step[None, :], inv_top[None, :]
    mean = tl.maximum(total_sums(total, M, HG) * inv_w, 1e-20 * COLUMNS * inv_w)
    r = to_scale(square_root(mean))
    rho = r.to(tl.float32) * step
    weight = rho * w
    inv_rho = reciprocal(rho)
    if MIXED:
        inv_rho = tl.where(w > 0, inv_rho, 0.0)  # rows without codes count for nothing
        inv_top, step = spread_rows(inv_top, M, 1), spread_rows(step.to(tl.int32), M, 1)
    return r, spread_rows(inv_rho, M, HG), spread_rows(weight * weight, M, HG), inv_top, step


@triton.jit
def _largest(inv_top, BITS: tl.constexpr):
    """The largest code, after a refit the reciprocal of `inv_top` where rows differ; zero in rows without codes."""
    if BITS > 0:
        top: tl.constexpr = 2.0 ** (BITS - 1) - 1
    else:
        top = tl.where(inv_top > 0, (reciprocal(tl.maximum(inv_top, 1e-3)) + ROUND) - ROUND, 0.0)
    return top


@triton.jit
def fit_block(y, weight, inv_top, step, BITS: tl.constexpr, FOUR: tl.constexpr, REFITS: tl.constexpr):
    """Column scales and codes of a block.

    Args:
        y: the state tile ``[h, (e, l), n]`` in units of row factors and codes, FP32; weight, inv_top and step are
            `fit_rows`'.

    Returns:
        Codes in the lower halves of int32, in units of an 8-bit code where rows have precisions of their own (four
        levels: as `four_code` has them), after a refit not clamped yet; and c in FP16, ``[h, (e, l)]``.
    """
    if FOUR:
        bound = max_slots(tl.abs(y)) * (1.0 / 3.0)
    elif BITS > 0:
        TOP: tl.constexpr = 2 ** (BITS - 1) - 1
        bound = max_slots(tl.abs(y)) * (1.0 / TOP)
    else:
        bound = max_slots(tl.abs(y) * inv_top)
    c = to_scale(bound)
    scale = tl.maximum(c.to(tl.float32), bound * REACH)  # reaches every value: nothing to clamp
    for i in tl.static_range(REFITS):
        if FOUR:
            size = tl.abs(y)
            level = four_size(size, tl.expand_dims(2.0 * scale, 2))
            numerator, denominator = sum_slots(level * weight, size, level)
        else:
            q = (y * tl.expand_dims(reciprocal(scale), 2) + ROUND) - ROUND
            if i > 0:  # refitted scales need not
                q = tl.minimum(tl.maximum(q, -_largest(inv_top, BITS)), _largest(inv_top, BITS))
            numerator, denominator = sum_slots(q * weight, y, q)
        refit = to_scale(numerator * reciprocal(tl.maximum(denominator, 1e-37)))
        c = tl.where(denominator > 0, refit, c)
        scale = c.to(tl.float32)
    inv_c = reciprocal(scale)
    if FOUR:
        q = four_code(y, tl.expand_dims(0.125 * inv_c, 2))
    else:
        q = code_bits(y * tl.expand_dims(inv_c, 2) + ROUND)
        if BITS == 0:
            q = q * step
    return q, c


@triton.jit
def load_packed(
    planes, b, p_c, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Words and column scales of a block, as they lie in the page."""
    words = load_block(planes, b, J, M, E, 1, FULL, FOUR, NIBBLES, EIGHT, SIX, TWO)
    return words, tl.load(p_c + block_columns(b, J, E))


@triton.jit
def packed_tile(
    packed, rho, M: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """What `load_packed` gave as a float tile; `rho` holds row factors in units of z, and gates."""
    words, c = packed
    z00, z01, z10, z11 = unpack_block(words, M, E, 1, FOUR, NIBBLES, EIGHT, SIX, TWO)
    return scale_raw(tile_from_words(z00, z01, z10, z11, M, E), tl.expand_dims(c, 2).to(tl.float32)) * rho


@triton.jit
def store_codes(
    planes, b, p_c, q, c, p_limits, K: tl.constexpr, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    FULL: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr, REFITS: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Pack and write the codes and column scales that `fit_block` found; only a refit leaves anything to clamp."""
    tl.store(p_c + block_columns(b, J, E), c)
    if FOUR:
        store_crumbs(planes, b, crumbs_from_tile(q, M, E), J, M, E, FULL)
    else:
        limit0, limit1 = 0, 0
        if BITS == 0 and REFITS > 0:
            limit0, limit1 = load_limits(p_limits, 0, K, M, E), load_limits(p_limits, 1, K, M, E)
        z00, z01, z10, z11 = words_from_tile(q, limit0, limit1, M, E, BITS, ARCH, REFITS > 0)
        SHIFT: tl.constexpr = 8 - BITS if BITS > 0 else 0
        store_block(planes, b, z00, z01, z10, z11, J, M, E, FULL, SHIFT, NIBBLES, EIGHT, SIX, TWO)


@triton.jit
def pivot_place(p_pivots, b, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr):
    """Pointers to a block of a head that is kept in FP16, against the tile, and which exist."""
    slot = tile_slots(M)
    p = p_pivots + tl.expand_dims(block_columns(b, J, E), 2) + tl.reshape(slot, (1, 1, 8 * M)) * V
    return p, tl.reshape(slot < K, (1, 1, 8 * M)) & (tl.arange(0, 2) >= 0)[:, None, None]


@triton.jit
def saturate_half(x):
    """FP16; saturates instead of overflowing."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def split_half(x, WITHIN: tl.constexpr = False):
    """x as a sum of two halves, to within 2^-22 of it or 2^-25; WITHIN: x is known not to overflow FP16."""
    high = x.to(tl.float16) if WITHIN else saturate_half(x)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def load_pivots(p_pivots, o_p, n_pivots, col, col_in, V: tl.constexpr):
    """Rows `o_p` of the FP16 rows of a head, `[PB, VP]` in FP32; rows past the last are zero."""
    inside = (o_p < n_pivots)[:, None] & col_in[None, :]
    return tl.load(p_pivots + o_p[:, None] * V + col[None, :], mask=inside, other=0).to(tl.float32)


@triton.jit
def store_pivots(p_pivots, x, o_p, n_pivots, col, col_in, V: tl.constexpr):
    """Inverse of `load_pivots`."""
    inside = (o_p < n_pivots)[:, None] & col_in[None, :]
    tl.store(p_pivots + o_p[:, None] * V + col[None, :], saturate_half(x), mask=inside)


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
