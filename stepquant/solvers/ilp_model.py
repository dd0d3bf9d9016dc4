"""The integer program that both back ends solve: one option for every head, under a budget and side constraints.

Whatever the unit, a head is left with a short list of options, each with a cost, the bits it is charged against the
budget, and the bits it stores. With x[h, o] in {0, 1}:

    minimise    sum cost[h, o] x[h, o]
    subject to  sum_o x[h, o] = 1                                     for every head
                sum charge x <= budget
                floor_l <= sum over the heads of layer l of charge x <= cap_l
                sum over rank r of stored x equal for all r           (tensor parallelism, to the bit)

All coefficients but the costs are integers, reduced by what every option of a head has in common and by their
greatest common divisor, so that a solver's tolerances cannot bend a constraint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stepquant.errors import InfeasibleError
from stepquant.solvers.table import FloatArray, IntArray

#: Stands for "no cap".
UNLIMITED = 1 << 62

#: Values that a recipe's caps and floors can have, which messages propose.
LIMITS = (2, 4, 6, 8)


@dataclass(frozen=True)
class ChoiceModel:
    """One option for every head; U heads in the order of their layers, at most O options each.

    Attributes:
        costs: float64 [U, O]; infinite where a head has fewer options.
        charge: int64 [U, O], bits against the budget, rising along every line.
        stored: int64 [U, O], bits that are stored.
        layer: int64 [U], layer of the head.
        rank: int64 [U], tensor-parallel rank of the head, from 0 to ranks - 1.
        ranks: number of ranks.
        budget: bits charged at most.
        layer_floor: int64 [L], least charge of a layer.
        layer_cap: int64 [L], greatest charge of a layer; UNLIMITED for none.
        elements: values of the state, for the figures a value.
        remedy: what else than a larger budget would help.
        names: indices of the layers in the whole model, for messages.
        pivots: int64 [L], FP16 pivots of a layer, for messages.
        floors: keys of all floors, of layers and heads, for messages.
    """

    costs: FloatArray
    charge: IntArray
    stored: IntArray
    layer: IntArray
    rank: IntArray
    ranks: int
    budget: int
    layer_floor: IntArray
    layer_cap: IntArray
    elements: int
    remedy: str
    names: tuple[int, ...]
    pivots: IntArray
    floors: list[str]

    def total(self, table: IntArray, choice: IntArray, group: IntArray, groups: int) -> IntArray:
        """Sum a table [U, O] over the options chosen, per group (layer or rank) of heads: int64 [groups]."""
        sums = np.zeros(groups, np.int64)
        np.add.at(sums, group, table[np.arange(len(choice)), choice])
        return sums

    def cost(self, choice: IntArray) -> float:
        """Sum of the costs of the options chosen [U]."""
        return float(self.costs[np.arange(len(choice)), choice].sum())

    def layer_charges(self, choice: IntArray) -> IntArray:
        """Bits charged per layer [L]."""
        return self.total(self.charge, choice, self.layer, len(self.layer_cap))

    def rank_bits(self, choice: IntArray) -> IntArray:
        """Bits stored per rank [ranks]."""
        return self.total(self.stored, choice, self.rank, self.ranks)

    def meets(self, choice: IntArray) -> bool:
        """Whether a choice [U] keeps to every constraint, in exact integer arithmetic."""
        layers = self.layer_charges(choice)
        ranks = self.rank_bits(choice)
        return bool(
            np.isfinite(self.cost(choice))
            and layers.sum() <= self.budget
            and (layers >= self.layer_floor).all()
            and (layers <= self.layer_cap).all()
            and (ranks == ranks[0]).all()
        )


class LinearRow(NamedTuple):
    """low <= sum coefficients * x[columns] <= high, in integers; None for no limit."""

    columns: IntArray
    coefficients: IntArray
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Linear:
    """The model as a list of binary columns and of rows.

    Attributes:
        head, option: int64 [N], what a column stands for; the columns of a head are neighbours, options ascending.
        objective: float64 [N], scaled so that a good answer costs about 1e4, beyond the least cost of each head.
        rows: constraints beside "one option a head".
        possible: False when a row can be met by no choice at all.
    """

    head: IntArray
    option: IntArray
    objective: FloatArray
    rows: list[LinearRow]
    possible: bool

    def head_columns(self) -> list[IntArray]:
        """Columns of each head."""
        starts = np.flatnonzero(np.diff(self.head)) + 1
        return np.split(np.arange(len(self.head)), starts)

    def indicator(self, choice: IntArray) -> FloatArray:
        """The 0/1 vector [N] of a choice [U]."""
        return (self.option == choice[self.head]).astype(np.float64)

    def choice(self, values: FloatArray) -> IntArray:
        """The choice [U] of a vector [N] that is 0 or 1 up to a solver's tolerance."""
        return np.array([self.option[columns[values[columns].argmax()]] for columns in self.head_columns()], np.int64)


class Answer(NamedTuple):
    """What a back end found: a choice [U] or None, a bound on the scaled objective, and whether none can exist."""

    choice: IntArray | None
    bound: float
    infeasible: bool


