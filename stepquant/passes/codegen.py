"""Codegen: the plan's kernels as readable Triton source, and what is known of them before they run.

    kernels/<variant>.py, kernels/kernel_plan.json

They are for reading: the runtime generates them again from the plan and compares the hash, and never runs these files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stepquant.accounting import packable, page_layout
from stepquant.artifact import KERNELS
from stepquant.files import write_json, write_text
from stepquant.plan import LayoutPlan


def write_kernels(directory: Path, plan: LayoutPlan, targets: Sequence[str]) -> list[str]:
    """Write the sources and the kernel plan of a new artifact, compiled ahead of time for `targets` (``sm_90``, ...).

    Returns:
        Names of the variants; none where the plan's codec is simulated only.

    Raises:
        BackendError: when a target cannot be compiled for here.
    """
    if not packable(plan):
        return []
    from stepquant.codegen.generate import GENERATOR_VERSION, generate, source_hash
    from stepquant.codegen.kernel_plan import KernelPlan
    from stepquant.codegen.spec import KernelSpec

    layout, g = page_layout(plan), plan.geometry
    spec = KernelSpec.of(g.family, g.num_key_heads, layout, plan.codec, plan.window.length, plan.window.dtype)
    sources = generate(spec, plan.hash)
    kernels = KernelPlan.of(layout, spec, sources, plan.hash, GENERATOR_VERSION, source_hash(sources))
    if targets:
        from stepquant.codegen.aot import compile_plan

        compile_plan(kernels, sources, list(targets))
    place = directory / KERNELS
    for name, source in sources.items():
        write_text(place / f"{name}.py", source)
    write_json(place / "kernel_plan.json", kernels.to_json())
    return sorted(sources)
