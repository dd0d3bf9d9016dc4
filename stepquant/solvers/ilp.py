"""Allocation under side constraints that a closed form cannot take: an integer program with two back ends.

Rows of a head matter to the constraints only through how many of them are stored at each precision. So every head
is first priced exactly at each number of bits it can take (`row_pricing`), and the integer program chooses one such
number a head (`ilp_model`): a few thousand binary columns instead of hundreds of thousands, with nothing lost. Its
bound is a bound on the row problem itself. A problem of whole heads goes the same way, with the candidates as options.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stepquant.errors import BackendError, InfeasibleError, RecipeError, closest
from stepquant.solvers.ilp_explain import explain_infeasible
from stepquant.solvers.ilp_model import Answer, ChoiceModel, Linear, check_layers, linearise, tighten_budget
from stepquant.solvers.ilp_options import head_options, row_options
from stepquant.solvers.ilp_problem import PIVOT_BITS, HeadAllocation, HeadProblem, RowAllocation, RowProblem
from stepquant.solvers.ilp_start import warm_start
from stepquant.solvers.table import ROUNDING, IntArray, relative_gap

__all__ = ["BACKENDS", "HeadAllocation", "HeadProblem", "RowAllocation", "RowProblem", "solve_heads", "solve_rows"]

#: What an answer costs after scaling, so that tolerances of 1e-6 and 1e-9 in a solver are small beside it.
SCALED_COST = 1e4

#: Names of the back ends.
BACKENDS = ("ortools", "pulp")

Backend = Callable[[Linear, IntArray | None, float | None, float, int], Answer]


@dataclass(frozen=True)
class _Solved:
    choice: IntArray
    cost: float
    bound: float
    gap: float
    status: str
    solver: str


def solve_rows(problem: RowProblem, backend: str = "ortools", gap: float = 1e-5, threads: int = 1) -> RowAllocation:
    """Solve a row problem.

    Args:
        problem: see RowProblem.
        backend: "ortools" or "pulp".
        gap: relative gap at which to stop. A start that is proven closer than this is returned as it is, and the
            back end not asked; 0 always asks it.
        threads: threads of the solver, where it can use more than one.

    Raises:
        RecipeError, DataError: settings or tables that are not what they should be.
        InfeasibleError: no assignment meets the constraints; names the one to relax.
        BackendError: the back end is not installed or failed.
    """
    started = time.perf_counter()
    options = row_options(problem)
    solved = _solve(options.model, backend, problem.time_limit, gap, threads)
    heads = np.arange(len(solved.choice))
    layers, per_layer = options.heads
    pivots = options.pivots.sum(axis=1)
    coded = options.stored_rows[heads, solved.choice]
    precisions = np.array([*options.candidates, PIVOT_BITS], np.int64)
    bits = np.full(options.pivots.shape, PIVOT_BITS, np.uint8)
    counts = np.zeros((len(heads), len(precisions)), np.int64)
    counts[:, -1] = pivots
    for head, rows in enumerate(options.rows):
        chosen = options.choices[head][solved.choice[head]]
        bits[head, rows] = precisions[chosen]
        counts[head, :-1] = np.bincount(chosen, minlength=len(options.candidates))
    stored = np.concatenate([coded, pivots[:, None]], axis=1)
    padding = int(((stored - counts) @ precisions).sum()) * problem.value_dim // 8
    common = _common(options.model, solved, started)
    return RowAllocation(
        bits.reshape(layers, per_layer, -1),
        *common,
        counts.reshape(layers, per_layer, -1),
        stored.reshape(layers, per_layer, -1),
        padding,
    )


def solve_heads(problem: HeadProblem, backend: str = "ortools", gap: float = 1e-5, threads: int = 1) -> HeadAllocation:
    """Solve a problem of whole heads; arguments and errors as `solve_rows`."""
    started = time.perf_counter()
    options = head_options(problem)
    solved = _solve(options.model, backend, problem.time_limit, gap, threads)
    bits = options.bits[np.arange(len(solved.choice)), solved.choice].astype(np.uint8)
    return HeadAllocation(bits.reshape(options.heads), *_common(options.model, solved, started))


def _common(
    model: ChoiceModel, solved: _Solved, started: float
) -> tuple[float, float, float, str, int, int, IntArray, str, float]:
    used = int(model.layer_charges(solved.choice).sum())
    per_rank = model.rank_bits(solved.choice) // 8
    seconds = time.perf_counter() - started
    return solved.cost, solved.bound, solved.gap, solved.status, used, model.budget, per_rank, solved.solver, seconds


def _solve(given: ChoiceModel, backend: str, time_limit: float | None, gap: float, threads: int) -> _Solved:
    solver = _load(backend)
    smallest = check_layers(given)

    def explained() -> InfeasibleError:
        return explain_infeasible(given, smallest, lambda linear: solver(linear, None, time_limit, 0.5, threads))

    if given.budget < smallest:
        raise explained()
    model = tighten_budget(given)
    start, bound = warm_start(model)
    least = float(model.costs.min(axis=1).sum())
    if start is not None and (relative_gap(model.cost(start), bound) < gap or model.cost(start) == 0.0):
        return _solved(model, start, bound, "start")
    best = bound if start is None else model.cost(start)
    scale = best / SCALED_COST if best > 0 else 1.0
    # Rounding of the sums must not drop an option of the start itself.
    most = np.inf if start is None else (best - least) + 1e-9 * best
    linear = linearise(model, scale, most)
    answer = Answer(None, np.inf, True)
    if linear.possible:
        answer = solver(linear, start, time_limit, gap * SCALED_COST, threads)
    if answer.infeasible and start is None:
        raise explained()
    found = [choice for choice in (start, answer.choice) if choice is not None and model.meets(choice)]
    if not found:
        raise InfeasibleError(
            f"the {backend} back end found no assignment within its time limit of {time_limit} s, nor proved that "
            "there is none; allow more time, or relax tensor_parallel, the floors or the caps"
        )
    if np.isfinite(answer.bound):
        bound = max(bound, answer.bound * scale + least)
    return _solved(model, min(found, key=model.cost), bound, backend)


def _solved(model: ChoiceModel, choice: IntArray, bound: float, solver: str) -> _Solved:
    cost = model.cost(choice)
    # A bound above the cost of an answer can only be rounding.
    bound = min(bound, cost)
    gap = relative_gap(cost, bound)
    return _Solved(choice, cost, bound, gap, "optimal" if gap <= ROUNDING else "feasible", f"ilp:{solver}")


def _load(backend: str) -> Backend:
    if backend not in BACKENDS:
        raise RecipeError(
            f"unknown back end {backend!r} of the integer program{closest(backend, BACKENDS)}, expected one of "
            f"{list(BACKENDS)}; set it to one of them"
        )
    # Neither package is needed by who uses the other one, or no integer program at all.
    try:
        module = importlib.import_module(f"stepquant.solvers.ilp_{backend}")
    except ImportError as error:
        package = "pulp[cbc]" if backend == "pulp" else backend
        other = next(name for name in BACKENDS if name != backend)
        raise BackendError(
            f"the {backend} back end of the integer program cannot be imported ({error}); install it with "
            f"pip install '{package}', or use the {other} back end"
        ) from error
    return module.solve
