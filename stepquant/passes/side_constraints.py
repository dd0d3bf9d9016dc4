"""Allocation with side constraints: granularity, equal tensor-parallel ranks, caps and floors, by integer program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepquant.errors import RecipeError
from stepquant.passes.context import Context
from stepquant.solvers.ilp import HeadAllocation, HeadProblem, RowProblem, solve_heads, solve_rows

if TYPE_CHECKING:
    from stepquant.passes.allocation import Problem


HEAD_GAP = 1e-3  # heads with two-bit scales on equal ranks: a smaller gap is rarely proven in time


def needs_ilp(context: Context) -> bool:
    """Whether the recipe has a constraint that the closed solvers cannot take.

    Raises:
        RecipeError: when it has one, but names a closed solver.
    """
    recipe = context.recipe
    found = []
    if recipe.target.tensor_parallel > 1:
        found.append(f"target.tensor_parallel={recipe.target.tensor_parallel}")
    if recipe.allocation.granularity > 1 and context.unit == "row":
        found.append(f"allocation.granularity={recipe.allocation.granularity}")
    found += [f"allocation.{key}" for key in ("caps", "floors") if getattr(recipe.allocation, key)]
    if found and recipe.solver in ("dp", "lagrangian"):
        raise RecipeError(
            f"solver is {recipe.solver!r}, which cannot take {' and '.join(found)}; use solver=ilp or auto"
        )
    return bool(found) or recipe.solver == "ilp"


def solve_with_ilp(context: Context, problem: Problem) -> HeadAllocation:
    """Solve a `Problem` under the recipe's side constraints.

    Raises:
        InfeasibleError: naming the constraint to relax.
    """
    recipe, g = context.recipe, context.geometry
    layers, heads = g.num_delta_layers, g.num_heads
    charge = int(problem.sizes[problem.pivots].sum()) * 8
    limits = {**_limits(context, "floors", "floor"), **_limits(context, "caps", "cap")}
    common: dict[str, Any] = {
        "tensor_parallel": recipe.target.tensor_parallel,
        "time_limit": recipe.solver_options.time_limit,
        "layer_names": g.layers,
        **limits,
    }
    backend = recipe.solver_options.backend
    if context.unit == "head":
        return solve_heads(HeadProblem(
            problem.table.reshape(layers, heads, -1), problem.candidates, g.head_elements, problem.budget + charge,
            pivots=problem.pivots.reshape(layers, heads), stored_bytes=_head_bytes(context, problem.candidates),
            **common,
        ), backend, HEAD_GAP)  # fmt: skip
    return solve_rows(RowProblem(
        problem.table.reshape(layers, heads, g.key_dim, -1), problem.candidates, g.value_dim, problem.budget + charge,
        granularity=recipe.allocation.granularity, pivots=problem.pivots.reshape(layers, heads, g.key_dim), **common,
    ), backend)  # fmt: skip


def _head_bytes(context: Context, candidates: tuple[int, ...]) -> np.ndarray:
    """Bytes of a head at each candidate and as a whole pivot: four row vectors at 2 bits, no scales in a pivot."""
    g, codec = context.geometry, context.codec
    found = []
    for bits in candidates:
        groups = g.value_dim // codec.group if bits == 2 and codec.codebook == "head" else 1
        found.append(bits * g.head_elements // 8 + 2 * (g.key_dim * groups + g.value_dim))
    return np.array([*found, 2 * g.head_elements], dtype=np.int64)


def _limits(context: Context, key: str, name: str) -> dict[str, np.ndarray]:
    """Limits of layers (``7``) and heads (``7/3``) as arrays, NaN where there is none."""
    g, given = context.geometry, getattr(context.recipe.allocation, key) or {}
    layer = np.full(g.num_delta_layers, np.nan)
    head = np.full((g.num_delta_layers, g.num_heads), np.nan)
    for place, bits in given.items():
        at, _, which = place.partition("/")
        index = g.layers.index(int(at))
        if which:
            head[index, int(which)] = bits
        else:
            layer[index] = bits
    return {f"layer_{name}": layer, f"head_{name}": head}
