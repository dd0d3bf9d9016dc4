# mypy: ignore-errors
"""k^T D S and q^T D S of a packed head on the matrix units, without ever turning its codes into floats.

S = diag(rho) z diag(c), so what is needed are two products of row vectors k D rho and q D rho with the integer tile z.
Each vector is rounded to 21-bit integers and split into three signed digits of base 128: six int8 columns. Sums of
int8 products in int32 are exact. The error is that of the rounding, 2^-21 of a vector's largest entry.

Slots are contracted in the order (s, a, d, i), which is how the words of a page lie in the operand (`planes`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.planes import load_block, unpack_block
from stepquant.codegen.words import ROUND, reciprocal


@triton.jit
def max_pair(a, b, c, d):
    """Combine function of a reduction that takes two maxima at once."""
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def largest(size_k, size_q):
    """The largest entries of two vectors of sizes, never zero."""
    top_k, top_q = tl.reduce((size_k, size_q), 0, max_pair)
    return tl.maximum(top_k, 1e-30), tl.maximum(top_q, 1e-30)


@triton.jit
def add_triple(a, b, c, d, e, f):
    """Combine function of a reduction that takes three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def to_integers(x, scale):
    """x * scale, at most 2^20 in size, rounded to int32."""
    return (x * scale + ROUND).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _digits(t_k, t_q):
    """Three digits of base 128 of integer vectors and a zero, int8 ``[slot, kq, digit bit 0, digit bit 1]``."""
    t = tl.join(t_k, t_q)
    low, middle, high = (t & 127).to(tl.int8), ((t >> 7) & 127).to(tl.int8), (t >> 14).to(tl.int8)
    return tl.join(tl.join(low, middle), tl.join(high, tl.zeros_like(high)))


@triton.jit
def _each_fourth(t, M: tl.constexpr):
    """A vector in slot order as four, of slots 4n, 4n + 1, 4n + 2 and 4n + 3."""
    t0, t1 = tl.split(tl.reshape(t, (2 * M, 2, 2)))
    t00, t10 = tl.split(t0)
    t01, t11 = tl.split(t1)
    return t00, t01, t10, t11


@triton.jit
def _both_digits(t_k, t_q, u_k, u_q, FOUR: tl.constexpr):
    """`_digits`, with FOUR of both column halves, ``[..., half]``."""
    x = _digits(t_k, t_q)
    if FOUR:
        x = tl.join(x, _digits(u_k, u_q))
    return x


@triton.jit
def digits(t_k, t_q, u_k, u_q, M: tl.constexpr, FOUR: tl.constexpr, ALONE: tl.constexpr):
    """Right operand int8 `[8 M, 8]` from integer vectors in slot order: column 2l holds digit l of k, 2l + 1 of q.

    FOUR: `[8 M, 16]`, eight more columns for the vectors of the other column half (otherwise not used).
    ALONE: for a kernel of one warp, whose threads have four slots each. Those are joined last, so that they are
    neighbours on the way to the operand: four bytes go in a word instead of one by one.
    """
    if ALONE:
        k0, k1, k2, k3 = _each_fourth(t_k, M)
        q0, q1, q2, q3 = _each_fourth(t_q, M)
        v0, v1, v2, v3 = _each_fourth(u_k, M)
        r0, r1, r2, r3 = _each_fourth(u_q, M)
        even = tl.join(_both_digits(k0, q0, v0, r0, FOUR), _both_digits(k2, q2, v2, r2, FOUR))
        odd = tl.join(_both_digits(k1, q1, v1, r1, FOUR), _both_digits(k3, q3, v3, r3, FOUR))
        x = tl.join(even, odd)
        if FOUR:
            x = tl.permute(x, (4, 3, 2, 1, 0, 5, 6))
        else:
            x = tl.permute(x, (3, 2, 1, 0, 4, 5))
        x = tl.trans(tl.reshape(x, (16 if FOUR else 8, 8 * M)))
    else:
        x = _both_digits(t_k, t_q, u_k, u_q, FOUR)
        if FOUR:
            x = tl.permute(x, (0, 4, 3, 2, 1))
        else:
            x = tl.permute(x, (0, 3, 2, 1))
        x = tl.reshape(x, (8 * M, 16 if FOUR else 8))
    return x


