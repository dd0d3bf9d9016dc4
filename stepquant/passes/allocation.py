"""Allocation: a precision for every key row under the budget (equation 8, design 2.3).

Heads: pivots by residual risk of a first DP at the nominal budget, then an exact DP over the rest. Rows: pivots are
already fixed and their distortions recomputed; the rest by the Lagrangian with repair. Pivots count as 8-bit units:
integer budget = bits * N - 8 * P. Side constraints (granularity, equal ranks, caps and floors) go to the ILP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.spec import PIVOT
from stepquant.errors import InfeasibleError
from stepquant.passes.context import Context
from stepquant.passes.costs import columns, cost_per_token, cost_table, to_rows, unit_sizes, unit_table
from stepquant.passes.pivots import head_pivots
from stepquant.passes.protocol import Product, Products
from stepquant.passes.side_constraints import needs_ilp, solve_with_ilp
from stepquant.solvers.dp import solve_dp
from stepquant.solvers.ilp import HeadAllocation
from stepquant.solvers.lagrangian import solve_lagrangian
from stepquant.solvers.table import Allocation as Solved

PIVOT_CHARGE = 8  # bits a value that a pivot counts against the nominal budget


@dataclass
class Problem:
    """The integer part of the allocation.

    Attributes:
        table: costs `[U, C]` of all units at the integer candidates.
        pivot_cost: costs `[U]` of all units as FP16.
        pivots: mask `[U]`.
        candidates: integer precisions.
        sizes: elements `[U]`.
        budget: bits for the units that are no pivots.
    """

    table: np.ndarray
    pivot_cost: np.ndarray
    pivots: np.ndarray
    candidates: tuple[int, ...]
    sizes: np.ndarray
    budget: int

    def solve(self, method: str) -> Solved:
        """Solve over the units that are no pivots."""
        free = ~self.pivots
        solver = solve_dp if method == "dp" else solve_lagrangian
        try:
            return solver(self.table[free], self.candidates, self.sizes[free], self.budget)
        except InfeasibleError as error:
            charge = int(self.sizes[self.pivots].sum()) * PIVOT_CHARGE
            raise InfeasibleError(f"{error}; {int(self.pivots.sum())} pivots take {charge:,} bits of it") from None

    def units(self, solved: Solved) -> np.ndarray:
        """Precision `[U]` with pivots as 16."""
        bits = np.full(len(self.pivots), PIVOT, dtype=np.uint8)
        bits[~self.pivots] = solved.bits
        return bits

    @property
    def pivot_total(self) -> float:
        """Cost of the pivots themselves."""
        return float(self.pivot_cost[self.pivots].sum())


def make_problem(context: Context, products: Products, bits: float) -> Problem:
    """Costs, pivots and integer budget at `bits` a value."""
    source = "pivot_distortion" if "pivot_distortion" in products else "distortion"
    available = products[source].facts["candidates"]
    uniform = context.recipe.allocation.mode == "uniform"
    candidates = (int(bits),) if uniform else context.recipe.candidates(bits)
    table = unit_table(context, cost_table(context, products, source))
    picked = table[:, columns(candidates, available)]
    sizes = unit_sizes(context)
    nominal = int(np.floor(bits * int(sizes.sum()) + 1e-6))
    if context.unit == "head":
        pivots = head_pivots(context, picked, candidates, nominal)
    elif "pivots" in products:
        pivots = products["pivots"]["pivots"].bool().flatten().numpy()
    else:
        pivots = np.zeros(len(table), dtype=bool)
    budget = nominal - PIVOT_CHARGE * int(sizes[pivots].sum())
    return Problem(picked, table[:, columns((PIVOT,), available)[0]], pivots, candidates, sizes, budget)


class Allocation:
    """`bits` uint8 `[L, H, K]`, and what was predicted and proven, as facts."""

    name, version = "allocation", 1
    reads: tuple[str, ...] = (
        "budget", "pivots", "allocation", "solver", "solver_options", "temporal", "target", "window.length",
    )  # fmt: skip
    needs: tuple[str, ...] = (
        "distortion", "pivot_distortion", "pivots", "gate_statistics", "row_weights", "transition", "sensitivity",
        "rollout",
    )  # fmt: skip

    def wanted(self, context: Context) -> bool:
        return True

    def run(self, context: Context, products: Products) -> Product:
        bits = context.recipe.budget.bits
        assert bits is not None, "targets in bytes or concurrency are resolved to bits before"
        if context.recipe.allocation.mode == "uniform":
            return uniform(context, products, int(bits))
        problem = make_problem(context, products, bits)
        if needs_ilp(context):
            answer = solve_with_ilp(context, problem)
            rows = torch.as_tensor(answer.bits)
            if context.unit == "head":
                rows = rows.unsqueeze(-1).expand(-1, -1, context.geometry.key_dim).contiguous()
            return Product(
                {"bits": rows}, {**facts(context, problem, answer), **ilp_facts(answer, context.geometry.head_elements)}
            )
        method = context.recipe.solver
        if method == "auto":
            method = "dp" if context.unit == "head" else "lagrangian"
        solved = problem.solve(method)
        rows = to_rows(context, problem.units(solved)).to(torch.uint8)
        return Product({"bits": rows}, facts(context, problem, solved))


def facts(context: Context, problem: Problem, solved: Solved | HeadAllocation) -> dict[str, Any]:
    """What the plan records of the solution."""
    return {
        "solver": solved.solver, "status": solved.status, "cost": solved.cost + problem.pivot_total,
        "bound": solved.bound + problem.pivot_total, "gap": solved.gap, "seconds": round(solved.seconds, 4),
        "integer_budget_bits": problem.budget, "integer_bits_used": solved.bits_used,
        "pivot_units": int(problem.pivots.sum()), "units": len(problem.pivots), "unit": context.unit,
        "candidates": list(problem.candidates),
        "predicted_cost_per_token": cost_per_token(context, solved.cost + problem.pivot_total),
    }  # fmt: skip


def ilp_facts(answer: HeadAllocation, elements: int) -> dict[str, Any]:
    """What only the integer program reports: bytes of every rank, padding, and bits used without pivots' charge."""
    padding = getattr(answer, "padding_bytes", 0)
    pivots = answer.bits == PIVOT
    charge = PIVOT_CHARGE * int(pivots.sum()) * (elements // pivots[0, 0].size)
    return {
        "bytes_per_rank": [int(b) for b in answer.bytes_per_rank], "padding_bytes": int(padding),
        "integer_bits_used": answer.bits_used - charge,
    }  # fmt: skip


def uniform(context: Context, products: Products, bits: int) -> Product:
    """One precision everywhere but in pivots: the baselines and the spatial-only ablation.

    Pivots come on top of ``budget.bits``, since nothing else could pay for them.
    """
    shape = products["row_weights"]["w"].shape
    rows = torch.full(shape, bits, dtype=torch.uint8)
    source = "pivot_distortion" if "pivot_distortion" in products else "distortion"
    if context.unit == "head":
        rows[to_rows(context, make_problem(context, products, bits).pivots).bool()] = PIVOT
    elif "pivots" in products:
        rows[products["pivots"]["pivots"].bool()] = PIVOT
    table = cost_table(context, products, source)
    available = products[source].facts["candidates"]
    chosen = torch.where(rows == PIVOT, columns((PIVOT,), available)[0], columns((bits,), available)[0])
    cost = float(table.gather(-1, chosen.unsqueeze(-1)).sum())
    return Product({"bits": rows}, {
        "solver": "uniform", "status": "fixed", "cost": cost, "unit": context.unit, "candidates": [bits],
        "pivot_units": int((rows == PIVOT).sum()) // (1 if context.unit == "row" else context.geometry.key_dim),
        "predicted_cost_per_token": cost_per_token(context, cost),
    })  # fmt: skip


def predicted_by_layer(context: Context, products: Products, bits: Tensor) -> list[float]:
    """Predicted cost of each layer under a row map `[L, H, K]`."""
    source = "pivot_distortion" if "pivot_distortion" in products else "distortion"
    available = products[source].facts["candidates"]
    index = torch.tensor([available.index(int(b)) if int(b) in available else -1 for b in range(33)])
    table = cost_table(context, products, source)
    chosen = table.gather(-1, index[bits.long()].unsqueeze(-1)).sum((1, 2, 3))
    return [cost_per_token(context, float(x)) for x in chosen]
