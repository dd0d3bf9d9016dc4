"""The solver's cost over the whole range of budgets, from an artifact's tables.

Heads: the exact DP gives the optimum at every budget in one run. Rows: a sweep of the Lagrange multiplier; for each,
every row takes the precision of least cost + multiplier * bits, which is optimal at the bits that it comes to. Pivots
are the plan's own throughout and count as 8 bits, so that the plan lies on its curve unless it obeys side constraints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepquant.codec.spec import PIVOT
from stepquant.errors import StepQuantError
from stepquant.passes.allocation import PIVOT_CHARGE
from stepquant.passes.cache import Cache
from stepquant.passes.context import Context
from stepquant.passes.costs import columns, cost_table, unit_sizes, unit_table
from stepquant.passes.progress import Progress
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe
from stepquant.recipe_sections import AllocationSettings, TemporalSettings
from stepquant.report.evidence import Evidence, number
from stepquant.solvers.dp import dp_curve

POINTS = 240
Floats = NDArray[np.float64]


@dataclass
class Tradeoff:
    """Predicted cost a token against nominal bits a value.

    Attributes:
        bits, costs: the curve, bits rising.
        exact: from the DP rather than the sweep.
        uniform: every unit at one precision and no pivots: (precision, cost).
        chosen: the plan itself: (bits, cost).
        candidates: precisions the curve chooses from.
    """

    bits: Floats
    costs: Floats
    exact: bool
    chosen: tuple[float, float]
    uniform: list[tuple[int, float]] = field(default_factory=list)
    candidates: tuple[int, ...] = ()


def tradeoff(evidence: Evidence) -> Tradeoff | None:
    """The curve, or None where the tables do not allow one (and then a note says why)."""
    plan = evidence.plan
    if not evidence.products:
        return None
    try:
        return _tradeoff(plan, evidence.products)
    except (StepQuantError, KeyError, TypeError, ValueError, RuntimeError) as error:
        evidence.notes["tradeoff"] = f"The tables give no curve for this plan: {error}"
        return None


def _tradeoff(plan: LayoutPlan, products: dict[str, Product]) -> Tradeoff | None:
    temporal = TemporalSettings(**plan.settings["temporal"])
    unit = plan.predicted["unit"]
    recipe = Recipe(temporal=temporal, allocation=AllocationSettings(unit=unit))
    context = Context(recipe, plan.geometry, Cache(Path(), enabled=False), Progress(quiet=True))
    source = "pivot_distortion" if "pivot_distortion" in products else "distortion"
    available = list(products[source].facts["candidates"])
    asked = tuple(plan.predicted.get("candidates") or ())
    candidates = asked if len(asked) > 1 else tuple(b for b in available if b < PIVOT)
    chosen_cost = number(plan.predicted.get("predicted_cost_per_token"))
    if len(candidates) < 2 or chosen_cost is None:
        return None
    table = unit_table(context, cost_table(context, products, source))
    bits = plan.bits[..., 0] if unit == "head" else plan.bits
    pivots = (bits == PIVOT).flatten().numpy()
    sizes = unit_sizes(context)
    elements = int(sizes.sum())
    window = 1 if temporal.weight == "rollout" else plan.window.length
    fixed = float(table[pivots, columns((PIVOT,), available)[0]].sum())
    charged = PIVOT_CHARGE * int(sizes[pivots].sum())
    free, free_sizes = table[~pivots][:, columns(candidates, available)], sizes[~pivots]
    if unit == "head":
        curve = dp_curve(free, candidates, free_sizes)
        used, costs = curve.budgets.astype(np.float64), curve.costs
    else:
        used, costs = lagrangian_sweep(free, candidates, free_sizes)
    pick = np.unique(np.linspace(0, len(used) - 1, POINTS).round().astype(int))
    plain = unit_table(context, cost_table(context, products)).sum(0)
    charge = plan.bits.long().masked_fill(plan.bits == PIVOT, PIVOT_CHARGE).double().mean()
    return Tradeoff(
        bits=(used[pick] + charged) / elements,
        costs=(costs[pick] + fixed) / window,
        exact=unit == "head",
        chosen=(float(charge), chosen_cost),
        uniform=[(b, float(plain[columns((b,), available)[0]]) / window) for b in candidates],
        candidates=candidates,
    )


def lagrangian_sweep(table: Floats, candidates: tuple[int, ...], sizes: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Bits used and cost, bits rising, for multipliers spread over the slopes of all units.

    Args:
        table: costs `[U, C]`.
        candidates: ascending precisions.
        sizes: elements `[U]`.
    """
    weights = sizes[:, None] * np.asarray(candidates, dtype=np.float64)
    slopes = -np.diff(table, axis=1) / np.diff(weights, axis=1)
    positive = slopes[slopes > 0]
    multipliers = np.quantile(positive, np.linspace(1, 0, 48)) if len(positive) else np.zeros(0)
    rows, points = np.arange(len(table)), {}
    for multiplier in (*multipliers[:1] * 2, *multipliers, 0.0):
        choice = (table + multiplier * weights).argmin(axis=1)
        points[float(weights[rows, choice].sum())] = float(table[rows, choice].sum())
    used = np.array(sorted(points))
    return used, np.array([points[u] for u in used])
