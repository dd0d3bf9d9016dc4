"""A feasible answer for the integer program to start from: the Lagrangian, then ranks made equal.

Every rank is solved by the Lagrangian at an equal share of the stored bits. Gain-per-bit repair leaves the ranks a
few groups apart; a small exact DP per rank then prices every total near its own, and the cheapest total that all
ranks can reach and the budget allows is taken. Heads of a layer that breaks its cap or floor are first solved by
themselves at that limit and held there. The answer is checked; where this fails there is no start, and the solver
does without.
"""

from __future__ import annotations

import numpy as np

from stepquant.solvers.ilp_model import ChoiceModel
from stepquant.solvers.lagrangian import relax
from stepquant.solvers.table import FloatArray, IntArray

#: Units (the common divisor of stored bits) around the Lagrangian's total that the balancing looks at.
WINDOW = 256


def lagrangian_bound(model: ChoiceModel) -> float:
    """Proven lower bound on the cost: the Lagrangian with the budget alone."""
    budget = min(model.budget, int(model.charge.max(axis=1).sum()))
    return relax(model.costs, model.charge, max(budget, int(model.charge[:, 0].sum()))).bound


def warm_start(model: ChoiceModel) -> IntArray | None:
    """A choice [U] that meets every constraint, or None when this simple way finds none."""
    held = np.full(len(model.costs), -1, np.int64)
    for _ in range(3):
        choice = _balanced(model, held)
        if choice is None or model.meets(choice):
            return choice
        charges = model.layer_charges(choice)
        broken = np.flatnonzero((charges > model.layer_cap) | (charges < model.layer_floor))
        if not len(broken):
            return None
        for layer in broken:
            heads = np.flatnonzero(model.layer == layer)
            held[heads] = _at_limit(model, heads, bool(charges[layer] > model.layer_cap[layer]), int(layer))
    return None


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


def _balanced(model: ChoiceModel, held: IntArray) -> IntArray | None:
    """The Lagrangian with held heads fixed, and every rank brought to the same stored bits."""
    costs, charge, stored = _hold(model, held)
    if model.budget < int(charge[:, 0].sum()):
        return None
    choice = relax(costs, charge, min(model.budget, int(charge.max(axis=1).sum()))).choice
    if model.ranks > 1:
        choice_or_none = _equalise(model, costs, charge, stored, choice)
        if choice_or_none is None:
            return None
        choice = choice_or_none
    return np.where(held >= 0, held, choice)


def _hold(model: ChoiceModel, held: IntArray) -> tuple[FloatArray, IntArray, IntArray]:
    """The tables of the model with held heads left a single option, in column 0."""
    costs, charge, stored = model.costs.copy(), model.charge.copy(), model.stored.copy()
    fixed = np.flatnonzero(held >= 0)
    costs[fixed] = np.inf
    costs[fixed, 0] = model.costs[fixed, held[fixed]]
    charge[fixed] = model.charge[fixed, held[fixed]][:, None]
    stored[fixed] = model.stored[fixed, held[fixed]][:, None]
    return costs, charge, stored


def _equalise(
    model: ChoiceModel, costs: FloatArray, charge: IntArray, stored: IntArray, choice: IntArray
) -> IntArray | None:
    """Bring every rank to the same stored bits near the share that `choice` [U] gives it, as cheaply as possible."""
    finite = np.isfinite(costs)
    unit = int(np.gcd.reduce((stored - stored[:, :1])[finite], initial=0)) or 1
    members = [np.flatnonzero(model.rank == rank) for rank in range(model.ranks)]
    share = int(stored[np.arange(len(choice)), choice].sum()) // model.ranks
    share = max(share, *(int(stored[heads, 0].sum()) for heads in members))
    curves, picks, used = [], [], []
    for heads in members:
        relaxed = relax(costs[heads], stored[heads], share).choice
        moves = (stored[heads] - stored[heads, relaxed][:, None]) // unit
        curve, pick = _near(costs[heads], moves)
        curves.append(curve)
        picks.append((pick, moves))
        used.append(int(stored[heads, relaxed].sum()))
    if len({bits % unit for bits in used}) > 1:
        return None
    # The totals that lie in the window of every rank, and what all ranks cost there.
    offsets = [(max(used) - bits) // unit for bits in used]
    totals = np.arange(-WINDOW, WINDOW + 1)
    cost = np.zeros(len(totals))
    for curve, offset in zip(curves, offsets, strict=True):
        shifted = np.full(len(totals), np.inf)
        shifted[: max(len(totals) - offset, 0)] = curve[offset:]
        cost += shifted
    for place in np.argsort(cost, kind="stable").tolist():
        if not np.isfinite(cost[place]):
            continue
        answer = choice.copy()
        for heads, (pick, moves), offset in zip(members, picks, offsets, strict=True):
            answer[heads] = _backtrack(pick, moves, place + offset)
        excess = int(charge[np.arange(len(answer)), answer].sum()) - model.budget
        if excess <= 0:
            return answer
        # Totals less than `excess` bits below this one are over the budget as well.
        cost[max(place - (excess - 1) // (unit * model.ranks), 0) :] = np.inf
    return None


def _near(costs: FloatArray, moves: IntArray) -> tuple[FloatArray, IntArray]:
    """Least cost of the heads of a rank at every total within WINDOW units of the present one.

    Args:
        costs: [U, O]; infinite where a head has fewer options.
        moves: [U, O], units that an option adds to the present total.

    Returns:
        float64 [2 * WINDOW + 1] and the option taken last, [U, 2 * WINDOW + 1].
    """
    width = 2 * WINDOW + 1
    curve = np.full(width, np.inf)
    curve[WINDOW] = 0.0
    pick = np.zeros((len(costs), width), np.int64)
    for head in range(len(costs)):
        best = np.full(width, np.inf)
        for option in np.flatnonzero(np.isfinite(costs[head]) & (np.abs(moves[head]) < width)):
            move = int(moves[head, option])
            reached = np.full(width, np.inf)
            reached[max(move, 0) : width + min(move, 0)] = curve[max(-move, 0) : width + min(-move, 0)]
            reached += costs[head, option]
            better = reached < best
            best[better] = reached[better]
            pick[head, better] = option
        curve = best
    return curve, pick


def _backtrack(pick: IntArray, moves: IntArray, place: int) -> IntArray:
    """The options [U] that lead to `place` of the curve."""
    choice = np.zeros(len(pick), np.int64)
    for head in range(len(pick) - 1, -1, -1):
        choice[head] = pick[head, place]
        place -= int(moves[head, choice[head]])
    return choice