def linearise(model: ChoiceModel, scale: float, most: float = np.inf) -> Linear:
    """Write a model as columns and rows.

    Args:
        model: the model.
        scale: costs beyond the least of each head are divided by it.
        most: options that alone cost more than this beyond the least of their head are left out; with the cost of a
            known answer, beyond the least of all heads, no better answer is lost.
    """
    least = model.costs.min(axis=1)
    beyond = model.costs - least[:, None]
    head, option = np.nonzero(np.isfinite(beyond) & (beyond <= most))
    objective = (model.costs[head, option] - least[head]) / scale
    rows: list[LinearRow] = []
    possible = True
    everything = np.ones(len(model.costs), bool)
    wanted: list[tuple[IntArray, int | None, int | None]] = []

    def add(table: IntArray, sign: IntArray, low: int | None, high: int | None) -> None:
        # What every option of a head has in common goes to the other side of the inequality.
        extra = (table - table[:, :1])[head, option] * sign[head]
        common = int((table[:, 0] * sign).sum())
        wanted.append((extra, None if low is None else low - common, None if high is None else high - common))

    if model.budget < UNLIMITED:
        add(model.charge, everything.astype(np.int64), None, model.budget)
    for layer, (floor, cap) in enumerate(zip(model.layer_floor.tolist(), model.layer_cap.tolist(), strict=True)):
        if floor > 0 or cap < UNLIMITED:
            here = (model.layer == layer).astype(np.int64)
            add(model.charge, here, floor if floor > 0 else None, cap if cap < UNLIMITED else None)
    for rank in range(model.ranks - 1):
        add(model.stored, (model.rank == rank).astype(np.int64) - (model.rank == rank + 1), 0, 0)
    for extra, low, high in wanted:
        columns = np.flatnonzero(extra)
        if not len(columns):
            possible &= (low is None or low <= 0) and (high is None or high >= 0)
            continue
        divisor = int(np.gcd.reduce(np.abs(extra[columns])))
        low = None if low is None else -(-low // divisor)
        high = None if high is None else high // divisor
        possible &= low is None or high is None or low <= high
        rows.append(LinearRow(columns, extra[columns] // divisor, low, high))
    return Linear(head, option, objective, rows, possible)


def tighten_budget(model: ChoiceModel) -> ChoiceModel:
    """Lower the budget to the greatest charge that equal ranks can have, where that is plain to see.

    Every rank stores a whole number of units (the common divisor of all steps), so equal ranks move together by
    `ranks` units. A linear relaxation would spend the fraction in between, and its bound would be low by as much.
    That needs charge and stored bits to differ by a constant of each head.
    """
    finite = np.isfinite(model.costs)
    apart = model.stored - model.charge
    unit = int(np.gcd.reduce((model.stored - model.stored[:, :1])[finite], initial=0))
    first = model.rank_bits(np.zeros(len(model.costs), np.int64))
    constant = bool((apart == apart[:, :1])[finite].all())
    if model.ranks == 1 or not unit or not constant or len(set((first % unit).tolist())) > 1:
        return model
    total = int(apart[:, 0].sum())
    residue = int(first[0]) % unit
    share = ((model.budget + total) // model.ranks - residue) // unit * unit + residue
    return replace(model, budget=min(model.budget, model.ranks * share - total))


def check_layers(model: ChoiceModel) -> int:
    """Bits of the smallest charge that meets the floors of all layers, equal ranks left aside.

    Raises:
        InfeasibleError: the heads of some layer cannot be brought between its floor and its cap.
    """
    smallest = 0
    for layer, (floor, cap) in enumerate(zip(model.layer_floor.tolist(), model.layer_cap.tolist(), strict=True)):
        here = np.flatnonzero(model.layer == layer)
        values = [np.unique(model.charge[head][np.isfinite(model.costs[head])]).tolist() for head in here]
        least, most = sum(value[0] for value in values), sum(value[-1] for value in values)
        if cap < least or floor > most:
            raise _unreachable(model, layer, len(here), least, most)
        if floor <= least:
            smallest += least
            continue
        # Totals that the layer can reach, as the set bits of one integer.
        unit = int(np.gcd.reduce([value - row[0] for row in values for value in row])) or 1
        reachable = 1
        for row in values:
            reachable = _any(reachable << ((value - row[0]) // unit) for value in row)
        from_floor = -(-(floor - least) // unit)
        above = reachable >> from_floor
        total = least + unit * (from_floor + (above & -above).bit_length() - 1)
        if not above or total > cap:
            size = model.elements // len(model.names)
            raise InfeasibleError(
                f"no assignment brings layer {model.names[layer]} between allocation.floors.{model.names[layer]} = "
                f"{floor / size:g} and allocation.caps.{model.names[layer]} = {cap / size:g} bits a value on average: "
                f"the next mean above the floor is {total / size:g}; move the floor or the cap"
            )
        smallest += total
    return smallest


def _unreachable(model: ChoiceModel, layer: int, heads: int, least: int, most: int) -> InfeasibleError:
    """The refusal of a layer's cap below what its heads take at least, or its floor above what they take at most."""
    size, name = model.elements // len(model.names), model.names[layer]
    cap, floor, pivots = int(model.layer_cap[layer]), int(model.layer_floor[layer]), int(model.pivots[layer])
    kind, limit, found, ask = ("cap", cap, least, "least") if cap < least else ("floor", floor, most, "most")
    key = f"allocation.{kind}s.{name}"
    held = ""
    if pivots and kind == "cap":
        held = f" ({pivots} FP16 pivot{'s' if pivots > 1 else ''} among them, charged 8)"
    value = found / size
    near = math.ceil(value * 1e4) / 1e4 if kind == "cap" else math.floor(value * 1e4) / 1e4
    fits = [bits for bits in LIMITS if (bits >= near if kind == "cap" else bits <= near)]
    enough = (min if kind == "cap" else max)(fits, default=near)
    remedy = f"{'raise' if kind == 'cap' else 'lower'} it to {enough:g}" + (", or lower pivots.count" if held else "")
    return InfeasibleError(
        f"{key} is {limit / size:g} bits a value on average, but the {heads} heads of layer {name}{held} take at {ask} "
        f"{near:g}; {remedy}"
    )


def _any(sets: object) -> int:
    union = 0
    for one in sets:  # type: ignore[attr-defined]
        union |= one
    return union
