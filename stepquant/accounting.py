"""Bytes of a plan: exactly what a slot stores, what the pool takes for it, and the paper's own way of counting."""

from __future__ import annotations

from dataclasses import dataclass

from stepquant.codec.registry import storage_bits
from stepquant.codec.spec import PACKED_MENU, PIVOT
from stepquant.layout import KERNEL_GRANULARITY, ByteCount, PageLayout
from stepquant.memory import window_bytes
from stepquant.plan import LayoutPlan


def packable(plan: LayoutPlan) -> bool:
    """Whether the packers and kernels take the plan; the baselines' codecs and 3- or 5-bit rows are simulated only."""
    return why_simulated(plan) is None


def why_simulated(plan: LayoutPlan) -> str | None:
    """What keeps a plan from having pages and kernels, and what to do about it; None where nothing does."""
    g, found = plan.geometry, set(plan.bits.unique().tolist())
    if plan.codec.kind != "dual_axis":
        return f"codec {plan.codec.kind!r} is simulated only; kernels need spatial.codec=dual_axis"
    if not found <= {*PACKED_MENU, PIVOT}:
        odd = ", ".join(map(str, sorted(found - {*PACKED_MENU, PIVOT})))
        return f"precisions of {odd} bits are simulated only; kernels need budget.candidates of {list(PACKED_MENU)}"
    if g.key_dim % 16 or g.value_dim % 16:
        return f"heads of {g.key_dim} x {g.value_dim} are simulated only; kernels need multiples of 16"
    return None


def page_layout(plan: LayoutPlan) -> PageLayout:
    """The plan's page layout.

    Raises:
        RecipeError: when the plan is not packable.
    """
    granularity = max(plan.granularity, KERNEL_GRANULARITY)
    return PageLayout(plan.geometry, plan.bits.numpy(), plan.codec.codebook, granularity, plan.codec.group)


def byte_count(plan: LayoutPlan) -> ByteCount:
    """Bytes of one slot; a simulated-only codec has no padding and is its own allocation."""
    if packable(plan):
        return page_layout(plan).bytes
    columns = plan.geometry.value_dim
    total = -(-storage_bits(plan.bits, plan.codec, columns) // 8)
    pivot = plan.bits == PIVOT
    pivots = int(pivot.sum()) * columns * 2
    codes = int(plan.bits.masked_fill(pivot, 0).sum(dtype=plan.bits.long().dtype)) * columns // 8
    if plan.codec.kind == "float":
        codes, pivots = total, 0
    return ByteCount(codes, total - codes - pivots, pivots, 0, total, total)


@dataclass(frozen=True)
class Accounting:
    """Figures of a plan that `inspect` and the summary show.

    Attributes:
        slot: bytes of one slot.
        fp32: bytes of one slot's FP32 state.
        running: window buffer bytes of one running request.
        bits_per_value: 8 * total / values.
        paper_bits_per_value: the paper's count (equations 22, 23): the nominal budget, two scale vectors for every
            head, pivots replacing 8-bit units; None where no budget was recorded.
    """

    slot: ByteCount
    fp32: int
    running: int
    bits_per_value: float
    paper_bits_per_value: float | None

    def to_json(self) -> dict[str, object]:
        """Stable names of ``inspect --json``."""
        s = self.slot
        return {
            "bytes_per_request": {
                "codes": s.codes, "scales": s.scales, "pivots": s.pivots, "padding": s.padding, "total": s.total,
                "allocated": s.allocated, "fp32": self.fp32,
            },
            "bytes_per_running_request": self.running,
            "bits_per_value": self.bits_per_value,
            "paper_bits_per_value": self.paper_bits_per_value,
            "compression_fp32": self.fp32 / s.total,
            "compression_bf16": self.fp32 / 2 / s.total,
        }  # fmt: skip


def account(plan: LayoutPlan) -> Accounting:
    """All figures of a plan."""
    g, slot = plan.geometry, byte_count(plan)
    nominal = plan.budget.get("bits")
    paper = None
    if isinstance(nominal, int | float) and plan.codec.kind == "dual_axis":
        scales = 16 / g.key_dim + 16 / g.value_dim
        pivots = int((plan.bits == PIVOT).sum()) / plan.bits.numel()
        paper = float(nominal + scales + pivots * 8)
    return Accounting(slot, g.fp32_bytes, window_bytes(g, plan.window.length, plan.window.dtype),
                      8 * slot.total / g.elements, paper)  # fmt: skip
