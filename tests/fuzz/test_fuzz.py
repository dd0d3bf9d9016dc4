"""10,000 mutations of what is loaded, in a process of its own with a bound on its memory; what the oracle would see.

``python -m benchmarks.fuzz`` runs 100,000 and more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepquant import files, kernel_files, plan, reading, run_record
from stepquant.errors import ArtifactError
from stepquant.files import read_json
from stepquant.runtime import load
from tests.fuzz.corpus import Corpus, artifact, by_rows
from tests.fuzz.forge import MARK
from tests.fuzz.guard import Guard
from tests.fuzz.run import one_case
from tests.fuzz.targets import Target, targets

COUNT = 10_000


def test_mutations() -> None:
    """Every damaged file gives a sound result or a StepQuantError that names it, and nothing else happens."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", str(COUNT), "20261130"], cwd=root, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *wrong, last = done.stdout.strip().splitlines()
    assert not wrong, "\n".join(wrong[:30])
    found = json.loads(last)
    assert found["cases"] == COUNT
    for name, row in found["targets"].items():  # no target whose cases are all alike: something is reached and refused
        assert row["cases"] > 5, name
        if "report" not in name:
            assert row.get("refused", 0) + row.get("not taken", 0) > 0.3 * row["cases"], (name, row)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    (tmp_path_factory.getbasetemp() / "outside").mkdir(exist_ok=True)
    return Corpus.make(tmp_path_factory.getbasetemp() / "inside")


@pytest.fixture(scope="module")
def guard(corpus: Corpus) -> Guard:
    return Guard([corpus.root])


def failures(corpus: Corpus, guard: Guard, name: str, count: int = 150) -> list[str]:
    target = next(t for t in targets(corpus) if t.name == name)
    found = [one_case(target, corpus, guard, Random(f"x{i}"))[1] for i in range(count)]
    return [text for text in found if text]


def test_the_oracle_sees_a_check_that_is_gone(corpus: Corpus, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures(corpus, guard, "plan rows")
    with monkeypatch.context() as patch:
        patch.setattr(plan, "check_weights", lambda *_: None)
        patch.setattr(plan, "check_storage", lambda *_: None)
        found = failures(corpus, guard, "plan rows", 400)
    assert any("geometric mean" in text for text in found)
    with monkeypatch.context() as patch:
        patch.setattr(run_record, "_is_pass", lambda found: True)
        assert any("crashed" in text or "Error" in text for text in failures(corpus, guard, "run.json rows", 400))
    with monkeypatch.context() as patch:
        patch.setattr(kernel_files, "source_hash", lambda sources: json.loads(
            (corpus.artifacts["rows"] / "kernels/kernel_plan.json").read_bytes())["source_sha256"])  # fmt: skip
        edited = corpus.artifacts["rows"] / "kernels" / "pack.py"
        sound = edited.read_bytes()
        edited.write_bytes(sound + b"#")
        load.load_rank_plan(corpus.artifacts["rows"])
        edited.write_bytes(sound)


def misbehave(kind: str, corpus: Corpus) -> Any:
    if kind == "write":
        return (corpus.root.parent / "outside" / "x").write_text("x")
    if kind == "socket":
        import socket

        with socket.socket() as one:
            one.settimeout(0.01)
            one.connect_ex(("127.0.0.1", 9))
    if kind == "process":
        return subprocess.run(["true"], check=True)
    if kind == "run":
        return exec(compile("1", str(corpus.root / "heads" / "kernels" / "pack.py"), "exec"))
    if kind == "mark":
        sys.modules[MARK] = sys
    if kind == "memory":
        return bytearray(os.urandom(1) * (400 << 20))
    if kind == "crash":
        raise KeyError("x")
    return None


@pytest.mark.parametrize(
    ("kind", "seen"),
    [("write", "for writing"), ("socket", "socket.connect"), ("process", "subprocess.Popen"), ("run", "ran code of"),
     ("mark", "code of the artifact ran"), ("memory", "MiB"), ("crash", "KeyError")],
)  # fmt: skip
def test_the_guard_sees(kind: str, seen: str, corpus: Corpus, guard: Guard) -> None:
    name = "run.json"
    target = Target("x", corpus.artifacts["rows"], (name,), lambda: misbehave(kind, corpus), lambda r: "", 1.0)
    assert seen in one_case(target, corpus, guard, Random("1"))[1]


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket", "loop"])
def test_what_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140644)
    else:
        path.symlink_to(path)
    with pytest.raises(ArtifactError, match=rf"plan\.json: the plan cannot be read: .*({kind}|symbolic links)"):
        read_json(path, "the plan")
    with pytest.raises(ArtifactError, match=r"plan\.json: tensors cannot be read"):
        files.read_tensors(path, "tensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 65 + "]" * 65, "more than 64 levels"), ("1e999", "holds 1e999"), ("9" * 41, "41 digits"),
     ('"\\ud800"', "surrogates"), ('{"a":1,"a":1}', "appears twice"), ("NaN", "holds NaN")],
)  # fmt: skip
def test_strict_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reading.parse_json(text)
    assert reading.parse_json('["\\ud83d\\ude00", 1.5, 99999999999999999999]') == ["😀", 1.5, 99999999999999999999]


def test_an_edited_kernel_is_refused_by_name(tmp_path: Path) -> None:
    """Its text is compared before anything is generated or run; so is one that was added or taken away."""
    place = artifact(tmp_path / "a", by_rows())
    assert load.load_rank_plan(place).kernel_hash
    path = place / "kernels" / "fold.py"
    sound = path.read_text()
    path.write_text(f"import sys\nsys.modules[{MARK!r}] = sys\n" + sound)
    for size in (1, 2):  # the ranks of a server compare it too
        with pytest.raises(ArtifactError, match=r"kernel_plan\.json \(fold\.py differ from what this stepquant"):
            load.load_rank_plan(place, 0, size)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"fold\.py differ "):
        load.load_rank_plan(place)
    path.write_text(sound)
    (place / "kernels" / "extra.py").write_text("x = 1\n")
    with pytest.raises(ArtifactError, match=r"extra\.py differ "):
        load.load_rank_plan(place)
    assert MARK not in sys.modules


def test_a_small_recipe_does_not_grow(tmp_path: Path) -> None:
    from stepquant.config import compose_recipe
    from stepquant.errors import RecipeError

    path = tmp_path / "mine.yaml"
    lines = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    for text, message in (
        ("\n".join(lines), "more than 20000 values"),
        ("budget: &a [*a]", "inside of what it stands for"),
        ("x: " + "[" * 40 + "]" * 40, "more than 32 levels"),
        ("#" * 2**20 + "\nx: 1", "1048576 bytes"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            compose_recipe(str(path))
