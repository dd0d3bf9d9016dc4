"""Exact multiple-choice knapsack by dynamic programming, with the optimum at every budget from one run.

f_u(b) = min_c f_{u-1}(b - s_u * (p_c - p_0)) + costs[u, c] is the least cost of the first u units with at most b bits
beyond the smallest assignment. Capacities are divided by their greatest common divisor, so 2,304 equal heads with
candidates {2, 4, 6, 8} have 6,913 states, whatever the size of a head. The last f is the whole Pareto curve; the
choices, one byte a state, give the assignment at any budget by backtracking.

Ties are broken in a fixed way. Among assignments of equal cost `at` takes one of the fewest bits, and among those
the units from the last to the first take the lowest candidate that keeps the cost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import RecipeError
from stepquant.solvers.table import (
    Allocation,
    FloatArray,
    IntArray,
    Table,
    check_budget,
    check_table,
    make_allocation,
    require_feasible,
)

#: Bytes of the table of choices (units x states) above which the DP is refused.
MAX_CHOICE_BYTES = 1 << 29


@dataclass(frozen=True)
class Curve:
    """The least cost at every budget.

    Attributes:
        budgets: int64 [S], the budgets (bits) at which the curve is sampled: from the smallest feasible one, in
            steps of the common divisor of all capacities. Between two of them the optimum does not change.
        costs: float64 [S], the least cost at that budget, never rising.
        seconds: wall time of the run that made the curve.
    """

    budgets: IntArray
    costs: FloatArray
    seconds: float
    _table: Table = field(repr=False)
    _choices: NDArray[np.uint8] = field(repr=False)  # [U, S]

    def at(self, budget: int) -> Allocation:
        """The optimal assignment at `budget` bits, by backtracking; the same as `solve_dp` at that budget.

        Raises:
            InfeasibleError: the budget is below the smallest that an assignment meets.
            RecipeError: the budget is not a whole number, or lies beyond the `max_budget` of the curve.
        """
        started = time.perf_counter()
        budget = check_budget(budget)
        table = self._table
        require_feasible(budget, table.smallest, table.elements, f"add a candidate below {table.candidates[0]} bits")
        if self.budgets[-1] < table.largest and budget > self._reach:
            raise RecipeError(
                f"a budget of {budget:,} bits lies beyond the curve, which was made up to {self._reach:,} bits; "
                "make the curve with a larger max_budget"
            )
        state = int(np.searchsorted(self.budgets, budget, side="right")) - 1
        # The first state of this cost uses the fewest bits, since one that left bits over would have come earlier.
        state = int(np.searchsorted(-self.costs[: state + 1], -self.costs[state], side="left"))
        step = _step(table)
        choice = np.zeros(len(table.sizes), np.int64)
        extra = _extra_states(table, step)
        for unit in range(len(choice) - 1, -1, -1):
            choice[unit] = self._choices[unit, state]
            state -= int(extra[unit, choice[unit]])
        return make_allocation(table, choice, budget, 0.0, "dp", time.perf_counter() - started, optimal=True)

    @property
    def _reach(self) -> int:
        return int(self.budgets[-1]) + _step(self._table) - 1


def dp_curve(costs: Any, candidates: Any, sizes: Any, max_budget: int | None = None) -> Curve:
    """Solve the problem at every budget in one run.

    Args:
        costs: [U, C] finite costs, not negative; a higher precision may cost more.
        candidates: [C] ascending ints, bits a value; any set.
        sizes: [U] elements of each unit; they may differ.
        max_budget: the largest budget (bits) of interest; None makes the whole curve.

    Raises:
        RecipeError: bad candidates, or a state space too large for memory (the message names what to use instead).
        DataError: bad costs or sizes.
        InfeasibleError: `max_budget` is below the smallest budget that an assignment meets.
    """
    started = time.perf_counter()
    table = check_table(costs, candidates, sizes)
    top = table.largest
    if max_budget is not None:
        top = min(top, check_budget(max_budget))
        require_feasible(top, table.smallest, table.elements, f"add a candidate below {table.candidates[0]} bits")
    step = _step(table)
    states = (top - table.smallest) // step + 1
    units = len(table.sizes)
    if units * states > MAX_CHOICE_BYTES:
        raise RecipeError(
            f"the exact DP needs {units:,} units x {states:,} budgets = {units * states / 2**30:.1f} GiB of choices, "
            f"expected at most {MAX_CHOICE_BYTES / 2**30:.1f} GiB; use the lagrangian solver (proven gap) or the ilp "
            "for so many units or such uneven sizes, or pass a smaller max_budget"
        )
    extra = _extra_states(table, step)
    best = np.zeros(states)
    choices = np.zeros((units, states), np.uint8)
    filled = 1  # states beyond this one hold the same cost: no assignment of the units so far can use more bits
    for unit in range(units):
        reach = min(states, filled + int(extra[unit, -1]))
        best[filled:reach] = best[filled - 1]
        old = best[:reach].copy()
        new = best[:reach]
        new += table.costs[unit, 0]
        chosen = choices[unit]
        for candidate in range(1, len(table.candidates)):
            shift = int(extra[unit, candidate])
            if shift >= reach:
                break
            cost = old[: reach - shift] + table.costs[unit, candidate]
            better = cost < new[shift:]  # strict: a tie keeps the lower candidate
            np.copyto(new[shift:], cost, where=better)
            np.copyto(chosen[shift:reach], np.uint8(candidate), where=better)
        chosen[reach:] = chosen[reach - 1]
        filled = reach
    best[filled:] = best[filled - 1]
    budgets = table.smallest + step * np.arange(states, dtype=np.int64)
    return Curve(budgets, best, time.perf_counter() - started, table, choices)


def solve_dp(costs: Any, candidates: Any, sizes: Any, budget: int) -> Allocation:
    """The exact optimum at one budget; arguments and errors as `dp_curve`, `budget` in bits over all units.

    Raises:
        InfeasibleError: the budget is below the smallest that an assignment meets; the message states that one.
    """
    started = time.perf_counter()
    table = check_table(costs, candidates, sizes)
    budget = check_budget(budget)
    require_feasible(budget, table.smallest, table.elements, f"add a candidate below {table.candidates[0]} bits")
    answer = dp_curve(table.costs, table.candidates, table.sizes, budget).at(min(budget, table.largest))
    return make_allocation(table, answer.choice, budget, 0.0, "dp", time.perf_counter() - started, optimal=True)


def _step(table: Table) -> int:
    """Greatest common divisor of every capacity beyond the smallest assignment, bits."""
    if len(table.candidates) == 1:
        return int(np.gcd.reduce(table.sizes)) * table.candidates[0]
    return int(np.gcd.reduce(table.sizes)) * int(np.gcd.reduce(np.diff(table.candidates)))


def _extra_states(table: Table, step: int) -> IntArray:
    """[U, C] states that each candidate takes beyond the lowest one."""
    raised = np.asarray(table.candidates, np.int64) - table.candidates[0]
    return table.sizes[:, None] * raised[None, :] // step
