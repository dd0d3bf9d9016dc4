"""Pivots: the units kept in FP16 (section 3.2, appendix C.2, design 2.3).

Heads: a first exact allocation of all units at the nominal budget; the P units with the largest residual risk
L_u d_u(b_u) become pivots. Rows: the P rows with the largest L_u (d_u(8) - d_u(fp16)). Ties go to the earlier unit.
"""

from __future__ import annotations

import numpy as np
import torch

from stepquant.codec.spec import PIVOT
from stepquant.passes.context import Context
from stepquant.passes.costs import columns, cost_table, to_rows, unit_sizes, unit_table
from stepquant.passes.protocol import Product, Products
from stepquant.solvers.dp import solve_dp
from stepquant.solvers.pivots import round_pivots


def largest(risk: np.ndarray, count: int) -> np.ndarray:
    """Mask `[U]` of the `count` largest risks, ties to the earlier unit."""
    mask = np.zeros(len(risk), dtype=bool)
    mask[np.argsort(-risk, kind="stable")[:count]] = True
    return mask


def largest_by_rank(context: Context, risk: np.ndarray, count: int) -> np.ndarray:
    """`largest`, taken in equal numbers from the heads of every tensor-parallel rank, so that ranks can be equal."""
    ranks = context.recipe.target.tensor_parallel
    g = context.geometry
    owner = np.arange(g.num_heads) // (g.num_heads // ranks)
    owner = np.broadcast_to(owner[None, :, None], (g.num_delta_layers, g.num_heads, g.key_dim))
    unit_owner = owner[..., 0].ravel() if context.unit == "head" else owner.ravel()
    mask = np.zeros(len(risk), dtype=bool)
    for rank in range(ranks):
        mine = np.flatnonzero(unit_owner == rank)
        mask[mine] = largest(risk[mine], count // ranks)
    return mask


class Pivots:
    """Mask `pivots` uint8 `[L, H, K]`."""

    name, version = "pivots", 1
    reads: tuple[str, ...] = (
        "pivots.count", "temporal.horizon", "temporal.weight", "temporal.sensitivity", "allocation.unit",
        "allocation.granularity", "target.tensor_parallel",
    )  # fmt: skip
    needs: tuple[str, ...] = ("distortion", "gate_statistics", "row_weights", "transition", "sensitivity", "rollout")

    def wanted(self, context: Context) -> bool:
        return context.unit == "row" and context.recipe.pivots.count > 0

    def run(self, context: Context, products: Products) -> Product:
        available = products["distortion"].facts["candidates"]
        table = unit_table(context, cost_table(context, products))
        eight, sixteen = columns((8, PIVOT), available)
        risk = np.maximum(table[:, eight] - table[:, sixteen], 0)
        granularity = context.recipe.allocation.granularity
        if granularity == 1:
            mask = to_rows(context, largest_by_rank(context, risk, context.recipe.pivots.count))
        else:
            asked = to_rows(context, largest(risk, context.recipe.pivots.count)).numpy()
            mask = torch.as_tensor(round_pivots(asked, to_rows(context, risk).numpy(), granularity))
        return Product({"pivots": mask.to(torch.uint8)})


def head_pivots(context: Context, table: np.ndarray, candidates: tuple[int, ...], budget: int) -> np.ndarray:
    """Pivot heads by residual risk after a first DP over all heads at the nominal budget; mask `[U]`."""
    if context.recipe.pivots.count == 0:
        return np.zeros(len(table), dtype=bool)
    first = solve_dp(table, candidates, unit_sizes(context), budget)
    return largest_by_rank(context, table[np.arange(len(table)), first.choice], context.recipe.pivots.count)
