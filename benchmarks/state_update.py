"""The state update of one layer beside others' kernels: one command, one table.

    python -m benchmarks.state_update [--batches 1,8,32,128,512,1024] [--out benchmarks/results/state_update_h200.json]

Microseconds of a decode step of one layer (GDN: 48 value and 16 key heads, KDA: 32 heads; 128 x 128) by CUDA-graph
replay over slot sets that do not fit in the L2 cache, medians. Everything is counted: readout, fit, pack, writeback,
folds averaged over whole windows. Plans have mixed precisions and pivots (`benchmarks.synthetic`). Beside them SGLang's
own decode kernels with FP32 and BF16 states and FLA's recurrent kernel, where they can be imported. Outputs are checked
against float64 (W = 1) and the torch window before anything is timed.

A list of the requests that fold is made once a step for all layers; it is timed apart (`list_us`). The file is written
after every plan, so that a run that is cut off leaves what it measured (``complete`` says which it is).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import counts, listed, need_gpu
from benchmarks.baselines import baseline_times
from benchmarks.kernel_check import check_steps, check_windows
from benchmarks.kernel_times import copy_bandwidth, graph_time, packed_calls
from benchmarks.synthetic import Case
from stepquant.files import write_json

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "state_update_h200.json"
MODELS = {"gdn": "qwen", "kda": "kimi"}
SHAPES = {"gdn": "48 value heads, 16 key heads", "kda": "32 heads"}
EVERY = ((6, 1), (6, 8), (4, 8))  # bits and window at every batch
SOME = ((6, 2), (6, 4), (6, 16), (4, 1))  # at the batches of `WINDOW_BATCHES`
WINDOW_BATCHES = (32, 128, 512)
TOLERANCE = {"output_error": 4e-3, "flipped_codes": 1e-4}  # outputs are bfloat16


def plan_name(family: str, bits: int) -> str:
    return f"{MODELS[family]}_{bits}bit"


def worker(name: str, window: int, batches: list[int]) -> None:
    """Compile the kernels of a plan, compare them with the references, say so, and time them when told to.

    Raises:
        AssertionError: on a mismatch.
    """
    case, results = Case.make(name, 1, "cuda"), {}
    if window == 1:
        check_steps(case, results, (3, 64))
    else:
        check_windows(case, results, window, "fp16", 2 * window)
    for part, found in results.items():
        for key, limit in TOLERANCE.items():
            assert found[key] <= limit, f"{name} {part}: {key} {found[key]:.2e}, at most {limit:.0e}"
    print("ready", flush=True)
    sys.stdin.readline()
    bits = int(name.split("_")[1][0])
    for batch in batches:
        row: dict[str, Any] = {"family": case.family, "state": f"{bits} bits", "window": window, "batch": batch}
        print(json.dumps(row | times(case, window, batch)), flush=True)
    print("done", flush=True)


def times(case: Case, window: int, batch: int) -> dict[str, float]:
    """Microseconds and bytes of a step: folds after their reads, and on a stream of their own."""
    calls = packed_calls(case, window, batch)
    found = {"us": graph_time(calls.inline), "bytes": calls.bytes}
    if window > 1:
        found["aside_us"] = graph_time(calls.aside)
        found["read_us"], found["fold_us"] = graph_time(calls.read), graph_time(calls.fold)
        found["list_us"] = graph_time([calls.make_list])
    return found


class Worker:
    """One `worker` in a process of its own: all compile side by side, and are timed one at a time."""

    def __init__(self, name: str, window: int, batches: list[int]) -> None:
        self.title = f"{name}, W = {window}"
        command = [sys.executable, "-m", "benchmarks.state_update", "--worker", f"{name}:{window}"]
        command += ["--batches", ",".join(map(str, batches))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def until(self, word: str) -> list[dict[str, Any]] | None:
        """Rows until the worker says `word`; None if it ended without."""
        rows = []
        for line in self.process.stdout or ():
            if line.strip() == word:
                return rows
            if line.startswith("{"):
                rows.append(json.loads(line))
        return None

    def measure(self) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        rows = self.until("done")
        self.process.wait()
        return rows or []


def environment() -> dict[str, Any]:
    import triton

    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    except OSError:
        commit = ""
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": os.environ.get("STEPQUANT_COMMIT") or commit, "shapes": SHAPES,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=counts, default=[1, 8, 32, 128, 512, 1024])
    parser.add_argument("--families", type=listed(list(MODELS)), default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", help="one plan and window, PLAN:W (used by the command itself)")
    args = parser.parse_args()
    need_gpu(parser)
    batches = args.batches
    if args.worker:
        name, window = args.worker.split(":")
        worker(name, int(window), batches)
        return
    start, families = time.time(), args.families
    some = [b for b in batches if b in WINDOW_BATCHES]
    workers = [
        Worker(plan_name(family, bits), window, own)
        for family in families
        for pairs, own in ((EVERY, batches), (SOME, some))
        for bits, window in pairs
        if own
    ]
    failed = [w.title for w in workers if w.until("ready") is None]
    if failed:
        for w in workers:
            w.process.kill()
        sys.exit(f"not timed: outputs are wrong or kernels do not compile for {'; '.join(failed)}")
    checked, copy, rows = time.time() - start, copy_bandwidth(), []
    about = environment() | {"copy_gb_s": copy, "check_seconds": checked}

    def keep(measured: list[dict[str, Any]], complete: bool = False) -> dict[str, Any]:
        for row in measured:
            row["copy_share"] = row["bytes"] / best_us(row) / 1e3 / copy
        rows.extend(measured)
        found = about | {"seconds": time.time() - start, "complete": complete, "rows": rows}
        write_json(args.out, found)
        return found

    args.out.parent.mkdir(parents=True, exist_ok=True)
    for family in families:
        for batch in batches:
            keep(baseline_times(family, batch))
    for w in workers:
        measured = w.measure()
        keep(measured)
        print(w.title, [round(r.get("aside_us", r["us"]), 1) for r in measured], flush=True)
    ended = [w.title for w in workers if w.process.returncode != 0]
    print(table(keep([], complete=not ended)))
    if ended:
        sys.exit(f"not timed to the end: {'; '.join(ended)}")


def best_us(row: dict[str, Any]) -> float:
    """Microseconds of a step, folds after their reads or on a stream of their own."""
    return min(row["us"], row.get("aside_us", row["us"]))


def table(found: dict[str, Any]) -> str:
    """Markdown: microseconds of each variant, and how many times faster than the FP32 state."""
    lines = []
    for family, shape in SHAPES.items():
        rows = [r for r in found["rows"] if r["family"] == family]
        lines += [f"\n{family.upper()}, {shape}\n", "| batch | state | W | us | x FP32 | x BF16 | share of copy |",
                  "|---|---|---|---|---|---|---|"]  # fmt: skip
        for batch in sorted({r["batch"] for r in rows}):
            here = [r for r in rows if r["batch"] == batch]
            us = {r["state"]: r["us"] for r in here}
            for r in here:
                best = best_us(r)
                others = (us.get("sglang fp32"), us.get("sglang bf16"))
                ratios = " | ".join("" if x is None else f"{x / best:.2f}" for x in others)
                window = r.get("window", "")
                lines.append(f"| {batch} | {r['state']} | {window} | {best:.1f} | {ratios} | {r['copy_share']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
