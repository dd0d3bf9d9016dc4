"""Layer-by-layer runs give what the whole model gives, in any micro-batching and after an interruption."""

from __future__ import annotations

import functools

import pytest
import torch

from stepquant.errors import ModelError
from stepquant.models.adapter import load_model
from stepquant.models.capture import capture_delta_rule
from stepquant.models.layerwise import load_layerwise, load_progress
from tests.models.checkpoints import CONFIGS, needs, save_checkpoint

torch.set_num_threads(1)
ROWS, TOKENS = 3, 20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("layerwise")
    return functools.cache(lambda name: save_checkpoint(name, root))


def ids() -> torch.Tensor:
    return torch.randint(3, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def collect(into: dict[int, list[torch.Tensor]]):
    return lambda layer, trace: into.setdefault(layer, []).append(
        torch.cat([trace.v.flatten(), trace.log_gate.flatten(), trace.k.flatten()])
    )


def whole(loaded) -> dict[int, list[torch.Tensor]]:
    seen: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad(), capture_delta_rule(loaded, collect(seen)):
        for rows in ids().split(2):
            loaded.model(input_ids=rows, use_cache=False)
    return seen


@pytest.mark.parametrize("weights", ["checkpoint", "random:3"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_equals_the_whole_model(name, weights, checkpoints):
    path = checkpoints(name)
    expected = whole(load_model(path, weights=weights, device="cpu"))
    runner = load_layerwise(path, weights=weights, device="cpu")
    seen: dict[int, list[torch.Tensor]] = {}
    order: list[int] = []
    rows: list[range] = []
    observe = collect(seen)

    def observer(layer, trace):
        rows.append(runner.rows)
        observe(layer, trace)

    with capture_delta_rule(runner.loaded, observer):
        runner.run(ids(), batch=2, on_layer=lambda done: order.append(done.layer))
    assert list(seen) == list(expected)
    assert rows == [range(2), range(2, 3)] * len(expected)
    for layer, parts in expected.items():
        for ours, theirs in zip(seen[layer], parts, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert order == list(range(runner.loaded.geometry.layers[-1] + 1))
    assert all(parameter.is_meta for layer in runner.source.layers for parameter in layer.parameters())


@needs("glm5_next")
def test_resumes_at_the_layer_reached(checkpoints, tmp_path):
    runner = load_layerwise(checkpoints("glm5_next"), device="cpu")
    expected = runner.run(ids(), batch=3, activations="device", last_layer=3)

    class Interruption(Exception):
        pass

    def interrupt(done):
        if done.layer == 2:
            raise Interruption

    with pytest.raises(Interruption):
        runner.run(ids(), batch=2, on_layer=interrupt, directory=tmp_path, key="a", last_layer=3)
    assert load_progress(tmp_path, "a").next_layer == 3
    assert load_progress(tmp_path, "b") is None
    order: list[int] = []
    resumed = load_layerwise(checkpoints("glm5_next"), device="cpu").run(
        ids(), batch=2, directory=tmp_path, key="a", last_layer=3, on_layer=lambda done: order.append(done.layer)
    )
    assert order == [3]
    torch.testing.assert_close(resumed, expected, rtol=1e-3, atol=1e-5)


def test_incomplete_checkpoint_is_named(checkpoints, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "cut"
    shutil.copytree(checkpoints("qwen3_5"), path)
    tensors = load_file(path / "model.safetensors")
    gone = next(name for name in tensors if "layers.1.linear_attn.out_proj" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path / "model.safetensors")
    runner = load_layerwise(path, device="cpu")
    with pytest.raises(ModelError, match=r"lacks 1 tensors of model\.layers\.1, first linear_attn\.out_proj"):
        runner.run(ids(), batch=2)
