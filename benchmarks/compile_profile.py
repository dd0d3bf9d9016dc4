"""Where a compile's time goes on the CPU: ``python -m benchmarks.compile_profile [RECIPE ...] [--before FILE]``.

Each recipe (by default the built-in models' at 6 bits: what `make demo` compiles, and its KDA twin) is compiled in a
process of its own with an empty cache. Processor seconds are counted, not those of the clock, so that what else the
machine does changes little; every pass is named in its order. ``--before`` puts another file's seconds and the ratio
beside them, ``--functions N`` profiles instead and prints the N functions that take longest (a third slower).

    git worktree add /tmp/old COMMIT
    python -m benchmarks.compile_profile --source /tmp/old --output before.json
    python -m benchmarks.compile_profile --before before.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "compile_profile_cpu.json"
RECIPES = ("tiny_gdn_6bit", "tiny_kda_6bit")
LEAST = 0.05  # seconds that a row needs
START, BETWEEN = "start: imports, composing, text", "between passes: writing, comparing, summary"


def compile_here(recipe: str, place: str, functions: int) -> None:
    """Compile in this process and print processor seconds by step as JSON, or the functions that take longest."""
    from stepquant.compile import main
    from stepquant.passes.progress import Progress

    seconds: dict[str, float] = {}
    inner = [0.0]  # seconds of steps inside of the open ones, the innermost last
    own = Progress.step

    @contextmanager
    def timed(self: Progress, name: str, *args: Any) -> Iterator[None]:
        if not seconds:
            seconds[START] = time.process_time()
        began = time.process_time()
        inner.append(0.0)
        with own(self, name, *args):
            yield
        name, took = name.partition(" (")[0], time.process_time() - began
        seconds[name] = seconds.get(name, 0.0) + took - inner.pop()
        inner[-1] += took

    Progress.step = timed  # type: ignore[method-assign]
    arguments = [f"recipe={recipe}", f"output={place}/out", f"cache.dir={place}/cache"]
    if functions:
        import cProfile
        import pstats

        profile = cProfile.Profile(time.process_time)
        code = profile.runcall(main, arguments)
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(functions)
        pstats.Stats(profile).sort_stats("cumtime").print_stats("stepquant", functions)
    else:
        code = main(arguments)
    seconds[BETWEEN] = time.process_time() - sum(seconds.values())
    if code:
        raise SystemExit(code)
    print(json.dumps(seconds))


def measure(recipe: str, source: Path, functions: int) -> dict[str, float]:
    """Processor seconds by step of a compile of the checkout `source`, one thread, caches empty."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, recipe, "--here", place, "--functions", str(functions)]
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    if functions:
        print(run.stdout)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return {name: round(value, 2) for name, value in found.items()}


def table(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Markdown: a row a step; seconds, and where there is a `before` its seconds and the ratio."""
    lines = []
    for recipe, steps in now["seconds"].items():
        old = (before or {}).get("seconds", {}).get(recipe)
        lines += [f"| {recipe} | " + ("before | now | ratio |" if old else "processor seconds |"),
                  "|---|---|---|---|" if old else "|---|---|"]  # fmt: skip
        rows = {**steps, "all": sum(steps.values())}
        past = {**old, "all": sum(old.values())} if old else {}
        for name, value in rows.items():
            if max(value, past.get(name, 0.0)) < LEAST:
                continue
            if not past:
                lines.append(f"| {name} | {value:.1f} |")
            elif name in past:
                lines.append(f"| {name} | {past[name]:.1f} | {value:.1f} | {value / max(past[name], 1e-9):.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--before", type=Path, help="figures of an earlier run, to stand beside these")
    parser.add_argument("--source", type=Path, default=ROOT, help="checkout whose compiler is measured")
    parser.add_argument("--functions", type=int, default=0, help="profile, and print so many functions")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        compile_here(args.recipes[0], args.here, args.functions)
        return 0
    seconds = {recipe: measure(recipe, args.source, args.functions) for recipe in args.recipes}
    found: dict[str, Any] = {"seconds": seconds}
    before = json.loads(args.before.read_text()) if args.before else None
    print(table(found, before))
    if not args.functions:
        from stepquant.files import write_json
        from stepquant.run_record import machine

        write_json(args.output, {**found, "before": before, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
