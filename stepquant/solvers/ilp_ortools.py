"""The integer program through OR-Tools: SCIP, driven by MathOpt.

Chosen by `benchmarks/solvers.py --engines --limit 20` (Kimi's 640 heads, granularity 16, 4 equal ranks, 512 pivots,
to a gap of 1e-5; OR-Tools 9.15, CPU seconds on one core, pricing and start left out):

                                           SCIP    HiGHS   CP-SAT
    {4, 6, 8}, 6 bits                       1.7      1.3      1.6
    {4, 6, 8}, 5.123 bits, caps, floors     2.1      1.2      2.3
    {2, 4, 6, 8}, 4.03 bits, caps, floors   2.8      2.3      3.7
    {3, 5, 16}, 5.37 bits                   3.1      7.6     10.2
    the same without a start               12.6   nothing    15.1

HiGHS is a little quicker where all three are quick. SCIP is the one that is never slow: it stays within seconds on the
knapsacks that uneven steps make hard, and finds an answer there without a start, on a single thread. CP-SAT has to
round costs to integers, and is the slowest nearly everywhere.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
from ortools.math_opt.python import mathopt

from stepquant.errors import BackendError
from stepquant.solvers.ilp_model import Answer, Linear
from stepquant.solvers.table import IntArray

#: Solvers of OR-Tools that were tried, by the name used here.
ENGINES = {
    "scip": mathopt.SolverType.GSCIP,
    "highs": mathopt.SolverType.HIGHS,
    "cp-sat": mathopt.SolverType.CP_SAT,
}
ENGINE = "scip"


def solve(
    linear: Linear,
    start: IntArray | None,
    time_limit: float | None,
    gap: float,
    threads: int = 1,
    engine: str = ENGINE,
) -> Answer:
    """Minimise `linear`.

    Args:
        linear: the integer program.
        start: a choice [U] to begin with, or None.
        time_limit: seconds, or None.
        gap: absolute gap of the scaled objective at which to stop.
        threads: for CP-SAT; the other two run on one thread through MathOpt.
        engine: key of ENGINES.
    """
    model = mathopt.Model()
    columns = [model.add_binary_variable() for _ in range(len(linear.head))]
    for members in linear.head_columns():
        model.add_linear_constraint(mathopt.fast_sum([columns[i] for i in members]) == 1)
    for row in linear.rows:
        constraint = model.add_linear_constraint(
            lb=-np.inf if row.low is None else row.low, ub=np.inf if row.high is None else row.high
        )
        for column, coefficient in zip(row.columns.tolist(), row.coefficients.tolist(), strict=True):
            constraint.set_coefficient(columns[column], coefficient)
    for column, cost in zip(columns, linear.objective.tolist(), strict=True):
        model.objective.set_linear_coefficient(column, cost)
    model.objective.is_maximize = False
    parameters = mathopt.SolveParameters(
        time_limit=None if time_limit is None else timedelta(seconds=time_limit),
        absolute_gap_tolerance=gap,
        relative_gap_tolerance=0.0,
        threads=threads if engine == "cp-sat" else None,
    )
    hints = []
    if start is not None:
        values = dict(zip(columns, linear.indicator(start).tolist(), strict=True))
        hints = [mathopt.SolutionHint(variable_values=values)]
    start_from = mathopt.ModelSolveParameters(solution_hints=hints)
    try:
        result = mathopt.solve(model, ENGINES[engine], params=parameters, model_params=start_from)
    except (RuntimeError, ValueError, AttributeError) as error:  # 9.15 turns some refusals into an AttributeError
        raise BackendError(f"{engine} of OR-Tools did not run ({error!r}); use the pulp back end") from error
    reason = result.termination.reason
    bound = result.termination.objective_bounds.dual_bound
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(None, np.inf, True)
    if not result.has_primal_feasible_solution():
        return Answer(None, bound, False)
    found = result.variable_values()
    return Answer(linear.choice(np.array([found[column] for column in columns])), bound, False)
