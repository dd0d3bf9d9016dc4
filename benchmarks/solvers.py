"""Times of the solvers at full model size, with the gaps they prove.

    python benchmarks/solvers.py [--json FILE] [--engines [--limit SECONDS]] [--seed N]

Costs are synthetic: log-normal over units, falling fourfold a bit, with 30% of noise an entry, so that rows and heads
disagree about what a step is worth. Wall time is the whole call; CPU time is that of this process and of the solver's
process, which says more on a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stepquant.solvers import ilp_ortools, ilp_pulp
from stepquant.solvers.dp import dp_curve, solve_dp
from stepquant.solvers.ilp import BACKENDS, HeadProblem, RowProblem, solve_heads, solve_rows
from stepquant.solvers.ilp_model import linearise, tighten_budget
from stepquant.solvers.ilp_options import row_options
from stepquant.solvers.ilp_start import warm_start
from stepquant.solvers.lagrangian import solve_lagrangian
from stepquant.solvers.pivots import round_pivots

HEADS, HEAD_ELEMENTS = 2_304, 128 * 128
LAYERS, HEADS_PER_LAYER, ROWS, VALUES, PIVOTS = 20, 32, 128, 128, 512
DEFAULT_GAP = 1e-5

Record = dict[str, Any]


def costs(rng: np.random.Generator, shape: tuple[int, ...], candidates: tuple[int, ...]) -> np.ndarray:
    """Costs [*shape, C] that are log-normal over units and fall fourfold a bit, noise aside."""
    scale = rng.lognormal(0.0, 2.0, (*shape, 1))
    return scale * 4.0 ** -np.asarray(candidates) * rng.lognormal(0.0, 0.3, (*shape, len(candidates)))


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, its wall seconds, and the CPU seconds of this process and its children."""
    wall, cpu = time.perf_counter(), _cpu()
    answer = work()
    return answer, time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def dynamic_programming(rng: np.random.Generator) -> list[Record]:
    """The whole curve of 2,304 heads, and every 0.05 bits of it turned into an assignment."""
    records = []
    sizes = np.full(HEADS, HEAD_ELEMENTS)
    for candidates in ((2, 4, 6, 8), (3, 5, 16)):
        table = costs(rng, (HEADS,), candidates)
        curve, wall, cpu = timed(lambda table=table, candidates=candidates: dp_curve(table, candidates, sizes))
        name = f"{HEADS:,} heads, {list(candidates)}"
        records.append(_record("DP, whole curve", name, wall, cpu, 0.0, f"{len(curve.budgets):,} budgets"))
        budgets = np.arange(candidates[0], candidates[-1] + 1e-9, 0.05) * sizes.sum()
        _, wall, cpu = timed(lambda curve=curve, budgets=budgets: [curve.at(int(budget)) for budget in budgets])
        records.append(_record("DP, from the curve", name, wall, cpu, 0.0, f"{len(budgets)} assignments"))
        _, wall, cpu = timed(
            lambda table=table, candidates=candidates: solve_dp(table, candidates, sizes, 5 * int(sizes.sum()))
        )
        records.append(_record("DP, one budget", name, wall, cpu, 0.0, "5 bits"))
    return records


def lagrangian(rng: np.random.Generator) -> list[Record]:
    """81,920 rows at budgets that fall between the steps."""
    records = []
    sizes = np.full(LAYERS * HEADS_PER_LAYER * ROWS, VALUES)
    for candidates, bits in (((2, 4, 6, 8), 4.03), ((2, 4, 6, 8), 6.0), ((4, 6, 8), 5.123), ((3, 5, 16), 5.37)):
        table = costs(rng, sizes.shape, candidates)
        budget = int(bits * int(sizes.sum()))
        answer, wall, cpu = timed(
            lambda table=table, candidates=candidates, budget=budget: solve_lagrangian(table, candidates, sizes, budget)
        )
        left = f"{answer.budget - answer.bits_used} bits left"
        records.append(
            _record("Lagrangian", f"{len(sizes):,} rows, {list(candidates)}, {bits} bits", wall, cpu, answer.gap, left)
        )
    return records


def kimi(rng: np.random.Generator, candidates: tuple[int, ...], bits: float, limits: bool) -> RowProblem:
    """The row problem of Kimi-Linear: granularity 16, 4 ranks, 512 pivots; with caps and floors where asked for."""
    table = costs(rng, (LAYERS, HEADS_PER_LAYER, ROWS), candidates)
    risk = table[..., -1]
    pivots = round_pivots(risk >= np.sort(risk, axis=None)[-PIVOTS], risk, 16)
    cap, floor = np.full(LAYERS, np.nan), np.full(LAYERS, np.nan)
    if limits:
        cap[::3], floor[1::3] = bits - 0.2, bits + 0.2
    budget = int(bits * risk.size * VALUES)
    return RowProblem(table, candidates, VALUES, budget, 16, pivots, 4, layer_cap=cap, layer_floor=floor)


