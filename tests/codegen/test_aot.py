"""Ahead-of-time compile without a GPU: hardly any spills; what each kernel takes is printed at the end of the run.

In CI the kernels of the four main recipes are compiled once each, for sm_80 or sm_90, so that most kinds of kernel of a
family are compiled for both; one recipe's read and unpack also for the other targets. That takes two and a half minutes
of one processor; STEPQUANT_SLOW=1 compiles everything for everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stepquant.codegen.aot import MAX_SPILL, TARGETS

ROOT = Path(__file__).resolve().parents[2]
WINDOW = ("read", "fold", "flush", "pack", "unpack")
ALL = {1: ("step", "pack", "unpack"), 8: WINDOW}
Jobs = list[tuple[str, int, str, tuple[str, ...]]]
CI: dict[str, Jobs] = {
    "qwen": [("qwen_6bit", 8, "sm_90", ("read", "fold", "pack")), ("qwen_6bit", 8, "sm_80", ("flush", "unpack")),
             ("qwen_4bit", 8, "sm_80", ("read", "fold", "pack")), ("qwen_4bit", 8, "sm_90", ("unpack",)),
             ("qwen_6bit", 1, "sm_90", ("step",))],
    "kimi": [("kimi_6bit", 8, "sm_80", ("read", "fold", "pack")), ("kimi_6bit", 8, "sm_90", ("flush", "unpack")),
             ("kimi_4bit", 8, "sm_90", ("read", "fold", "pack")), ("kimi_4bit", 8, "sm_80", ("flush", "unpack")),
             ("kimi_6bit", 1, "sm_80", ("step",)),
             ("kimi_6bit", 8, "sm_89", ("read",)), ("kimi_6bit", 8, "sm_100", ("read",)),
             ("kimi_6bit", 8, "sm_120", ("read", "unpack"))],
}  # fmt: skip
LEFT_OUT = {("qwen_4bit", "flush"), ("qwen_4bit", "step"), ("kimi_4bit", "step")}  # long, and much like fold or 6 bits
SLOW: dict[str, Jobs] = {
    f"{recipe} {target}": [(recipe, window, target, names) for window, names in ALL.items()]
    for recipe in ("qwen_6bit", "qwen_4bit", "kimi_6bit", "kimi_4bit")
    for target in TARGETS
}


def compile_and_check(jobs: Jobs, record: Callable[[str, object], None]) -> None:
    """Compile, record a line a kernel, and check registers, spills and shared memory against what is allowed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.codegen.aot_pool", json.dumps(jobs)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    reports = found["reports"]
    assert set(reports) == {f"{r} W={w} {name} {target}" for r, w, target, names in jobs for name in names}
    for name, r in reports.items():
        warps, cap = r["launch"]["warps"], r["launch"]["registers"] or 255
        record("figures", f"{name}: {warps} warps, {r['registers']} of {cap} registers, {r['spill_bytes']} B spilled, "
               f"{r['shared_bytes']} B shared, {r['instructions_per_element']} instructions an element; "
               f"{found['seconds'][name]:.1f} processor seconds")  # fmt: skip
    for name, r in reports.items():
        assert r["spill_bytes"] <= MAX_SPILL, name
        assert 0 < r["registers"] <= (r["launch"]["registers"] or 255), name
        assert r["shared_bytes"] <= 1024 * TARGETS[name.split()[-1]], name
        assert r["instructions"] > 0, name


@pytest.mark.parametrize("jobs", CI.values(), ids=CI)
def test_main_recipes_compile(jobs: Jobs, record_property: Callable[[str, object], None]) -> None:
    compile_and_check(jobs, record_property)


def test_ci_leaves_no_more_out() -> None:
    """Every kernel of every main recipe but `LEFT_OUT`; what a step or a prefill runs for both targets; all targets."""
    jobs = {(r, name, target) for part in CI.values() for r, _, target, names in part for name in names}
    recipes = ("qwen_6bit", "qwen_4bit", "kimi_6bit", "kimi_4bit")
    assert {(r, name) for r, name, _ in jobs} == {(r, name) for r in recipes for name in (*WINDOW, "step")} - LEFT_OUT
    assert {(r.split("_")[0], name, target) for r, name, target in jobs} >= {
        (family, name, target) for family in ("qwen", "kimi") for name in ("read", "fold", "pack", "unpack")
        for target in ("sm_80", "sm_90")
    }  # fmt: skip
    assert {target for _, _, target in jobs} == set(TARGETS)


@pytest.mark.slow
@pytest.mark.skipif("STEPQUANT_SLOW" not in os.environ, reason="half an hour; set STEPQUANT_SLOW=1")
@pytest.mark.parametrize("jobs", SLOW.values(), ids=SLOW)
def test_everything_compiles(jobs: Jobs, record_property: Callable[[str, object], None]) -> None:
    compile_and_check(jobs, record_property)
