"""Verify: the plan on its way out, against what it was asked for and against the packed codec itself."""

from __future__ import annotations

import torch

from stepquant.accounting import byte_count, packable, page_layout
from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.spec import PIVOT
from stepquant.errors import ArtifactError
from stepquant.passes.allocation import PIVOT_CHARGE
from stepquant.passes.context import Context
from stepquant.plan import LayoutPlan


def verify_plan(context: Context, plan: LayoutPlan) -> None:
    """Check the plan's invariants, its budget, its permutation, and that packing and unpacking agree.

    Raises:
        ArtifactError: an internal contradiction: the plan must not be written.
    """
    plan.verify("the new plan")
    charged = plan.bits.long().masked_fill(plan.bits == PIVOT, PIVOT_CHARGE).sum() * plan.geometry.value_dim
    bits = context.recipe.budget.bits or 0
    allowed = bits * plan.geometry.elements
    if context.recipe.allocation.mode == "uniform":  # there pivots come on top
        allowed += max(0, PIVOT_CHARGE - bits) * int((plan.bits == PIVOT).sum()) * plan.geometry.value_dim
    if int(charged) > allowed + 1e-3:
        raise ArtifactError(f"the new plan uses {int(charged):,} bits, above its budget of {allowed:,.0f}")
    if not packable(plan):
        return
    layout = page_layout(plan)
    if (layout.permutation != plan.permutation.numpy()).any():
        raise ArtifactError("the new plan's row permutation is not the page layout's")
    check_packing(plan, layer=int(plan.bits.float().std((1, 2)).argmax()))
    if byte_count(plan).total <= 0:
        raise ArtifactError("the new plan stores nothing")


def check_packing(plan: LayoutPlan, layer: int) -> None:
    """Pack and unpack seeded random states of one layer: the bytes must hold exactly what the codec says.

    Raises:
        ArtifactError: when they do not.
    """
    from stepquant.codec.packed import PackedCodec

    g = plan.geometry
    generator = torch.Generator().manual_seed(0)
    states = 0.02 * torch.randn(1, g.num_heads, g.key_dim, g.value_dim, generator=generator)
    packed = PackedCodec(page_layout(plan), layer, plan.w[layer], plan.codec)
    expected = DualAxisCodec(plan.bits[layer], plan.w[layer], plan.codec, g.value_dim).roundtrip(states)
    if not torch.equal(packed.unpack(packed.pack(states)), expected):
        raise ArtifactError(f"layer {layer}: unpacking what was packed does not give what the codec stores")
