"""From an artifact directory to what a rank runs: the checked plan, its pages and its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepquant.accounting import packable, page_layout
from stepquant.codegen.spec import KernelSpec
from stepquant.errors import BackendError
from stepquant.kernel_files import stated_hash
from stepquant.layout import ALIGNMENT, PageLayout
from stepquant.plan import LayoutPlan, load_plan
from stepquant.swap import read_whole


@dataclass(frozen=True)
class RankPlan:
    """A plan as one tensor-parallel rank holds it.

    Attributes:
        plan: the whole plan.
        layout: pages of this rank.
        w: float32 `[L, H / size, K]`.
        num_key_heads: key heads of this rank.
        rank, size: of the tensor-parallel group.
        slot_bytes: the largest page of all ranks, aligned: every rank sizes its pool with it, so that all agree.
        kernel_hash: of the kernels that the artifact shows, None where it shows none for this split.
    """

    plan: LayoutPlan
    layout: PageLayout
    w: Tensor
    num_key_heads: int
    rank: int
    size: int
    slot_bytes: int
    kernel_hash: str | None

    def kernels(self, device: torch.device | str) -> Any:
        """The plan's kernels: Triton's on a GPU, plain torch on a CPU.

        Raises:
            ArtifactError: if the artifact shows other kernels than this stepquant generates.
            BackendError: if the kernels cannot take the plan.
        """
        g, window = self.plan.geometry, self.plan.window
        settings = (self.layout, self.w, self.plan.codec, g.family, self.num_key_heads)
        if torch.device(device).type == "cpu":
            from stepquant.runtime.reference import ReferenceKernels

            return ReferenceKernels(*settings, window.length, window.dtype, device)
        from stepquant.runtime.step import PackedKernels

        return PackedKernels(
            *settings, self.plan.hash, window.length, window.dtype, device, expected_hash=self.kernel_hash
        )

    def check_kernels(self) -> None:
        """Compare the kernels that the artifact shows with those that this stepquant generates; nothing is compiled.

        Raises:
            ArtifactError: if they differ: a GPU would refuse them.
        """
        from stepquant.codegen.generate import check_source, generate, source_hash

        check_source(source_hash(generate(self._spec, self.plan.hash)), self.kernel_hash)

    @property
    def _spec(self) -> KernelSpec:
        window = self.plan.window
        return KernelSpec.of(
            self.plan.geometry.family, self.num_key_heads, self.layout, self.plan.codec, window.length, window.dtype
        )

    @property
    def window_bytes(self) -> int:
        """Window buffers of one running request on this rank, bytes over all layers, and its place in what the layers
        share."""
        from stepquant.runtime.window import bytes_per_request, now_bytes

        if self.plan.window.length == 1:
            return 0
        return bytes_per_request(self._spec) * self.layout.num_layers + now_bytes(self._spec)


def load_rank_plan(directory: Path, rank: int = 0, size: int = 1) -> RankPlan:
    """Load a plan for serving.

    Args:
        directory: artifact directory of stepquant.compile.
        rank, size: of the tensor-parallel group.

    Raises:
        ArtifactError: if the artifact is damaged or its kernels are those of another generator.
        BackendError: if the plan cannot be packed or its heads do not divide by `size`.
    """
    plan = load_plan(directory)
    if not packable(plan):
        raise BackendError(
            f"{directory}: codec {plan.codec.kind!r} with precisions {plan.bits.unique().tolist()} is simulated only; "
            "serving needs dual_axis with 2, 4, 6, 8 and 16 bits"
        )
    g = plan.geometry
    if size < 1 or g.num_heads % size or g.num_key_heads % size:
        raise BackendError(
            f"{directory}: {g.num_heads} value heads and {g.num_key_heads} key heads do not divide by tp {size}; "
            "choose --tp so that both do"
        )
    whole = page_layout(plan)
    parts = [whole.rank(i, size) for i in range(size)] if size > 1 else [whole]
    slot = max(-(-int(part.layer_bytes.sum()) // ALIGNMENT) * ALIGNMENT for part in parts)
    count = g.num_heads // size
    w = plan.w[:, rank * count : (rank + 1) * count].contiguous()
    told = read_whole(directory, lambda: stated_hash(directory, plan))
    kernel_hash = told if size == 1 else None  # a rank's kernels are specialised to its own heads
    return RankPlan(plan, parts[rank], w, g.num_key_heads // size, rank, size, slot, kernel_hash)
