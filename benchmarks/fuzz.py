"""Fuzz everything that is loaded: ``python -m benchmarks.fuzz [COUNT] [SEED]``, by default 120,000 mutations.

The engine is in tests/fuzz; what a case may and may not do is in tests/fuzz/guard.py. Prints a table by loader and
writes benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stepquant.files import write_json

RESULTS = Path(__file__).parent / "results" / "fuzz.json"
ROOT = Path(__file__).parents[1]
PART = 10_000  # cases of one process


def run_part(count: int, seed: int, first: int) -> subprocess.Popen[str]:
    """Start a process over cases `first` .. `first + count - 1`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.run", str(count), str(seed), str(first)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(process: subprocess.Popen[str], first: int) -> dict[str, Any]:
    """What a process found."""
    out, error = process.communicate()
    *wrong, last = out.strip().splitlines() or [""]
    if process.returncode:
        raise SystemExit(f"cases from {first} on: the process ended with {process.returncode}\n{error[-3000:]}")
    return {**json.loads(last), "failures": wrong}


def main() -> int:
    """Run and report; the exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=120_000)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    starts = list(range(0, args.count, PART))
    began = time.perf_counter()
    found: list[dict[str, Any]] = []
    running: list[tuple[int, subprocess.Popen[str]]] = []
    while starts or running:
        while starts and len(running) < args.jobs:
            first = starts.pop(0)
            running.append((first, run_part(min(PART, args.count - first), args.seed, first)))
        first, process = running.pop(0)
        found.append(finish(process, first))
        print(f"{sum(one['cases'] for one in found)} of {args.count}, {time.perf_counter() - began:.0f} s", flush=True)
    names = list(found[0]["targets"])
    table = {name: Counter[str]() for name in names}
    for one in found:
        for name, row in one["targets"].items():
            table[name].update(row)
    failures = [text for one in found for text in one["failures"]]
    columns = ("cases", "loaded", "refused", "not taken", "crashed")
    print("| loader | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(f"{table[name][c]:,}" for c in columns) + " |")
    print(*failures, sep="\n")
    write_json(args.output, {
        "cases": args.count, "seed": args.seed, "seconds": round(time.perf_counter() - began),
        "slowest_case_seconds": max(one["slowest"] for one in found),
        "peak_mib": max(one["peak_mib"] for one in found),
        "targets": {name: dict(table[name]) for name in names}, "failures": failures,
    })  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
