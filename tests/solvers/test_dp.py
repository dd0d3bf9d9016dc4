import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import InfeasibleError, RecipeError
from stepquant.solvers.dp import dp_curve, solve_dp
from stepquant.solvers.table import smallest_feasible

from .brute import best_allocation
from .strategies import tables


@settings(max_examples=2000, deadline=None)
@given(tables(max_units=4), st.floats(0, 1))
def test_equals_brute_force(table, where):
    costs, candidates, sizes = table
    least, most = candidates[0] * sizes.sum(), candidates[-1] * sizes.sum()
    budget = int(least + where * (most - least))
    answer = solve_dp(costs, candidates, sizes, budget)
    cost, bits = best_allocation(costs, candidates, sizes, budget)
    assert answer.cost == pytest.approx(cost, rel=1e-12, abs=1e-300)
    assert answer.bits_used <= budget
    assert answer.bits_used == (answer.bits * sizes).sum()
    assert answer.bits.tolist() == [candidates[c] for c in answer.choice]
    assert (answer.status, answer.gap, answer.bound) == ("optimal", 0.0, answer.cost)
    if (costs == np.rint(costs)).all():  # sums of whole numbers are exact, so ties are ties
        assert answer.bits_used == bits


@settings(max_examples=300, deadline=None)
@given(tables(max_units=6), st.integers(1, 40))
def test_one_curve_answers_every_budget(table, stride):
    costs, candidates, sizes = table
    least, most = int(candidates[0] * sizes.sum()), int(candidates[-1] * sizes.sum())
    curve = dp_curve(costs, candidates, sizes)
    assert (curve.budgets[0], curve.budgets[-1]) == (least, most)
    assert (np.diff(curve.costs) <= 0).all()
    for budget in [*range(least, most + 1, stride), most, most + 7]:
        one, other = curve.at(budget), solve_dp(costs, candidates, sizes, budget)
        assert one.choice.tolist() == other.choice.tolist()
        assert (one.cost, one.bits_used, one.budget) == (other.cost, other.bits_used, budget)
        place = np.searchsorted(curve.budgets, budget, side="right") - 1
        assert curve.costs[place] == pytest.approx(one.cost, rel=1e-12, abs=1e-300)


@settings(max_examples=200, deadline=None)
@given(tables(max_units=5), st.floats(0, 1))
def test_a_curve_up_to_a_budget_agrees_with_the_whole(table, where):
    costs, candidates, sizes = table
    least, most = int(candidates[0] * sizes.sum()), int(candidates[-1] * sizes.sum())
    limit = int(least + where * (most - least))
    part, whole = dp_curve(costs, candidates, sizes, limit), dp_curve(costs, candidates, sizes)
    assert part.costs.tolist() == whole.costs[: len(part.costs)].tolist()
    assert part.at(limit).choice.tolist() == whole.at(limit).choice.tolist()
    if limit < most and part.budgets[-1] < whole.budgets[-1]:
        with pytest.raises(RecipeError, match="larger max_budget"):
            part.at(int(whole.budgets[len(part.budgets)]))


@settings(max_examples=200, deadline=None)
@given(tables())
def test_the_message_states_the_smallest_budget(table):
    costs, candidates, sizes = table
    smallest = smallest_feasible(candidates, sizes)
    for solve in (lambda b: solve_dp(costs, candidates, sizes, b), dp_curve(costs, candidates, sizes).at):
        assert solve(smallest).bits_used == smallest
        with pytest.raises(InfeasibleError, match=f"at least {smallest:,} bits"):
            solve(smallest - 1)


def test_ties_take_the_fewest_bits_and_the_last_unit_stays_low():
    # Either unit may be raised for the same gain, and a third raise gains nothing.
    costs = [[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]]
    answer = solve_dp(costs, (4, 6, 8), [1, 1], 10)
    assert answer.bits.tolist() == [6, 4]
    assert solve_dp(costs, (4, 6, 8), [1, 1], 16).bits.tolist() == [6, 6]


def test_a_higher_precision_that_costs_more_is_not_taken():
    assert solve_dp([[1.0, 3.0, 2.0]], (3, 5, 16), [7], 10**6).bits.tolist() == [3]


def test_states_too_many_for_memory_name_the_other_solvers():
    rng = np.random.default_rng(0)
    with pytest.raises(RecipeError) as caught:
        dp_curve(rng.random((81_920, 3)), (4, 6, 8), np.full(81_920, 128))
    assert "lagrangian" in str(caught.value)
    assert "ilp" in str(caught.value)
    assert "81,920 units" in str(caught.value)
    with pytest.raises(RecipeError, match="GiB"):
        dp_curve(rng.random((2_304, 3)), (4, 6, 8), rng.integers(1, 10**6, 2_304))


def test_a_full_model_of_heads():
    rng = np.random.default_rng(1)
    costs = rng.lognormal(0, 2, (2_304, 1)) * 4.0 ** -np.array([2, 4, 6, 8])
    sizes = np.full(2_304, 128 * 128)
    curve = dp_curve(costs, (2, 4, 6, 8), sizes)
    assert len(curve.budgets) == 3 * 2_304 + 1
    answer = curve.at(6 * int(sizes.sum()))
    assert answer.bits_used == answer.budget
