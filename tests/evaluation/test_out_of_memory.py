"""Memory that runs out in an analysis, in lm-eval tasks, in greedy generation or while a model loads: one line with the
arithmetic and a setting of that command, exit code 2; what it advises is taken."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stepquant.analyse import main as analyse_command
from stepquant.errors import BackendError
from stepquant.evaluate import main as evaluate_command
from stepquant.evaluation import demands, forward
from stepquant.evaluation import generate as generate_module
from stepquant.evaluation.analyses import base
from stepquant.evaluation.analyses.exact_read import INJECTED
from stepquant.evaluation.settings import AnalyseSettings
from stepquant.harness import main as harness_command
from stepquant.models import adapter
from stepquant.models.adapter import LoadedModel
from stepquant.passes import context
from tests.evaluation.test_harness import Letters
from tests.passes.test_out_of_memory import TORCH_SAYS, fails_at

NEEDED = "2.00 GiB more were needed on GPU 3, of whose 79.10 GiB 1.25 GiB were free; "


def arguments(loaded: LoadedModel, plan: Path, cache: Path, *more: str) -> list[str]:
    return [f"plan={plan}", f"model.path={loaded.path}", "model.weights=random:0", "model.device=cpu",
            f"cache.dir={cache}", "streams=2", *more]  # fmt: skip


def traced(loaded: LoadedModel, tokens: int) -> str:
    """Bytes of q, k and v, FP32, of one layer, as a message has them."""
    g = loaded.geometry
    return f"{tokens * g.num_heads * (g.key_dim + g.key_dim + g.value_dim) * 4 / 2**20:.2f} MiB"


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_an_analysis_names_its_streams_and_takes_what_it_advises(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    common = ["half_life", f"output={tmp_path / 'out'}", "figure=false", "prefill=16"]
    given = arguments(loaded, artifact, tmp_path / "cache")
    with monkeypatch.context() as patched:
        fails_at(patched, base, "decode_layer", call=2)
        assert analyse_command([*common, *given, "decode=40"]) == 2
    line = last_line(capsys)
    assert line.startswith(f"error: out of memory in the analysis half_life: {NEEDED}"), line
    assert line.endswith(f"a stream of 57 tokens took {traced(loaded, 57)} for one layer's q, k, v; set decode=20")
    assert not (tmp_path / "out" / "numbers.json").exists()
    assert analyse_command([*common, *given, "decode=20"]) == 0
    assert (tmp_path / "out" / "numbers.json").exists()


def test_an_analysis_of_variants_names_its_batch(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fails_at(monkeypatch, forward, "decode_layer", call=2)
    given = arguments(loaded, artifact, tmp_path / "cache", "prefill=16", "decode=24", "batch=2")
    assert analyse_command(["drift", *given, f"output={tmp_path / 'out'}"]) == 2
    line = last_line(capsys)
    assert line.startswith(f"error: out of memory in the evaluation: {NEEDED}batch=2 streams of 41 tokens"), line
    assert line.endswith("; set batch=1"), line


def test_a_compile_inside_an_analysis_says_whose_settings_it_names(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The ablation compiles plans; `data.batch` is no setting of `analyse`."""
    fails_at(monkeypatch, context, "chunked_delta_rule")
    given = arguments(loaded, artifact, tmp_path / "cache", "prefill=16", "decode=24")
    assert analyse_command(["ablation", *given, f"output={tmp_path / 'out'}"]) == 2
    line = last_line(capsys)
    start = f"error: compiling temporal only with the settings of {artifact / 'recipe.yaml'}: out of memory in trace ("
    assert line.startswith(start), line
    assert "; set data.batch=1" in line


def test_no_stream_is_advised_that_the_analysis_refuses(loaded: LoadedModel) -> None:
    """The oracle needs more than 256 tokens; with fewer there is nothing to look at."""
    few = AnalyseSettings(prefill=64, decode=INJECTED + 4)
    told = demands.analysis("exact_read", few, loaded, few.prefill + few.decode)
    assert str(told).endswith("; set prefill=32")
    few = AnalyseSettings(prefill=1, decode=INJECTED)
    assert "no setting lowers it" in str(demands.analysis("exact_read", few, loaded, few.prefill + few.decode))


