"""The integer program through PuLP and CBC.

PuLP itself bundles no CBC from version 4 on; `pulp[cbc]` installs the package cbcbox, whose binary is handed to
COIN_CMD by path here, which works in 3.3 as well. CBC takes a start through its `mips` option. PuLP hands back no
bound, so CBC writes its log to a file, and the bound is read from there.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pulp

from stepquant.errors import BackendError
from stepquant.solvers.ilp_model import Answer, Linear
from stepquant.solvers.table import IntArray

_BOUND = re.compile(r"^Lower bound:\s+(\S+)", re.MULTILINE)


def solve(linear: Linear, start: IntArray | None, time_limit: float | None, gap: float, threads: int = 1) -> Answer:
    """Minimise `linear`.

    Args:
        linear: the integer program.
        start: a choice [U] to begin with, or None.
        time_limit: seconds, or None.
        gap: absolute gap of the scaled objective at which to stop.
        threads: threads of the branch and bound.

    Raises:
        BackendError: no CBC is installed, or it ended with an error.
    """
    problem = pulp.LpProblem("allocation", pulp.LpMinimize)
    columns = [problem.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(len(linear.head))]
    problem += pulp.LpAffineExpression(zip(columns, linear.objective.tolist(), strict=True))
    for members in linear.head_columns():
        problem += pulp.lpSum(columns[i] for i in members) == 1
    for row in linear.rows:
        pairs = zip((columns[i] for i in row.columns), row.coefficients.tolist(), strict=True)
        expression = pulp.LpAffineExpression(pairs)
        if row.low is not None and row.low == row.high:
            problem += expression == row.low
            continue
        if row.low is not None:
            problem += expression >= row.low
        if row.high is not None:
            problem += expression <= row.high
    if start is not None:
        for column, value in zip(columns, linear.indicator(start).tolist(), strict=True):
            column.setInitialValue(int(value))
    with tempfile.TemporaryDirectory(prefix="stepquant-cbc-") as folder:
        log = Path(folder, "cbc.log")
        solver = pulp.COIN_CMD(
            path=_cbc_path(),
            msg=False,
            logPath=str(log),
            timeLimit=time_limit,
            gapAbs=gap,
            gapRel=0.0,
            threads=threads if threads > 1 else None,
            warmStart=start is not None,
        )
        solver.tmpDir = folder
        try:
            problem.solve(solver)
        except pulp.PulpSolverError as error:
            raise BackendError(
                f"CBC did not run ({error}); install it with pip install 'pulp[cbc]', or use the ortools back end"
            ) from error
        text = log.read_text(errors="replace") if log.exists() else ""
    if problem.status == pulp.LpStatusInfeasible:
        return Answer(None, np.inf, True)
    bound = _bound(text)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Answer(None, bound, False)
    choice = linear.choice(np.array([column.value() or 0.0 for column in columns]))
    if "Result - Optimal solution found" in text:
        bound = max(bound, float(linear.objective[linear.indicator(choice) > 0].sum()) - gap)
    return Answer(choice, bound, False)


def _cbc_path() -> str | None:
    """The CBC of cbcbox where it is installed, else None: COIN_CMD then looks for one on the PATH."""
    try:
        import cbcbox
    except ImportError:
        return None
    return str(cbcbox.cbc_bin_path())


def _bound(log: str) -> float:
    """The lower bound that CBC printed last, less half a unit of its last digit, since it prints six of them."""
    printed = _BOUND.findall(log)
    try:
        value = float(printed[-1])
    except (IndexError, ValueError):
        return -np.inf
    return value - 0.5 * 10.0 ** (np.floor(np.log10(max(abs(value), 1e-30))) - 5)
