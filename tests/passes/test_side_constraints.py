"""Caps, floors and pivots as a user meets them: keys and values in the messages, layers by their own numbers."""

from __future__ import annotations

import pytest

from stepquant.config import compose_recipe
from stepquant.errors import StepQuantError
from stepquant.passes.compile import compile_recipe
from tests.plans import compiled, synthetic_plan

PIVOT = synthetic_plan("tiny_gdn_6bit")
LAYER, HEAD = (int(i) for i in (PIVOT.bits[..., 0] == 16).nonzero()[0])
LAYER = PIVOT.geometry.layers[LAYER]


def refused(tmp_path, *overrides, name="tiny_gdn_6bit") -> str:
    with pytest.raises(StepQuantError) as caught:
        compiled(tmp_path / "out", name, *overrides)
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_floors_that_the_budget_cannot_pay_are_named_by_key(tmp_path):
    layers = PIVOT.geometry.layers
    floors = ",".join(f"{layer}:8" for layer in layers)
    message = refused(tmp_path, f"allocation.floors={{{floors}}}")
    assert "a budget of 4,718,592 bits (6.0000 a value)" in message
    for layer in layers:
        assert f"allocation.floors.{layer}" in message
    assert message.endswith("raise budget.bits to 8, or lower a floor")


def test_floors_of_heads_are_named_by_key(tmp_path):
    heads = ",".join(f"{layer}/{head}:8" for layer in PIVOT.geometry.layers for head in range(8))
    message = refused(tmp_path, f"allocation.floors={{{heads}}}")
    assert "allocation.floors.0/0, allocation.floors.0/1" in message
    assert message.endswith("and others; raise budget.bits to 8, or lower a floor")


def test_a_cap_that_a_pivot_breaks_names_key_value_and_pivot(tmp_path):
    message = refused(tmp_path, f"allocation.caps={{{LAYER}:4}}")
    assert f"allocation.caps.{LAYER} is 4 bits a value on average" in message
    assert f"8 heads of layer {LAYER} (1 FP16 pivot among them, charged 8) take at least 4.5;" in message
    assert message.endswith("raise it to 6, or lower pivots.count")
    message = refused(tmp_path, f"allocation.caps={{{LAYER}/{HEAD}:4}}")
    assert message == (
        f"allocation.caps.{LAYER}/{HEAD} is 4 bits a value, but head {HEAD} of layer {LAYER} (an FP16 pivot, charged "
        "8) takes 8; raise the cap, or lower pivots.count"
    )


def test_a_layer_s_cap_bounds_the_mean_of_its_heads(tmp_path):
    plan = compiled(tmp_path / "out", "tiny_gdn_6bit", "allocation.caps={0:6}", "pivots.count=0", "budget.bits=7").plan
    bits = plan.bits[0, :, 0].float()
    assert float(bits.mean()) <= 6
    assert float(bits.max()) > 6


def test_uniform_keeps_pivots_on_top_of_the_budget(tmp_path):
    for name, count, unit in (("tiny_gdn_6bit", 1, 128 * 64), ("tiny_kda_6bit", 38, 64)):
        done = compiled(tmp_path / name, name, "allocation.mode=uniform")
        plan = done.plan
        found = {int(bits): int((plan.bits == bits).sum()) for bits in plan.bits.unique()}
        rows = plan.geometry.key_dim if unit > 64 else 1
        assert found == {6: plan.bits.numel() - count * rows, 16: count * rows}, name
        assert done.summary["predicted"]["pivot_units"] == count
        dry = compiled(tmp_path / name, name, "allocation.mode=uniform", "dry_run=true").summary
        assert dry["bytes_per_request"]["total"] == pytest.approx(done.summary["bytes_per_request"]["total"], rel=0.01)


def test_a_target_below_the_smallest_plan_repeats_what_was_given(tmp_path):
    message = refused(tmp_path, "budget.bytes_per_request=300000", "window.length=8")
    assert message.startswith("budget.bytes_per_request is 300,000, which leaves 167,904 ")
    assert "bytes a slot beside window buffers (" in message
    enough = int(message.partition("raise it to ")[2].split()[0].rstrip(",;").replace(",", ""))
    assert compiled(tmp_path / "fits", "tiny_gdn_6bit", f"budget.bytes_per_request={enough}", "window.length=8").plan
    message = refused(tmp_path, "budget.concurrency=1000", "budget.gpu_memory=1GiB", "budget.weights_bytes=1",
                      "budget.context_length=1", "window.length=1")  # fmt: skip
    assert message.startswith("budget.concurrency is 1,000 in 1.00 GiB, which leaves ")
    pinned = "{" + ",".join(f"{layer}/{head}:2" for layer in PIVOT.geometry.layers for head in range(8)) + "}"
    message = refused(tmp_path, "budget.bytes_per_request=1MiB", "window.length=1", f"allocation.caps={pinned}")
    assert "budget.bytes_per_request is 1,048,576, but no plan meets the side constraints" in message


def test_a_target_in_bytes_leaves_room_for_floors(tmp_path):
    floors = "allocation.floors={0:8,1:8,2:6}"
    plan = compiled(
        tmp_path / "out", "tiny_gdn_6bit", "budget.bytes_per_request=600000", "window.length=1", floors
    ).plan
    assert [float(plan.bits[i, :, 0].clamp(max=8).float().mean()) >= b for i, b in enumerate((8, 8, 6))] == [True] * 3
    message = refused(tmp_path / "small", "budget.bytes_per_request=400000", "window.length=1", floors)
    assert "expected at least the smallest plan, " in message


def test_whole_groups_of_pivot_rows_are_stored(tmp_path):
    message = refused(tmp_path, "allocation.granularity=16", name="tiny_kda_6bit")
    assert "pivots.count is 38, which allocation.granularity=16 cannot store in whole groups" in message
    assert message.endswith("expected a multiple of 16, such as 32 or 48")
    made = compose_recipe("tiny_kda_6bit", {"calibration": "synthetic", "target.tensor_parallel": 4})
    with pytest.raises(
        StepQuantError, match=r"38, which 4 tensor-parallel ranks cannot share equally; .* such as 36 or 40"
    ):
        compile_recipe(made.replace({"dry_run": True, "output": str(tmp_path)}), quiet=True)
    plan = synthetic_plan("tiny_kda_6bit", "allocation.granularity=16", "pivots.count=32")
    assert int((plan.bits == 16).sum()) == 32
