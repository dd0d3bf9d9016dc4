"""Small random problems."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

CANDIDATES = st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True).map(lambda values: tuple(sorted(values)))


@st.composite
def cost_tables(draw, units, count):
    """[units, count] costs: rising and falling, with ties and zeros, or falling about fourfold a bit."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["any", "ties", "falling", "wide"]))
    if kind == "any":
        return rng.random((units, count))
    if kind == "ties":
        return rng.integers(0, 4, (units, count)).astype(float)
    scale = rng.lognormal(0, 2 if kind == "falling" else 8, (units, 1))
    return scale * np.sort(rng.random((units, count)), axis=1)[:, ::-1] * 4.0 ** -np.arange(count)


@st.composite
def tables(draw, max_units=5):
    """(costs, candidates, sizes) of at most `max_units` units, sizes equal or not."""
    candidates = draw(CANDIDATES)
    units = draw(st.integers(1, max_units))
    costs = draw(cost_tables(units, len(candidates)))
    equal = draw(st.booleans())
    size = st.integers(1, 12)
    sizes = [draw(size)] * units if equal else [draw(size) for _ in range(units)]
    return costs, candidates, np.array(sizes)
