"""k^T D S and q^T D S of a packed head on the matrix units, without ever turning its codes into floats.

S = diag(rho) z diag(c), so what is needed are two products of row vectors k D rho and q D rho with the integer tile z.
Both vectors are rounded to 21-bit integers of a common scale and split into three signed digits of base 128: six int8
columns, and sums of int8 products in int32 are exact. The error is that of the rounding, 2^-21 of the largest entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.words import ROUND


@triton.jit
def digits(t_k, t_q):
    """int8 `[N, 8]` of two integer vectors `[N]`: columns 2l and 2l + 1 hold digit l of both, the last two are zero."""
    o = tl.arange(0, 8)[None, :]
    t = tl.where(o % 2 == 0, t_k[:, None], t_q[:, None]) >> (7 * (o // 2))
    return tl.where(o < 4, t & 127, tl.where(o < 6, t, 0)).to(tl.int8)


@triton.jit
def to_integers(x, scale):
    """x * scale, at most 2^20 in size, rounded to int32."""
    return (x * scale + ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def operand(z, M: tl.constexpr, JP: tl.constexpr):
    """A tile of codes `[M, 4 * JP]` as `[JP, 4 * M]`: columns of the state against its slots."""
    return tl.reshape(tl.permute(tl.reshape(z, (M, JP, 4)), (1, 0, 2)), (JP, 4 * M))


@triton.jit
def slot_halves(x, M: tl.constexpr):
    """Compact rows `[8 M]` as two vectors `[4 M]` that go with `operand` of s = 0 and s = 1."""
    return tl.split(tl.reshape(x, (4 * M, 2)))


@triton.jit
def multiply_codes(
    z00, z01, z10, z11, k_rho, q_rho, M: tl.constexpr, JP: tl.constexpr, G: tl.constexpr, FOUR: tl.constexpr
):
    """Sums over the rows of z times k_rho and q_rho (compact rows, or row factors where grouped), as compact columns."""
    VP: tl.constexpr = 2 * JP
    top = tl.maximum(tl.max(tl.abs(k_rho), 0), tl.max(tl.abs(q_rho), 0))
    scale = 1048576.0 / tl.maximum(top, 1e-30)
    t_k, t_q = to_integers(k_rho, scale), to_integers(q_rho, scale)
    if FOUR:
        a0 = _grouped_dot(z00, z10, t_k, t_q, 0, M, JP, G)
        a1 = _grouped_dot(z01, z11, t_k, t_q, 1, M, JP, G)
    else:
        k0, k1 = slot_halves(t_k, M)
        q0, q1 = slot_halves(t_q, M)
        b0, b1 = digits(k0, q0), digits(k1, q1)
        a0 = tl.dot(operand(z00, M, JP), b0, out_dtype=tl.int32)
        a0 = tl.dot(operand(z10, M, JP), b1, a0, out_dtype=tl.int32)
        a1 = tl.dot(operand(z01, M, JP), b0, out_dtype=tl.int32)
        a1 = tl.dot(operand(z11, M, JP), b1, a1, out_dtype=tl.int32)
    o = tl.arange(0, 8) // 2
    weight = tl.where(o == 0, 1.0, tl.where(o == 1, 128.0, 16384.0)) / scale
    total = tl.join(a0, a1).to(tl.float32) * weight[None, :, None]  # [JP, 8, h]
    total = tl.sum(tl.reshape(total, (JP, 4, 2, 2)), 1)
    h_k, h_q = tl.split(tl.permute(total, (0, 2, 1)))
    o_v = tl.arange(0, VP)  # out of the matrix units' layout
    return tl.gather(tl.reshape(h_k, (VP,)), o_v, 0), tl.gather(tl.reshape(h_q, (VP,)), o_v, 0)


@triton.jit
def _grouped_dot(z0, z1, t_k, t_q, HALF: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, G: tl.constexpr):
    """`[JP, 8]` sums of one column half where every group of columns has its own row factors."""
    C: tl.constexpr = JP // G
    k0, k1 = _half_factors(t_k, HALF, M, G)
    q0, q1 = _half_factors(t_q, HALF, M, G)
    b0 = tl.reshape(digits(k0, q0), (4 * M, 8 * G))
    b1 = tl.reshape(digits(k1, q1), (4 * M, 8 * G))
    a = tl.dot(operand(z0, M, JP), b0, out_dtype=tl.int32)
    a = tl.dot(operand(z1, M, JP), b1, a, out_dtype=tl.int32)
    own = tl.arange(0, G)[:, None, None, None] == tl.arange(0, G)[None, None, :, None]
    return tl.reshape(tl.sum(tl.where(own, tl.reshape(a, (G, C, G, 8)), 0), 2), (JP, 8))


@triton.jit
def _half_factors(t, HALF: tl.constexpr, M: tl.constexpr, G: tl.constexpr):
    """Compact row factors (m, g, i, h, s) of one column half as flat (m, i, g) vectors for s = 0 and s = 1."""
    t = tl.permute(tl.reshape(t, (M, G, 4, 2, 2)), (0, 2, 1, 4, 3))
    low, high = tl.split(t)  # h
    t = low
    if HALF == 1:
        t = high
    t0, t1 = tl.split(t)
    return tl.reshape(t0, (4 * M * G,)), tl.reshape(t1, (4 * M * G,))
