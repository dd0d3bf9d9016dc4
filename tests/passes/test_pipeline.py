"""The pipeline on the built-in models: caching, resuming, re-solving, and the figures of the plan it writes."""

from __future__ import annotations

import json

import pytest
import torch

from stepquant.config import compose_recipe
from stepquant.errors import InfeasibleError, RecipeError
from stepquant.passes import trace
from stepquant.passes.compile import compile_recipe
from stepquant.plan import load_plan

SMALL = {"data.segments": 4, "data.length": 64, "data.batch": 1, "samples.per_layer": 4}


def recipe(tmp_path, name="tiny_gdn_6bit", **changes):
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    settings = {**SMALL, "cache.dir": str(tmp_path / "cache"), "output": str(tmp_path / "out"), **changes}
    return compose_recipe(name, settings)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """One compile of the GDN model whose cache the tests below share."""
    root = tmp_path_factory.mktemp("pipeline")
    return root, compile_recipe(recipe(root, method="paper"), quiet=True)


def test_first_compile_runs_the_model_and_writes_a_plan(compiled):
    root, result = compiled
    assert result.model_loaded
    plan = load_plan(root / "out")
    assert torch.equal(plan.bits, result.plan.bits)
    assert int((plan.bits == 16).all(-1).sum()) == 1
    integer = plan.bits.long().masked_fill(plan.bits == 16, 0).sum() * plan.geometry.value_dim
    assert int(integer) <= 6 * plan.geometry.elements - 8 * plan.geometry.head_elements
    assert not plan.synthetic
    assert (root / "out" / "report.html").is_file()


def test_another_budget_runs_only_the_solver(compiled, tmp_path):
    root, _ = compiled
    result = compile_recipe(recipe(root, method="paper", budget__bits=4, output=str(tmp_path / "four")), quiet=True)
    assert not result.model_loaded
    assert result.ran == ["allocation", "codegen", "report"]
    assert {"gate_statistics", "row_impact", "distortion"} <= set(result.reused)


def test_gamma_runs_from_the_row_weights_on(compiled, tmp_path):
    root, _ = compiled
    result = compile_recipe(recipe(root, spatial__gamma=0.5, temporal__weight="gate", temporal__sensitivity="none",
                                   window__length=1, spatial__impact="one_step", output=str(tmp_path / "gamma")),
                            quiet=True)  # fmt: skip
    assert not result.model_loaded
    assert result.ran == ["row_weights", "distortion", "allocation", "codegen", "report"]


def test_horizon_reads_no_state_again(compiled, tmp_path):
    root, _ = compiled
    first = {"temporal__weight": "gate", "temporal__sensitivity": "none", "window__length": 1,
             "spatial__impact": "one_step", "spatial__gamma": 0.25, "spatial__refits": 1,
             "spatial__sample": 0}  # fmt: skip
    result = compile_recipe(recipe(root, temporal__horizon=512, output=str(tmp_path / "h"), **first), quiet=True)
    assert result.ran == ["allocation", "codegen", "report"]


def test_reuse_solves_again_without_model_or_cache(compiled, tmp_path):
    root, first = compiled
    again = recipe(tmp_path, method="paper", reuse=str(root / "out"), budget__bits=4)
    result = compile_recipe(again, quiet=True)
    direct = compile_recipe(recipe(root, method="paper", budget__bits=4, output=str(tmp_path / "four")), quiet=True)
    assert not result.model_loaded
    assert torch.equal(result.plan.bits, direct.plan.bits)
    assert result.plan.fingerprint == first.plan.fingerprint
    assert not (tmp_path / "cache").exists()


def test_reuse_refuses_what_needs_state_samples(compiled, tmp_path):
    root, _ = compiled
    changed = recipe(tmp_path, reuse=str(root / "out"), spatial__gamma=0.5, spatial__impact="one_step",
                     temporal__weight="gate", temporal__sensitivity="none")  # fmt: skip
    with pytest.raises(RecipeError, match=r"spatial\.gamma is 0\.5, but reuse=.* was made with 0\.25.*state samples"):
        compile_recipe(changed, quiet=True)


