"""The evaluate command: rows, JSON, refusals with exit code 2, workers, greedy generation."""

from __future__ import annotations

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepquant.errors import BackendError
from stepquant.evaluate import main
from stepquant.evaluation import run as run_module
from stepquant.evaluation.generate import DecodeHook, generate, greedy_figures
from stepquant.evaluation.report import HEADER, header, markdown_table
from stepquant.evaluation.settings import EvaluateSettings
from stepquant.evaluation.variants import from_plan, named_variant
from stepquant.models.adapter import LoadedModel
from stepquant.models.capture import capture_delta_rule
from stepquant.plan import LayoutPlan

NAMES = {
    "variant", "bits_per_value", "window", "kl_first", "kl_last", "kl_all", "excess_nll_all", "top1_all", "streams",
    "path",
}  # fmt: skip


@pytest.fixture
def directory(plan: LayoutPlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan")
    return tmp_path / "plan"


def arguments(loaded: LoadedModel, directory: Path, *more: str) -> list[str]:
    return [
        f"plan={directory}", f"model.path={loaded.path}", "model.device=cpu", "model.weights=random:0",
        "any_checkpoint=true", "streams=2", "prefill=16", "decode=24", f"cache.dir={directory.parent / 'cache'}", *more,
    ]  # fmt: skip


def test_rows_have_stable_names(
    loaded: LoadedModel, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rows.json"
    more = ["against=[int8,int4@8,fp32]", f"json={target}", "greedy=6", "layers=true", "workers=1"]
    assert main(arguments(loaded, directory, *more)) == 0
    rows = json.loads(target.read_text())
    assert [row["variant"] for row in rows] == ["plan", "int8", "int4@8", "fp32"]
    for row in rows:
        assert set(row) >= NAMES
    assert rows[2]["window"] == 8
    assert rows[3]["kl_all"] == 0
    assert rows[0]["kl_ratio"] == 1
    assert rows[3]["greedy_agreement"] == 1
    printed = capsys.readouterr().out
    for row in rows:
        assert str(row["variant"]) in printed
    assert markdown_table(rows).count("\n") == 2 + len(rows)
    assert len(HEADER) == markdown_table(rows).splitlines()[0].count("|") - 1
    again = tmp_path / "again.json"
    more[1] = f"json={again}"
    assert main(arguments(loaded, directory, *more)) == 0
    assert again.read_bytes() == target.read_bytes()


def test_the_packed_path_is_named_and_agrees(loaded: LoadedModel, directory: Path, tmp_path: Path) -> None:
    rows = {}
    for path in ("simulated", "packed"):
        target = tmp_path / f"{path}.json"
        more = ["against=[int8]", f"path={path}", f"json={target}", "workers=1"]
        assert main(arguments(loaded, directory, *more)) == 0
        rows[path] = json.loads(target.read_text())
    assert [row["path"] for row in rows["packed"]] == ["packed", "simulated"]
    assert abs(rows["packed"][0]["kl_all"] - rows["simulated"][0]["kl_all"]) < 1e-6


@pytest.mark.slow
def test_workers_share_the_work_and_change_nothing(loaded: LoadedModel, directory: Path, tmp_path: Path) -> None:
    if loaded.geometry.family == "kda":
        pytest.skip("processes do not depend on the family")
    written = []
    for workers in (1, 2):
        target = tmp_path / f"{workers}.json"
        more = ["against=[int8,int6]", f"workers={workers}", f"json={target}", f"cache.dir={tmp_path / str(workers)}"]
        assert main([*arguments(loaded, directory)[:-1], *more]) == 0
        written.append(target.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("strems=3", "did you mean 'streams'"),
        ("streams=0", "streams is 0"),
        ("against=[itn8]", "did you mean 'int8'"),
        ("path=fast", "simulated"),
        ("plan=/nowhere/at/all", "no such artifact directory"),
        ("any_checkpoint=false", "a plan belongs to its weights"),
        ("plan=null", "plan is not given"),
        ("model.device=tpu", "model.device"),
        ("data.path=/some/file", "data.source=builtin reads no file"),
        ("model.loading=layerwise", "decoding reads every layer"),
    ],
)
def test_mistakes_are_named(
    loaded: LoadedModel, directory: Path, capsys: pytest.CaptureFixture[str], more: str, message: str
) -> None:
    key = more.partition("=")[0]
    kept = [a for a in arguments(loaded, directory) if not a.startswith(f"{key}=")]
    assert main([*kept, more]) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert message in error
    assert "Traceback" not in error


def test_generation_is_teacher_forcing_fed_with_itself(loaded: LoadedModel, plan: LayoutPlan) -> None:
    """What a hook generates is what one forward over prompt and continuation predicts, for windows too."""
    from stepquant.evaluation.forward import Readout, run_variant

    prompts = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(3))
    readout = Readout(loaded)
    for name in ("fp32", "bf16", "bf16@4:fp32"):
        variant = named_variant(name, plan)
        found = generate(loaded, prompts, 11, variant, set())
        tokens = torch.cat([prompts, found], 1)
        logits = readout.logits(run_variant(loaded, readout, tokens[:, :-1], 12, variant))
        assert (logits.argmax(-1) == found).double().mean() > 0.9, name


def test_prefill_of_a_hook_is_exact(loaded: LoadedModel, plan: LayoutPlan) -> None:
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = loaded.model(input_ids=tokens, use_cache=True).logits
        with capture_delta_rule(loaded, replace=DecodeHook(from_plan(plan))):
            found = loaded.model(input_ids=tokens, use_cache=True).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_batches_fit_the_device(plan: LayoutPlan) -> None:
    from dataclasses import replace

    from stepquant.evaluation.run import pick_batch

    assert pick_batch(plan, torch.device("cpu"), 1537) == 8
    assert pick_batch(plan, torch.device("cuda"), 1537) == 64
    large = replace(plan, geometry=replace(plan.geometry, num_heads=48, num_key_heads=16, key_dim=128, value_dim=128))
    assert pick_batch(large, torch.device("cuda"), 8193) == 3
    assert pick_batch(large, torch.device("cuda"), 10**6) == 1


def test_greedy_figures() -> None:
    reference = torch.tensor([[5, 6, 7, 2, -1], [5, 6, 7, 8, 9]])
    variant = torch.tensor([[5, 6, 7, 2, -1], [5, 9, 7, 8, 9]])
    found = greedy_figures(reference, variant)
    assert found["greedy_agreement"] == 8 / 9
    assert found["greedy_prefix"] == (4 + 1) / 2
    assert found["greedy_length"] == 4.5
    assert found["greedy_ended"] == 0.5


def test_a_killed_worker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system does when memory runs out, without using it up."""

    class Dead:
        def __init__(self, *args: object, **more: object) -> None:
            pass

        def __enter__(self) -> Dead:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def submit(self, *args: object) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(run_module, "ProcessPoolExecutor", Dead)
    drift = SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cpu")), evaluate=lambda variants: [])
    variants = [SimpleNamespace(name=name) for name in "ab"]
    with pytest.raises(BackendError, match=r"one of 2 evaluation processes was killed.*fewer than workers=2"):
        run_module.evaluate_spread(EvaluateSettings(workers=2), drift, variants)


def test_short_runs_do_not_claim_256_tokens() -> None:
    assert header([{"tokens": 128}])[3:5] == ["KL first 128", "KL last 128"]
    assert header([{"tokens": 1024}])[3:5] == ["KL first 256", "KL last 256"]
