import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import RecipeError
from stepquant.solvers.row_pricing import compositions, price_heads

from .brute import head_prices
from .strategies import CANDIDATES, cost_tables


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_number_of_bits_has_its_least_cost(data):
    candidates = data.draw(CANDIDATES)
    rows, batch = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3))
    granularity, spare = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    costs = data.draw(cost_tables(batch * rows, len(candidates))).reshape(batch, rows, len(candidates))
    prices = price_heads(costs, candidates, granularity, spare)
    for head in range(batch):
        expected = head_prices(costs[head], candidates, granularity, spare)
        assert prices.row_bits.tolist() == sorted(expected)
        assert prices.costs[head] == pytest.approx([expected[bits] for bits in sorted(expected)], rel=1e-9)
        for option, bits in enumerate(prices.row_bits):
            choice, stored = prices.choice[head, option], prices.stored[head, option]
            assert stored @ np.array(candidates) == bits
            assert (stored % granularity == 0).all()
            assert (np.bincount(choice, minlength=len(candidates)) <= stored).all()
            assert costs[head, np.arange(rows), choice].sum() == pytest.approx(prices.costs[head, option], rel=1e-12)


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (1, 1), (5, 2), (8, 3), (8, 4), (3, 5)])
def test_neighbouring_vectors_differ_by_one_group(total, parts):
    vectors = list(compositions(total, parts))
    assert len(set(vectors)) == len(vectors)
    assert all(sum(vector) == total for vector in vectors)
    for before, after in itertools.pairwise(vectors):
        assert sorted(np.subtract(after, before)) == [-1] + [0] * (parts - 2) + [1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_spare_groups_gain_nothing_where_more_bits_never_cost_more(data):
    candidates = data.draw(CANDIDATES)
    rows, granularity = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    costs = -np.sort(-data.draw(cost_tables(rows, len(candidates))), axis=1)[None]
    tight, loose = price_heads(costs, candidates, granularity), price_heads(costs, candidates, granularity, 2)
    for bits, cost in zip(loose.row_bits, loose.costs[0], strict=True):
        below = tight.costs[0][tight.row_bits <= bits]
        assert below.min() <= cost * (1 + 1e-9)


def test_a_full_head_is_priced_as_the_sorted_assignment_where_rows_differ_by_a_factor():
    rng = np.random.default_rng(0)
    scale = np.sort(rng.lognormal(0, 2, 128))
    costs = (scale[:, None] * 4.0 ** -np.array([4, 6, 8]))[None]
    prices = price_heads(costs, (4, 6, 8), 16)
    assert prices.row_bits.tolist() == [16 * groups for groups in range(32, 65, 2)]
    for option in range(len(prices.row_bits)):
        assert (np.diff(prices.choice[0, option].astype(int)) >= 0).all()


def test_too_fine_a_granularity_is_refused():
    with pytest.raises(RecipeError, match="granularity 1 gives a head of 128 rows 366,145 ways"):
        price_heads(np.zeros((1, 128, 4)), (2, 4, 6, 8), 1)