def test_an_interrupted_trace_resumes_where_it_was(tmp_path, monkeypatch):
    plain = compile_recipe(recipe(tmp_path / "plain"), quiet=True)
    batches = []
    original = trace.watch_batch

    def interrupting(context, tokens, rows, observations):
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(rows)
        original(context, tokens, rows, observations)

    monkeypatch.setattr(trace, "watch_batch", interrupting)
    with pytest.raises(KeyboardInterrupt):
        compile_recipe(recipe(tmp_path / "cut"), quiet=True)
    assert not (tmp_path / "cut" / "out" / "plan.json").exists()
    resumed = []

    def watching(context, tokens, rows, observations):
        resumed.append(rows)
        original(context, tokens, rows, observations)

    monkeypatch.setattr(trace, "watch_batch", watching)
    result = compile_recipe(recipe(tmp_path / "cut"), quiet=True)
    assert [r.start for r in batches + resumed] == [0, 1, 2, 3]
    assert torch.equal(result.plan.bits, plain.plan.bits)
    assert torch.equal(result.plan.w, plain.plan.w)


def test_kda_rows_with_the_default_method(tmp_path):
    result = compile_recipe(recipe(tmp_path, "tiny_kda_4bit"), quiet=True)
    plan = result.plan
    assert int((plan.bits == 16).sum()) == 38
    assert set(plan.bits.unique().tolist()) <= {2, 4, 6, 8, 16}
    assert plan.predicted["gap"] < 1e-3


def test_dry_run_reads_no_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("stepquant.models.adapter.load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    found = tmp_path / "dry.json"
    result = compile_recipe(recipe(tmp_path, dry_run=True, json=str(found)), quiet=True)
    assert result.plan is None
    summary = json.loads(found.read_text())
    assert summary["bytes_per_request"]["fp32"] == 3_145_728
    assert not (tmp_path / "out").exists()


def test_dry_run_charges_no_window_to_fp32_and_says_what_it_cannot_know(tmp_path):
    keys = {"dry_run": True, "budget__gpu_memory": "4GiB", "budget__weights_bytes": "1GiB", "budget__bits": 4}
    summary = compile_recipe(recipe(tmp_path, **keys), quiet=True).summary
    g, strategy = summary["geometry"], recipe(tmp_path).budget.slots_per_request
    slot = summary["bytes_per_request"]["fp32"] + g["conv_bytes"]
    context = recipe(tmp_path).budget.context_length * g["kv_bytes_per_token"]
    assert summary["concurrency"]["fp32"] == (3 * 2**30 - slot) // (strategy * slot + context)
    assert any("estimate" in note for note in summary["notes"])


def test_bytes_target_is_met_and_nearly_used(compiled, tmp_path):
    root, _ = compiled
    target = 450_000
    result = compile_recipe(recipe(root, budget__bytes_per_request=target, output=str(tmp_path / "bytes"),
                                   temporal__weight="gate", temporal__sensitivity="none", spatial__impact="one_step",
                                   spatial__gamma=0.25, window__length=1), quiet=True)  # fmt: skip
    allocated = result.summary["bytes_per_request"]["allocated"]
    assert 0.97 * target <= allocated <= target
    assert not result.model_loaded


def test_impossible_bytes_name_the_smallest_plan(compiled, tmp_path):
    root, _ = compiled
    with pytest.raises(InfeasibleError, match="smallest plan"):
        compile_recipe(recipe(root, budget__bytes_per_request=100_000, output=str(tmp_path / "x"), window__length=1,
                              temporal__weight="gate", temporal__sensitivity="none", spatial__impact="one_step",
                              spatial__gamma=0.25), quiet=True)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "baseline_int6",
        "baseline_nvfp4",
        "baseline_qmamba4",
        "baseline_damp",
        "ablation_spatial_6",
        "ablation_temporal_6",
        "ablation_temporal_no_pivots_4",
    ],
)
def test_baselines_share_the_pipeline(compiled, tmp_path, name):
    root, _ = compiled
    result = compile_recipe(recipe(root, name, output=str(tmp_path / name)), quiet=True)
    assert not result.model_loaded
    assert load_plan(tmp_path / name).name == name


def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("stepquant.models.adapter.load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(InfeasibleError, match=r"smallest plan takes 2\.125"):
        compile_recipe(recipe(tmp_path, budget__bits=2, dry_run=True), quiet=True)
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="is a file"):
        compile_recipe(recipe(tmp_path, output=str(tmp_path / "file")), quiet=True)
