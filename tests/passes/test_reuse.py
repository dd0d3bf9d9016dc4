"""``reuse``: what the artifact fixes, what is refused by which key, and what the new plan records."""

from __future__ import annotations

import json

import pytest
import torch

from stepquant.compare import compare_plans
from stepquant.config import compose_recipe
from stepquant.errors import RecipeError
from stepquant.passes.compile import compile_recipe
from stepquant.passes.reuse import Reused, needs_states
from stepquant.plan import load_plan
from tests.plans import small_plan

SMALL = {"data.segments": 2, "data.length": 64, "data.batch": 1, "samples.per_layer": 4, "method": "paper"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An artifact of the GDN model at 6 bits, and the directory it lies in."""
    root = tmp_path_factory.mktemp("reuse")
    settings = {**SMALL, "cache.dir": str(root / "cache"), "output": str(root / "g6")}
    compile_recipe(compose_recipe("tiny_gdn_6bit", settings), quiet=True)
    return root


def again(made, tmp_path, *overrides, method="paper"):
    """Compile once more from the artifact's tables."""
    given = [f"reuse={made}/g6", f"output={tmp_path}/out", f"method={method}", *overrides]
    return compile_recipe(compose_recipe("tiny_gdn_6bit", given), quiet=True)


def refused(*args, **kwargs) -> str:
    with pytest.raises(RecipeError) as caught:
        again(*args, **kwargs)
    return str(caught.value)


def test_invented_statistics_are_not_mixed_with_real_ones(made, tmp_path):
    message = refused(made, tmp_path, "calibration=synthetic")
    assert message.startswith(f"calibration is 'synthetic', but reuse={made}/g6 was made with 'trace'")
    invented = compose_recipe("tiny_gdn_6bit", ["calibration=synthetic", "cache.enabled=false", f"output={tmp_path}/s"])
    compile_recipe(invented, quiet=True)
    real = compose_recipe("tiny_gdn_6bit", [f"reuse={tmp_path}/s", f"output={tmp_path}/out"])
    with pytest.raises(RecipeError, match=r"calibration is 'trace', but .* with 'synthetic'; give calibration=synth"):
        compile_recipe(real, quiet=True)
    assert not (tmp_path / "out").exists()


def test_the_new_plan_records_the_text_that_was_calibrated_on(made, tmp_path):
    again(made, tmp_path, "solver=dp", "data.segments=2", "data=builtin")
    first, second = load_plan(made / "g6"), load_plan(tmp_path / "out")
    assert second.settings["data"] == first.settings["data"]
    assert second.settings["samples"] == first.settings["samples"]
    assert set(compare_plans(made / "g6", tmp_path / "out")["settings"]) == {"solver"}
    assert "segments: 2\n" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.segments=4", "data.segments is 4, but reuse=.* was calibrated with 2; leave data.segments out"),
        ("data=wikitext2", "data.source is 'wikitext2', but reuse=.* was calibrated with 'builtin'"),
        ("samples.per_layer=8", "samples.per_layer is 8, but reuse=.* was calibrated with 4"),
        ("seed=3", "seed is 3, but reuse=.* was calibrated with 0"),
        ("model.weights=random:1", "model.weights is 'random:1', but reuse=.* was made with 'checkpoint'"),
        ("spatial.refits=2", "spatial.refits is 2, but method=paper pins it to 1"),
    ],
)
def test_refusals_name_the_key_that_differs(made, tmp_path, override, words):
    with pytest.raises(RecipeError, match=words):
        again(made, tmp_path, override)
    assert not (tmp_path / "out").exists()


