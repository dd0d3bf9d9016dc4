"""What a plan's kernels are specialised to: shapes, precisions, codebook, window. Counts of rows are data, not code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from stepquant.codec.spec import PIVOT, CodecSpec, covers, four_level_fault, four_refits
from stepquant.errors import BackendError
from stepquant.layout import KERNEL_GRANULARITY, PageLayout


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class KernelSpec:
    """Compile-time facts of a plan's kernels.

    Attributes:
        family: ``gdn`` (a gate a head; q, k and v may come packed) or ``kda`` (a gate a key row).
        num_heads, num_key_heads, key_dim, value_dim: of one layer, on this rank.
        precisions: integer precisions that occur, ascending.
        uniform: every head has one precision (the ``head`` codebook).
        four: some heads are in the four-level two-bit codebook; `group` columns share a row factor there.
        pivots: ``none``, ``rows`` of otherwise packed heads, or ``heads`` only.
        permuted: rows are stored in another order than the model's.
        refits: least-squares refits of the column scales.
        window: tokens between two writebacks; buffer: dtype of its buffers.
        sample: columns of each half that row factors are means over; 0 for all.
        whole: rows have precisions of their own, and some heads none but FP16.
    """

    family: Literal["gdn", "kda"]
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    precisions: tuple[int, ...]
    uniform: bool
    four: bool
    pivots: Literal["none", "rows", "heads"]
    permuted: bool
    group: int = 32
    refits: int = 1
    window: int = 1
    buffer: str = "fp16"
    sample: int = 0
    whole: bool = False

    @classmethod
    def of(
        cls, family: Literal["gdn", "kda"], num_key_heads: int, layout: PageLayout, codec: CodecSpec,
        window: int = 1, buffer: str = "fp16",
    ) -> KernelSpec:  # fmt: skip
        """Read the spec off a page layout.

        Raises:
            BackendError: where the kernels cannot take the layout.
        """
        if codec.kind != "dual_axis":
            raise BackendError(f"codec.kind is {codec.kind!r}; only 'dual_axis' has kernels")
        if layout.granularity % KERNEL_GRANULARITY:
            raise BackendError(f"pages have a granularity of {layout.granularity}; kernels need {KERNEL_GRANULARITY}")
        bits = layout.bits
        precisions = tuple(int(b) for b in np.unique(bits) if b != PIVOT)
        four = codec.codebook == "head" and 2 in precisions
        if four and (fault := four_level_fault(layout.value_dim, codec.group)):
            raise BackendError(fault)
        whole, some = layout.whole_pivot, layout.num_pivots > 0
        pivots: Literal["none", "rows", "heads"] = (
            "none" if not some.any() else "heads" if bool((some == whole).all()) else "rows"
        )
        identity = bool((layout.permutation == np.arange(layout.key_dim)).all())
        return cls(
            family, layout.num_heads, num_key_heads, layout.key_dim, layout.value_dim, precisions,
            codec.codebook == "head", four, pivots, not identity, codec.group, codec.refits, window, buffer,
            codec.sample, codec.codebook != "head" and bool(whole.any()),
        )  # fmt: skip

    @cached_property  # every launch of a read asks
    def constants(self) -> Mapping[str, int | bool]:
        """Names and values that a generated file binds."""
        m, half = max(8 if self.window > 1 else 4, power_of_two(self.key_dim // 8)), self.value_dim // 2
        j, wide = max(16, power_of_two(half)), 1 if half % 16 else 2
        high = any(b in self.precisions for b in (4, 6, 8))
        entries = 16 if self.buffer == "int8" else 8  # Triton gives a thread four neighbours of what was bytes
        return {
            "H": self.num_heads, "HK": self.num_key_heads, "K": self.key_dim, "V": self.value_dim,
            "M": m, "J": half, "JP": j, "E": wide, "KP": 8 * m, "VP": 2 * j, "GROUP": min(self.group, j),
            "NIBBLES": high, "EIGHT": 8 in self.precisions, "SIX": 6 in self.precisions,
            "TWO": 2 in self.precisions and not self.uniform, "REFITS": self.refits,
            "FOUR_REFITS": four_refits(self.refits), "SAMPLE": self.sample,
            "PIVOT_BLOCK": 4, "W": self.window, "EN": max(entries, power_of_two(self.window)),
        }  # fmt: skip

    @property
    def blocks(self) -> int:
        """Blocks of columns of a head (`stepquant.codegen.planes`)."""
        constants = self.constants
        return int(constants["J"]) // (8 * int(constants["E"]))


def head_tables(layout: PageLayout, layer: int, w: ArrayLike, spec: KernelSpec) -> dict[str, np.ndarray]:
    """The data that a layer's kernels read beside the pages, as numpy arrays.

    Returns:
        ``table`` int32 `[H, 16]` (columns in `planes`); in slot order ``row_w`` float32 `[4, H, K]` (w, 1 / (n w) for
        row factors over n columns, the step of a code in units of an 8-bit code and 1 / its reach; w and the last are 0
        in FP16 rows among others) and ``row_limits`` uint8 `[H, K]` (largest codes in 8-bit units); ``order``
        int32 `[2, H, K]` (rows in slot order, slots of the rows).
    """
    heads = np.arange(layout.num_heads)[:, None]
    order = layout.permutation[layer].astype(np.int32)
    bits = layout.bits[layer][heads, order]
    weights = np.asarray(w, dtype=np.float32)[heads, order]
    four = spec.four & (bits[:, :1] == 2)
    whole, half = layout.value_dim, layout.value_dim // 2
    sampled = 2 * spec.sample if 0 < spec.sample < half else whole
    columns = np.where(four, min(spec.sample or layout.group, layout.group), sampled).astype(np.float32)
    table = np.zeros((layout.num_heads, 16), np.int32)
    table[:, :7] = layout.offsets[layer]
    slots = layout.slots[layer] // KERNEL_GRANULARITY
    table[:, 7] = slots[:, :3].sum(-1)
    table[:, 8] = slots[:, 0]
    table[:, 9] = slots[:, :2].sum(-1)
    table[:, 10] = slots.sum(-1)
    table[:, 11] = layout.num_pivots[layer]
    table[:, 13] = bits[:, 0]
    table[:, 14] = layout.head_offsets[layer]
    table[:, 15] = layout.sizes[layer].sum(-1)
    coded = bits < PIVOT
    step = 1 << np.where(coded, 8 - bits.astype(np.int64), 0)
    inverse = np.where(coded, covers(bits, spec.refits) / (128 // step - 1), 0)
    used = weights if spec.uniform else np.where(coded, weights, 0)
    return {
        "table": table,
        "row_w": np.stack([used, 1 / (columns * weights), step, inverse]).astype(np.float32),
        "row_limits": np.where(coded, 128 - step, 1).astype(np.uint8),
        "order": np.stack([order, np.argsort(order, -1).astype(np.int32)]),
    }
