# mypy: ignore-errors
"""k^T S and q^T S of a head that is kept in FP16, on the matrix units."""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.blocks import issue_loads, split_half
from stepquant.codegen.matrix import largest
from stepquant.codegen.words import reciprocal


@triton.jit
def half_columns(k, q, slot):
    """Entries `slot` of k and q as right operand f16 `[slots, 8]`: both halves of k, both halves of q, zeros."""
    o = tl.arange(0, 8)[None, :]
    x = tl.where(o < 2, tl.gather(k, slot, 0)[:, None], tl.gather(q, slot, 0)[:, None])
    high, low = split_half(x, True)
    return tl.where(o < 4, tl.where(o % 2 == 0, high, low), 0.0).to(tl.float16)


@triton.jit
def all_half_columns(k, q):
    """The same of all slots in their order: nothing to gather."""
    k0, k1 = split_half(k, True)
    q0, q1 = split_half(q, True)
    x = tl.join(tl.join(k0, k1), tl.join(q0, q1))
    x = tl.permute(tl.join(x, tl.zeros_like(x)), (0, 3, 2, 1))
    return tl.reshape(x, (k.shape[0], 8))


@triton.jit
def multiply_pivots(
    p_pivots, x_k, x_q, col, col_in, K: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """k^T S and q^T S of a head that is kept in FP16, compact columns, for compact rows as in `multiply_head`.

    Each vector is split into two halves, in units of its largest entry: the error is 2^-22 of that. Sixteen rows at a
    time, and of a part's few columns all of them. For one or two warps: of four Triton makes a product of Hopper's warp
    groups, through shared memory.
    """
    ROWS: tl.constexpr = 16 if PARTS == 1 else x_k.shape[0]
    x_k, x_q = x_k.to(tl.float32), x_q.to(tl.float32)
    top_k, top_q = largest(tl.abs(x_k), tl.abs(x_q))
    k, q = x_k * reciprocal(top_k), x_q * reciprocal(top_q)
    o_p = tl.arange(0, ROWS)
    p, acc = p_pivots + o_p[None, :] * V + col[:, None], tl.zeros([VP // PARTS, 8], tl.float32)
    if PARTS > 1:
        x = tl.load(p, mask=col_in[:, None] & (o_p < K)[None, :], other=0)
        issue_loads()
        acc = tl.dot(x, all_half_columns(k, q), acc)
    else:
        for first in tl.range(0, K, ROWS, num_stages=1):
            x = tl.load(p + first * V, mask=col_in[:, None] & (first + o_p < K)[None, :], other=0)
            acc = tl.dot(x, half_columns(k, q, first + o_p), acc)
    h_k, h_q = tl.split(tl.sum(tl.sum(tl.reshape(acc, (VP // PARTS, 2, 2, 2)), 3), 1))
    return h_k * top_k, h_q * top_q
