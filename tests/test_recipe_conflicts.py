"""Settings that would be ignored or quietly changed beside others, values that would overflow, and what was written."""

from __future__ import annotations

import pytest

from stepquant.errors import RecipeError
from stepquant.recipe import Recipe
from tests.test_recipe import GDN, recipe, refused


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"window.length": "atuo"}, ["window.length is 'atuo'", "2, 4, 8, 16, or auto", "did you mean 'auto'"]),
        ({"budget.bits": None, "budget.concurrency": 10**23}, ["budget.concurrency is 1", "from 1 to 10000000"]),
        ({"budget.bits": None, "budget.bytes_per_request": 1e30}, ["budget.bytes_per_request is 1e+30", "1024TiB"]),
        ({"budget.gpu_memory": "9000000TiB"}, ["budget.gpu_memory is '9000000TiB'", "1024TiB"]),
        ({"seed": 10**30}, ["seed is 1", "from 0 to 4294967295"]),
        ({"data.seed": 2**32}, ["data.seed is 4294967296"]),
        ({"data.segments": 10**12}, ["data.segments is 1000000000000", "from 1 to 10000000"]),
        ({"model.weights": "random:" + "9" * 30}, ["model.weights is 'random:999", "random:SEED"]),
        ({"allocation.caps": {0: 2}}, ["allocation.caps.0 is 2", "lowest of the candidates [4, 6, 8]", "at least 4"]),
        (
            {"allocation.floors": {"0/1": 8}, "budget.candidates": [4, 6]},
            ["allocation.floors.0/1 is 8", "highest of the candidates [4, 6]", "at most 6"],
        ),
        ({"allocation.mode": "uniform", "allocation.caps": {0: 4}}, ["allocation.caps is {'0': 4}", "mode=uniform"]),
        ({"allocation.mode": "uniform", "allocation.floors": {1: 8}}, ["allocation.floors is", "mode=uniform"]),
        ({"allocation.mode": "uniform", "solver": "ilp"}, ["solver is 'ilp'", "mode=uniform", "leave solver"]),
        ({"model.geometry": {"family": "gdn"}}, ["geometry lacks model_type, layers, num_heads", "expected a value"]),
        ({"model.geometry": {**GDN.to_json(), "layers": 5}}, ["geometry.layers is 5", "a list of whole numbers"]),
    ],
)
def test_refusals_name_key_value_and_expectation(flat, words):
    message = refused(**flat)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        (
            {"allocation.unit": "row", "allocation.granularity": 16, "pivots.count": 20},
            ["pivots.count is 20", "allocation.granularity=16", "a multiple of 16, such as 16"],
        ),
        (
            {"pivots.count": 1, "target.tensor_parallel": 2},
            ["pivots.count is 1", "2 tensor-parallel ranks", "a multiple of 2, such as 2"],
        ),
    ],
)
def test_pivots_that_would_be_rounded_are_refused(flat, words):
    with pytest.raises(RecipeError) as caught:
        recipe(**flat).check_geometry(GDN)
    for word in words:
        assert word in str(caught.value)


def test_what_the_user_wrote_is_known():
    made = recipe(seed=3)
    assert made.written == {"model.path", "budget.bits", "seed"}
    assert made == Recipe.from_config(made.to_dict(), explicit=())
    assert "written" not in made.to_dict()
