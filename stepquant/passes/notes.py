"""What a plan should say about the model and the text it was made from: gates that are under-sampled, beta above 1.

A unit's gate is *uncertain* where its lifetime weight (equation 7), taken two standard errors of the mean log gate up
and down, differs by more than a factor of 4: one bit of precision. It *outlives* its text where its half-life is longer
than half a segment: then its states were sampled, and its rollouts run, before they had settled. Either is noted when
it holds for more than `SHARE` of the units.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stepquant.geometry import Geometry
from stepquant.passes.context import Context
from stepquant.passes.gate_statistics import half_life, lifetime
from stepquant.passes.protocol import Products
from stepquant.recipe import Recipe

FACTOR = 4.0  # of the cost: one bit
SHARE = 0.01  # of the units


def gate_sampling(mean: Tensor, standard_error: Tensor, tokens: int, length: int, horizon: int) -> dict[str, Any]:
    """How well the calibration text sampled the gates.

    Args:
        mean: mean log gate, any shape; standard_error: of that mean.
        tokens: tokens it was averaged over.
        length: tokens of a segment.
        horizon: of the lifetime weight.

    Returns:
        ``units``, ``tokens``, ``uncertain`` and ``outlive``: counts.
    """
    low = lifetime(mean - 2 * standard_error, horizon)
    high = lifetime((mean + 2 * standard_error).clamp_max(0), horizon)
    return {
        "units": mean.numel(), "tokens": tokens, "uncertain": int((high > FACTOR * low).sum()),
        "outlive": int((half_life(mean) > length / 2).sum()),
    }  # fmt: skip


def sampling_notes(found: dict[str, Any], length: int) -> list[str]:
    """One line for each thing that is under-sampled."""
    notes, units = [], found["units"]
    if found["uncertain"] > SHARE * units:
        notes.append(
            f"gates under-sampled: for {found['uncertain']:,} of {units:,} units {found['tokens']:,} tokens leave the "
            f"lifetime weight uncertain by more than a factor of {FACTOR:g} (a bit); raise data.segments"
        )
    if found["outlive"] > SHARE * units:
        notes.append(
            f"gates under-sampled: {found['outlive']:,} of {units:,} units remember for more than half a segment of "
            f"{length:,} tokens; their states were sampled before they settled; raise data.length"
        )
    return notes


def geometry_notes(geometry: Geometry) -> list[str]:
    """What is unusual about the recurrence itself."""
    if geometry.beta_max <= 1:
        return []
    return [
        f"negative eigenvalues: beta reaches {geometry.beta_max:g}, so the paper's contraction argument does "
        "not hold; costs are measured, not bounded: evaluate the plan before serving it"
    ]


def codec_notes(recipe: Recipe, unit: str, bits: Tensor) -> list[str]:
    """Where the codec's sampled row factors can fail: 2-bit rows that are fitted again after every token.

    Such a row has few codes that are not zero. With none among the sampled columns, and a key near zero, its factor
    becomes too small by orders of magnitude, and a column where it has one follows: that column's scale is up to 150
    times the others', and other rows' codes in it are zero. Over two tokens and more this was not seen.
    """
    sample = recipe.spatial.sample
    if recipe.window.length != 1 or unit != "row" or sample == 0 or not bool((bits == 2).any()):
        return []
    return [
        f"window.length=1 with 2-bit rows: row factors are means over spatial.sample={sample} columns of each half, "
        "and in one of some 20,000 columns a token one row's factor, near zero there, spoils the scale of all; "
        "spatial.sample=0 takes all columns"
    ]


def plan_notes(context: Context, products: Products, length: int) -> tuple[list[str], dict[str, Any] | None]:
    """Lines for the plan, and the counts behind them (None where no text was run); `length` of a segment, tokens."""
    notes = geometry_notes(context.geometry)
    notes += codec_notes(context.recipe, context.unit, products["allocation"]["bits"])
    gates = products["gate_statistics"]
    if "standard_error" not in gates.tensors:
        return notes, None
    horizon = context.recipe.temporal.horizon
    found = gate_sampling(gates["mean_log_gate"], gates["standard_error"], gates.facts["tokens"], length, horizon)
    return [*notes, *sampling_notes(found, length)], found
