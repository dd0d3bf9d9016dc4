import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.solvers.lagrangian import relax
from stepquant.solvers.rank_dp import balance

from .strategies import cost_tables


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_balanced_choice_and_bound_against_brute_force(data):
    ranks, heads, options = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    count = ranks * heads
    costs = data.draw(cost_tables(count, options))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    charge = np.cumsum(rng.integers(1, 4, (count, options)), axis=1)
    # Stored bits are the charge and a constant of the head, or something of their own that rises as well.
    constant = data.draw(st.booleans())
    stored = (
        charge + rng.integers(0, 3, (count, 1)) if constant else np.cumsum(rng.integers(1, 4, charge.shape), axis=1)
    )
    rank = np.repeat(np.arange(ranks), heads)
    budget = int(charge[:, 0].sum() + data.draw(st.floats(0, 1)) * (charge[:, -1] - charge[:, 0]).sum())
    found = balance(costs, charge, stored, rank, ranks, budget, relax(costs, charge, budget))
    best = np.inf
    for choice in itertools.product(range(options), repeat=count):
        place = np.arange(count), np.array(choice)
        totals = np.bincount(rank, stored[place], ranks)
        if (totals == totals[0]).all() and charge[place].sum() <= budget:
            best = min(best, float(costs[place].sum()))
    assert found.bound <= best + 1e-9 * costs.max()
    if found.choice is None:
        assert not constant or best == np.inf
        return
    place = np.arange(count), found.choice
    totals = np.bincount(rank, stored[place], ranks)
    assert (totals == totals[0]).all()
    assert charge[place].sum() <= budget
    assert costs[place].sum() >= best - 1e-12 * costs.max()
    if constant:
        assert costs[place].sum() == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert found.bound == pytest.approx(best, rel=1e-9, abs=1e-9 * costs.max())
