"""Ahead-of-time compile without a GPU: the preferred launch of every kernel spills no more than `MAX_SPILL`; what each
kernel takes is printed at the end of the run.

In CI every kernel of the four main recipes is compiled for sm_90, every kind of body for sm_80, and one recipe's read,
fold and pack for the other targets: about three minutes of one processor. Left to STEPQUANT_SLOW=1, which takes a
quarter of an hour of one: every other pair of kernel and target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepquant.codegen.aot import MAX_SPILL, TARGETS

ROOT = Path(__file__).resolve().parents[2]
WINDOW = ("read", "fold", "flush", "pack", "unpack")
ALL = {1: ("step", "pack", "unpack"), 8: WINDOW}
Jobs = list[tuple[str, int, str, tuple[str, ...]]]
RECIPES = ("qwen_6bit", "qwen_4bit", "kimi_6bit", "kimi_4bit")
MAIN = ("sm_80", "sm_90")
OTHERS = tuple(target for target in TARGETS if target not in MAIN)
CI: dict[str, Jobs] = {
    family: [
        *((recipe, 8, "sm_90", WINDOW) for recipe in RECIPES if recipe.startswith(family)),
        (f"{family}_4bit", 1, "sm_90", ("step",)),  # window.length=1, as with method=paper
        (f"{family}_4bit", 8, "sm_80", ("read", "fold", "pack", "unpack")),
        (f"{family}_6bit", 8, "sm_80", ("fold",)),  # 8 bits
    ]
    for family in ("qwen", "kimi")
}
CI["kimi"] += [("kimi_6bit", 8, target, ("read", "fold", "pack")) for target in OTHERS]
SLOW: dict[str, Jobs] = {
    f"{recipe} {target}": [(recipe, window, target, names) for window, names in ALL.items()]
    for recipe in RECIPES
    for target in TARGETS
}


def names_of(jobs: Jobs) -> set[str]:
    return {f"{recipe} W={window} {name} {target}" for recipe, window, target, names in jobs for name in names}


def compile_and_check(jobs: Jobs, record: Callable[[str, object], None]) -> dict[str, Any]:
    """Compile, record a line a kernel, and check registers, spills and shared memory against what is allowed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.codegen.aot_pool", json.dumps(jobs)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    reports = found["reports"]
    assert set(reports) == names_of(jobs)
    for name, r in reports.items():
        warps, cap = r["launch"]["warps"], r["launch"]["registers"] or 255
        record("figures", f"{name}: {warps} warps, {r['registers']} of {cap} registers, {r['spill_bytes']} B spilled, "
               f"{r['shared_bytes']} B shared, {r['instructions_per_element']} instructions an element; "
               f"{found['seconds'][name]:.1f} processor seconds")  # fmt: skip
    for name, r in reports.items():
        assert r["spill_bytes"] <= MAX_SPILL, f"{name}: spills {r['spill_bytes']} bytes"
        assert 0 < r["registers"] <= (r["launch"]["registers"] or 255), name
        assert r["shared_bytes"] <= 1024 * TARGETS[name.split()[-1]], name
        assert r["instructions"] > 0, name
    return reports


@pytest.mark.parametrize("jobs", CI.values(), ids=CI)
def test_main_recipes_compile(jobs: Jobs, record_property: Callable[[str, object], None]) -> None:
    compile_and_check(jobs, record_property)


def test_what_ci_compiles() -> None:
    """Every kernel of every main recipe for sm_90, every kind of body for sm_80, and something for all targets."""
    from tests.codegen.aot_pool import kernels

    jobs = {(r, w, name, target) for part in CI.values() for r, w, target, names in part for name in names}
    assert jobs >= {(r, 8, name, "sm_90") for r in RECIPES for name in WINDOW}
    assert {target for *_, target in jobs} == set(TARGETS)
    for family in ("qwen", "kimi"):
        specs = [kernels(r, w)[0].spec for r, w, name, target in jobs if (name, target) == ("fold", "sm_80")
                 and r.startswith(family)]  # fmt: skip
        assert {bits for spec in specs for bits in spec.precisions} == {2, 4, 6, 8}
        assert {spec.pivots for spec in specs} == {"heads" if family == "qwen" else "rows"}
        assert {kernels(r, w)[0].spec.refits for r, w, *_ in jobs if r.startswith(family)} == {0, 1}
        assert any(spec.four for spec in specs) == (family == "qwen")


@pytest.mark.slow
@pytest.mark.skipif("STEPQUANT_SLOW" not in os.environ, reason="eight minutes of two cores; set STEPQUANT_SLOW=1")
@pytest.mark.parametrize("jobs", SLOW.values(), ids=SLOW)
def test_everything_compiles(jobs: Jobs, record_property: Callable[[str, object], None]) -> None:
    compile_and_check(jobs, record_property)
