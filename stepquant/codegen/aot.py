"""Ahead-of-time compile of generated kernels for named targets, without a GPU: registers, spills, instruction counts.

Triton compiles to a cubin, and the disassembler and resource reader that Triton bundles say what is in it. A launch
that spills registers, or needs more shared memory than the target has, is rejected by name and the next one tried.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepquant.codegen.generate import load_source
from stepquant.codegen.kernel_plan import LARGE, KernelPlan, Launch, TargetReport, Variant, few_programs, launches_of
from stepquant.codegen.sass import count_instructions
from stepquant.codegen.spec import KernelSpec
from stepquant.errors import BackendError

TARGETS = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}  # KiB of shared memory a block
# Bytes a thread. On an H200 KDA's read is fastest with 16 bytes of spills, four-level folds with 272: what lies outside
# of the loops costs less than fewer programs a multiprocessor (docs/kernels.md).
MAX_SPILL = 384
_DTYPES = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32", "int8": "*i8"}


def signature(spec: KernelSpec, name: str, model_dtype: str = "*bf16") -> dict[str, str]:
    """Argument types of a variant as the runtime launches it."""
    found = {"pages": "*u8", "stride_page": "i64", "table": "*i32", "row_w": "*fp32", "row_limits": "*u8",
             "order": "*i32", "slots": "*i32", "stride_slot": "i32"}  # fmt: skip
    if name in ("step", "read"):
        for x in "qkvab":
            found |= {x: model_dtype, f"stride_{x}": "i32"}
        found |= {"A_log": "*fp32", "dt_bias": "*fp32", "scale": "fp32", "out": model_dtype, "stride_out": "i32"}
    if name in ("read", "fold", "flush"):
        buffer = _DTYPES[spec.buffer]
        found |= {"buffers": "*i32", "phases": "*i32", "pending": "*i32", "keys": buffer, "key_scale": "*fp16",
                  "us": buffer, "u_scale": "*fp16", "ratios": "*fp32", "gammas": "*fp32"}  # fmt: skip
    if name in ("read", "fold"):
        found |= dict.fromkeys(("k_now", "u_now"), "*fp32" if spec.buffer == "fp32" else "*fp16")
    if name == "fold":
        found["folds"] = "*i32"
    if name in ("pack", "unpack"):
        found |= {
            "state": "*fp32",
            "stride_state": "i32",
            "stride_head": "i32",
            "stride_row": "constexpr",
            "stride_col": "constexpr",
        }
    if name in ("step", "read"):
        found["L2NORM"] = "constexpr"
    if name == "read":
        found |= {"arrivals": "*i32", "FEW": "constexpr", "PARTS": "constexpr"}
    return found | {"ARCH": "constexpr"}


def compile_variant(
    spec: KernelSpec, variant: Variant, source: str, target: str, launches: Sequence[Launch] = ()
) -> TargetReport:
    """Compile one variant for a target with the first launch that spills at most `MAX_SPILL` and fits shared memory.

    Args:
        launches: the launches to try in their order; by default all that the variant has.

    Raises:
        BackendError: for an unknown target, or where no launch fits (the message lists what each needed).
    """
    if target not in TARGETS:
        raise BackendError(f"codegen.targets has {target!r}; expected some of {', '.join(TARGETS)}")
    rejected: list[str] = []
    best: TargetReport | None = None
    for launch in launches or launches_of(spec, variant.name):
        report = _compile(spec, variant, source, target, launch)
        if report.shared_bytes > 1024 * TARGETS[target]:
            rejected.append(f"{launch.warps} warps need {report.shared_bytes} bytes of shared memory")
            continue
        if report.spill_bytes <= MAX_SPILL:
            return _with(report, rejected)
        rejected.append(f"{launch.warps} warps at {launch.registers or 255} registers spill {report.spill_bytes} bytes")
        best = report if best is None or report.spill_bytes < best.spill_bytes else best
    if best is None:
        raise BackendError(f"{variant.name} does not fit {target}: {'; '.join(rejected)}")
    return _with(best, rejected)


def compile_plan(plan: KernelPlan, sources: dict[str, str], targets: list[str]) -> None:
    """Compile every variant for every target and fill in the plan's reports and predictions."""
    for variant in plan.variants:
        for target in targets:
            variant.targets[target] = compile_variant(plan.spec, variant, sources[variant.name], target)
        variant.predict()


def _with(report: TargetReport, rejected: list[str]) -> TargetReport:
    return TargetReport(**{**{n: getattr(report, n) for n in report.__dataclass_fields__}, "rejected": tuple(rejected)})


def build(
    spec: KernelSpec, name: str, source: str, target: str, launch: Launch, constants: Mapping[str, int] | None = None
) -> Any:
    """Triton's compiled kernel of a variant (`asm` has its stages, ptx and cubin among them).

    `constants` are strides of dense states other than those of `[n, H, V, K]`, as SGLang has them, and FEW and PARTS of
    a read other than those of a large batch.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    arch = int(target.removeprefix("sm_"))
    kernel = getattr(load_source(name, source), name)
    types = signature(spec, name)
    given = {"ARCH": arch, "L2NORM": True, "FEW": few_programs(spec, LARGE), "PARTS": 1}
    given |= {"stride_row": 1, "stride_col": spec.key_dim, **(constants or {})}
    given = {n: given[n] for n, t in types.items() if t == "constexpr"}
    strides = ("stride_page", "stride_q", "stride_k", "stride_v", "stride_state", "stride_head")
    aligned = [n for n, t in types.items() if t.startswith("*") or n in strides]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": True}
    if launch.registers:
        options["maxnreg"] = launch.registers
    types = {n: types[n] for n in kernel.arg_names}
    source_of = ASTSource(fn=kernel, signature=types, constexprs=given, attrs=attributes)
    return compile(source_of, target=GPUTarget("cuda", arch, 32), options=options)


def _compile(spec: KernelSpec, variant: Variant, source: str, target: str, launch: Launch) -> TargetReport:
    start = time.perf_counter()
    built = build(spec, variant.name, source, target, launch)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage, listing = _tool("cuobjdump", "-res-usage", cubin), _tool("nvdisasm", "-c", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise BackendError(f"cuobjdump does not say what {variant.name} needs on {target}: {usage[:200]}")
    count, executed = count_instructions(listing, 1 if variant.name in ("read", "unpack") else spec.blocks)
    elements = spec.num_heads * spec.key_dim * spec.value_dim / variant.programs
    return TargetReport(
        launch=launch,
        registers=int(found[1]),
        spill_bytes=int(found[2]),
        shared_bytes=built.metadata.shared,
        instructions=count,
        instructions_per_element=round(executed * launch.warps * 32 / elements, 2),
        seconds=round(seconds, 2),
    )


def _tool(name: str, option: str, path: Path) -> str:
    """Output of a binary tool that comes with Triton."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not program.exists():
        raise BackendError(f"{program} is missing; Triton's NVIDIA backend brings it")
    run = subprocess.run([program, option, path], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr
