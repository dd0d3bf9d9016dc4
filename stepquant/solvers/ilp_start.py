"""A feasible answer for the integer program to start from: the Lagrangian, then ranks made equal.

Heads of a layer that breaks its cap or floor are solved by themselves at that limit and held there. The answer is
checked; where this simple way fails there is no start, and the solver does without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stepquant.solvers.ilp_model import ChoiceModel
from stepquant.solvers.lagrangian import relax
from stepquant.solvers.rank_dp import balance
from stepquant.solvers.table import FloatArray, IntArray


class Start(NamedTuple):
    """A choice [U] that meets every constraint, or None, and a proven lower bound on the cost."""

    choice: IntArray | None
    bound: float


def warm_start(model: ChoiceModel) -> Start:
    """Look for a choice to start from, and bound the cost on the way.

    Args:
        model: a model whose budget is at least the least charge of its heads.
    """
    held = np.full(len(model.costs), -1, np.int64)
    choice, bound = _balanced(model, held)
    for _ in range(3):
        if choice is None or model.meets(choice):
            return Start(choice, bound)
        charges = model.layer_charges(choice)
        broken = np.flatnonzero((charges > model.layer_cap) | (charges < model.layer_floor))
        if not len(broken):
            break
        for layer in broken:
            heads = np.flatnonzero(model.layer == layer)
            held[heads] = _at_limit(model, heads, bool(charges[layer] > model.layer_cap[layer]), int(layer))
        # What holds for the held heads says nothing about the whole problem, so the first bound stays.
        choice, _ = _balanced(model, held)
    return Start(choice if choice is not None and model.meets(choice) else None, bound)


def _at_limit(model: ChoiceModel, heads: IntArray, over: bool, layer: int) -> IntArray:
    """Options [heads] of one layer, as cheap as its cap allows, or raised until its floor is met."""
    costs, charge = model.costs[heads], model.charge[heads]
    rows = np.arange(len(heads))
    limit = int(model.layer_cap[layer] if over else model.layer_floor[layer])
    choice = relax(costs, charge, max(limit, int(charge[:, 0].sum()))).choice
    while not over and int(charge[rows, choice].sum()) < limit:
        rise = charge - charge[rows, choice][:, None]
        price = np.where((rise > 0) & np.isfinite(costs), costs - costs[rows, choice][:, None], np.inf)
        price = np.where(np.isfinite(price), price / np.maximum(rise, 1), np.inf)
        head, option = np.unravel_index(int(price.argmin()), price.shape)
        if not np.isfinite(price[head, option]):
            break
        choice[head] = option
    return choice


def _balanced(model: ChoiceModel, held: IntArray) -> Start:
    """The Lagrangian with held heads fixed, and every rank brought to the same stored bits; limits of layers aside."""
    costs, charge, stored = _hold(model, held)
    if model.budget < int(charge[:, 0].sum()):
        return Start(None, -np.inf)
    relaxed = relax(costs, charge, min(model.budget, int(charge.max(axis=1).sum())))
    if model.ranks == 1:
        return Start(np.where(held >= 0, held, relaxed.choice), relaxed.bound)
    choice, bound = balance(costs, charge, stored, model.rank, model.ranks, model.budget, relaxed)
    return Start(None if choice is None else np.where(held >= 0, held, choice), max(bound, relaxed.bound))


def _hold(model: ChoiceModel, held: IntArray) -> tuple[FloatArray, IntArray, IntArray]:
    """The tables of the model with held heads left a single option, in column 0."""
    costs, charge, stored = model.costs.copy(), model.charge.copy(), model.stored.copy()
    fixed = np.flatnonzero(held >= 0)
    costs[fixed] = np.inf
    costs[fixed, 0] = model.costs[fixed, held[fixed]]
    charge[fixed] = model.charge[fixed, held[fixed]][:, None]
    stored[fixed] = model.stored[fixed, held[fixed]][:, None]
    return costs, charge, stored
