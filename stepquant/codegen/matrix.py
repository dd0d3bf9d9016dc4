# mypy: ignore-errors
"""k^T D S and q^T D S of a packed head on the matrix units, without ever turning its codes into floats.

S = diag(rho) z diag(c), so what is needed are two products of row vectors k D rho and q D rho with the integer tile z.
Each vector is rounded to 21-bit integers and split into three signed digits of base 128: six int8 columns. Sums of
int8 products in int32 are exact. The error is that of the rounding, 2^-21 of a vector's largest entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.words import ROUND, reciprocal


@triton.jit
def max_pair(a, b, c, d):
    """Combine function of a reduction that takes two maxima at once."""
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def add_triple(a, b, c, d, e, f):
    """Combine function of a reduction that takes three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def to_integers(x, scale):
    """x * scale, at most 2^20 in size, rounded to int32."""
    return (x * scale + ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def digits(t_k, t_q, o_slot, ROWS: tl.constexpr, G: tl.constexpr):
    """Right operand int8 `[ROWS, 8 G]` from integer vectors: columns 2l and 2l + 1 of 8 hold digit l of both.

    `o_slot`, flat `[G, ROWS]`, says which entries go where. Built transposed, so that a thread has whole words.
    """
    k = tl.reshape(tl.gather(t_k, o_slot, 0), (G, 1, ROWS))
    q = tl.reshape(tl.gather(t_q, o_slot, 0), (G, 1, ROWS))
    o = tl.arange(0, 8)[None, :, None]
    t = tl.where(o % 2 == 0, k, q) >> (7 * (o // 2))
    t = tl.where(o < 4, t & 127, tl.where(o < 6, t, 0)).to(tl.int8)
    return tl.trans(tl.reshape(t, (8 * G, ROWS)))


@triton.jit
def operand(z, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr):
    """A tile of codes ``[a, b, l, d, (e, i)]`` as columns against slots, `[JP, 4 M]`: no data moves."""
    z = tl.reshape(z, (M // 4, JP // (8 * E), 8, 4, E, 4))
    return tl.reshape(tl.permute(z, (1, 4, 2, 0, 3, 5)), (JP, 4 * M))


@triton.jit
def multiply_codes(
    z00, z01, z10, z11, k_rho, q_rho, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    FOUR: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of z times k_rho and q_rho (compact rows, or row factors where grouped): compact columns."""
    ROWS: tl.constexpr = 4 * M
    top_k, top_q = tl.reduce((tl.abs(k_rho), tl.abs(q_rho)), 0, max_pair)
    top_k, top_q = tl.maximum(top_k, 1e-30), tl.maximum(top_q, 1e-30)
    t_k, t_q = to_integers(k_rho, 1048576.0 * reciprocal(top_k)), to_integers(q_rho, 1048576.0 * reciprocal(top_q))
    if FOUR:
        o = tl.arange(0, G * ROWS)
        o_slot = (o // ROWS) * (8 * M) + 8 * ((o % ROWS) // 4) + o % 4
        half: tl.constexpr = 8 * M * G
        a0 = tl.dot(operand(z00, M, JP, E), digits(t_k, t_q, o_slot, ROWS, G), out_dtype=tl.int32)
        a0 = tl.dot(operand(z10, M, JP, E), digits(t_k, t_q, o_slot + 4, ROWS, G), a0, out_dtype=tl.int32)
        a1 = tl.dot(operand(z01, M, JP, E), digits(t_k, t_q, o_slot + half, ROWS, G), out_dtype=tl.int32)
        a1 = tl.dot(operand(z11, M, JP, E), digits(t_k, t_q, o_slot + half + 4, ROWS, G), a1, out_dtype=tl.int32)
        a0, a1 = _own_group(a0, JP, G), _own_group(a1, JP, G)
    else:
        o = tl.arange(0, ROWS)
        o_slot = 8 * (o // 4) + o % 4
        b0, b1 = digits(t_k, t_q, o_slot, ROWS, 1), digits(t_k, t_q, o_slot + 4, ROWS, 1)
        a0 = tl.dot(operand(z00, M, JP, E), b0, out_dtype=tl.int32)
        a0 = tl.dot(operand(z10, M, JP, E), b1, a0, out_dtype=tl.int32)
        a1 = tl.dot(operand(z01, M, JP, E), b0, out_dtype=tl.int32)
        a1 = tl.dot(operand(z11, M, JP, E), b1, a1, out_dtype=tl.int32)
    o = tl.arange(0, 8)
    weight = tl.where(o < 2, 1.0 / 1048576.0, tl.where(o < 4, 1.0 / 8192.0, 1.0 / 64.0))
    weight = weight * tl.where(o % 2 == 0, top_k, top_q)
    total = tl.join(a0, a1).to(tl.float32) * weight[None, :, None]  # [JP, 8, h]
    total = tl.sum(tl.reshape(total, (JP, 4, 2, 2)), 1)
    h_k, h_q = tl.split(tl.reshape(tl.permute(total, (2, 0, 1)), (2 * JP, 2)))
    o_v = tl.arange(0, 2 * JP)  # out of the matrix units' layout
    return tl.gather(h_k, o_v, 0), tl.gather(h_q, o_v, 0)


@triton.jit
def _own_group(a, JP: tl.constexpr, G: tl.constexpr):
    """`[JP, 8 G]` sums against every group's factors: keep, for each column, its own group's."""
    own = tl.arange(0, G)[:, None, None, None] == tl.arange(0, G)[None, None, :, None]
    return tl.reshape(tl.sum(tl.where(own, tl.reshape(a, (G, JP // G, G, 8)), 0), 2), (JP, 8))
