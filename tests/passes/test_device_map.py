"""A model spread over devices calibrates to the plan of one device; needs accelerate."""

from __future__ import annotations

import pytest
import torch

from stepquant.passes.layout import make_plan
from tests.models.checkpoints import needs, save_checkpoint
from tests.passes.test_layerwise_compile import byte_segments, open_pipeline, text  # noqa: F401 - fixtures

accelerate = pytest.importorskip("accelerate")
torch.set_num_threads(1)
FAMILIES = pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3_5", marks=needs("qwen3_5")), pytest.param("kimi_linear", marks=needs("kimi_linear"))],
)
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
DEVICES = pytest.mark.parametrize("device", ["auto", pytest.param("cuda", marks=TWO_GPUS)])
WEIGHTS = pytest.mark.parametrize("weights", ["checkpoint", "random:2"])


def same(found, expected):
    for pipeline in (expected, found):
        pipeline.run()
    for item in ("rows", "heads"):
        torch.testing.assert_close(found["rollout"][item], expected["rollout"][item], rtol=1e-3, atol=1e-12)
    assert torch.equal(make_plan(found.context, found).bits, make_plan(expected.context, expected).bits)


@FAMILIES
def test_the_same_plan_through_accelerate_s_hooks(name, tmp_path, text):  # noqa: F811
    """Two kinds of device that every machine has: two layers come from the disk whenever they run."""
    path = save_checkpoint(name, tmp_path)
    expected, found = (open_pipeline(path, text, tmp_path / place) for place in ("one", "map"))
    model = found.context.model.model
    places = {child: "cpu" for child, _ in model.named_children() if child != "model"}
    places |= {f"model.{child}": "cpu" for child, _ in model.model.named_children() if child != "layers"}
    places |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(len(model.model.layers))}
    accelerate.dispatch_model(model, device_map=places, main_device="cpu", offload_dir=str(tmp_path / "offload"))
    assert all(p.is_meta for p in model.model.layers[1].parameters())
    same(found, expected)


@FAMILIES
@WEIGHTS
@DEVICES
def test_the_same_plan_with_device_map_auto(name, weights, device, tmp_path, text):  # noqa: F811
    path = save_checkpoint(name, tmp_path)
    model = {"weights": weights, "device": device}
    expected = open_pipeline(path, text, tmp_path / "one", model=model)
    found = open_pipeline(path, text, tmp_path / "map", model={**model, "device_map": "auto"})
    same(found, expected)
    if device == "cuda":
        assert {p.device.index for p in found.context.model.model.parameters()} == {0, 1}
