"""What every solver shares: the cost table and its checks, the answer, and the budget that cannot be met.

A table has one line per *unit* (a head or a key row) and one column per *candidate* precision. The problem is the
multiple-choice knapsack of design 2.3 (equation 8 of the paper):

    minimise sum_u costs[u, choice_u]   subject to   sum_u sizes[u] * candidates[choice_u] <= budget
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import DataError, InfeasibleError, RecipeError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Relative gap that is rounding of float64 sums rather than distance from the optimum.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Allocation:
    """A precision for every unit, what it costs, and how far from the optimum it can be at most.

    Attributes:
        choice: int64 [U], index into `candidates`.
        candidates: ascending precisions, bits a value.
        bits: int64 [U], `candidates[choice]`.
        cost: sum of the chosen costs.
        bits_used: bits over all units.
        budget: the bits that were allowed.
        bound: proven lower bound on the cost of every assignment that keeps to the budget.
        gap: (cost - bound) / max(|cost|, tiny); 0 means proven optimal.
        status: "optimal" or "feasible".
        solver: which solver answered.
        seconds: wall time of the solver.
    """

    choice: IntArray
    candidates: tuple[int, ...]
    bits: IntArray
    cost: float
    bits_used: int
    budget: int
    bound: float
    gap: float
    status: str
    solver: str
    seconds: float


@dataclass(frozen=True)
class Table:
    """A checked problem: costs float64 [U, C], ascending candidates [C], sizes int64 [U] in elements."""

    costs: FloatArray
    candidates: tuple[int, ...]
    sizes: IntArray

    @property
    def elements(self) -> int:
        """Elements (values of the state) over all units."""
        return int(self.sizes.sum())

    @property
    def smallest(self) -> int:
        """Bits of the assignment that gives every unit the lowest candidate."""
        return self.elements * self.candidates[0]

    @property
    def largest(self) -> int:
        """Bits of the assignment that gives every unit the highest candidate."""
        return self.elements * self.candidates[-1]


def check_table(costs: Any, candidates: Any, sizes: Any) -> Table:
    """Check a cost table and bring it into the types the solvers work on.

    Args:
        costs: [U, C], finite and not negative. They need not fall with the precision.
        candidates: [C] ascending positive ints, bits a value; any set, gaps and odd values included.
        sizes: [U] positive ints, elements of each unit.

    Raises:
        RecipeError: candidates that are not ascending positive integers.
        DataError: shapes that do not fit, costs that are not finite or negative, sizes that are not positive.
    """
    precisions = check_candidates(candidates)
    table = check_costs(costs, "the cost table")
    if table.ndim != 2 or table.shape[1] != len(precisions) or table.shape[0] == 0:
        raise DataError(
            f"the cost table has shape {list(table.shape)}, expected [units, {len(precisions)}] with one column per "
            f"candidate of {list(precisions)} and at least one unit; rebuild the table for these candidates"
        )
    elements = check_integers(sizes, "the sizes of the units")
    if elements.shape != (table.shape[0],) or (elements <= 0).any():
        found = f"shape {list(elements.shape)}" if elements.shape != (table.shape[0],) else f"{elements.min()}"
        raise DataError(
            f"the sizes of the units are wrong: found {found}, expected {table.shape[0]} positive element counts, "
            "one per line of the cost table; pass the elements of every unit"
        )
    return Table(table, precisions, elements)


def check_candidates(candidates: Any) -> tuple[int, ...]:
    """Return the candidates as a tuple of ints, or raise RecipeError when they are not ascending and positive."""
    try:
        values = tuple(int(value) for value in candidates)
        whole = all(value == found for value, found in zip(values, candidates, strict=True))
    except (TypeError, ValueError):
        values, whole = (), False
    if not values or not whole or values[0] <= 0 or any(a >= b for a, b in itertools.pairwise(values)):
        raise RecipeError(
            f"the candidate precisions are {candidates!r}, expected positive integers in ascending order such as "
            "[4, 6, 8]; sort them and drop repeated values"
        )
    return values


def check_costs(costs: Any, name: str) -> FloatArray:
    """Return `costs` as a contiguous float64 array, or raise DataError when an entry is negative or not finite."""
    try:
        table = np.ascontiguousarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} is not an array of numbers ({error}); pass a float64 array") from error
    bad = ~(np.isfinite(table) & (table >= 0))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{name} holds {table[where]!r} at {list(where)} ({int(bad.sum())} such entries), expected finite costs "
            "that are not negative; calibrate again, or look for overflow in the statistics that made it"
        )
    return table


def check_integers(values: Any, name: str) -> IntArray:
    """Return `values` as an int64 array, or raise DataError when an entry is not a whole number."""
    try:
        found = np.asarray(values)
        whole = found.astype(np.int64)
        exact = bool((whole == found).all())
    except (TypeError, ValueError, OverflowError):
        whole, exact = np.zeros(0, np.int64), False
    if not exact:
        raise DataError(f"{name} are not whole numbers: found {values!r}; pass integers")
    return whole


def check_budget(budget: Any) -> int:
    """Return the budget as an int, or raise RecipeError when it is not a whole number of bits."""
    try:
        bits = int(budget)
        whole = bits == budget
    except (TypeError, ValueError, OverflowError):
        bits, whole = 0, False
    if not whole:
        raise RecipeError(f"the budget is {budget!r}, expected a whole number of bits over all units; round it down")
    return bits


def smallest_feasible(candidates: Any, sizes: Any) -> int:
    """Bits of the smallest budget that some assignment meets: every unit at the lowest candidate.

    Args:
        candidates: [C] ascending ints, bits a value.
        sizes: [U] elements of each unit.
    """
    return int(check_integers(sizes, "the sizes of the units").sum()) * check_candidates(candidates)[0]


def require_feasible(budget: int, smallest: int, elements: int, remedy: str) -> None:
    """Raise InfeasibleError when `budget` is below `smallest`.

    Args:
        budget: bits allowed.
        smallest: bits that the cheapest assignment takes.
        elements: values of the state, for the figures a value.
        remedy: what else than a larger budget would help.
    """
    if budget < smallest:
        raise InfeasibleError(
            f"a budget of {budget:,} bits ({budget / elements:.4f} a value) is met by no assignment: expected at "
            f"least {smallest:,} bits ({smallest / elements:.4f} a value); raise the budget to that, or {remedy}"
        )


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / max(|cost|, tiny), never negative."""
    return max(cost - bound, 0.0) / max(abs(cost), float(np.finfo(np.float64).tiny))


def make_allocation(
    table: Table, choice: IntArray, budget: int, bound: float, solver: str, seconds: float, optimal: bool = False
) -> Allocation:
    """Wrap a choice [U] as an Allocation; `optimal` says the solver is exact, so that the bound is the cost itself."""
    choice = choice.astype(np.int64)
    bits = np.asarray(table.candidates, np.int64)[choice]
    cost = float(np.take_along_axis(table.costs, choice[:, None], axis=1).sum())
    # A bound above the cost can only be rounding: the assignment itself proves the smaller value.
    bound = cost if optimal else min(bound, cost)
    gap = relative_gap(cost, bound)
    used = int((bits * table.sizes).sum())
    status = "optimal" if gap <= ROUNDING else "feasible"
    return Allocation(choice, table.candidates, bits, cost, used, budget, bound, gap, status, solver, seconds)
