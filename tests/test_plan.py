"""Plans on disk: round trip, and every damage refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepquant import files
from stepquant.codec.spec import CodecSpec
from stepquant.errors import ArtifactError
from stepquant.files import dump_json, dump_tensors, hash_json, read_json, read_tensors, write_tensors
from stepquant.plan import PLAN_JSON, PLAN_TENSORS, LayoutPlan, WindowSpec, load_plan
from tests.plans import GEOMETRY, small_plan


def write_unchecked(plan: LayoutPlan, directory: Path) -> None:
    """What a broken writer would leave: wrong content under hashes that are right."""
    (directory / PLAN_TENSORS).write_bytes(dump_tensors(plan.tensors))
    (directory / PLAN_JSON).write_text(json.dumps(plan.to_json()))


def edit(directory: Path, change: Callable[[dict[str, Any]], object], rehash: bool = True) -> None:
    """Change plan.json in place, with a json_sha256 that fits."""
    data = json.loads((directory / PLAN_JSON).read_text())
    change(data)
    if rehash and "json_sha256" in data:
        data["json_sha256"] = hash_json({k: v for k, v in data.items() if k != "json_sha256"})
    (directory / PLAN_JSON).write_text(json.dumps(data))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_plan().save(tmp_path)
    return tmp_path


def test_round_trip(saved):
    plan, loaded = small_plan(), load_plan(saved)
    for name, tensor in plan.tensors.items():
        assert torch.equal(tensor, loaded.tensors[name])
        assert tensor.dtype == loaded.tensors[name].dtype
    assert loaded.to_json() == plan.to_json()
    assert loaded.hash == plan.hash
    before = [(saved / n).read_bytes() for n in (PLAN_JSON, PLAN_TENSORS)]
    loaded.save(saved)
    assert before == [(saved / n).read_bytes() for n in (PLAN_JSON, PLAN_TENSORS)]
    assert sorted(p.name for p in saved.iterdir()) == [PLAN_JSON, PLAN_TENSORS]


def test_json_is_for_people_and_has_no_path(saved):
    text = (saved / PLAN_JSON).read_text()
    assert text == dump_json(json.loads(text))
    assert str(saved) not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": torch.full((2, 4, 16), 7, dtype=torch.uint8)}, r"bits holds \[7\]; expected only \[2, 3, 4, 5, "),
        ({"bits": torch.full((2, 4, 15), 4, dtype=torch.uint8)}, r"bits is torch.uint8 \[2, 4, 15\]; expected "),
        ({"bits": torch.full((2, 4, 16), 4, dtype=torch.int32)}, "bits is torch.int32"),
        ({"bits": torch.tensor([4, 8] * 64, dtype=torch.uint8).view(2, 4, 16)}, "codebook is 'head' but a head mixes"),
        ({"w": torch.full((2, 4, 16), float("nan"))}, "w holds values that are not finite and positive"),
        ({"w": torch.zeros(2, 4, 16)}, "w holds values that are not finite and positive"),
        ({"w": torch.ones(2, 4)}, r"w is torch.float32 \[2, 4\]"),
        ({"permutation": torch.zeros(2, 4, 16, dtype=torch.int16)}, "permutation of some head is not a permutation"),
        ({"permutation": torch.arange(1, 17, dtype=torch.int16).expand(2, 4, 16)}, "is not a permutation of 0..15"),
        ({"granularity": 3}, r"granularity is 3; expected one of \(1, 8, 16\)"),
        ({"window": WindowSpec(3)}, "window.length is 3"),
        ({"window": WindowSpec(8, "fp8")}, "window.dtype is 'fp8'"),
        ({"codec": CodecSpec("magic")}, "codec.kind is 'magic'"),
        ({"codec": CodecSpec("dual_axis", "x" * 5000)}, r"codec.codebook is 'x{30,90}\.*'?; expected one of"),
        ({"codec": CodecSpec("dual_axis", "none")}, "codec.codebook is 'none'; expected one of"),
        ({"codec": CodecSpec("dual_axis", "head", 1, 0)}, "codec.group is 0"),
        ({"codec": CodecSpec("dual_axis", "head", 1, 24)}, "codec.group is 24; expected a divisor of value_dim 32"),
        ({"name": "line\nbreak"}, "name is 'line.nbreak'; expected (1 to 200 )?printable characters"),
        ({"budget": {"bits": "six"}}, "budget.bits is 'six'; expected a number or null"),
        ({"predicted": {"by_layer": [1.0]}}, r"predicted.by_layer is \[1.0\]; expected 2 numbers"),
        ({"predicted": {"gap": "small"}}, "predicted.gap is 'small'"),
        ({"settings": {"a": [{"b": float("inf")}]}}, r"settings.a\[0\].b is inf; expected a finite number|Infinity"),
        ({"geometry": replace(GEOMETRY, num_heads=8)}, r"expected torch.uint8 \[2, 8, 16\] from the geometry"),
    ],
)  # fmt: skip
def test_wrong_content_is_refused_in_and_out(tmp_path, change, message):
    plan = small_plan(**change)
    with pytest.raises(ArtifactError, match=message):
        plan.save(tmp_path)
    assert not list(tmp_path.iterdir())
    write_unchecked(plan, tmp_path)
    with pytest.raises(ArtifactError, match=message):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=1), "schema_version is 1; this stepquant reads 2"),
        (lambda d: d.pop("schema_version"), "schema_version is None"),
        (lambda d: d.pop("budget"), "budget is missing; expected an object"),
        (lambda d: d.update(granularity="8"), "granularity is '8'; expected a whole number"),
        (lambda d: d.update(granularity=True), "granularity is True; expected a whole number"),
        (lambda d: d.update(synthetic=0), "synthetic is 0; expected true or false"),
        (lambda d: d["geometry"].update(family="x" * 3000), r"geometry.family is 'x{76}\.{3}; expected one of gdn"),
        (lambda d: d.update(extra=1), r"plan\.json: 'extra' is unknown; expected \['budget', "),
        (lambda d: d.update(windows={}), r"'windows' is unknown \(did you mean 'window'\?\)"),
        (lambda d: d.update(granularity=-8), "granularity is -8; expected no negative number"),
        (lambda d: d["codec"].update(extra=1), "codec has keys .*extra"),
        (lambda d: d["codec"].pop("refits"), "codec has keys"),
        (lambda d: d["codec"].update(refits=1.5), "codec.refits is 1.5"),
        (lambda d: d["codec"].update(refits=-1), "codec.refits is -1"),
        (lambda d: d["window"].update(length="1"), "window.length is '1'"),
        (lambda d: d["geometry"].update(extra=1), "geometry has the unknown key 'extra'"),
        (lambda d: d["geometry"].pop("key_dim"), "geometry lacks key_dim; expected a value"),
        (lambda d: d.update(geometry={}), "geometry lacks family, model_type, layers, num_heads"),
        (lambda d: d["geometry"].update(key_dim=16.5), "geometry.key_dim is 16.5"),
        (lambda d: d["geometry"].update(num_heads=-4), "geometry.num_heads is -4"),
        (lambda d: d["geometry"].update(num_heads=10**30), "geometry.num_heads is 1000"),
        (lambda d: d["geometry"].update(family="rwkv"), "geometry.family is 'rwkv'"),
        (lambda d: d["geometry"].update(family=["gdn"]), "geometry.family is .*expected a string"),
        (lambda d: d["geometry"].update(layers=["a", "b"]), "geometry.layers is .*expected a list of layer indices"),
        (lambda d: d["geometry"].update(layers=7), "geometry.layers is 7"),
        (lambda d: d["geometry"].update(layers=[2, 0]), "geometry.layers is .*ascending"),
        (lambda d: d["geometry"].update(beta_max=0), "geometry.beta_max is 0"),
        (lambda d: d["geometry"].update(conv_bytes="0"), "geometry.conv_bytes is '0'"),
    ],
)  # fmt: skip
def test_wrong_json_is_refused(saved, change, message):
    edit(saved, change)
    with pytest.raises(ArtifactError, match=message):
        load_plan(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(synthetic=True), lambda d: d.update(fingerprint="0" * 64), lambda d: d.update(name="other"),
        lambda d: d["predicted"].update(gap=0.5), lambda d: d["provenance"].update(torch="1.0"),
    ],
)  # fmt: skip
def test_an_edited_plan_is_refused(saved, change):
    edit(saved, change, rehash=False)
    with pytest.raises(ArtifactError, match="json_sha256 does not match"):
        load_plan(saved)
    edit(saved, lambda d: d.pop("json_sha256"))
    with pytest.raises(ArtifactError, match="json_sha256 is missing"):
        load_plan(saved)


def test_hashes_that_do_not_match_are_refused(saved):
    edit(saved, lambda d: d["window"].update(length=8))
    with pytest.raises(ArtifactError, match="plan_sha256 does not match"):
        load_plan(saved)
    small_plan().save(saved)
    other = small_plan(bits=torch.full((2, 4, 16), 4, dtype=torch.uint8))
    write_tensors(saved / PLAN_TENSORS, other.tensors)
    with pytest.raises(ArtifactError, match="do not match tensors_sha256"):
        load_plan(saved)


def test_tensors_missing_or_too_many(saved):
    tensors = read_tensors(saved / PLAN_TENSORS, "tensors")
    write_tensors(saved / PLAN_TENSORS, {k: v for k, v in tensors.items() if k != "w"})
    with pytest.raises(
        ArtifactError, match=r"tensors \['bits', 'permutation'\]; expected \['bits', 'permutation', 'w'\]"
    ):
        load_plan(saved)
    write_tensors(saved / PLAN_TENSORS, {**tensors, "z": torch.zeros(1)})
    with pytest.raises(ArtifactError, match=r"tensors .*'z'"):
        load_plan(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"), ("{", "not valid JSON"), ("[1]", "holds a list; expected a JSON object"),
        ("\xff", "schema_version|not valid JSON"), ('{"schema_version": NaN}', "it holds NaN, expected finite"),
        ('{"schema_version": -Infinity}', "it holds -Infinity"), ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[" * 100_000, "not valid JSON"), ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("null", "the plan holds null; expected a JSON object"),
    ],
)  # fmt: skip
def test_files_that_are_no_json_are_refused(saved, content, message):
    (saved / PLAN_JSON).write_bytes(content.encode("latin-1"))
    with pytest.raises(ArtifactError, match=message):
        load_plan(saved)


def test_truncated_missing_and_oversized_files_are_refused(saved, monkeypatch):
    whole = (saved / PLAN_TENSORS).read_bytes()
    for size in (0, 4, 9, 200, len(whole) - 1):
        (saved / PLAN_TENSORS).write_bytes(whole[:size])
        with pytest.raises(
            ArtifactError, match=r"plan\.safetensors: the file of the plan's tensors is not a sound safetensors file"
        ):
            load_plan(saved)
    (saved / PLAN_TENSORS).unlink()
    with pytest.raises(ArtifactError, match=r"plan\.safetensors: the file of the plan's tensors is missing"):
        load_plan(saved)
    (saved / PLAN_TENSORS).mkdir()
    with pytest.raises(ArtifactError, match=r"plan\.safetensors"):
        load_plan(saved)
    with monkeypatch.context() as patch:
        patch.setattr(files, "MAX_JSON_BYTES", 100)
        with pytest.raises(ArtifactError, match="expected at most 100"):
            load_plan(saved)
    (saved / PLAN_JSON).unlink()
    with pytest.raises(ArtifactError, match=r"plan\.json: the plan is missing"):
        load_plan(saved)
    with pytest.raises(ArtifactError, match="no such artifact directory"):
        load_plan(saved / "nowhere")
    (saved / PLAN_JSON).mkdir()
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_json(saved / PLAN_JSON, "the plan")


def test_identity_is_content_and_not_provenance():
    plan = small_plan()
    assert replace(plan, name="other", provenance={"x": 1}, fingerprint="f").hash == plan.hash
    changed = (
        replace(plan, window=WindowSpec(8)), replace(plan, codec=CodecSpec(refits=2)), replace(plan, granularity=8),
        replace(plan, w=plan.w * 2), replace(plan, geometry=replace(GEOMETRY, num_layers=8)),
    )  # fmt: skip
    assert len({p.hash for p in (plan, *changed)}) == 6


def test_integer_keys_and_tuples_in_facts_survive_the_hash(tmp_path):
    plan = small_plan(settings={"caps": {10: 4, 9: 6}, "pair": (1, 2)})
    plan.save(tmp_path)
    assert load_plan(tmp_path).settings == {"caps": {"10": 4, "9": 6}, "pair": [1, 2]}
