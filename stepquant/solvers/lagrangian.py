"""Lagrangian relaxation with repair: any number of units, a feasible answer, and a proven gap.

For a multiplier x (cost a bit) the units separate: each takes the option of least cost + x * weight, which is always a
corner of the lower convex hull of its options. Instead of bisecting x, the slopes of all hull edges are sorted once.
Taking edges from the steepest on while the budget lasts is the greedy optimum of the linear relaxation, and the
slope of the first edge that does not fit is the exact best multiplier. The dual function there,

    bound(x) = sum_u min_c (costs[u, c] + x * weights[u, c]) - x * budget,

is the bound that is reported. What the broken edge leaves over is spent by gain per bit on whatever fits, corners of
the hull or not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepquant.solvers.table import (
    Allocation,
    FloatArray,
    IntArray,
    check_budget,
    check_table,
    make_allocation,
    require_feasible,
)


@dataclass(frozen=True)
class Relaxed:
    """What the relaxation found: choice int64 [U], the multiplier (cost a unit of weight) and the proven bound."""

    choice: IntArray
    multiplier: float
    bound: float


def solve_lagrangian(costs: Any, candidates: Any, sizes: Any, budget: int) -> Allocation:
    """Minimise the sum of costs under a budget, to a gap that is proven and reported.

    Args:
        costs: [U, C] finite costs, not negative; a higher precision may cost more.
        candidates: [C] ascending ints, bits a value; any set.
        sizes: [U] elements of each unit; they may differ.
        budget: bits over all units.

    Raises:
        RecipeError: bad candidates or a budget that is not a whole number.
        DataError: bad costs or sizes.
        InfeasibleError: the budget is below the smallest that an assignment meets; the message states that one.
    """
    started = time.perf_counter()
    table = check_table(costs, candidates, sizes)
    budget = check_budget(budget)
    require_feasible(budget, table.smallest, table.elements, f"add a candidate below {table.candidates[0]} bits")
    weights = table.sizes[:, None] * np.asarray(table.candidates, np.int64)[None, :]
    # Assignments lie whole steps above the smallest; the bound must not spend what is left of the last step.
    step = int(np.gcd.reduce(table.sizes)) * int(np.gcd.reduce(np.diff(table.candidates), initial=0))
    reachable = budget - (budget - table.smallest) % step if step else budget
    answer = relax(table.costs, weights, reachable)
    return make_allocation(table, answer.choice, budget, answer.bound, "lagrangian", time.perf_counter() - started)


def relax(costs: FloatArray, weights: IntArray, budget: int) -> Relaxed:
    """Solve a multiple-choice knapsack with weights of its own for every unit.

    Args:
        costs: [U, O]; infinite entries are options that a unit does not have.
        weights: int64 [U, O], rising along every line. The first option of every unit must be finite.
        budget: the most weight; at least the sum of the first options.
    """
    units, stop, spent, slope = _hull_edges(costs, weights)
    rows = np.arange(len(costs))
    # Stable, so that the edges of one unit keep the order of its hull where slopes are equal.
    order = np.argsort(-slope, kind="stable")
    units, stop, spent, slope = units[order], stop[order], spent[order], slope[order]
    left = budget - int(weights[:, 0].sum())
    fits = int(np.searchsorted(np.cumsum(spent), left, side="right"))
    choice = np.zeros(len(costs), np.int64)
    np.maximum.at(choice, units[:fits], stop[:fits])
    multiplier = float(slope[fits]) if fits < len(slope) else 0.0
    bound = float((costs + multiplier * weights).min(axis=1).sum() - multiplier * budget)
    left = budget - int(weights[rows, choice].sum())
    return Relaxed(_spend(costs, weights, choice, left), multiplier, bound)


def _hull_edges(costs: FloatArray, weights: IntArray) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Edges of falling cost on the lower convex hull of every unit: (unit, option reached, weight, slope), each [E].

    Wraps the hull of all units at once: from the current corner, the next one is where the cost falls most a bit,
    and the farthest of those in a tie, so that collinear points are no corners.
    """
    count, options = costs.shape
    corner = np.zeros(count, np.int64)
    last = np.full(count, np.inf)
    alive = np.arange(count)
    units, stops, spent, slopes = [], [], [], []
    for _ in range(options - 1):
        here = corner[alive]
        rise = weights[alive] - weights[alive, here][:, None]
        fall = costs[alive, here][:, None] - costs[alive]
        rate = np.where((rise > 0) & (fall > 0), fall / np.maximum(rise, 1), 0.0)
        # argmax takes the first of equals: looked at from the far end, that is the farthest.
        best = options - 1 - rate[:, ::-1].argmax(axis=1)
        rate, rise = rate[np.arange(len(alive)), best], rise[np.arange(len(alive)), best]
        falls = rate > 0
        alive, best, rate, rise = alive[falls], best[falls], rate[falls], rise[falls]
        # Rounding must not make a later edge look steeper than the one before it: the sort would swap them.
        last[alive] = np.minimum(rate, last[alive])
        corner[alive] = best
        units.append(alive)
        stops.append(best)
        spent.append(rise)
        slopes.append(last[alive])
    empty = np.zeros(0, np.int64)
    return (
        np.concatenate([empty, *units]),
        np.concatenate([empty, *stops]),
        np.concatenate([empty, *spent]),
        np.concatenate([empty.astype(np.float64), *slopes]),
    )


def _spend(costs: FloatArray, weights: IntArray, choice: IntArray, left: int) -> IntArray:
    """Spend what is left of the budget by gain a bit, one raise a unit and round, until nothing fits that gains."""
    choice = choice.copy()
    rows = np.arange(len(costs))
    while left > 0:
        rise = weights - weights[rows, choice][:, None]
        fall = costs[rows, choice][:, None] - costs
        rate = np.where((rise > 0) & (rise <= left) & (fall > 0), fall / np.maximum(rise, 1), 0.0)
        option = rate.argmax(axis=1)
        best = rate[rows, option]
        units = np.flatnonzero(best > 0)
        if not len(units):
            break
        units = units[np.argsort(-best[units], kind="stable")]
        taken = rise[units, option[units]]
        fits = int(np.searchsorted(np.cumsum(taken), left, side="right"))  # the first always fits
        units, taken = units[:fits], taken[:fits]
        choice[units] = option[units]
        left -= int(taken.sum())
    return choice
