"""``output`` and ``json``: what may be replaced, and what is refused before anything is computed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepquant.errors import ArtifactError, RecipeError
from stepquant.files import write_json
from stepquant.passes import destinations
from stepquant.passes.compile import compile_recipe
from stepquant.passes.destinations import ROWS, SIZING, SUMMARY, check_json, check_output
from stepquant.recipe import Recipe
from tests.plans import small_plan

OLD_SUMMARY = {"name": "x", "geometry": {}, "bytes_per_request": {}}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    small_plan().save(tmp_path / "plan")
    return tmp_path / "plan"


def refused(function, *args) -> str:
    with pytest.raises(RecipeError) as caught:
        function(*args)
    return str(caught.value)


def test_outputs_that_may_be_written(tmp_path, artifact):
    (tmp_path / "empty").mkdir()
    (artifact / "notes.txt").touch()
    for place in (artifact, tmp_path / "empty", tmp_path / "new" / "deep", artifact / "budget.bits=4"):
        check_output(place)
    small_plan().save(tmp_path / "sweep" / "budget.bits=4")  # a sweep's own directory, before a single compile
    (tmp_path / "sweep" / ".budget.bits=6.x1.building").mkdir()
    check_output(tmp_path / "sweep")


def test_outputs_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    message = refused(check_output, tmp_path / "photos")
    assert message.startswith(f"output={tmp_path}/photos holds 'cat.jpg' and is no artifact of stepquant")
    assert "output=DIR" in message
    assert "output=/ holds" in refused(check_output, Path("/"))
    write_json(tmp_path / "terraform" / "plan.json", {"resources": []})
    assert "holds 'plan.json'" in refused(check_output, tmp_path / "terraform")


def test_the_artifact_that_is_reused_is_not_replaced(tmp_path, artifact):
    (tmp_path / "link").symlink_to(artifact)
    for place in (artifact, tmp_path / "link"):
        message = refused(check_output, place, artifact)
        assert f"output={place} is the artifact that reuse={artifact} reads" in message
    check_output(tmp_path / "other", artifact)


def test_a_mount_point_is_refused(artifact, monkeypatch):
    monkeypatch.setattr(destinations.os.path, "ismount", lambda path: True)
    message = refused(check_output, artifact)
    assert f"output={artifact} is a mount point, which cannot be replaced as a whole" in message
    assert f"such as output={artifact}/plan" in message


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors", "report.html", "kernels/new.json", "run.json"])
def test_json_does_not_replace_files_of_artifacts(tmp_path, artifact, name):
    for output in (artifact, tmp_path / "other"):
        assert f"is a file of the artifact {artifact}" in refused(check_json, artifact / name, output)
    assert "is a file of the artifact" in refused(check_json, tmp_path / "other" / name, tmp_path / "other")


def test_json_replaces_summaries_only(tmp_path, artifact):
    write_json(tmp_path / "old.json", OLD_SUMMARY)
    for path in (tmp_path / "old.json", artifact / "summary.json", tmp_path / "none" / "deep" / "s.json"):
        check_json(path, artifact)
    assert not (tmp_path / "none").exists()
    (tmp_path / "my.yaml").write_text("budget: {bits: 5}\n")
    write_json(tmp_path / "config.json", {"model_type": "x"})
    for name in ("my.yaml", "config.json"):
        assert f"json={tmp_path / name} exists and is no summary" in refused(check_json, tmp_path / name, artifact)
    assert "is a directory; expected a file" in refused(check_json, tmp_path, artifact)
    assert "my.yaml is a file; expected a directory" in refused(check_json, tmp_path / "my.yaml" / "s.json", artifact)


def test_json_replaces_no_device_and_no_pipe(tmp_path, artifact):
    """As root a file renamed onto /dev/null takes its place, for every program on the machine."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        for kind in (SUMMARY, SIZING, ROWS):
            assert "is no ordinary file" in refused(check_json, path, artifact, kind)
    with pytest.raises(ArtifactError, match="is no ordinary file and is not replaced"):
        write_json(tmp_path / "pipe", {})


def test_json_of_other_commands_spares_artifacts_and_other_files(tmp_path, artifact):
    for kind in (SIZING, ROWS):
        assert "is a file of the artifact" in refused(check_json, artifact / "plan.json", None, kind)
    write_json(tmp_path / "rows.json", [{"variant": "int8"}])
    check_json(tmp_path / "rows.json", None, ROWS)
    write_json(tmp_path / "list.json", [1, 2])
    assert "exists and is no list of an evaluation's rows" in refused(check_json, tmp_path / "list.json", None, ROWS)
    assert "exists and is no sizing" in refused(check_json, tmp_path / "rows.json", None, SIZING)


def test_places_without_permission_are_refused(tmp_path, artifact, monkeypatch):
    monkeypatch.setattr(destinations.os, "access", lambda path, mode: False)
    assert f"{tmp_path} cannot be written to" in refused(check_output, tmp_path / "new")
    assert "cannot be written to; give output=DIR" in refused(check_output, artifact)
    assert "s.json cannot be written; give json=FILE" in refused(check_json, tmp_path / "s.json", artifact)


def test_json_is_checked_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr("stepquant.passes.compile.Context.open", lambda *a: pytest.fail("the compile went on"))
    config = {"model": {"path": "builtin:tiny_gdn"}, "budget": {"bits": 6}, "json": str(tmp_path)}
    with pytest.raises(RecipeError, match=r"json=.* is a directory"):
        compile_recipe(Recipe.from_config({**config, "output": str(tmp_path / "out")}), quiet=True)
    with pytest.raises(RecipeError, match=r"output=/ holds"):
        compile_recipe(Recipe.from_config({**config, "json": None, "output": "/"}), quiet=True)