def _cases(rng: np.random.Generator) -> list[tuple[str, RowProblem]]:
    return [
        (f"{list(candidates)}, {bits} bits{', caps and floors' if limits else ''}", kimi(rng, candidates, bits, limits))
        for candidates, bits, limits in (
            ((4, 6, 8), 6.0, False),
            ((4, 6, 8), 5.123, False),
            ((4, 6, 8), 5.123, True),
            ((2, 4, 6, 8), 4.03, True),
            ((3, 5, 16), 5.37, False),
        )
    ]


def integer_programs(rng: np.random.Generator) -> list[Record]:
    """The row problem at Kimi's size and the head problem at Qwen's, with both back ends."""
    records = []
    for name, problem in _cases(rng):
        for backend in BACKENDS:
            # A gap of 0 asks the back end even where the start is proven optimal already.
            for gap in (DEFAULT_GAP, 0.0):
                answer, wall, cpu = timed(
                    lambda problem=problem, backend=backend, gap=gap: solve_rows(problem, backend, gap=gap)
                )
                records.append(_row_record(f"ILP rows, {backend}, gap {gap:g}", name, wall, cpu, answer))
    table = costs(rng, (48, 48), (2, 4, 6, 8))
    stored = [HEAD_ELEMENTS * bits // 8 + (1_280 if bits == 2 else 512) for bits in (2, 4, 6, 8)] + [2 * HEAD_ELEMENTS]
    pivots = table[..., -1] >= np.sort(table[..., -1], axis=None)[-32]
    problem = HeadProblem(
        table, (2, 4, 6, 8), HEAD_ELEMENTS, 4 * HEADS * HEAD_ELEMENTS, pivots, stored, tensor_parallel=8
    )
    for backend in BACKENDS:
        answer, wall, cpu = timed(lambda backend=backend: solve_heads(problem, backend, gap=1e-3))
        records.append(_row_record(f"ILP heads, {backend}, gap 0.001", "48 x 48, 4 bits, TP 8", wall, cpu, answer))
    return records


def engines(rng: np.random.Generator, limit: float) -> list[Record]:
    """The back ends and the solvers of OR-Tools on the same integer programs, pricing and start left out.

    Every solver gets the start ("warm") or none ("cold"), and may stop at a gap of 1e-5.
    """
    solvers = {engine: partial(ilp_ortools.solve, engine=engine) for engine in ilp_ortools.ENGINES}
    solvers["cbc"] = ilp_pulp.solve
    records = []
    for name, problem in _cases(rng):
        model = tighten_budget(row_options(problem).model)
        start, bound = warm_start(model)
        least = float(model.costs.min(axis=1).sum())
        scale = (bound if start is None else model.cost(start)) / 1e4
        linear = linearise(model, scale)
        for begin, label in ((start, "warm"), (None, "cold")):
            for solver, solve in solvers.items():
                answer, wall, cpu = timed(
                    lambda solve=solve, linear=linear, begin=begin: solve(linear, begin, limit, 0.1, 1)
                )
                gap, note = float("inf"), "no answer"
                if answer.choice is not None:
                    cost = model.cost(answer.choice)
                    gap, note = max(cost - answer.bound * scale - least, 0.0) / cost, f"cost {cost:.6g}"
                records.append(_record(f"{solver}, {label}", name, wall, cpu, gap, note))
    return records


def _row_record(solver: str, name: str, wall: float, cpu: float, answer: Any) -> Record:
    ranks = answer.bytes_per_rank.tolist()
    note = f"{len(ranks)} x {ranks[0]:,} bytes, {answer.solver}" if len(set(ranks)) == 1 else f"ranks differ: {ranks}"
    return _record(solver, name, wall, cpu, answer.gap, note) | {"bytes_per_rank": ranks}


def _record(solver: str, name: str, wall: float, cpu: float, gap: float, note: str) -> Record:
    return {"solver": solver, "problem": name, "seconds": wall, "cpu_seconds": cpu, "gap": gap, "note": note}


def main() -> None:
    """Print the table, and write it as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--engines", action="store_true", help="compare the solvers of OR-Tools instead")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each solver with --engines")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    if arguments.engines:
        records = engines(rng, arguments.limit)
    else:
        records = [*dynamic_programming(rng), *lagrangian(rng), *integer_programs(rng)]
    table = Table("solver", "problem", "wall s", "CPU s", "proven gap", "")
    for record in records:
        figures = f"{record['seconds']:.3f}", f"{record['cpu_seconds']:.3f}", f"{record['gap']:.1e}"
        table.add_row(record["solver"], record["problem"], *figures, record["note"])
    Console(width=None if Console().is_terminal else 140).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
