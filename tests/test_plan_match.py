"""A plan belongs to its checkpoint and to the format of its weights; each exception has a word of its own."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from stepquant.errors import ArtifactError
from stepquant.models.checkpoint import read_config
from stepquant.models.families import geometry_from_config
from stepquant.models.fingerprint import fingerprint
from stepquant.plan_match import check_checkpoint
from tests.models.checkpoints import save_checkpoint
from tests.models.test_quantised_weights import quantise
from tests.plans import small_plan


@pytest.fixture
def made(tmp_path):
    """A checkpoint and what a plan made for it carries."""
    path = save_checkpoint("qwen3_5", tmp_path)
    geometry = geometry_from_config(read_config(path))
    return path, small_plan(geometry=geometry, fingerprint=fingerprint(path), weight_format="unquantised")


def test_its_own_checkpoint_is_taken(made):
    path, plan = made
    check_checkpoint(plan, "plan", path)


def test_other_weights_need_any_checkpoint(made):
    path, plan = made
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "out_proj" in name)
    save_file({**tensors, name: tensors[name] + 1}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"fingerprint sha256:.*any_checkpoint=true"):
        check_checkpoint(plan, "plan", path)
    with pytest.raises(ArtifactError, match="any_checkpoint=true"):
        check_checkpoint(plan, "plan", path, any_weight_format=True)
    check_checkpoint(plan, "plan", path, any_checkpoint=True)


def test_another_weight_format_needs_its_own_word(made):
    path, plan = made
    quantise(path)
    match = r"plan was made for unquantised weights, .* holds compressed-tensors-8bit.*any_weight_format=true"
    for any_checkpoint in (False, True):
        with pytest.raises(ArtifactError, match=match):
            check_checkpoint(plan, "plan", path, any_checkpoint=any_checkpoint)
    check_checkpoint(plan, "plan", path, any_weight_format=True)


def test_other_shapes_are_never_taken(made):
    path, plan = made
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["linear_num_value_heads"] = 8
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"num_heads 8 \(the plan: 4\)"):
        check_checkpoint(plan, "plan", path, any_checkpoint=True, any_weight_format=True)
