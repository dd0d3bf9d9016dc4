"""Names of variants, their codecs and sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepquant.codec.spec import PIVOT
from stepquant.errors import RecipeError
from stepquant.evaluation.variants import from_plan, named_variant, unique_names
from stepquant.models.adapter import LoadedModel
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan
from tests.evaluation.conftest import make_plan


@pytest.mark.parametrize(
    ("name", "bits"),
    [("fp32", 32), ("bf16", 16), ("fp16", 16), ("native", 32), ("int8", 8.5), ("int4", 4.5), ("qmamba6", 7),
     ("spatial4", 5), ("nvfp4", 4 + 8 / 16 + 32 / 1024), ("int3@8", 3.5), ("spatial6@4:int8", 7)],
)  # fmt: skip
def test_names(plan: LayoutPlan, name: str, bits: float) -> None:
    variant = named_variant(name, plan)
    assert variant.name == name
    assert variant.bits_per_value == bits  # 32 x 32 states: a scale vector costs half a bit a value
    codec = variant.codec(0, torch.device("cpu"))
    x = torch.randn(1, plan.geometry.num_heads, 32, 32)
    if name in ("fp32", "native"):
        assert codec is None
    else:
        assert codec is not None
        assert codec.roundtrip(x).shape == x.shape
    assert variant.exact == (name == "fp32")


def test_windows(plan: LayoutPlan) -> None:
    variant = named_variant("int4@8:int8", plan)
    assert (variant.window.length, variant.window.dtype) == (8, "int8")
    assert named_variant("int4@8", plan).window.dtype == plan.window.dtype
    assert named_variant("int4", plan).key == named_variant("int4@1", plan).key
    assert len({named_variant(n, plan).key for n in ("int4", "int4@8", "int4@8:int8", "int6", "native", "fp32")}) == 6


def test_damp_keeps_the_worst_rows(plan: LayoutPlan) -> None:
    shape = plan.bits.shape
    gates = -torch.rand(shape if plan.geometry.family == "kda" else shape[:2]).double()
    error = torch.rand(*shape, 3, dtype=torch.float64)
    tables = {
        "gate_statistics": Product({"mean_log_gate": gates}),
        "distortion": Product({"row_error": error}, {"candidates": [6, 8, PIVOT]}),
    }
    variant = named_variant("damp", plan, tables)
    assert set(variant.bits.unique().tolist()) == {8, PIVOT}
    with pytest.raises(RecipeError, match="baseline_damp"):
        named_variant("damp", plan)


def test_other_plans(plan: LayoutPlan, loaded: LoadedModel, tmp_path: Path) -> None:
    other = make_plan(loaded, bits=4, seed=1)
    other.save(tmp_path / "x@y")
    found = named_variant(str(tmp_path / "x@y"), plan, path="packed")
    assert torch.equal(found.bits, other.bits)
    assert found.path == "packed"
    assert named_variant(f"{tmp_path / 'x@y'}@8", plan).window.length == 8
    mine = unique_names([from_plan(plan), found, from_plan(plan)])
    assert [v.name for v in mine] == ["plan", "plan#2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("itn8", "did you mean 'int8'"), ("int7", "int7"), ("temporal6", "ablation_temporal_6"), ("int4@3", r"\(1, 2, 4"),
     ("int4@8:fp8", "fp8"), ("int8@", "window '' is not W"),
     ("int8@04", "window '04' is not W"), ("int8@\u0664", "is not W"), ("int08", "did you mean 'int8'"),
     ("build/nothing", "build/nothing")],
)  # fmt: skip
def test_refusals(plan: LayoutPlan, name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        named_variant(name, plan)


def test_a_plan_for_another_checkpoint_is_refused(plan: LayoutPlan, tmp_path: Path) -> None:
    from dataclasses import replace

    replace(plan, fingerprint="sha256:other").save(tmp_path)
    with pytest.raises(RecipeError, match="another checkpoint"):
        named_variant(str(tmp_path), plan)