def test_refusals_of_another_method_name_its_keys(made, tmp_path):
    message = refused(made, tmp_path, method="default")
    assert "temporal.weight is 'rollout'" in message or "temporal.weight=gate" in message
    message = refused(made, tmp_path, "window.length=2", "temporal.weight=rollout", method="default")
    assert "window.length=1" in message
    gates = ("temporal.weight=gate", "temporal.sensitivity=none", "window.length=1")
    message = refused(made, tmp_path, *gates, "allocation.unit=row", method="default")
    assert "allocation.unit is 'row', but reuse=" in message
    message = refused(made, tmp_path, *gates, "spatial.gamma=0.5", method="default")
    assert message.startswith("spatial.gamma is 0.5, but reuse=")
    assert "set spatial.gamma=0.25" in message


def test_a_window_that_is_to_be_chosen_needs_its_costs(tmp_path):
    small = {**SMALL, "cache.enabled": False, "method": "default", "output": str(tmp_path / "made")}
    compile_recipe(compose_recipe("tiny_gdn_6bit", small), quiet=True)
    given = [f"reuse={tmp_path}/made", f"output={tmp_path}/out", "window.length=auto", "budget.bytes_per_request=3MiB"]
    with pytest.raises(RecipeError, match=r"^window.length=auto tries lengths .* of: window.length is 1, but reuse="):
        compile_recipe(compose_recipe("tiny_gdn_6bit", given), quiet=True)
    with pytest.raises(RecipeError, match=r"^temporal.weight is 'gate', but reuse="):
        compile_recipe(compose_recipe("tiny_gdn_6bit", [*given, "temporal.weight=gate"]), quiet=True)


def test_a_dry_run_says_what_the_tables_spare(made, tmp_path):
    assert again(made, tmp_path, "budget.bits=5", "dry_run=true").summary["passes"] == ["allocation"]
    gates = ("temporal.weight=gate", "temporal.sensitivity=none", "window.length=1")
    message = refused(made, tmp_path, *gates, "spatial.gamma=0.5", "dry_run=true", method="default")
    assert message.startswith("spatial.gamma is 0.5, but reuse=")


def test_other_candidates_need_no_new_table(made, tmp_path):
    again(made, tmp_path, "budget.candidates=[4,6,8]")
    assert torch.equal(load_plan(tmp_path / "out").bits, load_plan(made / "g6").bits)
    gates = ("temporal.weight=gate", "temporal.sensitivity=none", "window.length=1")
    again(made, tmp_path, "budget.candidates=[4,8]", "spatial.refits=1", "spatial.sample=0", *gates, method="default")
    assert set(load_plan(tmp_path / "out").bits.unique().tolist()) <= {4, 8, 16}


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "none is no directory; expected the output"), ("file", "file is a file"), ("empty", "holds no plan")],
)
def test_what_is_no_artifact_is_named(tmp_path, name, words):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=f"^reuse={tmp_path}/.*{words}"):
        compile_recipe(compose_recipe("tiny_gdn_6bit", {"reuse": str(tmp_path / name)}), quiet=True)


def test_json_does_not_replace_the_plan_that_is_reused(made, tmp_path):
    before = (made / "g6" / "plan.json").read_bytes()
    assert "is a file of the artifact" in refused(made, tmp_path, f"json={made}/g6/plan.json")
    assert (made / "g6" / "plan.json").read_bytes() == before
    again(made, tmp_path, f"json={tmp_path}/deep/s.json")
    assert json.loads((tmp_path / "deep" / "s.json").read_text())["name"] == "tiny_gdn_6bit"


def test_a_setting_that_is_gone_is_not_asked_for_again() -> None:
    """Artifacts of earlier versions can have `spatial.refits=auto`."""
    recipe = compose_recipe("tiny_kda_4bit", [])

    def refusal(refits: object) -> str:
        plan = small_plan(settings={"spatial": {"refits": refits, "sample": 16}})
        return str(needs_states(recipe, Reused("old", plan, {}, {}), ["spatial.refits", "spatial.sample"]))

    assert refusal("auto").endswith("this stepquant has no spatial.refits=auto: compile without reuse")
    assert refusal(1).endswith("set spatial.refits=1, or compile without reuse")
