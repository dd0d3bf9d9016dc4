"""The README's compile commands, as dry runs with made-up statistics in place of a checkpoint."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stepquant.compile import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
COMMANDS = re.findall(r"^    python -m stepquant\.compile (.*?)(?:  +#.*)?$", README, re.MULTILINE)
WEIGHTS = "budget.weights_bytes=50.1GiB"  # of Qwen3.8-27B in BF16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the README's own recipe, and the artifact that one of its commands starts from."""
    root = tmp_path_factory.mktemp("readme")
    own = re.search(r"^    # my\.yaml\n((?:    .*\n)+)", README, re.MULTILINE)
    assert own is not None
    (root / "my.yaml").write_text(re.sub(r"^    ", "", own[1], flags=re.MULTILINE))
    output = f"output={root / 'build' / 'qwen_6bit'}"
    assert main(["recipe=qwen_6bit", "calibration=synthetic", output, f"cache.dir={root / 'cache'}"]) == 0
    return root


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken(command: str, place: Path, monkeypatch: pytest.MonkeyPatch,
                            capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    arguments = [word for word in shlex.split(command) if not word.startswith("model.path=")]
    if not any("tiny" in word or word == "calibration=synthetic" for word in arguments):
        arguments.append("calibration=synthetic")
    if any(word.endswith(".yaml") for word in arguments):
        arguments.append("model.path=null")
    if "budget.gpu_memory" in command:
        arguments.append(WEIGHTS)
    code = main([*arguments, "dry_run=true", f"cache.dir={place / 'cache'}"])
    assert code == 0, capsys.readouterr().err
