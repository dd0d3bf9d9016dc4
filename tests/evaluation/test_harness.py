"""The harness' model without the harness, and the harness itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stepquant.errors import DataError, RecipeError
from stepquant.evaluation.generate import generate
from stepquant.evaluation.harness import StateModel, check_tasks
from stepquant.evaluation.settings import HarnessSettings
from stepquant.evaluation.variants import named_variant
from stepquant.harness import main
from stepquant.models.adapter import LoadedModel
from stepquant.passes.progress import Progress
from stepquant.plan import LayoutPlan

FIRST = 3  # ids below are special


class Letters:
    """A tokenizer of one id a character, for the 64-word vocabulary of the smallest models."""

    eos_token_id = 2
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [FIRST + (ord(c) - 64) % 61 for c in text]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(64 + int(i) - FIRST) for i in ids if int(i) >= FIRST)


@pytest.fixture
def model(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> StateModel:
    monkeypatch.setattr(loaded, "tokenizer", Letters())
    return StateModel(loaded, None, 12, Progress(quiet=True))


def test_answers_are_greedy_continuations(model: StateModel, plan: LayoutPlan) -> None:
    for name in ("fp32", "int4", "int4@4:fp32"):
        variant = named_variant(name, plan)
        model.variant = variant
        text = model.answer("ABCDEFGH", {"until": []})
        prompt = torch.tensor([model.encode("ABCDEFGH")])
        expected = generate(model.loaded, prompt, 12, variant, {2})[0]
        assert text == Letters().decode(expected[expected >= 0])
    assert model.lengths[-1] <= 12
    assert model.capped <= 3


def test_answers_stop_at_stop_strings_and_limits(model: StateModel) -> None:
    model.max_tokens = 7
    whole = model.answer("ABCDEFGH", {})
    assert model.lengths == [7]
    assert model.capped == 1
    stop = whole[3:5]
    cut = model.answer("ABCDEFGH", {"until": [stop]})
    assert cut == whole[: whole.index(stop)]
    assert model.lengths[-1] < 7
    model.max_tokens = None
    assert len(model.answer("ABCDEFGH", {"max_gen_toks": 5})) <= 5


def test_likelihoods_are_read_from_the_stored_state(model: StateModel, plan: LayoutPlan) -> None:
    ids = model.encode("ABCDEFGHIJ")
    with torch.no_grad():
        logits = model.loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    expected = sum(float(logits[t - 1, ids[t]]) for t in range(6, 10))
    found, _ = model.likelihood("ABCDEF", "GHIJ")
    assert found == pytest.approx(expected, abs=1e-4)
    model.variant = named_variant("int3", plan)
    assert abs(model.likelihood("ABCDEF", "GHIJ")[0] - expected) > 1e-4
    one = model.likelihood("ABCDEF", "G")[0]
    model.variant = None
    assert one != pytest.approx(model.likelihood("ABCDEF", "G")[0], abs=1e-7), "the first token is decoded too"
    assert model.rolling("ABC") < 0
    assert model.likelihood("", "A")[0] < 0


def test_mistakes_are_named(plan: LayoutPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path)
    assert main([f"plan={tmp_path}"]) == 2
    assert "tasks is empty" in capsys.readouterr().err
    assert main(["tasks=[gsm8k]"]) == 2
    assert "plan is not given" in capsys.readouterr().err
    if importlib.util.find_spec("lm_eval") is None:
        assert main([f"plan={tmp_path}", "tasks=[gsm8k]"]) == 2
        assert "stepquant[eval]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_runs_a_local_task(
    loaded: LoadedModel, plan: LayoutPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr("stepquant.models.adapter.load_tokenizer", lambda *a, **k: Letters())
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    plan.save(tmp_path / "plan")
    common = [f"plan={tmp_path / 'plan'}", f"model.path={loaded.path}", "any_checkpoint=true", "model.device=cpu",
              "include=benchmarks/tasks", "limit=2", f"json={tmp_path / 'rows.json'}"]  # fmt: skip
    assert main([*common, "tasks=[echo_line]", "max_tokens=4"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["variant"] for row in rows} == {"plan", "fp32"}
    assert all(row["mean_tokens"] <= 4 for row in rows)
    assert main([*common, "tasks=[echo_choice]"]) == 2
    assert "never reads a quantised state" in capsys.readouterr().err
    assert main([*common, "tasks=[echo_choice]", "likelihood=decode"]) == 0


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ConnectionError("hub is down\nand more"), DataError, r"ConnectionError: hub is down\); without a network"),
        (KeyError("gsm9k"), RecipeError, r"KeyError: 'gsm9k'\); lm-eval ls tasks"),
    ],
)
def test_tasks_that_cannot_be_loaded_are_one_line(monkeypatch: pytest.MonkeyPatch, failure, kind, message) -> None:
    """The harness' loaders raise whatever their libraries do."""

    def get_task_dict(names: list[str], manager: object) -> None:
        raise failure

    tasks = ModuleType("lm_eval.tasks")
    tasks.TaskManager, tasks.get_task_dict = lambda **more: None, get_task_dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    with pytest.raises(kind, match=message) as found:
        check_tasks(HarnessSettings(tasks=("gsm9k",)))
    assert "\n" not in str(found.value)
