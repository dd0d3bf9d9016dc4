"""Ahead-of-time compile without a GPU: hardly any spills; registers and instructions per element are printed.

A process a plan, because this folder's own process runs the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepquant.codegen.aot import MAX_SPILL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from stepquant.codegen.aot import compile_plan
from stepquant.codegen.generate import generate, source_hash
from stepquant.codegen.kernel_plan import KernelPlan
from tests.codegen.cases import Case

name, window, targets, only = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(",")
case = Case.make(name, 128, 128)
spec = case.kernels(window).spec
sources = generate(spec, "0" * 64)
plan = KernelPlan.of(case.layout, spec, sources, "0" * 64, "1", source_hash(sources))
plan.variants = [v for v in plan.variants if v.name in only]
compile_plan(plan, sources, targets)
print(json.dumps(plan.to_json()["variants"]))
"""
QUICK = [
    ("qwen_6bit", 8, "sm_90", "read,fold"),
    ("kimi_4bit", 8, "sm_80,sm_90", "read,fold"),
    ("kimi_6bit", 1, "sm_90", "step,pack"),
]
FULL = [
    (name, window, targets, "step,read,fold,flush,pack,unpack")
    for name, targets in (
        ("qwen_6bit", "sm_80,sm_90"), ("qwen_4bit", "sm_80,sm_90"), ("kimi_6bit", "sm_80,sm_90,sm_89,sm_100,sm_120"),
        ("kimi_4bit", "sm_80,sm_90"),
    )
    for window in (1, 8)
]  # fmt: skip


def compile_and_check(name: str, window: int, targets: str, only: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, name, str(window), targets, only]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for variant in json.loads(run.stdout.splitlines()[-1]):
        for target, r in variant["targets"].items():
            print(f"{name} W={window} {variant['name']:6} {target}: {r['launch']['warps']} warps, {r['registers']} "
                  f"registers, {r['spill_bytes']} spilled, {r['shared_bytes']} B shared, "
                  f"{r['instructions_per_element']} instructions an element, {r['seconds']} s")  # fmt: skip
            assert r["spill_bytes"] <= MAX_SPILL
            assert r["registers"] <= 255


@pytest.mark.parametrize(("name", "window", "targets", "only"), QUICK)
def test_compiles_without_spills(name: str, window: int, targets: str, only: str) -> None:
    compile_and_check(name, window, targets, only)


@pytest.mark.slow
@pytest.mark.skipif("STEPQUANT_SLOW" not in os.environ, reason="minutes; set STEPQUANT_SLOW=1")
@pytest.mark.parametrize(("name", "window", "targets", "only"), FULL)
def test_everything_compiles(name: str, window: int, targets: str, only: str) -> None:
    compile_and_check(name, window, targets, only)
