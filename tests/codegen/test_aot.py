"""Ahead-of-time compile without a GPU: no spills; what each kernel takes is printed at the end of the run.

In CI every kernel of the four main recipes is compiled for sm_80 and sm_90, and one recipe's for the other targets:
about eight minutes of one processor. STEPQUANT_SLOW=1 compiles everything for everything.
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
RECIPES = ("qwen_6bit", "qwen_4bit", "kimi_6bit", "kimi_4bit")
MAIN = ("sm_80", "sm_90")
CI: dict[str, Jobs] = {
    family: [(recipe, window, target, names) for recipe in RECIPES if recipe.startswith(family) for target in MAIN
             for window, names in ((8, WINDOW), (1, ("step",)))]
    for family in ("qwen", "kimi")
}  # fmt: skip
CI["kimi"] += [("kimi_6bit", 8, target, WINDOW) for target in TARGETS if target not in MAIN]
SLOW: dict[str, Jobs] = {
    f"{recipe} {target}": [(recipe, window, target, names) for window, names in ALL.items()]
    for recipe in RECIPES
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


def test_ci_leaves_nothing_out() -> None:
    """Every kernel of every main recipe for both main targets, and of one recipe for all others."""
    jobs = {(r, name, target) for part in CI.values() for r, _, target, names in part for name in names}
    everything = {(r, name, target) for r in RECIPES for name in (*WINDOW, "step") for target in MAIN}
    assert jobs >= everything | {("kimi_6bit", name, target) for name in WINDOW for target in TARGETS}


@pytest.mark.slow
@pytest.mark.skipif("STEPQUANT_SLOW" not in os.environ, reason="half an hour; set STEPQUANT_SLOW=1")
@pytest.mark.parametrize("jobs", SLOW.values(), ids=SLOW)
def test_everything_compiles(jobs: Jobs, record_property: Callable[[str, object], None]) -> None:
    compile_and_check(jobs, record_property)
