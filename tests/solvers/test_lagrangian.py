import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import InfeasibleError
from stepquant.solvers.dp import solve_dp
from stepquant.solvers.lagrangian import solve_lagrangian
from stepquant.solvers.table import smallest_feasible

from .brute import best_allocation
from .strategies import tables


@settings(max_examples=2000, deadline=None)
@given(tables(max_units=4), st.floats(0, 1))
def test_feasible_and_within_its_own_bound(table, where):
    costs, candidates, sizes = table
    least, most = candidates[0] * sizes.sum(), candidates[-1] * sizes.sum()
    budget = int(least + where * (most - least))
    answer = solve_lagrangian(costs, candidates, sizes, budget)
    best, _ = best_allocation(costs, candidates, sizes, budget)
    rounding = 1e-12 * max(best, float(costs.max()))
    assert answer.bits_used <= budget
    assert answer.bits_used == (answer.bits * sizes).sum()
    assert answer.cost == pytest.approx(sum(costs[u, c] for u, c in enumerate(answer.choice)), rel=1e-12)
    assert answer.bound <= best + rounding
    assert best <= answer.cost + rounding
    assert answer.gap == pytest.approx((answer.cost - answer.bound) / max(answer.cost, 1e-300), abs=1e-12)
    if answer.status == "optimal":
        assert answer.cost <= best + rounding


@settings(max_examples=200, deadline=None)
@given(tables(max_units=40), st.floats(0, 1))
def test_nothing_that_gains_is_left_unspent(table, where):
    costs, candidates, sizes = table
    least, most = candidates[0] * sizes.sum(), candidates[-1] * sizes.sum()
    budget = int(least + where * (most - least))
    answer = solve_lagrangian(costs, candidates, sizes, budget)
    exact = solve_dp(costs, candidates, sizes, budget)
    assert answer.bound <= exact.cost * (1 + 1e-12) + 1e-12 * costs.max()
    left = budget - answer.bits_used
    for unit, chosen in enumerate(answer.choice):
        for option in range(chosen + 1, len(candidates)):
            fits = (candidates[option] - candidates[chosen]) * sizes[unit] <= left
            assert not (fits and costs[unit, option] < costs[unit, chosen])


@settings(max_examples=200, deadline=None)
@given(tables())
def test_the_message_states_the_smallest_budget(table):
    costs, candidates, sizes = table
    smallest = smallest_feasible(candidates, sizes)
    assert solve_lagrangian(costs, candidates, sizes, smallest).bits_used == smallest
    with pytest.raises(InfeasibleError, match=f"at least {smallest:,} bits"):
        solve_lagrangian(costs, candidates, sizes, smallest - 1)


def test_repair_takes_points_off_the_hull():
    # The hull goes from 2 straight to 8 bits; with 4 bits left only the corner off the hull fits.
    answer = solve_lagrangian([[10.0, 9.0, 0.0]], (2, 4, 8), [1], 6)
    assert answer.bits.tolist() == [4]
    assert answer.bound == pytest.approx(10 - 10 / 6 * 4)


def test_a_full_model_of_rows_is_solved_to_a_small_gap():
    rng = np.random.default_rng(2)
    steps = np.array([2, 4, 6, 8])
    costs = rng.lognormal(0, 2, (81_920, 1)) * 4.0**-steps * rng.lognormal(0, 0.3, (81_920, 4))
    answer = solve_lagrangian(costs, steps, np.full(81_920, 128), int(5.123 * 81_920 * 128))
    assert answer.gap <= 1e-5
    assert answer.bits_used <= answer.budget
