from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import InfeasibleError
from stepquant.solvers.ilp import BACKENDS, HeadProblem, RowProblem, solve_heads, solve_rows
from stepquant.solvers.pivots import round_pivots

from .brute import best_heads, best_rows
from .strategies import cost_tables

SETS = st.sampled_from([(4, 6, 8), (2, 4, 6, 8), (3, 5, 16), (4, 8), (6,)])


@st.composite
def row_problems(draw):
    candidates = draw(SETS)
    ranks = draw(st.sampled_from([1, 2]))
    layers, heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    heads *= ranks
    if layers * heads > 4:
        layers = 1
    rows, granularity = draw(st.integers(4, 6)), draw(st.sampled_from([1, 2]))
    value_dim = 8
    costs = draw(cost_tables(layers * heads * rows, len(candidates))).reshape(layers, heads, rows, -1)
    asked = np.random.default_rng(draw(st.integers(0, 99))).random(costs.shape[:3]) < draw(st.sampled_from([0, 0.3]))
    pivots = round_pivots(asked, costs[..., -1], granularity)
    values = costs[..., 0].size * value_dim
    limits = {}
    for name, shape in (("layer", (layers,)), ("head", (layers, heads))):
        if draw(st.booleans()) and draw(st.booleans()):
            limits[f"{name}_floor"] = np.full(shape, np.nan)
            limits[f"{name}_floor"][(0,) * len(shape)] = draw(st.floats(candidates[0], candidates[-1]))
        if draw(st.booleans()) and draw(st.booleans()):
            limits[f"{name}_cap"] = np.full(shape, np.nan)
            limits[f"{name}_cap"][(-1,) * len(shape)] = draw(st.floats(candidates[0], candidates[-1] + 2))
    bits = draw(st.floats(candidates[0] - 0.5, candidates[-1] + 1))
    return RowProblem(
        costs,
        candidates,
        value_dim,
        int(bits * values),
        granularity,
        pivots,
        ranks,
        pivot_charge=draw(st.sampled_from([8, 16])),
        spare_groups=draw(st.sampled_from([0, 0, 1])),
        **limits,
    )


def check_rows(problem, answer):
    """An answer is what it says: counts, bytes and cost follow from the map of bits alone."""
    costs, pivots = np.asarray(problem.costs), problem.pivots
    precisions = np.array([*problem.candidates, 16])
    coded = np.where(pivots, -1, answer.bits)
    for column, bits in enumerate(problem.candidates):
        assert ((coded == bits).sum(axis=2) == answer.counts[..., column]).all()
    assert (answer.counts[..., -1] == pivots.sum(axis=2)).all()
    assert (answer.bits[pivots] == 16).all()
    assert (answer.stored >= answer.counts).all()
    assert (answer.stored % problem.granularity == 0).all()
    column = np.searchsorted(problem.candidates, np.where(pivots, problem.candidates[0], answer.bits))
    chosen = np.take_along_axis(costs, column[..., None], axis=3)[..., 0]
    assert answer.cost == pytest.approx(chosen[~pivots].sum(), rel=1e-9)
    assert answer.bound <= answer.cost
    assert answer.gap >= 0
    stored_bytes = (answer.stored * precisions).sum(axis=2) * problem.value_dim // 8
    ranks = stored_bytes.reshape(len(costs), problem.tensor_parallel, -1).sum(axis=(0, 2))
    assert ranks.tolist() == answer.bytes_per_rank.tolist()
    assert len(set(ranks.tolist())) == 1
    padding = ((answer.stored - answer.counts) * precisions).sum() * problem.value_dim // 8
    assert padding == answer.padding_bytes
    extra = pivots.sum() * (16 - problem.pivot_charge) * problem.value_dim
    assert answer.bits_used == 8 * stored_bytes.sum() - extra <= problem.budget


@pytest.mark.parametrize(("backend", "examples"), [("ortools", 250), ("pulp", 120)])
def test_rows_equal_brute_force(backend, examples):
    @settings(max_examples=examples, deadline=None)
    @given(row_problems())
    def check(problem):
        best = best_rows(problem)
        if best is None:
            with pytest.raises(InfeasibleError):
                solve_rows(problem, backend)
            return
        for gap in (0.0, 1e-5):  # 0 asks the back end even where the start is proven optimal
            answer = solve_rows(problem, backend, gap=gap)
            check_rows(problem, answer)
            assert answer.cost == pytest.approx(best, rel=1e-6 + gap, abs=1e-12)
            assert answer.bound <= best * (1 + 1e-6)
            assert answer.gap <= 2e-5
            assert answer.solver in ([f"ilp:{backend}"] if gap == 0.0 and best > 0 else [f"ilp:{backend}", "ilp:start"])

    check()


