"""Progress: what passes took, nested, and what is said when stderr is no terminal."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from stepquant.config import compose_recipe
from stepquant.inspect import main as inspect
from stepquant.passes import progress as progress_module
from stepquant.passes.compile import compile_recipe
from stepquant.passes.memory import PeakMemory
from stepquant.passes.progress import Lines, Progress
from tests.passes.test_pipeline import SMALL

MIB = 1 << 20


def test_peaks_are_of_the_pass_and_of_those_inside_it():
    progress = Progress(quiet=True)
    with progress.step("before"):
        torch.ones(300 * MIB // 4)
    with progress.step("outer"), progress.step("inner"):
        torch.ones(200 * MIB // 4)
    with progress.step("after", tokens=10):
        pass
    before, inner, outer, after = (cost.memory.host for cost in progress.costs)
    assert progress.ran == ["before", "inner", "outer", "after"]
    if before < after + 150 * MIB:
        pytest.skip("this system does not reset the high-water mark")
    assert before - after > 250 * MIB
    assert 150 * MIB < inner - after < 250 * MIB
    assert outer >= inner
    assert progress.costs[3].to_json()["tokens"] == 10


def test_a_bar_is_lines_with_time_left_where_there_is_no_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    bar = Lines(Console(file=out, width=200), "trace", total=100, done=0)
    bar.skip(40)
    for _ in range(20):
        now[0] += 3
        bar.advance()
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0].strip() for line in lines] == ["trace 44/100", "trace 48/100", "trace 52/100",
                                                              "trace 56/100", "trace 60/100"]  # fmt: skip
    assert "168 s left" in lines[0]  # 4 of the 60 in 12 s
    assert "host " in lines[0]


def test_an_artifact_records_what_its_compile_took(tmp_path, capsys):
    recipe = compose_recipe("tiny_gdn_6bit", {**SMALL, "cache.dir": str(tmp_path / "c"), "output": str(tmp_path / "o"),
                                              "json": str(tmp_path / "s.json"), "method": "paper"})  # fmt: skip
    compile_recipe(recipe, quiet=True)
    run = json.loads((tmp_path / "o" / "run.json").read_text())
    names = [one["name"] for one in run["passes"]]
    assert names[0] == "load"
    assert names[1].startswith("trace (gate_statistics, row_impact")
    assert names[2:] == ["row_weights", "distortion", "allocation", "codegen", "report"]
    assert all(one["seconds"] >= 0 and one["host_peak_bytes"] > 50 * MIB for one in run["passes"])
    assert run["passes"][1]["tokens"] == 4 * 64
    assert json.loads((tmp_path / "s.json").read_text())["run"] == run
    assert inspect([str(tmp_path / "o"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == run
    assert inspect([str(tmp_path / "o"), "--passes"]) == 0
    assert "peak host GiB" in capsys.readouterr().out
    (tmp_path / "o" / "run.json").write_text(json.dumps({**run, "plan_sha256": "another"}))
    assert inspect([str(tmp_path / "o"), "--json"]) == 0
    assert "run" not in json.loads(capsys.readouterr().out)


def test_peak_memory_shows_gpus_that_were_used():
    assert PeakMemory(3 << 30, [0, 0]).shown() == "host 3.0 GiB"
    assert PeakMemory(3 << 30, [5 << 30, 1 << 29]).shown() == "host 3.0 GiB, GPU 5.0 + 0.5 GiB"
