"""Settings that would be ignored or quietly changed beside others, values that would overflow, and what was written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepquant.codec.spec import CodecSpec, four_level_fault
from stepquant.codegen.spec import KernelSpec
from stepquant.errors import BackendError, RecipeError
from stepquant.layout import PageLayout, StateShape
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
            ["pivots.count is 20", "allocation.granularity=16", "a multiple of 16, such as 16 or 32"],
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


TWO_BITS = [
    ({}, "budget.candidates is [2, 4, 6, 8]", "give budget.candidates=[4,6,8]"),
    ({"budget.candidates": [2, 8]}, "budget.candidates is [2, 8]", "give budget.candidates=[8]"),
    ({"budget.bits": 2, "allocation.mode": "uniform"}, "budget.bits is 2", "give budget.bits=4"),
    ({"budget.bits": None, "budget.bytes_per_request": 10**6}, "budget.candidates is [2, 4, 6, 8]", "[4,6,8]"),
]


@pytest.mark.parametrize(("flat", "names", "says"), TWO_BITS)
def test_two_bit_heads_that_no_kernel_takes_are_refused_before_calibration(flat, names, says):
    with pytest.raises(RecipeError) as caught:
        recipe(**{"budget.bits": 4, **flat}).check_geometry(replace(GDN, value_dim=32))
    message = str(caught.value)
    assert message.startswith(names)
    assert "two-bit heads need half of 32 columns in groups of 32" in message
    assert says in message


@pytest.mark.parametrize(
    "flat",
    [
        {"budget.candidates": [4, 6, 8]}, {"allocation.unit": "row"}, {"budget.bits": 6},
        {"allocation.mode": "uniform", "budget.bits": 4},
        {"allocation.mode": "uniform", "budget.bits": 2, "spatial.codec": "dsq"},
    ],
)  # fmt: skip
def test_what_needs_no_two_bit_heads_is_let_through(flat):
    recipe(**{"budget.bits": 4, **flat}).check_geometry(replace(GDN, value_dim=32))
    recipe(**{"budget.bits": 4}).check_geometry(GDN)


@pytest.mark.parametrize(
    ("value_dim", "group"),
    [(v, g) for v in (16, 32, 48, 64, 96, 128, 192) for g in (8, 16, 24, 32, 64) if v % g == 0],
)
def test_the_early_rule_is_that_of_the_kernels(value_dim, group):
    """The recipe's check and the kernel generator agree on every shape, in the same words."""
    layout = PageLayout(StateShape(1, 16, value_dim), np.full((1, 1, 16), 2), "head", group=group)
    fault = four_level_fault(value_dim, group)
    if fault is None:
        KernelSpec.of("gdn", 1, layout, CodecSpec(group=group))
    else:
        with pytest.raises(BackendError, match=f"^{fault}$"):
            KernelSpec.of("gdn", 1, layout, CodecSpec(group=group))


def test_what_the_user_wrote_is_known():
    made = recipe(seed=3)
    assert made.written == {"model.path", "budget.bits", "seed"}
    assert made == Recipe.from_config(made.to_dict(), explicit=())
    assert "written" not in made.to_dict()
