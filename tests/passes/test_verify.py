"""A plan on its way out that contradicts what was asked for, or its own pages, is not written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stepquant.codec.packed import PackedCodec
from stepquant.config import compose_recipe
from stepquant.errors import ArtifactError
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan, permutation
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.passes.verify import verify_plan
from stepquant.plan import LayoutPlan


@pytest.fixture(params=["tiny_gdn_4bit", "tiny_kda_4bit", "baseline_int4"])
def made(request) -> tuple[Context, LayoutPlan]:
    """A sound plan, and what it was made for."""
    recipe = compose_recipe(request.param, ["calibration=synthetic", "cache.enabled=false"])
    pipeline = Pipeline(Context.open(recipe, Progress(quiet=True)))
    pipeline.run()
    plan = make_plan(pipeline.context, pipeline)
    verify_plan(pipeline.context, plan)
    return pipeline.context, plan


def test_a_plan_above_its_budget(made):
    context, plan = made
    bits = torch.where(plan.bits == 16, 16, 8).to(torch.uint8)
    with pytest.raises(ArtifactError, match=r"the new plan uses [\d,]+ bits, above its budget of [\d,]+"):
        verify_plan(context, replace(plan, bits=bits, permutation=permutation(bits)))


def test_rows_in_another_order_than_the_pages(made):
    """Equal precisions lie together, so that the plan itself is sound, but not where the pages have them."""
    context, plan = made
    order = plan.permutation.clone()
    codes = plan.bits.long().gather(-1, order.long())
    layer, head = (codes[..., 0] == codes[..., 1]).nonzero()[0].tolist()
    order[layer, head, :2] = order[layer, head, :2].flip(0)
    changed = replace(plan, permutation=order)
    if plan.codec.kind != "dual_axis":
        verify_plan(context, changed)  # no pages
        return
    with pytest.raises(ArtifactError, match="the new plan's row permutation is not the page layout's"):
        verify_plan(context, changed)


def test_pages_that_do_not_hold_what_the_codec_says(made, monkeypatch):
    context, plan = made
    pack = PackedCodec.pack

    def one_code_off(self: PackedCodec, x: torch.Tensor) -> torch.Tensor:
        pages = pack(self, x)
        pages[:, 0] ^= 16
        return pages

    monkeypatch.setattr(PackedCodec, "pack", one_code_off)
    if plan.codec.kind != "dual_axis":
        verify_plan(context, plan)  # no pages
        return
    with pytest.raises(
        ArtifactError, match=r"layer \d+: unpacking what was packed does not give what the codec stores"
    ):
        verify_plan(context, plan)
