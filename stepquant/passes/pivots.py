"""Pivots: the units kept in FP16 (section 3.2, appendix C.2, design 2.3).

Heads: a first exact allocation of all units at the nominal budget; the P units with the largest residual risk
L_u d_u(b_u) become pivots. Rows: the P rows with the largest L_u (d_u(8) - d_u(fp16)). Ties go to the earlier unit.
"""

from __future__ import annotations

import numpy as np
import torch

from stepquant.codec.spec import PIVOT
from stepquant.passes.context import Context
from stepquant.passes.costs import columns, row_costs, to_rows, unit_sizes, unit_table
from stepquant.passes.protocol import Product, Products
from stepquant.solvers.dp import solve_dp


def largest(risk: np.ndarray, count: int) -> np.ndarray:
    """Mask `[U]` of the `count` largest risks, ties to the earlier unit."""
    mask = np.zeros(len(risk), dtype=bool)
    mask[np.argsort(-risk, kind="stable")[:count]] = True
    return mask


class Pivots:
    """Mask `pivots` uint8 `[L, H, K]`."""

    name, version = "pivots", 1
    reads: tuple[str, ...] = (
        "pivots.count", "temporal.horizon", "temporal.weight", "temporal.sensitivity", "allocation.unit",
    )  # fmt: skip
    needs: tuple[str, ...] = ("distortion", "gate_statistics", "row_weights", "transition", "sensitivity")

    def wanted(self, context: Context) -> bool:
        return context.unit == "row" and context.recipe.pivots.count > 0

    def run(self, context: Context, products: Products) -> Product:
        available = products["distortion"].facts["candidates"]
        table = unit_table(context, row_costs(context, products), products["distortion"]["row_error"])
        eight, sixteen = columns((8, PIVOT), available)
        mask = largest(table[:, eight] - table[:, sixteen], context.recipe.pivots.count)
        return Product({"pivots": to_rows(context, mask).to(torch.uint8)})


def head_pivots(context: Context, table: np.ndarray, candidates: tuple[int, ...], budget: int) -> np.ndarray:
    """Pivot heads by residual risk after a first DP over all heads at the nominal budget; mask `[U]`."""
    if context.recipe.pivots.count == 0:
        return np.zeros(len(table), dtype=bool)
    first = solve_dp(table, candidates, unit_sizes(context), budget)
    return largest(table[np.arange(len(table)), first.choice], context.recipe.pivots.count)
