"""``python -m benchmarks.mutations [--only WORD] [--write]``: every guard broken on purpose, and which test notices.

benchmarks/mutations.toml lists the guards. Each is broken in a copy of the repository, where the tests named there are
run until the first one fails. A guard whose tests pass without it has survived: it needs a test. ``--write`` puts the
table into docs/mutations.md (only after a run of all of them). Exit code 1 where one survived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = (
    "stepquant",
    "tests",
    "benchmarks",
    "conf",
    "recipes",
    "requirements",
    "pyproject.toml",
    ".ci",
    "Makefile",
    "README.md",
)
TABLE = ROOT / "docs" / "mutations.md"
SECONDS = 300


@dataclass(frozen=True)
class Mutation:
    """One guard: `old`, which must stand exactly once in `file`, becomes `new`; one of `tests` must then fail."""

    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def broken(self, text: str) -> str:
        """The file without the guard.

        Raises:
            ValueError: the text to replace is not there, or there twice.
        """
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file}: {self.guard}: {self.old!r} stands there {text.count(self.old)} times, not once"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `failed` is the first test that failed, None where none did."""

    mutation: Mutation
    failed: str | None
    seconds: float


def mutations() -> Iterator[Mutation]:
    """All of benchmarks/mutations.toml."""
    with (ROOT / "benchmarks" / "mutations.toml").open("rb") as file:
        groups = tomllib.load(file)
    for group in groups.values():
        for one in group["mutations"]:
            tests = tuple(one.get("tests", group["tests"]))
            yield Mutation(one["guard"], group["file"], one["old"], one["new"], tests)


def pytest(copy: Path, tests: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run tests in the copy until one fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=1", *tests]
    return subprocess.run(
        command, cwd=copy, capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def check_sound(copy: Path, tests: Sequence[str]) -> None:
    """Refuse to begin where tests fail with every guard in place.

    Raises:
        RuntimeError: with what pytest said.
    """
    done = pytest(copy, tests, 4 * SECONDS)
    if done.returncode:
        raise RuntimeError(f"the tests do not pass with every guard in place\n{done.stdout[-3000:]}")


def run(mutation: Mutation, copy: Path) -> Outcome:
    """Break one guard in `copy`, run its tests, and put it back.

    Raises:
        RuntimeError: pytest could not run them at all.
    """
    path, started = copy / mutation.file, time.monotonic()
    sound = path.read_text()
    path.write_text(mutation.broken(sound))
    try:
        done = pytest(copy, mutation.tests, SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(mutation, "a test that then never ends", SECONDS)
    finally:
        path.write_text(sound)
    seconds = time.monotonic() - started
    if done.returncode == 0:
        return Outcome(mutation, None, seconds)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode != 1 or found is None:
        raise RuntimeError(
            f"{mutation.guard}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return Outcome(mutation, found[1], seconds)


def table(outcomes: list[Outcome]) -> str:
    """docs/mutations.md."""
    killed = sum(o.failed is not None for o in outcomes)
    lines = [
        "# Guards broken on purpose", "",
        f"`python -m benchmarks.mutations --write` broke {len(outcomes)} guards, one at a time, and ran the tests of "
        f"each: {killed} were noticed. `benchmarks/mutations.toml` has what each guard became.", "",
        "| guard | file | first test that failed |", "|---|---|---|",
    ]  # fmt: skip
    for o in outcomes:
        test = re.sub(r"\[.*", "", (o.failed or "**none**").removeprefix("tests/"))
        lines.append(f"| {o.mutation.guard} | `{o.mutation.file.removeprefix('stepquant/')}` | `{test}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="guards or files that hold this word")
    parser.add_argument("--write", action="store_true", help="write docs/mutations.md")
    args = parser.parse_args()
    chosen = [m for m in mutations() if args.only in m.guard or args.only in m.file]
    if not chosen:
        parser.error(f"--only {args.only}: no guard and no file has this word")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="stepquant-mutations-") as name:
        for item in COPIED:
            source, target = ROOT / item, Path(name) / item
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
        check_sound(Path(name), sorted({test for m in chosen for test in m.tests}))
        for mutation in chosen:
            outcome = run(mutation, Path(name))
            outcomes.append(outcome)
            print(
                f"{outcome.seconds:6.1f} s  {mutation.file}: {mutation.guard}: {outcome.failed or 'SURVIVED'}",
                flush=True,
            )
    survived = [o for o in outcomes if o.failed is None]
    print(f"{len(outcomes)} broken, {len(outcomes) - len(survived)} noticed")
    if args.write and not args.only:
        TABLE.write_text(table(outcomes))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
