"""Compiles that kill themselves at random file operations; run by test_edges.py in a process of its own, which forks
before torch has threads: ``python -m tests.passes.killed PLACE SEED ROUNDS ARGUMENT ...``. Prints the exit codes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from pathlib import Path

import transformers.models.qwen3_5.modeling_qwen3_5  # noqa: F401 - imported once for all children, as are the others

import stepquant.models.adapter
import stepquant.passes.compile
import stepquant.report  # noqa: F401
from stepquant.compile import main as compile_command
from stepquant.plan import load_plan
from tests.test_swap import EVENTS, forked, status


def killing_itself(place: Path, number: int, arguments: list[str]) -> int:
    """Exit code of a compile that is killed before its `number`-th file operation below `place`."""

    def run() -> None:
        seen = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal seen
            if event in EVENTS and any(str(place) in str(a) for a in args):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        with (place.parent / "log").open("w") as log, contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            sys.addaudithook(hook)
            code = compile_command(arguments)
        os._exit(code)

    return status(forked(run))


def main(place: Path, seed: str, rounds: int, arguments: list[str]) -> None:
    draw = random.Random(seed)
    for round_ in range(rounds):
        code = killing_itself(place, draw.randint(1, 20 + 25 * round_), arguments)
        print(code, flush=True)
        if code not in (0, -signal.SIGKILL):
            sys.exit((place.parent / "log").read_text())
        if (place / "out").exists():  # whole or not there
            load_plan(place / "out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