@triton.jit
def operand(z00, z01, z10, z11, M: tl.constexpr, E: tl.constexpr):
    """The tiles of a block as columns (h, e, l) against slots (a, d, s, i), `[16 E, 8 M]`: no data moves."""
    z = tl.join(tl.join(z00, z01), tl.join(z10, z11))  # [d, l, a, (e, i), h, s]
    z = tl.reshape(z, (4, 8, M // 4, E, 4, 2, 2))
    return tl.reshape(tl.permute(z, (5, 3, 1, 2, 0, 6, 4)), (16 * E, 8 * M))


@triton.jit
def multiply_block(
    words, t, M: tl.constexpr, E: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Sums over the slots of a block times the digits `t`, int32 ``[h, (e, l), 8]``; FOUR: digits of each half."""
    z00, z01, z10, z11 = unpack_block(words, M, E, 4, FOUR, NIBBLES, EIGHT, SIX, TWO)
    x = tl.dot(operand(z00, z01, z10, z11, M, E), t, out_dtype=tl.int32)
    if FOUR:
        own = tl.arange(0, 2)[:, None, None, None] == tl.arange(0, 2)[None, None, :, None]
        x = tl.reshape(tl.sum(tl.where(own, tl.reshape(x, (2, 8 * E, 2, 8)), 0), 2), (16 * E, 8))
    return tl.reshape(x, (2, 8 * E, 8))


@triton.jit
def add_digits(x):
    """The sums of digits ``[h, column, 8]`` as floats ``[h, column, kq]``, in units of 2^20.

    All digits of a column first come to one thread: four threads that each have one would add all columns four times.
    """
    x = tl.permute(tl.reshape(x, (2, x.shape[1], 2, 2, 2)), (0, 1, 4, 3, 2))  # h, column, kq, digit bit 0, digit bit 1
    x, high = tl.split(x)
    low, middle = tl.split(x)
    high, _ = tl.split(high)
    x = low.to(tl.float32) * (1.0 / 1048576.0) + middle.to(tl.float32) * (1.0 / 8192.0)
    return x + high.to(tl.float32) * (1.0 / 64.0)


@triton.jit
def multiply_blocks(
    planes, words, t, FIRST: tl.constexpr, COUNT: tl.constexpr, J: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    FULL: tl.constexpr, AHEAD: tl.constexpr,
    FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The same of `COUNT` blocks, a power of two, ``[h, (b, e, l), 8]``, and the words of the block that follows.

    AHEAD: a block's words are loaded before the block in front of it is multiplied. Where rows differ in precision a
    block has words of every plane, and a single warp has not the registers for two of them.
    """
    if COUNT == 1:
        following = words
        if AHEAD and FIRST + 1 < J // (8 * E):
            following = load_block(planes, FIRST + 1, J, M, E, 4, FULL, FOUR, NIBBLES, EIGHT, SIX, TWO)
        if not AHEAD and FIRST > 0 and FIRST < J // (8 * E):
            words = load_block(planes, FIRST, J, M, E, 4, FULL, FOUR, NIBBLES, EIGHT, SIX, TWO)
        x = multiply_block(words, t, M, E, FOUR, NIBBLES, EIGHT, SIX, TWO)
    else:
        HALF: tl.constexpr = COUNT // 2
        x0, following = multiply_blocks(
            planes, words, t, FIRST, HALF, J, M, E, FULL, AHEAD, FOUR, NIBBLES, EIGHT, SIX, TWO
        )
        x1, following = multiply_blocks(
            planes, following, t, FIRST + HALF, HALF, J, M, E, FULL, AHEAD, FOUR, NIBBLES, EIGHT, SIX, TWO
        )
        x = join_blocks(x0, x1)
    return x, following


@triton.jit
def join_blocks(x0, x1):
    """Sums of two runs of blocks one after another."""
    x = tl.permute(tl.join(x0, x1), (0, 3, 1, 2))
    return tl.reshape(x, (2, 2 * x0.shape[1], x0.shape[2]))


@triton.jit
def read_factors(p_r, slot, i_group, K: tl.constexpr, GROUPS: tl.constexpr, FOUR: tl.constexpr):
    """Compact vectors of the row factors of a group of each half as the page has them; both the same without FOUR."""
    r0 = tl.load(p_r + i_group * K + slot, mask=slot < K, other=0)
    r1 = r0
    if FOUR:
        r1 = tl.load(p_r + (GROUPS + i_group) * K + slot, mask=slot < K, other=0)
    return r0, r1


@triton.jit
def multiply_group(
    planes, words, factors, x_k, x_q, FIRST: tl.constexpr, J: tl.constexpr, M: tl.constexpr,
    JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr,
    ALONE: tl.constexpr, FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """k^T and q^T times rho z of the columns of one group of each half, ``[h, column, kq]``."""
    x_k, x_q = x_k.to(tl.float32), x_q.to(tl.float32)
    rho = factors[0].to(tl.float32) * UNIT
    k0, q0 = rho * x_k, rho * x_q
    size_k, size_q = tl.abs(k0), tl.abs(q0)
    k1, q1 = k0, q0
    if FOUR:
        rho = factors[1].to(tl.float32) * UNIT
        k1, q1 = rho * x_k, rho * x_q
        size_k, size_q = tl.maximum(size_k, tl.abs(k1)), tl.maximum(size_q, tl.abs(q1))
    top_k, top_q = largest(size_k, size_q)
    scale_k, scale_q = 1048576.0 * reciprocal(top_k), 1048576.0 * reciprocal(top_q)
    t0, t1 = to_integers(k0, scale_k), to_integers(q0, scale_q)
    t = digits(t0, t1, to_integers(k1, scale_k), to_integers(q1, scale_q), M, FOUR, ALONE)
    COUNT: tl.constexpr = JP // (8 * E * G)
    AHEAD: tl.constexpr = FULL or not ALONE
    x, words = multiply_blocks(
        planes, words, t, FIRST * COUNT, COUNT, J, M, E, FULL, AHEAD, FOUR, NIBBLES, EIGHT, SIX, TWO
    )
    return add_digits(x) * tl.where(tl.arange(0, 2) == 0, top_k, top_q)[None, None, :], words


@triton.jit
def multiply_groups(
    planes, words, factors, p_r, x_k, x_q, slot, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr,
    J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    UNIT: tl.constexpr, FULL: tl.constexpr, ALONE: tl.constexpr, FOUR: tl.constexpr, NIBBLES: tl.constexpr,
    EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The same of `COUNT` groups, a power of two; factors: of the first."""
    if COUNT == 1:
        x, words = multiply_group(
            planes, words, factors, x_k, x_q, FIRST, J, M, JP, E, G, UNIT, FULL, ALONE, FOUR, NIBBLES, EIGHT, SIX, TWO
        )
    else:
        HALF: tl.constexpr = COUNT // 2
        later = read_factors(p_r, slot, FIRST + HALF, K, GROUPS, FOUR)
        x0, words = multiply_groups(
            planes, words, factors, p_r, x_k, x_q, slot, FIRST, HALF, K, J, M, JP, E, G, GROUPS, UNIT, FULL, ALONE,
            FOUR, NIBBLES, EIGHT, SIX, TWO,
        )  # fmt: skip
        x1, words = multiply_groups(
            planes, words, later, p_r, x_k, x_q, slot, FIRST + HALF, HALF, K, J, M, JP, E, G, GROUPS, UNIT, FULL, ALONE,
            FOUR, NIBBLES, EIGHT, SIX, TWO,
        )  # fmt: skip
        x = join_blocks(x0, x1)
    return x, words


@triton.jit
def multiply_head(
    planes, words, factors, p_r, c, x_k, x_q, slot, K: tl.constexpr, J: tl.constexpr, M: tl.constexpr, JP: tl.constexpr,
    E: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr, FULL: tl.constexpr,
    ALONE: tl.constexpr, FOUR: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """k^T S and q^T S of a head, compact columns, for compact rows `x_k` and `x_q` with all gates in them.

    JP, G: compact columns of a half and row factors that they have, of the GROUPS that the page has; of a single block
    the caller says which, by `words` and `factors`.
    words, factors: of the first block and group (`read_factors`), loaded by the caller ahead of everything that takes
    time; ALONE as in `digits`.
    """
    x, words = multiply_groups(
        planes, words, factors, p_r, x_k, x_q, slot, 0, G, K, J, M, JP, E, G, GROUPS, UNIT, FULL, ALONE, FOUR,
        NIBBLES, EIGHT, SIX, TWO,
    )  # fmt: skip
    h_k, h_q = tl.split(tl.reshape(x, (2 * JP, 2)))
    return h_k * c, h_q * c
