"""Launches chosen by measurement: the file beside the artifact, and which batch takes which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepquant.codegen.kernel_plan import Launch, launches_of
from stepquant.runtime import tuning
from stepquant.runtime.step import PackedKernels
from tests.codegen.cases import Case

CHOICE = {"read": ((32, Launch(1, 128)), (512, Launch(2))), "fold": ((32, Launch(2)), (512, Launch(4, 128)))}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[PackedKernels, list[int]]:
    measured: list[int] = []

    def measure(kernels: PackedKernels) -> tuning.Tuned:
        measured.append(1)
        return CHOICE

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "machine_key", lambda kernels: "this GPU")
    return Case.make("qwen_6bit", 32, 32).kernels(4), measured


def test_measured_once_and_kept_beside_the_artifact(kernels, tmp_path: Path) -> None:
    made, measured = kernels
    assert tuning.tuned_launches(made, tmp_path / "plan") == CHOICE
    assert tuning.tuned_launches(made, tmp_path / "plan") == CHOICE
    assert len(measured) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["plan.tuning.json"]


def test_another_gpu_is_measured_and_both_are_kept(kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, measured = kernels
    tuning.tuned_launches(made, tmp_path / "plan")
    monkeypatch.setattr(tuning, "machine_key", lambda kernels: "another GPU")
    tuning.tuned_launches(made, tmp_path / "plan")
    assert len(measured) == 2
    assert set(json.loads((tmp_path / "plan.tuning.json").read_text())) == {"this GPU", "another GPU"}


@pytest.mark.parametrize(
    "entry",
    [
        None, {}, [], "x", {"pack": [[32, 1, None]]}, {"read": []}, {"read": [[32, 1]]}, {"read": [[32, 3, None]]},
        {"read": [[32, 1, 1000]]}, {"read": [[32, 1, 128.0]]}, {"read": [["32", 1, None]]}, {"read": [[True, 1, None]]},
    ],
)  # fmt: skip
def test_an_entry_that_does_not_fit_is_measured_again(kernels, tmp_path: Path, entry: object) -> None:
    made, measured = kernels
    (tmp_path / "plan.tuning.json").write_text(json.dumps({"this GPU": entry}))
    assert tuning.tuned_launches(made, tmp_path / "plan") == CHOICE
    assert len(measured) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '"x"'])
def test_a_damaged_file_is_measured_again(kernels, tmp_path: Path, text: str) -> None:
    made, measured = kernels
    (tmp_path / "plan.tuning.json").write_text(text)
    assert tuning.tuned_launches(made, tmp_path / "plan") == CHOICE
    assert len(measured) == 1


def test_a_place_that_cannot_be_written_only_warns(kernels, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, _ = kernels
    (tmp_path / "file").write_text("")
    assert tuning.tuned_launches(made, tmp_path / "file" / "plan") == CHOICE
    assert "cannot be written" in caplog.text


def test_a_batch_takes_the_next_larger_choice(kernels) -> None:
    made, _ = kernels
    assert made.launch_of("read", 512) == launches_of(made.spec, "read")[0]
    made.tuned = CHOICE
    assert [made.launch_of("fold", n) for n in (1, 32, 33, 512, 4096)] == [
        Launch(2), Launch(2), Launch(4, 128), Launch(4, 128), Launch(4, 128),
    ]  # fmt: skip
    assert made.launch_of("pack", 8) == launches_of(made.spec, "pack")[0]
    made.launches["fold"], made.tuned = Launch(8), {}
    assert made.launch_of("fold", 8) == Launch(8)