def test_greedy_generation_names_its_streams(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fails_at(monkeypatch, generate_module, "decode_steps", call=2)
    given = arguments(loaded, artifact, tmp_path / "cache", "prefill=16", "decode=8", "greedy=4", "against=[]")
    assert evaluate_command([*given, "workers=1"]) == 2
    line = last_line(capsys)
    share = f"streams=2 prompts of prefill=16 tokens took {traced(loaded, 32)} for one layer's q, k, v; set streams=1"
    assert line == f"error: out of memory in greedy generation: {NEEDED}{share}"


def test_loading_names_the_weights(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With the checkpoint's own weights their size is that of its tensors."""
    fails_at(monkeypatch, adapter, "load_model")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = [a for a in arguments(loaded, artifact, tmp_path / "cache") if not a.startswith("model.weights")]
    assert analyse_command(["half_life", *given, "any_checkpoint=true"]) == 2
    line = last_line(capsys)
    size = sum(p.stat().st_size for p in Path(loaded.path).glob("*.safetensors"))
    found = re.fullmatch(
        rf"error: out of memory in loading the model: {re.escape(NEEDED)}weights took ([\d.]+) MiB; "
        r"set model\.device_map=auto", line,
    )  # fmt: skip
    assert found is not None, line
    assert float(found[1]) == pytest.approx(size / 2**20, abs=0.1)


def fake_harness(monkeypatch: pytest.MonkeyPatch, prompt: str, kind: str) -> None:
    """lm-eval as far as it is called: one task of one request."""

    class Task:
        def get_config(self, name: str) -> str:
            return kind

    def simple_evaluate(model: Any, **more: Any) -> dict[str, Any]:
        if kind == "generate_until":
            model.generate_until([SimpleNamespace(args=(prompt, {"max_gen_toks": 2}))])
        else:
            model.loglikelihood([SimpleNamespace(args=(prompt, "IJ"))])
        return {"results": {"task": {"exact,none": 1.0}}}

    parts = {"lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": object},
             "lm_eval.tasks": {"TaskManager": lambda **more: None,
                             "get_task_dict": lambda *a: {"task": Task()}}}  # fmt: skip
    for name, members in parts.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("stepquant.evaluation.harness.require_lm_eval", lambda: None)
    monkeypatch.setattr(adapter, "load_tokenizer", lambda *a, **k: Letters())


@pytest.mark.parametrize(
    ("kind", "tokens", "shots", "remedy"),
    [
        ("generate_until", 9, None, "set num_fewshot=0 (fewer examples in the prompt)"),
        ("generate_until", 9, 5, "set num_fewshot=2 (fewer examples in the prompt)"),
        ("multiple_choice", 10, 0, "no setting lowers it: use a larger device"),
    ],
)
def test_tasks_name_the_prompt(
    loaded: LoadedModel, artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    kind: str, tokens: int, shots: int | None, remedy: str,
) -> None:  # fmt: skip
    fake_harness(monkeypatch, "ABCDEFGHI", kind)
    owner = generate_module if kind == "generate_until" else forward
    fails_at(monkeypatch, owner, "decode_steps" if kind == "generate_until" else "decode_layer", call=2)
    given = [a for a in arguments(loaded, artifact, Path("/")) if not a.startswith(("streams", "cache.dir"))]
    more = ["tasks=[task]", "likelihood=decode", f"num_fewshot={'null' if shots is None else shots}"]
    assert harness_command([*given, *more]) == 2
    line = last_line(capsys)
    share = f"a prompt of {tokens} tokens took {traced(loaded, tokens)} for one layer's q, k, v"
    assert line == f"error: out of memory in the tasks: {NEEDED}{share}; {remedy}"


def test_torchs_own_error_is_kept_as_the_cause(loaded: LoadedModel) -> None:
    """Whoever calls from Python can still see it."""
    from stepquant.passes.out_of_memory import told

    with pytest.raises(BackendError) as found, told("x", lambda: demands.drift(loaded, 3, 10)):
        raise torch.OutOfMemoryError(TORCH_SAYS)
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    assert str(found.value).endswith("set batch=1")
