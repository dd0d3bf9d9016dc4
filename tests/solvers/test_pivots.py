import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import DataError, RecipeError
from stepquant.solvers.pivots import round_pivots


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whole_groups_that_cover_the_most_risk(data):
    heads, rows, granularity = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    risk = rng.random((1, heads, rows)) if data.draw(st.booleans()) else rng.integers(0, 3, (1, heads, rows)) * 1.0
    pivots = rng.random((1, heads, rows)) < data.draw(st.floats(0, 1))
    rounded = round_pivots(pivots, risk, granularity)
    counts = rounded.sum(axis=2)[0]
    assert (counts % granularity == 0).all()
    most = heads * (rows // granularity) * granularity
    assert abs(int(rounded.sum()) - min(int(pivots.sum()), most)) <= granularity / 2
    ranked = -np.sort(-risk[0], axis=1)
    best = max(
        sum(ranked[head, : groups * granularity].sum() for head, groups in enumerate(shared))
        for shared in itertools.product(range(rows // granularity + 1), repeat=heads)
        if sum(shared) * granularity == counts.sum()
    )
    assert risk[rounded].sum() == pytest.approx(best)


def test_the_paper_s_number_of_pivots_is_kept():
    rng = np.random.default_rng(0)
    risk = rng.lognormal(0, 2, (20, 32, 128))
    pivots = risk >= np.sort(risk.reshape(-1))[-512]
    rounded = round_pivots(pivots, risk, 16)
    assert rounded.sum() == 512
    assert (rounded.sum(axis=2) % 16 == 0).all()


def test_pivots_in_whole_groups_stay():
    pivots = np.zeros((1, 2, 8), bool)
    pivots[0, 1, :4] = True
    assert (round_pivots(pivots, np.where(pivots, 5.0, 1.0), 4) == pivots).all()


def test_wrong_input_is_refused():
    with pytest.raises(RecipeError, match="granularity is 0"):
        round_pivots(np.zeros((1, 1, 4), bool), np.zeros((1, 1, 4)), 0)
    with pytest.raises(DataError, match="same shape"):
        round_pivots(np.zeros((1, 1, 4), bool), np.zeros((1, 1, 5)), 2)
    with pytest.raises(DataError, match="finite"):
        round_pivots(np.zeros((1, 1, 4), bool), np.full((1, 1, 4), np.nan), 2)
