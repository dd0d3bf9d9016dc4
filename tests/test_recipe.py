"""The schema of recipes: what is accepted, what is refused and how, and the pins of the paper's method."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepquant.errors import RecipeError
from stepquant.geometry import Geometry
from stepquant.recipe import Recipe
from stepquant.recipe_rules import PAPER_PINS
from stepquant.units import format_bytes, parse_bytes

GDN = Geometry("gdn", "qwen3_5_text", (0, 1, 2), 8, 4, 128, 128)
KDA = Geometry("kda", "kimi_linear", (0, 1, 2), 8, 8, 128, 128)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        node = result
        for part in sections:
            node = node.setdefault(part, {})
        node[last] = value
    return result


def recipe(**flat: Any) -> Recipe:
    """A recipe with a budget and a model, and other keys given with __ for dots."""
    values = {key.replace("__", "."): value for key, value in flat.items()}
    if not any(key in values for key in ("budget.bytes_per_request", "budget.concurrency")):
        values.setdefault("budget.bits", 6)
    return Recipe.from_config(nested({"model.path": "builtin:tiny_gdn", **values}))


def refused(**flat: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(RecipeError) as caught:
        recipe(**flat)
    return str(caught.value)


def test_defaults_and_round_trip():
    made = recipe(name="mine", allocation__caps={3: 6, "0/1": 4}, budget__candidates=[8, 4], codegen__targets=["sm_90"])
    assert made.output == "build/mine"
    assert made.temporal.horizon == 2048
    assert made.allocation.caps == {"3": 6, "0/1": 4}
    assert made.budget.candidates == (4, 8)
    assert Recipe.from_config(made.to_dict()) == made


def test_geometry_round_trip():
    made = recipe(model__geometry=GDN.to_json())
    assert made.model.geometry == GDN
    assert Recipe.from_config(made.to_dict()) == made


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"budgt.bits": 6}, ["unknown key budgt.bits", "did you mean 'budget.bits'"]),
        ({"temporal.horizn": 5}, ["unknown key temporal.horizn", "did you mean 'temporal.horizon'"]),
        ({"window.size": 5}, ["unknown key window.size"]),
        ({"temporal.weight": "gates"}, ["temporal.weight is 'gates'", "gate, transition", "did you mean 'gate'"]),
        ({"solver": "lp"}, ["solver is 'lp'", "auto, dp, lagrangian, ilp"]),
        ({"method": "papers"}, ["method is 'papers'", "did you mean 'paper'"]),
        ({"temporal.horizon": 0}, ["temporal.horizon is 0", "from 1 to 10000000"]),
        ({"temporal.horizon": 1.5}, ["temporal.horizon is 1.5"]),
        ({"temporal.horizon": True}, ["temporal.horizon is True"]),
        ({"seed": float("nan")}, ["seed is nan"]),
        ({"seed": float("inf")}, ["seed is inf"]),
        ({"seed": float("-inf")}, ["seed is -inf"]),
        ({"spatial.gamma": -1}, ["spatial.gamma is -1", "from 0 to 2"]),
        ({"spatial.gamma": "much"}, ["spatial.gamma is 'much'"]),
        ({"spatial.refits": 9}, ["spatial.refits is 9"]),
        ({"budget.bits": 9}, ["budget.bits is 9", "from 2 to 8"]),
        ({"budget.bits": 5, "budget.candidates": [6, 8]}, ["budget.bits is 5", "[6, 8]"]),
        ({"budget.candidates": [4, 5]}, ["budget.candidates has 5", "2, 4, 6, 8"]),
        ({"budget.candidates": [4, 4]}, ["budget.candidates is [4, 4]", "distinct"]),
        ({"budget.candidates": []}, ["budget.candidates is []"]),
        ({"budget.candidates": 6}, ["budget.candidates is 6", "a list"]),
        ({"budget.strategy": "extra"}, ["budget.strategy is 'extra'", "did you mean 'extra_buffer'"]),
        ({"pivots.count": -1}, ["pivots.count is -1"]),
        ({"allocation.granularity": 4}, ["allocation.granularity is 4", "1, 8, 16"]),
        ({"allocation.caps": {"first": 6}}, ["allocation.caps has the key 'first'"]),
        ({"allocation.caps": {0: 5}}, ["allocation.caps.0 is 5"]),
        ({"allocation.caps": {0: 4}, "allocation.floors": {0: 6}}, ["allocation.floors.0 is 6", "allocation.caps.0"]),
        ({"window.length": 3}, ["window.length is 3", "one of 1, 2, 4, 8, 16, or auto"]),
        ({"window.dtype": "fp8"}, ["window.dtype is 'fp8'"]),
        ({"target.tensor_parallel": 3}, ["target.tensor_parallel is 3"]),
        ({"codegen.targets": ["sm_91"]}, ["codegen.targets[0] is 'sm_91'", "did you mean 'sm_90'"]),
        ({"codegen.targets": "sm_90"}, ["codegen.targets is 'sm_90'", "[sm_90]"]),
        ({"model.device": "gpu"}, ["model.device is 'gpu'", "cuda:N"]),
        ({"model.weights": "random"}, ["model.weights is 'random'", "random:SEED"]),
        ({"model.device_map": "auto", "model.device": "cpu"}, ["model.device_map", "model.device"]),
        ({"model.device_map": "auto", "model.loading": "layerwise"}, ["model.loading", "model.device_map"]),
        ({"model.geometry": {"famly": "gdn"}}, ["model.geometry.famly", "did you mean 'family'"]),
        ({"model.geometry": GDN.to_json(), "model.expect_family": "kda"}, ["model.expect_family is 'kda'"]),
        ({"model.path": None}, ["model.path is not set; give model.path=/path or calibration=synthetic"]),
        ({"model.path": None, "calibration": "synthetic"}, ["model.geometry"]),
        ({"data.source": "file"}, ["data.path is not set"]),
        ({"data.path": "x.txt"}, ["data.path is 'x.txt'", "data.source=file"]),
        ({"data.split": "dev"}, ["data.split is 'dev'"]),
        ({"dry_run": "yes"}, ["dry_run is 'yes'", "true or false"]),
        ({"name": "a/b"}, ["name is 'a/b'"]),
        ({"model": 5}, ["model is 5", "model.path=..."]),
        ({"budget.bytes_per_request": "lots"}, ["budget.bytes_per_request is 'lots'", "24MiB"]),
        ({"budget.bits": None}, ["budget has no target", "budget.concurrency"]),
        ({"budget.bits": 6, "budget.concurrency": 5}, ["budget.concurrency and budget.bits are both given"]),
        ({"budget.bits": None, "budget.concurrency": 5}, ["budget.gpu_memory is not set"]),
        ({"spatial.codec": "nvfp4"}, ["spatial.codec is 'nvfp4'", "allocation.mode=uniform"]),
        ({"allocation.mode": "uniform", "budget.bits": 5}, ["budget.bits is 5", "2, 4, 6, 8"]),
        ({"allocation.mode": "uniform", "spatial.codec": "damp"}, ["budget.bits is 6", "expected one of 8"]),
        ({"solver_options.time_limit": 0}, ["solver_options.time_limit is 0"]),
        ({"cache.dir": ""}, ["cache.dir is ''"]),
    ],
)
def test_refusals_name_key_value_and_expectation(flat, words):
    message = refused(**flat)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_message_for_something_that_is_no_mapping():
    with pytest.raises(RecipeError, match="expected a mapping"):
        Recipe.from_config([1])


@pytest.mark.parametrize(
    ("value", "size"),
    [(7, 7), ("24MiB", 24 << 20), ("80 GiB", 80 << 30), ("1.5gb", 1_500_000_000), ("2k", 2048), ("1_000", 1000)],
)
def test_byte_sizes(value, size):
    assert parse_bytes(value) == size
    assert recipe(budget__bytes_per_request=value).budget.bytes_per_request == size


@given(st.integers(0, 2**50))
def test_byte_sizes_survive_exactly(size):
    assert parse_bytes(str(size)) == parse_bytes(f"{size}B") == parse_bytes(size) == size
    assert parse_bytes(f"{size}MiB") == size << 20


@pytest.mark.parametrize(
    "value",
    [
        "",
        "MiB",
        "-3",
        "1.2.3",
        "3 parsecs",
        "9" * 400 + ".5",
        "9" * 5000 + "KiB",
        -1,
        1.5,
        True,
        None,
        [3],
        float("nan"),
    ],
)
def test_sizes_that_are_none(value):
    with pytest.raises(RecipeError, match="bytes"):
        parse_bytes(value)


def test_sizes_for_people():
    assert [format_bytes(x) for x in (5, 1536, 24 << 20, 80 << 30)] == ["5 B", "1.5 KiB", "24 MiB", "80 GiB"]


def test_targets_of_the_budget():
    assert recipe(budget__bits=5.5).budget.target == "bits"
    made = recipe(budget__bytes_per_request="24MiB")
    assert (made.budget.target, made.budget.bits) == ("bytes_per_request", None)
    made = recipe(budget__concurrency=300, budget__gpu_memory="80GiB", budget__gpus=4)
    assert (made.budget.target, made.budget.gpu_memory, made.budget.slots_per_request) == ("concurrency", 80 << 30, 5)
    # a target that the user wrote replaces the recipe's, in both directions
    both = nested({"model.path": "x", "budget.bits": 6, "budget.bytes_per_request": "24MiB"})
    assert Recipe.from_config(both, explicit=["budget.bytes_per_request"]).budget.bits is None
    assert Recipe.from_config(both, explicit=["budget.bits"]).budget.bytes_per_request is None
    assert Recipe.from_config(both, explicit=[]).budget.target == "bytes_per_request"


def test_candidates_follow_the_budget():
    assert recipe(budget__bits=6).candidates() == (4, 6, 8)
    assert recipe(budget__bits=5.99).candidates() == (2, 4, 6, 8)
    assert recipe(budget__bits=5, budget__candidates=[4, 8]).candidates() == (4, 8)
    assert recipe(budget__bytes_per_request="24MiB").candidates(6.2) == (4, 6, 8)
    assert recipe(budget__bytes_per_request="24MiB").candidates() == (2, 4, 6, 8)


@pytest.mark.parametrize(("strategy", "slots"), [("off", 1), (False, 1), ("no_buffer", 3), ("extra_buffer", 5)])
def test_slots_of_a_request(strategy, slots):
    assert recipe(budget__strategy=strategy).budget.slots_per_request == slots


def paper(explicit: tuple[str, ...] = (), **flat: Any) -> Recipe:
    """A recipe under method=paper; only `explicit` keys count as written by the user."""
    values = {"method": "paper", "model.path": "x", "budget.bits": 6}
    values.update({key.replace("__", "."): value for key, value in flat.items()})
    return Recipe.from_config(nested(values), explicit=explicit)


def test_paper_replaces_what_recipes_set():
    made = paper(
        temporal__weight="transition",
        temporal__sensitivity="local",
        temporal__horizon=512,
        spatial__gamma=0.5,
        spatial__impact="transition",
        spatial__refits=3,
        window__length=8,
        budget__candidates=[2, 8],
        allocation__unit="row",
        allocation__granularity=16,
        pivots__count=32,
    )
    assert made.select(*PAPER_PINS) == PAPER_PINS
    assert made.candidates() == (4, 6, 8)
    assert (made.spatial.refits, made.allocation.granularity, made.allocation.unit) == (1, 1, "auto")
    assert made.pivots.count == 32
    assert Recipe.from_config(made.to_dict()) == made


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temporal.weight", "transition"),
        ("temporal.sensitivity", "gradient"),
        ("temporal.horizon", 512),
        ("spatial.gamma", 0.5),
        ("spatial.impact", "transition"),
        ("window.length", 8),
        ("budget.candidates", [2, 4, 6, 8]),
    ],
)
def test_paper_refuses_overrides_that_contradict_it(key, value):
    with pytest.raises(RecipeError) as caught:
        paper(explicit=(key,), **{key: value})
    assert key in str(caught.value)
    assert "method=paper pins it to" in str(caught.value)
    assert "method=default" in str(caught.value)


def test_paper_accepts_overrides_that_agree_or_are_free():
    assert paper(("temporal.horizon",), temporal__horizon=2048).temporal.horizon == 2048
    assert paper(("budget.candidates",), budget__candidates=[4, 6, 8]).candidates() == (4, 6, 8)
    assert paper(("pivots.count",), pivots__count=0).pivots.count == 0
    assert paper(("solver",), solver="ilp").solver == "ilp"
    # in a plain mapping everything is written by the user
    with pytest.raises(RecipeError, match=r"spatial\.gamma is 0\.5"):
        Recipe.from_config(nested({"method": "paper", "model.path": "x", "budget.bits": 6, "spatial.gamma": 0.5}))


def test_paper_pins_the_unit_of_the_family():
    paper().check_geometry(GDN)
    assert (paper().unit("gdn"), paper().unit("kda")) == ("head", "row")
    row = paper(("allocation.unit",), allocation__unit="row")
    row.check_geometry(KDA)
    with pytest.raises(RecipeError, match=r"allocation\.unit is 'row', but method=paper pins it to 'head'"):
        row.check_geometry(GDN)


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"model.expect_family": "kda"}, ["model.expect_family is 'kda'", "qwen3_5_text"]),
        ({"pivots.count": 24}, ["pivots.count is 24", "24 units"]),
        ({"allocation.unit": "row", "allocation.granularity": 16, "solver": "dp"}, ["solver is 'dp'", "solver=ilp"]),
        ({"allocation.caps": {3: 6}}, ["allocation.caps.3", "layer 3", "0, 1, 2"]),
        ({"allocation.floors": {"1/8": 6}}, ["allocation.floors.1/8", "no head 8", "0 to 7"]),
    ],
)
def test_refusals_that_need_the_geometry(flat, words):
    made = recipe(**flat)
    with pytest.raises(RecipeError) as caught:
        made.check_geometry(GDN)
    for word in words:
        assert word in str(caught.value)


def test_geometry_that_ranks_and_granularity_do_not_divide():
    odd = Geometry("gdn", "m", (0,), 6, 6, 100, 64)
    with pytest.raises(RecipeError, match=r"target\.tensor_parallel is 4.*6 value heads"):
        recipe(target__tensor_parallel=4).check_geometry(odd)
    with pytest.raises(RecipeError, match=r"allocation\.granularity is 8.*100 key rows"):
        recipe(allocation__granularity=8).check_geometry(odd)


def test_select_and_replace():
    made = recipe(seed=3)
    assert made.select("seed", "temporal.horizon") == {"seed": 3, "temporal.horizon": 2048}
    assert made.select("samples") == {"samples": {"every": 8, "per_layer": 64}}
    assert made.replace({"budget.bits": 4}).budget.bits == 4
    assert made.replace({"budget.bytes_per_request": 9}).budget.target == "bytes_per_request"
    with pytest.raises(RecipeError, match=r"unknown key budget\.bitz"):
        made.replace({"budget.bitz": 4})
    with pytest.raises(RecipeError, match="method=paper pins"):
        made.replace({"method": "paper"}).replace({"window.length": 4})


def test_warnings():
    assert recipe().warnings() == []
    (warning,) = recipe(temporal__weight="transition").warnings()
    assert "temporal.sensitivity" in warning
    assert recipe(temporal__weight="transition", temporal__sensitivity="local").warnings() == []


def test_seed_of_random_weights():
    assert recipe(model__weights="random:17").model.weights_seed == 17
    assert recipe().model.weights_seed is None
