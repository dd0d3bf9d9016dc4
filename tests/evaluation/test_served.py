"""Decode through the serving runtime against the simulated codec: two implementations of the same states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepquant.codec.registry import make_codec
from stepquant.errors import RecipeError
from stepquant.evaluate import main
from stepquant.evaluation.decode import DecodeSettings, decode_layer
from stepquant.evaluation.drift import DriftRun
from stepquant.evaluation.served import ServedDecoder
from stepquant.evaluation.streams import Streams
from stepquant.evaluation.variants import from_plan, named_variant
from stepquant.models.adapter import LoadedModel
from stepquant.models.capture import capture_delta_rule
from stepquant.plan import LayoutPlan, WindowSpec
from stepquant.runtime.raw import raw_gates


@pytest.mark.parametrize("window", [1, 4])
def test_outputs_are_those_of_the_codec(loaded: LoadedModel, plan: LayoutPlan, tmp_path: Path, window: int) -> None:
    plan = replace(plan, window=WindowSpec(window, "fp16"))
    plan.save(tmp_path)
    served = ServedDecoder.load(tmp_path, torch.device("cpu"))
    tokens = torch.randint(3, 64, (2, 41), generator=torch.Generator().manual_seed(4))
    compared = 0

    def replaced(layer: int, trace):
        nonlocal compared
        codec = make_codec(plan.bits[layer], plan.w[layer], plan.codec, plan.geometry.value_dim)
        expected = decode_layer(trace, codec, DecodeSettings(17, window, "fp16"))
        found = served.decode_layer(layer, trace, 17)
        error = (found - expected).norm() / (expected - decode_layer(trace, None, DecodeSettings(17))).norm()
        assert error < 0.1  # rounding apart they agree; a code that falls on the other side is a fraction of the noise
        torch.testing.assert_close(found[:, :17], expected[:, :17])
        compared += 1
        return expected

    with capture_delta_rule(loaded, replace=replaced), torch.no_grad():
        loaded.model(input_ids=tokens, use_cache=False)
    assert compared == plan.geometry.num_delta_layers


def test_rows_say_what_served(loaded: LoadedModel, plan: LayoutPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    common = [f"plan={tmp_path / 'plan'}", f"model.path={loaded.path}", "any_checkpoint=true", "model.device=cpu",
              "model.weights=random:0",
              "streams=2", "prefill=12", "decode=20", "workers=1", f"cache.dir={tmp_path / 'c'}",
              "against=[int6]"]  # fmt: skip
    rows = {}
    for path in ("served", "packed"):
        target = tmp_path / f"{path}.json"
        assert main([*common, f"path={path}", f"json={target}"]) == 0
        rows[path] = json.loads(target.read_text())
    assert [row["path"] for row in rows["served"]] == ["served by torch operations", "simulated"]
    assert rows["served"][0]["kl_all"] == pytest.approx(rows["packed"][0]["kl_all"], rel=0.05)
    assert rows["served"][1]["kl_all"] == rows["packed"][1]["kl_all"]


def test_a_row_says_what_ran_on_the_model_s_device(plan: LayoutPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine has."""
    variant = from_plan(plan, path="served", directory="x")
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert variant.path_on(torch.device("cpu")) == "served by torch operations"
        assert variant.path_on(torch.device("cuda")) == "served by generated kernels"
    assert from_plan(plan).path_on(torch.device("cuda")) == "simulated"
    assert named_variant("native", plan).path_on(torch.device("cpu")) == "native"


def test_an_artifact_is_loaded_once_for_all_batches(
    loaded: LoadedModel, plan: LayoutPlan, streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.save(tmp_path)
    calls, original = [], ServedDecoder.load
    monkeypatch.setattr(ServedDecoder, "load", lambda *given: calls.append(given) or original(*given))
    both = [from_plan(plan, path="served", directory=tmp_path), from_plan(plan)]
    one, other = DriftRun(loaded, streams, batch=1).evaluate(both)
    assert calls == [(tmp_path, torch.device("cpu"))]
    assert one.row()["path"] == "served by torch operations"
    assert one.row()["kl_all"] == pytest.approx(other.row()["kl_all"], rel=0.1)


def test_served_refuses_what_it_cannot_do(plan: LayoutPlan, tmp_path: Path, capsys) -> None:
    plan.save(tmp_path)
    assert main([f"plan={tmp_path}", "path=served", "greedy=4"]) == 2
    assert "path=served measures the drift only" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="generated for a window of"):
        named_variant(f"{tmp_path}@16", plan, path="served")


def test_raw_gates_are_undone_by_the_kernels_formulas() -> None:
    gate = -torch.logspace(-6, 2, 50, dtype=torch.float64)
    beta = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    a, b = raw_gates(gate, beta)
    torch.testing.assert_close(-torch.nn.functional.softplus(a, threshold=50), gate)
    torch.testing.assert_close(torch.sigmoid(b), beta)
