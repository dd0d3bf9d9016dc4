"""Equal bytes on every rank: an exact DP per rank, and the cheapest total that all ranks share.

Every rank starts from its own Lagrangian answer at an equal share of the stored bits. A DP over its heads finds, for
every total of stored bits, the least of cost + multiplier * charge; the ranks then meet at one total. Where the DP
covers all totals this also bounds the whole problem, limits of layers left aside: exactly where heads store a
constant more than they are charged, and else by Lagrangian duality in the budget at every total. Unlike a
linear relaxation it knows that heads of different scales add up to the same bytes in a few ways only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepquant.solvers.lagrangian import Relaxed, relax
from stepquant.solvers.table import FloatArray, IntArray

#: Units (the common divisor of all steps of stored bits) to each side of a rank's own total that the DP looks at.
MAX_SIDE = 1 << 16
#: Heads x totals to each side of which the choices are kept, one byte each.
MAX_PICKS = 1 << 27
#: Multipliers of the budget that are tried where charge and stored bits differ by more than a constant.
MULTIPLIERS = 10


class Balanced(NamedTuple):
    """A choice [U] with equal ranks within the budget, or None; and a proven bound on the cost, or -inf."""

    choice: IntArray | None
    bound: float


class _Frame(NamedTuple):
    """The totals that a rank looks at, in units: the lowest, how many below and above its own answer, the units that
    an option adds to that, int64 [U, O], and whether these are all totals that it can have."""

    first: int
    below: int
    above: int
    moves: IntArray
    complete: bool


class _Totals(NamedTuple):
    """One rank at every total of stored bits: index i is `first + i` units.

    `value` float64 [W], least cost + multiplier * charge (infinite where the total cannot be had), `charge` int64 [W]
    of that assignment, `pick` [U, W] the option of each head that leads there, `moves` int64 [U, O] units an option
    adds to the rank's own answer.
    """

    first: int
    value: FloatArray
    charge: IntArray
    pick: NDArray[np.unsignedinteger]
    moves: IntArray


class _Line(NamedTuple):
    """What a multiplier found at every total: the cost float64 [W] and the bits over the budget int64 [W]."""

    multiplier: float
    cost: FloatArray
    excess: IntArray


def balance(
    costs: FloatArray, charge: IntArray, stored: IntArray, rank: IntArray, ranks: int, budget: int, relaxed: Relaxed
) -> Balanced:
    """Give every rank the same stored bits, as cheaply as the budget allows.

    Args:
        costs: [U, O]; infinite where a head has fewer options.
        charge: int64 [U, O], bits against the budget.
        stored: int64 [U, O], bits stored, rising along every line.
        rank: int64 [U], rank of every head.
        ranks: number of ranks.
        budget: bits charged at most.
        relaxed: the Lagrangian answer without regard to ranks.
    """
    finite = np.isfinite(costs)
    unit = int(np.gcd.reduce((stored - stored[:, :1])[finite], initial=0)) or 1
    members = [np.flatnonzero(rank == one) for one in range(ranks)]
    if len({int(stored[heads, 0].sum()) % unit for heads in members}) > 1:
        return Balanced(None, -np.inf)
    share = int(stored[np.arange(len(costs)), relaxed.choice].sum()) // ranks
    share = max(share, *(int(stored[heads, 0].sum()) for heads in members))
    sides = min(MAX_SIDE, MAX_PICKS // len(costs))
    frames = [_frame(costs[heads], stored[heads], share, unit, sides) for heads in members]
    complete = all(frame.complete for frame in frames)
    apart = np.where(finite, stored - charge, (stored - charge)[:, :1])
    constant = bool((apart == apart[:, :1]).all())
    best, least = None, np.inf
    tried: list[_Line] = []
    multiplier: float | None = relaxed.multiplier
    bounds = np.full(0, -np.inf)
    while multiplier is not None and len(tried) < MULTIPLIERS:
        totals = [
            _totals(costs[heads] + multiplier * charge[heads], charge[heads], frame)
            for heads, frame in zip(members, frames, strict=True)
        ]
        value, charged, begins = _meet(totals)
        if not len(value):
            return Balanced(None, -np.inf)
        pure = value - multiplier * charged
        cost = np.where(charged <= budget, pure, np.inf)
        place = int(cost.argmin())
        if cost[place] < least:
            least = float(cost[place])
            best = np.zeros(len(costs), np.int64)
            for heads, one, begin in zip(members, totals, begins, strict=True):
                best[heads] = _backtrack(one, begin + place)
        if constant:
            # A total says what is charged: it is allowed or it is not.
            bounds = cost
            break
        lower = value - multiplier * budget
        bounds = np.maximum(bounds, lower) if len(bounds) else lower
        tried.append(_Line(multiplier, pure, charged - budget))
        multiplier = _next_multiplier(tried, bounds, least)
    bound = -np.inf if best is None or not complete else float(bounds.min())
    return Balanced(best, bound)


def _next_multiplier(tried: list[_Line], bounds: FloatArray, least: float) -> float | None:
    """The multiplier that may raise the lowest bound of all totals, or None where there is nothing more to gain.

    At a total the dual function lies below a line for every multiplier tried; the best multiplier is where the last
    one that rises (over the budget) crosses the first one that falls (within it).
    """
    place = int(bounds.argmin())
    if bounds[place] >= least * (1 - 1e-6):
        return None
    rising = [line for line in tried if line.excess[place] > 0]
    falling = [line for line in tried if line.excess[place] <= 0]
    if not falling:
        return 4.0 * max(line.multiplier for line in tried)
    if not rising:
        return 0.0 if min(line.multiplier for line in tried) > 0 else None
    last = max(rising, key=lambda line: line.multiplier)
    first = min(falling, key=lambda line: line.multiplier)
    found = float((first.cost[place] - last.cost[place]) / (last.excess[place] - first.excess[place]))
    return found if last.multiplier * (1 + 1e-9) < found < first.multiplier * (1 - 1e-9) else None


def _frame(costs: FloatArray, stored: IntArray, share: int, unit: int, sides: int) -> _Frame:
    """Centre the DP of a rank on its Lagrangian answer at `share` bits, with at most `sides` units to each side."""
    own = relax(costs, stored, share).choice
    used = stored[np.arange(len(own)), own]
    moves = np.where(np.isfinite(costs), (stored - used[:, None]) // unit, 0)
    below, above = -int(moves.min(axis=1).sum()), int(moves.max(axis=1).sum())
    complete = max(below, above) <= sides
    below, above = min(below, sides), min(above, sides)
    return _Frame(int(used.sum()) // unit - below, below, above, moves, complete)


def _meet(totals: list[_Totals]) -> tuple[FloatArray, IntArray, list[int]]:
    """Sum over ranks of value and charge at the totals that all of them look at, and where these begin in each."""
    start = max(one.first for one in totals)
    stop = max(min(one.first + len(one.value) for one in totals), start)
    begins = [start - one.first for one in totals]
    value = np.sum([one.value[b : b + stop - start] for one, b in zip(totals, begins, strict=True)], axis=0)
    charged = np.sum([one.charge[b : b + stop - start] for one, b in zip(totals, begins, strict=True)], axis=0)
    return value, charged, begins


def _totals(value: FloatArray, charge: IntArray, frame: _Frame) -> _Totals:
    """Run the DP over the heads of a rank.

    Args:
        value: [U, O] cost + multiplier * charge; infinite where a head has fewer options.
        charge: int64 [U, O].
        frame: the totals to look at.
    """
    moves = frame.moves
    width = frame.below + frame.above + 1
    best, charged = np.full(width, np.inf), np.zeros(width, np.int64)
    best[frame.below] = 0.0
    low = high = frame.below  # totals reached so far
    narrow = value.shape[1] <= 256
    pick = np.zeros((len(value), width), np.uint8 if narrow else np.uint16)
    for head in range(len(value)):
        options = np.flatnonzero(np.isfinite(value[head]))
        steps = moves[head, options].tolist()
        new_low, new_high = max(low + min(steps), 0), min(high + max(steps), width - 1)
        reached = np.full(new_high - new_low + 1, np.inf)
        chosen = pick[head, new_low : new_high + 1]
        for option, step in zip(options.tolist(), steps, strict=True):
            begin, end = max(low + step, new_low), min(high + step, new_high) + 1
            if begin >= end:
                continue
            candidate = best[begin - step : end - step] + value[head, option]
            here = slice(begin - new_low, end - new_low)
            better = candidate < reached[here]
            np.copyto(reached[here], candidate, where=better)
            np.copyto(chosen[here], chosen.dtype.type(option), where=better)
        came_from = np.clip(np.arange(new_low, new_high + 1) - moves[head, chosen], 0, width - 1)
        charged[new_low : new_high + 1] = charged[came_from] + charge[head, chosen]
        best[low : high + 1] = np.inf
        best[new_low : new_high + 1] = reached
        low, high = new_low, new_high
    return _Totals(frame.first, best, charged, pick, moves)


def _backtrack(totals: _Totals, place: int) -> IntArray:
    """The options [U] that lead to index `place`."""
    choice = np.zeros(len(totals.pick), np.int64)
    for head in range(len(choice) - 1, -1, -1):
        choice[head] = totals.pick[head, place]
        place -= int(totals.moves[head, choice[head]])
    return choice
