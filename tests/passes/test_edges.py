"""Calibration at its edges: hardly any text, broken weights, a full disk, and interruptions at any moment."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stepquant.artifact import read_tables
from stepquant.compile import main as compile_command
from stepquant.models.checkpoint import resolve_checkpoint
from stepquant.passes import spill
from stepquant.plan import LayoutPlan, load_plan

TINY = {"data.segments": 3, "data.length": 16, "data.batch": 1, "samples.per_layer": 3}


def arguments(root: Path, recipe: str = "tiny_gdn_6bit", **changes: object) -> list[str]:
    settings = {**TINY, "cache.dir": root / "cache", "output": root / "out",
                **{key.replace("__", "."): value for key, value in changes.items()}}  # fmt: skip
    return [f"recipe={recipe}", *(f"{key}={value}" for key, value in settings.items())]


def refused(capsys: pytest.CaptureFixture[str], root: Path, **changes: object) -> str:
    """The one line that a compile ends with; nothing is written where the artifact would be."""
    assert compile_command(arguments(root, **changes)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert not (root / "out").exists()
    return line


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("", {}, "is empty; expected text"),
        ("x", {}, "file holds 2 tokens, 0 segments of 16; 3 segments need 48. Lower data.segments or data.length"),
        ("x", {"data__segments": 1, "data__length": 3, "samples__every": 1}, "2 tokens, 0 segments of 3"),
        ("short text", {}, "0 segments of 16"),
        ("long enough for two " * 2, {}, "segments of 16; 3 segments need 48"),
        ("x" * 400, {"data__length": 7}, "samples.every is 8, above data.length (7 tokens of a segment)"),
        ("x" * 400, {"data__length": 1}, "data.length is 1"),
    ],
)  # fmt: skip
def test_too_little_text_is_named_with_the_arithmetic(text, changes, says, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text)
    file = {"data__source": "file", "data__path": tmp_path / "text.txt"}
    assert says in refused(capsys, tmp_path, **{**file, **changes})


@pytest.mark.parametrize("recipe", ["tiny_gdn_6bit", "tiny_kda_4bit"])
@pytest.mark.parametrize("loading", ["whole", "layerwise"])
def test_one_token_of_text_is_enough_for_a_plan(recipe, loading, tmp_path):
    """A token and the end of the text: one update that leaves a state, one sample, finite tables."""
    (tmp_path / "text.txt").write_text("x")
    least = {"data__segments": 1, "data__length": 2, "samples__every": 1, "data__source": "file",
             "data__path": tmp_path / "text.txt", "model__loading": loading}  # fmt: skip
    assert compile_command(arguments(tmp_path, recipe, **least)) == 0
    plan = load_plan(tmp_path / "out")
    assert plan.provenance["data"]["segments"] == [1, 2]
    tables, _ = read_tables(tmp_path / "out")
    assert {"gate_statistics", "distortion", "rollout"} <= set(tables)
    assert float(tables["distortion"][1]["row_error"].max()) > 0
    assert any("under-sampled" in note for note in plan.provenance["notes"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("loading", ["whole", "layerwise"])
def test_weights_that_are_not_finite_end_a_compile_by_name(value, loading, tmp_path, capsys):
    shutil.copytree(resolve_checkpoint("builtin:tiny_gdn"), tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if "layers.1." in n and n.endswith("A_log"))
    tensors[name][-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    line = refused(capsys, tmp_path, model__path=tmp_path / "model", model__loading=loading)
    assert "1 tensors hold NaN or infinities, first model.layers.1.linear_attn.A_log" in line
    made = {p.name for p in (tmp_path / "cache").iterdir()}
    assert made <= {"segments", "locks", "partial"}, "statistics were made from it"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LayoutPlan]:
    made: dict[str, LayoutPlan] = {}

    def plan(recipe: str = "tiny_gdn_6bit", **changes: object) -> LayoutPlan:
        key = f"{recipe} {sorted(changes.items())}"
        if key not in made:
            root = tmp_path_factory.mktemp("undisturbed")
            assert compile_command(arguments(root, recipe, **changes)) == 0
            made[key] = load_plan(root / "out")
        return made[key]

    return plan


@pytest.mark.parametrize("call", [1, 10, 40])
@pytest.mark.parametrize("loading", ["whole", "layerwise"])
def test_a_disk_that_fills_up_while_states_are_written(call, loading, undisturbed, tmp_path, monkeypatch, capsys):
    """Named, and the next run, on a disk with room again, gives the plan of one that had room all along."""
    original, calls = os.pwrite, []

    def full(*given: object) -> int:
        calls.append(1)
        if len(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(spill.os, "pwrite", full)
        line = refused(capsys, tmp_path, model__loading=loading)
    assert ".safetensors could not be written: No space left on device" in line
    assert "cache.dir=DIR" in line
    assert compile_command(arguments(tmp_path, model__loading=loading)) == 0
    assert load_plan(tmp_path / "out").hash == undisturbed(model__loading=loading).hash


@contextlib.contextmanager
def interrupted_after(seconds: float):
    """SIGINT, as Ctrl-C sends it, in so many seconds, unless the block has ended by then."""
    armed = [True]

    def handler(*_: object) -> None:
        if armed[0]:
            signal.raise_signal(signal.SIGINT)  # its handler runs before this returns

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("recipe", "loading"), [("tiny_gdn_6bit", "whole"), ("tiny_kda_4bit", "layerwise")])
def test_ctrl_c_at_any_time_and_the_same_plan_in_the_end(recipe, loading, undisturbed, tmp_path, capsys):
    """The same command is interrupted at twenty random moments, ever later, and then left alone."""
    expected = undisturbed(recipe, model__loading=loading)
    draw, codes, outside = random.Random(f"{recipe}5"), [], 0
    for number in range(20):
        try:
            with interrupted_after(draw.uniform(0.002, 0.02 + 0.08 * number)):
                codes.append(compile_command(arguments(tmp_path, recipe, model__loading=loading)))
        except KeyboardInterrupt:  # between the command and this loop
            outside += 1
            continue
        said = capsys.readouterr().err
        assert codes[-1] in (0, 130), said
        assert "Traceback" not in said
        if (tmp_path / "out").exists():  # whole or not there
            load_plan(tmp_path / "out"), read_tables(tmp_path / "out")
    assert codes.count(130) >= 5
    assert outside <= 2
    assert compile_command(arguments(tmp_path, recipe, model__loading=loading)) == 0
    assert load_plan(tmp_path / "out").hash == expected.hash
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert not list((tmp_path / "cache" / "partial").glob("*"))


def test_a_kill_at_any_file_operation_and_the_same_plan_in_the_end(undisturbed, tmp_path):
    """Killed before a random one of what a compile does to files, and started again until it comes through."""
    place = tmp_path / "here"
    done = subprocess.run(
        [sys.executable, "-m", "tests.passes.killed", str(place), "3", "8", *arguments(place)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count(str(-signal.SIGKILL)) >= 4
    assert compile_command(arguments(place)) == 0
    assert load_plan(place / "out").hash == undisturbed().hash
    assert [p.name for p in place.iterdir() if p.name.startswith(".")] == []
