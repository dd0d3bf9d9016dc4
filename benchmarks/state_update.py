"""The state update of one layer beside others' kernels: one command, one table.

    python -m benchmarks.state_update [--batches 1,8,32,128,512,1024] [--out benchmarks/results/state_update_h200.json]

Microseconds of a decode step of one layer (GDN: 48 value and 16 key heads, KDA: 32 heads; 128 x 128) by CUDA-graph
replay over slot sets that do not fit in the L2 cache, medians. Everything is counted: readout, fit, pack, writeback,
folds averaged over whole windows. Plans have mixed precisions and pivots (`benchmarks.synthetic`). Beside them SGLang's
own decode kernels with FP32 and BF16 states and FLA's recurrent kernel, where they can be imported. Outputs are checked
against float64 (W = 1) and the torch window before anything is timed.

A list of the requests that fold is made once a step for all layers; it is timed apart (`list_us`).
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

from benchmarks.baselines import baseline_times
from benchmarks.kernel_check import check_steps, check_windows
from benchmarks.kernel_times import copy_bandwidth, graph_time, packed_calls
from benchmarks.synthetic import Case

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


def check(name: str, windows: list[int]) -> None:
    """Compile the kernels of a plan and compare them with the references; raises AssertionError on a mismatch."""
    case, results = Case.make(name, 1, "cuda"), {}
    for window in windows:
        if window == 1:
            check_steps(case, results, (3, 64))
        else:
            check_windows(case, results, window, "fp16", 2 * window)
    for part, found in results.items():
        for key, limit in TOLERANCE.items():
            assert found[key] <= limit, f"{name} {part}: {key} {found[key]:.2e}, at most {limit:.0e}"


def packed_row(family: str, bits: int, window: int, batch: int, copy: float) -> dict[str, Any]:
    """Microseconds and bytes of one plan, window and batch: folds after their reads, and on a stream of their own."""
    case = Case.make(plan_name(family, bits), 1, "cuda")
    calls = packed_calls(case, window, batch)
    row: dict[str, Any] = {"family": family, "state": f"{bits} bits", "window": window, "batch": batch}
    row["us"] = graph_time(calls.inline)
    if window > 1:
        row["aside_us"] = graph_time(calls.aside)
        row["read_us"], row["fold_us"] = graph_time(calls.read), graph_time(calls.fold)
        row["list_us"] = graph_time([calls.make_list])
    best = min(row["us"], row.get("aside_us", row["us"]))
    row["bytes"] = calls.bytes
    row["copy_share"] = calls.bytes / best / 1e3 / copy
    return row


def measure(family: str, batches: list[int], copy: float) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        for row in baseline_times(family, batch):
            row["copy_share"] = row["bytes"] / row["us"] / 1e3 / copy
            rows.append(row)
            print(shown(row), flush=True)
        pairs = EVERY + (SOME if batch in WINDOW_BATCHES else ())
        for bits, window in pairs:
            rows.append(packed_row(family, bits, window, batch, copy))
            print(shown(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    return rows


def shown(row: dict[str, Any]) -> str:
    return json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()})


def environment() -> dict[str, Any]:
    import triton

    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    except OSError:
        commit = ""
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "commit": commit or os.environ.get("STEPQUANT_COMMIT"), "shapes": SHAPES,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32,128,512,1024")
    parser.add_argument("--families", default="gdn,kda")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--check", help="check one plan, as PLAN:W,W,.. (used by the command itself)")
    args = parser.parse_args()
    if args.check:
        name, windows = args.check.split(":")
        check(name, [int(w) for w in windows.split(",")])
        return
    start, families = time.time(), args.families.split(",")
    batches = [int(b) for b in args.batches.split(",")]
    wanted: dict[str, list[int]] = {}
    for family in families:
        for bits, window in EVERY + (SOME if set(batches) & set(WINDOW_BATCHES) else ()):
            wanted.setdefault(plan_name(family, bits), []).append(window)
    jobs = [
        (f"{name}:{w}", subprocess.Popen([sys.executable, "-m", "benchmarks.state_update", "--check", f"{name}:{w}"]))
        for name, windows in wanted.items()
        for w in windows
    ]
    failed = [name for name, job in jobs if job.wait() != 0]
    if failed:
        sys.exit(f"not timed: outputs are wrong or kernels do not compile for {', '.join(failed)}")
    checked = time.time() - start
    copy = copy_bandwidth()
    rows = [row for family in families for row in measure(family, batches, copy)]
    found = environment() | {"copy_gb_s": copy, "check_seconds": checked, "seconds": time.time() - start, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


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
                best = min(r["us"], r.get("aside_us", r["us"]))
                others = (us.get("sglang fp32"), us.get("sglang bf16"))
                ratios = " | ".join("" if x is None else f"{x / best:.2f}" for x in others)
                window = r.get("window", "")
                lines.append(f"| {batch} | {r['state']} | {window} | {best:.1f} | {ratios} | {r['copy_share']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