@st.composite
def head_problems(draw):
    candidates = draw(SETS)
    ranks = draw(st.sampled_from([1, 2]))
    layers, heads = draw(st.sampled_from([(1, 2), (2, 2), (1, 4)]))
    costs = draw(cost_tables(layers * heads, len(candidates))).reshape(layers, heads, -1)
    pivots = np.random.default_rng(draw(st.integers(0, 99))).random((layers, heads)) < draw(st.sampled_from([0, 0.3]))
    stored = [16 * bits + (64 if bits == 2 else 40) for bits in candidates] + [256]
    cap = np.full(layers, np.nan)
    cap[0] = draw(st.sampled_from([np.nan, 5.0, 6.5]))
    return HeadProblem(
        costs,
        candidates,
        128,
        int(draw(st.floats(candidates[0] - 0.5, candidates[-1] + 2)) * 128 * layers * heads),
        pivots,
        draw(st.sampled_from([None, stored])),
        draw(st.booleans()),
        ranks,
        layer_cap=cap,
    )


@pytest.mark.parametrize(("backend", "examples"), [("ortools", 150), ("pulp", 60)])
def test_heads_equal_brute_force(backend, examples):
    @settings(max_examples=examples, deadline=None)
    @given(head_problems())
    def check(problem):
        best = best_heads(problem)
        if best is None:
            with pytest.raises(InfeasibleError):
                solve_heads(problem, backend)
            return
        for gap in (0.0, 1e-5):
            answer = solve_heads(problem, backend, gap=gap)
            assert answer.cost == pytest.approx(best, rel=1e-6 + gap, abs=1e-12)
            assert answer.bound <= best * (1 + 1e-6)
            assert len(set(answer.bytes_per_rank.tolist())) == 1
            assert answer.bits_used <= problem.budget
            assert (answer.bits[problem.pivots] == 16).all()

    check()


@settings(max_examples=60, deadline=None)
@given(row_problems())
def test_the_smallest_budget_stated_is_the_smallest(problem):
    with pytest.raises(InfeasibleError) as caught:
        solve_rows(replace(problem, budget=-1))
    text = str(caught.value)
    if "expected at least" not in text:
        assert best_rows(replace(problem, budget=10**9)) is None
        return
    smallest = int(text.split("expected at least ")[1].split(" bits")[0].replace(",", ""))
    assert best_rows(replace(problem, budget=smallest)) is not None
    assert best_rows(replace(problem, budget=smallest - 1)) is None
    assert solve_rows(replace(problem, budget=smallest)).bits_used == smallest


@pytest.mark.parametrize("backend", BACKENDS)
def test_kimi_in_small(backend):
    rng = np.random.default_rng(3)
    steps = np.array([4, 6, 8])
    costs = rng.lognormal(0, 2, (4, 8, 128, 1)) * 4.0**-steps * rng.lognormal(0, 0.3, (4, 8, 128, 3))
    risk = costs[..., -1]
    pivots = round_pivots(risk >= np.sort(risk.reshape(-1))[-100], risk, 16)
    cap = np.array([5.5, np.nan, np.nan, np.nan])
    problem = RowProblem(costs, (4, 6, 8), 128, 6 * risk.size * 128, 16, pivots, 4, layer_cap=cap)
    answer = solve_rows(problem, backend)
    check_rows(problem, answer)
    assert answer.padding_bytes == 0
    assert answer.gap <= 1e-3
    assert answer.solver == f"ilp:{backend}"
    assert (answer.stored[0] * [4, 6, 8, 8]).sum() <= 5.5 * 8 * 128


def test_heads_of_a_full_model_agree_with_the_dp():
    from stepquant.solvers.dp import solve_dp

    rng = np.random.default_rng(4)
    costs = rng.lognormal(0, 2, (12, 16, 1)) * 4.0 ** -np.array([4, 6, 8])
    budget = 6 * 192 * 64
    exact = solve_dp(costs.reshape(192, 3), (4, 6, 8), np.full(192, 64), budget)
    answer = solve_heads(HeadProblem(costs, (4, 6, 8), 64, budget), gap=1e-9)
    assert answer.cost == pytest.approx(exact.cost, rel=1e-7)
