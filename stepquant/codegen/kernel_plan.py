"""KernelPlan: the variants of a plan with what they move and cost, and kernel_plan.json.

Figures without a GPU: bytes and floating-point operations follow from the layout, a predicted time from the named GPU's
bandwidth and issue rate, and registers, spills and instructions from the ahead-of-time compile (`aot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stepquant.codegen.spec import KernelSpec
from stepquant.layout import ByteCount, PageLayout

SCHEMA_VERSION = 1
BUFFER_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "int8": 1}
UTILISATION = 0.6  # of the issue rate, as such kernels were measured to reach
PREDICTED_BATCH = 512  # requests of `predicted_us`

TITLES = {
    "step": "Decode step: unpack, update, read, fit and pack, one pass over the state.",
    "read": "Decode step of a write window: one pass over the packed state, nothing written back.",
    "fold": "Writeback of a full window: the state, fitted and packed once in W steps.",
    "flush": "Writeback of a window that is not full.",
    "pack": "Prefill boundary: dense FP32 states to pages.",
    "unpack": "Prefill boundary: pages to dense FP32 states.",
}
# Floating-point operations a state element: two contractions; update, row sum, scale, maximum, two roundings, refit.
FLOPS = {"step": 22, "read": 4, "fold": 18, "flush": 18, "pack": 14, "unpack": 2}


@dataclass(frozen=True)
class Gpu:
    """What a prediction needs of a GPU: bytes a second, lane-instructions a second (32 lanes an instruction)."""

    name: str
    target: str
    bandwidth: float
    issue_rate: float


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", "sm_80", 1.9e12, 108 * 128 * 1.41e9),
        Gpu("L40S", "sm_89", 0.86e12, 142 * 128 * 2.5e9),
        Gpu("H100", "sm_90", 3.1e12, 132 * 128 * 1.755e9),
        Gpu("H200", "sm_90", 4.29e12, 132 * 128 * 1.755e9),
        Gpu("B200", "sm_100", 7.5e12, 148 * 128 * 1.85e9),
        Gpu("RTX PRO 6000", "sm_120", 1.7e12, 188 * 128 * 2.4e9),
    )
}


@dataclass(frozen=True)
class Launch:
    """Warps of a program and its register cap (None: the compiler's choice)."""

    warps: int
    registers: int | None = None


# A compile report takes the first that hardly spills on its target, in the order of `launches_of`, a server the fastest
# on its GPU (`stepquant.runtime.tuning`). Caps on registers let more programs share a multiprocessor (docs/kernels.md).
LAUNCHES: Mapping[str, tuple[Launch, ...]] = {
    "read": (Launch(1, 128), Launch(1, 168), Launch(1), Launch(2)),
    **dict.fromkeys(("fold", "flush"), (Launch(2), Launch(4, 128), Launch(4), Launch(8))),
    "step": (Launch(2), Launch(2, 168), Launch(4, 128), Launch(4), Launch(8)),
    **dict.fromkeys(("pack", "unpack"), (Launch(4), Launch(2), Launch(8))),
}
RESIDENT_READS = 16 * 132  # programs of a read on a large GPU at once: 16 warps on each multiprocessor
RESIDENT_FOLDS = 2 * 132  # programs of a fold that have half a multiprocessor each
LARGE = 512  # requests of a large batch


def few_programs(spec: KernelSpec, batch: int) -> bool:
    """Whether reads of a batch ask for a head's bytes before they load them.

    Where heads have one precision, words are loaded a block ahead, and as soon as the programs are more than a large
    GPU holds they hide each other's loads: asking first then costs 4%. Rows of several precisions are loaded block by
    block, and always gain (docs/kernels.md).
    """
    return not spec.uniform or batch * spec.num_heads <= RESIDENT_READS


def read_parts(spec: KernelSpec, batch: int) -> int:
    """Programs that share a head of a read, a block of its columns each: as long as all of them run at once.

    A read takes as long as one program then, and a program takes most of its time for what it does one after another.
    A vector of an INT8 buffer has one scale, and what is not a power of two has no such blocks: 1.
    """
    c = spec.constants
    if spec.buffer == "int8" or c["J"] != c["JP"] or batch * spec.num_heads * spec.blocks > RESIDENT_READS:
        return 1
    return spec.blocks


def launches_of(spec: KernelSpec, name: str, batch: int = LARGE) -> tuple[Launch, ...]:
    """Launches in order of preference, the first as measured at such batches on an H200 (docs/kernels.md).

    Args:
        batch: requests; of a fold one in W of them folds.
    """
    launches = LAUNCHES[name]
    if name == "read":
        first = Launch(1, 168) if few_programs(spec, batch) else Launch(1, 128)
    elif name == "step":
        first = Launch(2, 168) if spec.uniform else Launch(2)
    elif name in ("fold", "flush"):
        first = Launch(4, 128) if spec.uniform and not spec.four else Launch(2)
        # Flushes are rare and of any number of requests: one launch, so that none waits for a compile in the middle.
        if name == "fold" and -(-batch // spec.window) * spec.num_heads <= RESIDENT_FOLDS:
            first = Launch(4)
    else:
        return launches
    return (first, *(x for x in launches if x != first))


@dataclass(frozen=True)
class TargetReport:
    """What the ahead-of-time compile of one variant for one target says."""

    launch: Launch
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    instructions_per_element: float
    seconds: float
    rejected: tuple[str, ...] = ()


@dataclass
class Variant:
    """One generated kernel.

    Attributes:
        name, title: of the kernel; file: its source below ``kernels/``.
        programs: programs a request and layer (one a head; unpack: one a head and block of columns); bodies:
            specialised bodies that they choose from.
        tile: axes of the state tile of a program; stages: software pipelining depth (one pass: none).
        bytes_read, bytes_written: a request and step over all layers; `read` with a half full window.
        flops: the same, floating-point operations.
        launch: the first choice; a target's report has the one that it compiles.
        predicted_us: a whole model's step at batch 512 on named GPUs, from bytes and, once compiled, instructions.
        targets: reports of the ahead-of-time compile by target.
    """

    name: str
    title: str
    file: str
    programs: int
    bodies: int
    tile: dict[str, int]
    elements: int
    bytes_read: int
    bytes_written: int
    flops: int
    launch: Launch
    stages: int = 1
    predicted_us: dict[str, float] = field(default_factory=dict)
    targets: dict[str, TargetReport] = field(default_factory=dict)

    def predict(self, batch: int = PREDICTED_BATCH) -> None:
        """Fill `predicted_us` for every GPU; the later the stage, the more it knows."""
        for gpu in GPUS.values():
            seconds = batch * (self.bytes_read + self.bytes_written) / gpu.bandwidth
            report = self.targets.get(gpu.target)
            if report is not None:
                work = batch * self.elements * report.instructions_per_element
                seconds = max(seconds, work / gpu.issue_rate / UTILISATION)
            self.predicted_us[gpu.name] = round(1e6 * seconds, 1)


@dataclass
class KernelPlan:
    """All variants of a plan; `to_json` is kernel_plan.json."""

    plan_hash: str
    generator_version: str
    source_hash: str
    spec: KernelSpec
    variants: list[Variant]

    @classmethod
    def of(cls, layout: PageLayout, spec: KernelSpec, sources: Mapping[str, str], plan_hash: str,
           generator_version: str, source_hash: str) -> KernelPlan:  # fmt: skip
        """Describe generated sources."""
        variants = [_variant(name, layout, spec) for name in sorted(sources)]
        for variant in variants:
            variant.predict()
        return cls(plan_hash, generator_version, source_hash, spec, variants)

    def launches(self, target: str) -> dict[str, Launch]:
        """Launch of every variant on a target: the compiled choice, or the first preference."""
        return {
            v.name: v.targets[target].launch if target in v.targets else launches_of(self.spec, v.name)[0]
            for v in self.variants
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "plan": self.plan_hash,
            "generator_version": self.generator_version,
            "source_sha256": self.source_hash,
            "spec": asdict(self.spec),
            "variants": [asdict(v) for v in self.variants],
        }


def window_bytes(spec: KernelSpec, entries: int) -> int:
    """Bytes of `entries` pending tokens of one layer and request, gates included."""
    size, kda = BUFFER_BYTES[spec.buffer], spec.family == "kda"
    heads, key_heads = spec.num_heads, spec.num_heads if kda else spec.num_key_heads
    vectors = entries * size * (heads * spec.value_dim + key_heads * spec.key_dim)
    return vectors + 4 * heads * (spec.key_dim if kda else 1 + entries)


def _variant(name: str, layout: PageLayout, spec: KernelSpec) -> Variant:
    count: ByteCount = layout.bytes
    page = count.total + count.padding
    layers, elements = layout.num_layers, layout.num_layers * spec.num_heads * spec.key_dim * spec.value_dim
    token = layers * 2 * (2 * spec.num_key_heads * spec.key_dim + 2 * spec.num_heads * spec.value_dim)
    half, full = (layers * window_bytes(spec, n) if spec.window > 1 else 0 for n in (spec.window // 2, spec.window - 1))
    appended = layers * window_bytes(spec, 1) if spec.window > 1 else 0
    dense = 4 * elements
    moved = {
        "step": (page + token, page), "read": (page + token + half, appended), "fold": (page + full, page),
        "flush": (page + full, page), "pack": (dense, page), "unpack": (page, dense),
    }  # fmt: skip
    constants = spec.constants
    return Variant(
        name=name,
        title=TITLES[name],
        file=f"{name}.py",
        programs=spec.num_heads * (spec.blocks if name == "unpack" else 1),
        bodies=len(spec.precisions) + (spec.pivots == "heads" and name != "read") if spec.uniform else 1,
        tile={"rows": int(constants["KP"]), "columns": int(constants["VP"])},
        elements=elements,
        bytes_read=moved[name][0],
        bytes_written=moved[name][1],
        flops=FLOPS[name] * elements,
        launch=launches_of(spec, name)[0],
    )
