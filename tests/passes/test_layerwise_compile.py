"""Compiles that hold one layer at a time give the plan of the whole model, also after interruptions."""

from __future__ import annotations

import functools

import pytest
import torch

from stepquant.errors import ArtifactError, ModelError, RecipeError
from stepquant.models import layerwise
from stepquant.models.checkpoint import read_config
from stepquant.models.families import geometry_from_config
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.recipe import Recipe
from tests.models.checkpoints import CONFIGS, needs, save_checkpoint
from tests.models.test_quantised_weights import quantise

torch.set_num_threads(1)
FAMILIES = [pytest.param("qwen3_5", marks=needs("qwen3_5")), pytest.param("kimi_linear", marks=needs("kimi_linear"))]
PRODUCTS = ("gate_statistics", "row_impact", "transition", "sensitivity", "row_weights", "distortion", "rollout")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("layerwise")
    return functools.cache(lambda name: save_checkpoint(name, root))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words of a text that is long enough. " * 60)
    return path


def open_pipeline(checkpoint, text, cache, loading="whole", **sections):
    """A pipeline over a small checkpoint whose text is bytes modulo its vocabulary."""
    config = {
        "model": {"path": str(checkpoint), "device": "cpu", "loading": loading, **sections.pop("model", {})},
        "data": {"source": "file", "path": str(text), "segments": 3, "length": 40, "batch": 2},
        "samples": {"every": 4, "per_layer": 7}, "budget": {"bits": 5, "candidates": [4, 6, 8]},
        "solver": "dp", "pivots": {"count": 1},
        "temporal": {"weight": "rollout", "sensitivity": "local"}, "window": {"length": 4},
        "cache": {"dir": str(cache)}, **sections,
    }  # fmt: skip
    if geometry_from_config(read_config(checkpoint)).family == "kda":
        config["solver"] = "lagrangian"
    return Pipeline(Context.open(Recipe.from_config(config), Progress(quiet=True)))


@pytest.fixture(autouse=True)
def byte_segments(monkeypatch):
    """These checkpoints have no tokenizer: bytes of the text stand for ids, as with random weights."""
    from stepquant.models import data

    original = data.load_segments
    monkeypatch.setattr(data, "load_segments", lambda tokenizer, **options: original(tokenizer, **{**options, "vocab_size": 64}))  # fmt: skip  # noqa: E501


def compare(found: Pipeline, expected: Pipeline) -> None:
    for name in expected.passes:
        if name == "allocation":
            continue
        for item, tensor in expected[name].tensors.items():
            if tensor.is_floating_point():
                error = (found[name][item].double() - tensor.double()).norm() / tensor.double().norm()
                assert float(error) < 1e-3, (name, item)
    ours, theirs = (make_plan(p.context, p) for p in (found, expected))
    assert torch.equal(ours.bits, theirs.bits)
    torch.testing.assert_close(ours.w, theirs.w, rtol=1e-3, atol=0)
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("temporal", [("rollout", "local"), ("transition", "local"), ("gate", "none")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_plan_as_the_whole_model(family, temporal, checkpoints, text, tmp_path):
    sections = {"temporal": {"weight": temporal[0], "sensitivity": temporal[1]}}
    expected = open_pipeline(checkpoints(family), text, tmp_path / "whole", **sections)
    expected.run()
    found = open_pipeline(checkpoints(family), text, tmp_path / "layers", "layerwise", **sections)
    found.run()
    compare(found, expected)
    assert all(p.is_meta for layer in found.context.runner.source.layers for p in layer.parameters())
    samples = expected["state_samples"]
    assert float(torch.cat([samples[f"states.{i}"] for i in range(3)]).abs().max()) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("killed", [False, True])
def test_resumes_at_the_layer_reached(family, killed, checkpoints, text, tmp_path, monkeypatch):
    """Interrupted (Ctrl-C, an error), or killed with no chance to write anything more."""
    expected = open_pipeline(checkpoints(family), text, tmp_path / "whole")
    expected.run()
    applied: list[int] = []
    original = layerwise.LayerwiseModel._apply

    def apply(self, index, *args, **kwargs):
        if len(applied) == 2:
            if killed:
                monkeypatch.setattr(layerwise, "save_progress", lambda *a: None)
            raise KeyboardInterrupt
        applied.append(index)
        return original(self, index, *args, **kwargs)

    monkeypatch.setattr(layerwise.LayerwiseModel, "_apply", apply)
    if killed:
        run = layerwise.LayerwiseModel.run
        monkeypatch.setattr(layerwise.LayerwiseModel, "run", functools.partialmethod(run, save_seconds=0.0))
    with pytest.raises(KeyboardInterrupt):
        open_pipeline(checkpoints(family), text, tmp_path / "cut", "layerwise").run()
    monkeypatch.undo()
    monkeypatch.setattr(layerwise.LayerwiseModel, "_apply", lambda self, i, *a, **k: (applied.append(i), original(self, i, *a, **k))[1])  # fmt: skip  # noqa: E501
    from stepquant.models import data

    load = data.load_segments
    monkeypatch.setattr(data, "load_segments", lambda tokenizer, **o: load(tokenizer, **{**o, "vocab_size": 64}))
    found = open_pipeline(checkpoints(family), text, tmp_path / "cut", "layerwise")
    found.run()
    assert applied == list(range(expected.context.geometry.layers[-1] + 1))
    compare(found, expected)
    assert not list((tmp_path / "cut" / "partial").glob("*"))


def test_a_disk_that_is_full_after_the_last_layer_costs_no_second_run(checkpoints, text, tmp_path, monkeypatch):
    """Products that cannot be stored leave the run where it is: at its end."""
    run = layerwise.LayerwiseModel.run
    monkeypatch.setattr(layerwise.LayerwiseModel, "run", functools.partialmethod(run, save_seconds=0.0))
    first = open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise")

    def full(*_):
        raise ArtifactError("no space")

    monkeypatch.setattr(first.context.cache, "store", full)
    with pytest.raises(ArtifactError, match="no space"):
        _ = first["gate_statistics"]
    monkeypatch.setattr(layerwise.LayerwiseModel, "_apply", lambda *_a, **_k: pytest.fail("a layer ran again"))
    again = open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise")
    again.run()
    expected = open_pipeline(checkpoints("qwen3_5"), text, tmp_path / "whole")
    expected.run()
    compare(again, expected)


def test_a_resumed_run_whose_samples_are_gone_starts_over(checkpoints, text, tmp_path, monkeypatch):
    import shutil

    original = layerwise.LayerwiseModel._apply
    applied: list[int] = []

    def apply(self, index, *args, **kwargs):
        applied.append(index)
        if len(applied) == 3:
            raise KeyboardInterrupt
        return original(self, index, *args, **kwargs)

    monkeypatch.setattr(layerwise.LayerwiseModel, "_apply", apply)
    with pytest.raises(KeyboardInterrupt):
        open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise").run()
    (partial,) = (tmp_path / "partial").iterdir()
    shutil.rmtree(partial / "state_samples")
    open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise").run()
    assert applied == [0, 1, 2, 0, 1, 2]


def test_whole_model_products_are_reused(checkpoints, text, tmp_path):
    open_pipeline(checkpoints("qwen3_5"), text, tmp_path).run()
    again = open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise")
    again.run()
    assert again.context.progress.ran == ["allocation"]


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family(family, checkpoints, text, tmp_path):
    expected = open_pipeline(checkpoints(family), text, tmp_path / "whole")
    found = open_pipeline(checkpoints(family), text, tmp_path / "layers", "layerwise")
    for pipeline in (expected, found):
        pipeline.run()
    compare(found, expected)


def test_what_needs_the_whole_model_is_refused_by_name(checkpoints, text, tmp_path):
    with pytest.raises(RecipeError, match=r"temporal\.sensitivity is 'gradient'.*model\.loading is 'layerwise'"):
        open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise", temporal={"sensitivity": "gradient"})
    path = save_checkpoint("qwen3_5", tmp_path)
    quantise(path)
    with pytest.raises(ModelError, match=r"compressed-tensors-8bit.*model\.loading=whole"):
        open_pipeline(path, text, tmp_path, "layerwise")


def test_what_a_trace_writes_is_what_was_announced(checkpoints, text, tmp_path, monkeypatch):
    """The dry run's figure against the files of a run that is interrupted at its end."""
    from stepquant.passes import trace

    monkeypatch.setattr(layerwise, "PROGRESS_FILE", "progress.safetensors")
    pipeline = open_pipeline(checkpoints("qwen3_5"), text, tmp_path, "layerwise")
    original = layerwise.LayerwiseModel._apply

    def apply(self, index, *args, **kwargs):
        if index == 2:
            raise KeyboardInterrupt
        return original(self, index, *args, **kwargs)

    monkeypatch.setattr(layerwise.LayerwiseModel, "_apply", apply)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run()
    written = sum(file.stat().st_size for file in (tmp_path / "partial").rglob("*.safetensors"))
    announced = trace.trace_bytes(pipeline.context)
    assert announced < written < announced + 8192  # headers and accumulators


def test_random_weights_layer_by_layer(checkpoints, text, tmp_path):
    sections = {"model": {"weights": "random:5"}}
    expected = open_pipeline(checkpoints("kimi_linear"), text, tmp_path / "a", model={"weights": "random:5"})
    expected.run()
    found = open_pipeline(checkpoints("kimi_linear"), text, tmp_path / "b", "layerwise", **sections)
    found.run()
    compare(found, expected)
    assert make_plan(found.context, found).synthetic
