"""Layout: the solved precision map becomes a LayoutPlan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stepquant.passes.allocation import predicted_by_layer
from stepquant.passes.context import Context
from stepquant.passes.notes import plan_notes
from stepquant.passes.pipeline import Pipeline, provenance
from stepquant.plan import LayoutPlan, WindowSpec

SHAPING = ("method", "calibration", "seed", "data", "samples", "temporal", "spatial", "budget", "pivots", "allocation",
           "solver", "solver_options", "window", "target")  # fmt: skip


def permutation(bits: torch.Tensor) -> torch.Tensor:
    """Storage order of rows, int16 `[..., K]`: precision falling, FP16 pivots last, stable (see `stepquant.layout`)."""
    order = torch.where(bits == 16, 0, bits.to(torch.int16))
    return order.sort(dim=-1, descending=True, stable=True).indices.to(torch.int16)


def make_plan(
    context: Context, pipeline: Pipeline, base: LayoutPlan | None = None, windows: Sequence[Mapping[str, Any]] = ()
) -> LayoutPlan:
    """The plan of a pipeline's allocation.

    Args:
        base: the plan of a reused artifact, whose model identity is carried over.
        windows: what each window length would have given, where the solver chose it.
    """
    recipe, allocation = context.recipe, pipeline["allocation"]
    bits = allocation["bits"]
    predicted = dict(allocation.facts)
    predicted["by_layer"] = predicted_by_layer(context, pipeline, bits)
    if windows:
        predicted["windows"] = [dict(tried) for tried in windows]
    made = dict(base.provenance) if base else provenance(context)
    shape = (made.get("data") or {}).get("segments") or [recipe.data.segments, recipe.data.length]
    made["notes"], made["gate_sampling"] = plan_notes(context, pipeline, int(shape[1]))
    settings: dict[str, Any] = recipe.select(*SHAPING)
    settings["data"] = {k: v for k, v in settings["data"].items() if k != "path"}
    return LayoutPlan(
        name=recipe.name,
        geometry=context.geometry,
        codec=context.codec,
        bits=bits,
        w=pipeline["row_weights"]["w"],
        permutation=permutation(bits),
        granularity=recipe.allocation.granularity,
        window=WindowSpec(recipe.window.tokens, recipe.window.dtype),  # type: ignore[arg-type]
        fingerprint=base.fingerprint if base else context.fingerprint,
        weight_format=base.weight_format if base else context.weight_format,
        synthetic=base.synthetic or recipe.calibration == "synthetic" if base else context.synthetic,
        budget={**settings["budget"], "pivots": recipe.pivots.count},
        predicted=predicted,
        settings=settings,
        provenance=made,
    )
