from dataclasses import replace

import numpy as np
import pytest

from stepquant.errors import DataError, InfeasibleError, RecipeError
from stepquant.solvers.ilp import BACKENDS, HeadProblem, RowProblem, solve_heads, solve_rows

NAN = float("nan")
COSTS = np.random.default_rng(0).random((2, 4, 6, 1)) * 4.0 ** -np.array([4, 6, 8])
ROWS = RowProblem(COSTS, (4, 6, 8), 8, 6 * 48 * 8, 2)


def odd_pivots():
    pivots = np.zeros((2, 4, 6), bool)
    pivots[1, 2, 0] = True
    return pivots


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"budget": 100}, InfeasibleError, ["budget of 100 bits", "at least 1,536 bits (4.0000 a value)", "raise"]),
        (
            {"granularity": 4, "budget": 1_600},
            InfeasibleError,
            ["2,048", "raise budget.bits to 5.3334", "lower the granularity 4", "takes 512"],
        ),
        (
            {"layer_floor": [NAN, 7.0], "budget": 2_000},
            InfeasibleError,
            ["at least 2,112 bits", "with allocation.floors.1;", "raise budget.bits to 5.5, or lower a floor"],
        ),
        (
            {"layer_floor": [NAN, 9.0]},
            InfeasibleError,
            ["allocation.floors.1 is 9 bits a value on average", "take at most 8", "lower it to 8"],
        ),
        (
            {"layer_cap": [3.9, NAN]},
            InfeasibleError,
            ["allocation.caps.0 is 3.89583 bits", "4 heads of layer 0 take at least 4", "raise it"],
        ),
        (
            {"layer_floor": [NAN, 6.01], "layer_cap": [NAN, 6.05]},
            InfeasibleError,
            ["layer 1", "allocation.floors.1 = 6.01", "allocation.caps.1 = 6.04", "6.16"],
        ),
        (
            {"head_cap": np.full((2, 4), 3.0)},
            InfeasibleError,
            ["allocation.caps.0/0 is 3 bits", "head 0 of layer 0", "takes 4 to 8", "raise the cap"],
        ),
        (
            {"head_floor": np.where(np.arange(8).reshape(2, 4) == 6, 9.0, NAN)},
            InfeasibleError,
            ["allocation.floors.1/2 is 9", "head 2 of layer 1", "takes 4 to 8", "lower the floor"],
        ),
        ({"tensor_parallel": 3}, InfeasibleError, ["4 heads", "3 tensor-parallel ranks", "[1, 2, 4]"]),
        ({"pivots": odd_pivots()}, InfeasibleError, ["head 2 of layer 1", "1 pivot rows", "round_pivots"]),
        ({"granularity": 0}, RecipeError, ["granularity is 0"]),
        ({"granularity": 1, "value_dim": 3}, RecipeError, ["no whole number of bytes", "[4, 6]"]),
        ({"spare_groups": -1}, RecipeError, ["spare_groups"]),
        ({"tensor_parallel": 0}, RecipeError, ["tensor_parallel is 0"]),
        ({"layer_cap": [6.0]}, RecipeError, ["layer_cap", "[1]", "[2]"]),
        ({"candidates": (8, 4)}, RecipeError, ["ascending"]),
        ({"costs": COSTS[0]}, DataError, ["[4, 6, 3]", "[layers, heads, rows, 3]"]),
        ({"costs": -COSTS}, DataError, ["negative"]),
        ({"pivots": np.zeros((2, 4, 6))}, DataError, ["float64", "bool"]),
    ],
)
def test_the_constraint_to_relax_is_named(backend, change, kind, words):
    with pytest.raises(kind) as caught:
        solve_rows(replace(ROWS, **change), backend)
    for word in words:
        assert word in str(caught.value)


def test_ranks_that_cannot_be_equal_are_named():
    # Rank 0 stores a pivot head of 16 bits; the others move in steps of 4, so 16 + 5 = 21 is never 8 or 12 or 16.
    pivots = np.array([[True, False, False, False]])
    problem = HeadProblem(np.ones((1, 4, 2)), (5, 8), 8, 10**6, pivots, tensor_parallel=2)
    with pytest.raises(InfeasibleError, match="equal bytes on 2 tensor-parallel ranks cannot be had, whatever"):
        solve_heads(problem)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_budget_that_equal_ranks_need_is_stated(backend):
    # Without equal ranks 8 + 3 * 4 bits a value would do; rank 1 has to store 16 bits as well.
    pivots = np.array([[True, False, False, False]])
    problem = HeadProblem(np.ones((1, 4, 2)), (4, 16), 8, 200, pivots, tensor_parallel=2)
    with pytest.raises(InfeasibleError) as caught:
        solve_heads(problem, backend)
    for words in ("budget of 200 bits", "at least 256 bits (8.0000 a value) with equal bytes on 2", "fewer pivots"):
        assert words in str(caught.value)
    assert solve_heads(replace(problem, budget=256), backend).bits_used == 256


def test_ranks_and_a_layer_that_exclude_each_other_are_named():
    # The pivot makes rank 0 start 8 bits a value ahead; the cap keeps rank 1 from catching up.
    pivots = np.array([[True, False, False, False]])
    problem = HeadProblem(np.ones((1, 4, 2)), (4, 16), 8, 10**6, pivots, tensor_parallel=2, layer_cap=[5.0])
    with pytest.raises(InfeasibleError, match="cannot be had together with the floors and caps of layer 0"):
        solve_heads(problem)
    assert solve_heads(replace(problem, layer_cap=None, pivots=None)).bytes_per_rank.tolist() == [8, 8]
    assert solve_heads(replace(problem, layer_cap=None)).bytes_per_rank.tolist() == [20, 20]


def test_an_unknown_back_end_is_named():
    with pytest.raises(RecipeError, match=r"'ortool'.*did you mean 'ortools'"):
        solve_rows(ROWS, "ortool")


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_of_time_the_start_is_returned_with_its_gap(backend):
    rng = np.random.default_rng(5)
    costs = rng.lognormal(0, 2, (4, 8, 32, 1)) * 4.0 ** -np.array([3, 5, 16]) * rng.lognormal(0, 0.3, (4, 8, 32, 3))
    budget = int(5.37 * 1024 * 8)
    cap = [5.0, NAN, NAN, NAN]  # else the start would be proven optimal
    problem = RowProblem(costs, (3, 5, 16), 8, budget, 8, tensor_parallel=4, layer_cap=cap, time_limit=1e-3)
    answer = solve_rows(problem, backend, gap=1e-9)
    assert len(set(answer.bytes_per_rank.tolist())) == 1
    assert 0 < answer.gap < 0.2
    assert answer.status == "feasible"
