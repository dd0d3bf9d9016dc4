"""The artifact directory: atomic writing, tables that belong to their plan, nothing local inside, reuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from stepquant import artifact, files
from stepquant.artifact import RECIPE, TABLES, read_tables, write_artifact
from stepquant.config import compose_recipe
from stepquant.errors import ArtifactError
from stepquant.files import dump_tensors, write_bytes, write_json, write_tensors, write_together
from stepquant.passes.compile import compile_recipe
from stepquant.passes.protocol import Product
from stepquant.plan import PLAN_JSON, PLAN_TENSORS, load_plan
from tests.plans import compiled, small_plan

PRODUCTS = {
    "gate_statistics": ("key1", Product({"mean_log_gate": torch.full((2, 4), -0.5)}, {"tokens": 7})),
    "distortion": ("key2", Product({"row_error": torch.ones(2, 4, 16, 3)}, {"candidates": [4, 8, 16]})),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_artifact(tmp_path, small_plan(), compose_recipe("tiny_gdn_6bit"), PRODUCTS, {"seed": 1})
    return tmp_path


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_round_trip(written):
    products, base = read_tables(written)
    assert base == {"seed": 1}
    for name, (key, product) in PRODUCTS.items():
        assert products[name][0] == key
        assert products[name][1].facts == product.facts
        for item, tensor in product.tensors.items():
            assert torch.equal(products[name][1][item], tensor)
    assert load_plan(written).hash == small_plan().hash
    assert set(content(written)) == {PLAN_JSON, PLAN_TENSORS, TABLES, RECIPE}


def test_an_error_in_the_middle_leaves_the_old_artifact(written, monkeypatch):
    before = content(written)
    other = small_plan(bits=torch.full((2, 4, 16), 8, dtype=torch.uint8), name="other")
    monkeypatch.setattr(artifact, "recipe_yaml", lambda recipe: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_artifact(written, other, compose_recipe("tiny_gdn_6bit"), PRODUCTS, {})
    monkeypatch.undo()
    bad = small_plan(permutation=torch.zeros(2, 4, 16, dtype=torch.int16))
    with pytest.raises(ArtifactError, match="permutation"):  # the plan contradicts itself
        write_artifact(written, bad, compose_recipe("tiny_gdn_6bit"), PRODUCTS, {})
    real, calls = Path.write_bytes, []

    def full_disk(self, data):
        calls.append(self)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(ArtifactError, match="could not be written: No space"):
        write_artifact(written, other, compose_recipe("tiny_gdn_6bit"), PRODUCTS, {})
    assert content(written) == before


def test_a_kill_between_two_renames_is_refused(written, monkeypatch):
    other = small_plan(bits=torch.full((2, 4, 16), 8, dtype=torch.uint8))
    order: list[str] = []
    monkeypatch.setattr(files.os, "replace", lambda source, target: order.append(Path(target).name))
    write_artifact(written, other, compose_recipe("tiny_gdn_6bit"), PRODUCTS, {})
    assert order == [TABLES, RECIPE, PLAN_TENSORS, PLAN_JSON]
    monkeypatch.undo()
    fresh = written / "fresh"
    write_artifact(fresh, other, compose_recipe("tiny_gdn_6bit"), PRODUCTS, {})
    (written / TABLES).write_bytes((fresh / TABLES).read_bytes())
    with pytest.raises(ArtifactError, match="the tables belong to plan"):
        read_tables(written)
    (written / PLAN_TENSORS).write_bytes((fresh / PLAN_TENSORS).read_bytes())
    with pytest.raises(ArtifactError, match="do not match tensors_sha256"):
        load_plan(written)


def test_atomic_files(tmp_path):
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
        assert temporary.write_bytes(b"half") / 0
    assert content(path.parent) == {"file": b"old"}
    with pytest.raises(TypeError):
        write_together({path: b"new", path.parent / "other": 5})
    assert content(path.parent) == {"file": b"old"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert content(path.parent) == {"file": b"old"}


def test_tensors_that_share_memory_are_saved(tmp_path):
    base = torch.arange(6.0)
    write_tensors(tmp_path / "t", {"a": base, "b": base, "c": base[:4], "d": base.view(2, 3).T})
    with safe_open(str(tmp_path / "t"), "pt") as file:
        assert torch.equal(file.get_tensor("b"), base)
        assert torch.equal(file.get_tensor("c"), base[:4])
        assert torch.equal(file.get_tensor("d"), base.view(2, 3).T)


def rewrite(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **head: object) -> None:
    """tables.safetensors again with another header or other tensors."""
    with safe_open(str(directory / TABLES), "pt") as file:
        old = json.loads(file.metadata()["stepquant"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    kept = kept if tensors is None else tensors
    header = {**old, "tensors_sha256": files.hash_tensors(kept), **head}
    header = {k: v for k, v in header.items() if v is not None}
    (directory / TABLES).write_bytes(dump_tensors(kept, {"stepquant": json.dumps(header)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"products": None}, "header is not that of calibration tables"),
        ({"products": {"x": 1}}, "header is not that of calibration tables"),
        ({"base": 5}, "header is not that of calibration tables"),
        ({"plan_sha256": None}, "header is not that of calibration tables"),
        ({"plan_sha256": "0" * 64}, "the tables belong to plan 0000000000000000"),
        ({"tensors_sha256": "0" * 64}, "do not match tensors_sha256 of the header"),
        ({"tensors": {"other/x": torch.zeros(1)}}, "other/x belongs to no product"),
        ({"tensors": {"distortion/row_error": torch.tensor([float("nan")])}}, "distortion/row_error holds NaN"),
        (
            {"tensors": {"distortion/row_error": torch.tensor([1.0, float("-inf")])}},
            r"tables\.safetensors: tensor distortion/row_error holds infinities; expected finite numbers",
        ),
    ],
)  # fmt: skip
def test_damaged_tables_are_refused(written, change, message):
    rewrite(written, **change)
    with pytest.raises(ArtifactError, match=message):
        read_tables(written)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tables_that_are_not_finite_are_not_written(value, written):
    before = content(written)
    broken = {**PRODUCTS, "rollout": ("key3", Product({"rows": torch.tensor([0.0, value])}))}
    with pytest.raises(
        ArtifactError, match=r"tensor rollout/rows holds \w+; expected finite numbers: check the checkpo"
    ):
        write_artifact(written, small_plan(), compose_recipe("tiny_gdn_6bit"), broken, {})
    assert content(written) == before


def test_truncated_and_missing_tables_are_refused(written):
    whole = (written / TABLES).read_bytes()
    (written / TABLES).write_bytes(whole[:-5])
    with pytest.raises(ArtifactError, match=r"tables\.safetensors: the file of calibration tables is not a sound"):
        read_tables(written)
    (written / TABLES).write_bytes(dump_tensors({"a": torch.zeros(1)}))
    with pytest.raises(ArtifactError, match="header is not that"):
        read_tables(written)
    (written / TABLES).unlink()
    with pytest.raises(ArtifactError, match="the file of calibration tables is missing"):
        read_tables(written)


def test_nothing_local_in_an_artifact(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    compiled(tmp_path / "a", "tiny_kda_4bit")
    for name, data in content(tmp_path / "a").items():
        assert str(tmp_path).encode() not in data, name
    assert (tmp_path / "a" / "report.html").is_file()


def test_solving_again_from_an_artifact(tmp_path):
    first = compiled(tmp_path / "a", "tiny_gdn_6bit")
    made = compose_recipe(
        "tiny_gdn_6bit",
        ["calibration=synthetic", f"reuse={tmp_path / 'a'}", f"output={tmp_path / 'b'}", "budget.bits=5"],
    )
    second = compile_recipe(made, quiet=True)
    assert "distortion" in second.reused
    assert second.plan.fingerprint == first.plan.fingerprint
    assert second.plan.synthetic
    assert second.summary["bytes_per_request"]["total"] < first.summary["bytes_per_request"]["total"]
    assert load_plan(tmp_path / "b").hash == second.plan.hash
