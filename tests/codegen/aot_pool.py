"""Compile kernels of shipped recipes ahead of time, several at once: ``python -m tests.codegen.aot_pool JOBS``.

JOBS is a JSON list of [recipe, window, target, variants]. Plans are synthetic ones at full size; a kernel that plans
share is compiled once, with the first launch that hardly spills, as a compile report has it. Prints one JSON object:
reports by job, and the processor seconds of all of it. A process of its own, because the tests' process runs Triton's
interpreter; Triton's cache is a directory that goes with the process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from stepquant.accounting import page_layout
from stepquant.codegen.aot import compile_variant
from stepquant.codegen.generate import generate, source_hash
from stepquant.codegen.kernel_plan import KernelPlan, Launch, Variant, launches_of
from stepquant.codegen.spec import KernelSpec
from tests.plans import synthetic_plan

Job = tuple[KernelSpec, Variant, str, str, tuple[Launch, ...]]


def kernels(recipe: str, window: int) -> tuple[KernelPlan, dict[str, str]]:
    """Kernels of a recipe's plan, at W = 1 with the paper's refit; the header names no plan, so that equal kernels have
    equal texts."""
    plan = synthetic_plan(recipe, f"window.length={window}", f"spatial.refits={int(window == 1)}")
    g, layout = plan.geometry, page_layout(plan)
    spec = KernelSpec.of(g.family, g.num_key_heads, layout, plan.codec, window, plan.window.dtype)
    sources = generate(spec, "0" * 64)
    return KernelPlan.of(layout, spec, sources, "0" * 64, "0", source_hash(sources)), sources


def compile_one(job: Job) -> tuple[dict[str, Any], float]:
    """A job's report and the processor seconds that it took, ptxas included."""
    before = processor_seconds()
    return asdict(compile_variant(*job)), processor_seconds() - before


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    jobs: dict[tuple[str, str], Job] = {}
    names: dict[str, tuple[str, str]] = {}
    for recipe, window, target, variants in json.loads(sys.argv[1]):
        plan, sources = kernels(recipe, window)
        found = {v.name: v for v in plan.variants}
        for name in variants:
            key = (sources[name], target)
            launches = launches_of(plan.spec, name)
            jobs.setdefault(key, (plan.spec, found[name], sources[name], target, launches))
            names[f"{recipe} W={window} {name} {target}"] = key
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
            done = dict(zip(jobs, pool.map(compile_one, jobs.values()), strict=True))
    reports = {name: done[key][0] for name, key in names.items()}
    seconds = {name: done[key][1] for name, key in names.items()}
    print(json.dumps({"reports": reports, "seconds": seconds, "distinct": len(jobs)}))


if __name__ == "__main__":
    main()
