"""From a problem of rows or heads to the options of every head that the integer program chooses from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import DataError, InfeasibleError, RecipeError
from stepquant.solvers.ilp_model import UNLIMITED, ChoiceModel
from stepquant.solvers.ilp_problem import PIVOT_BITS, Checked, HeadProblem, RowProblem, check_problem
from stepquant.solvers.row_pricing import price_heads
from stepquant.solvers.table import FloatArray, IntArray, check_integers


@dataclass(frozen=True)
class RowOptions:
    """The model of a row problem, and what its options mean.

    Attributes:
        model: the choice model over the U = L * H heads.
        heads: (layers, heads a layer).
        candidates: ascending bits a value.
        pivots: bool [U, K].
        rows: of each head, the rows that are not pivots, int64 [N].
        choices: of each head, the candidate of these rows for every option, uint8 [O, N].
        stored_rows: int64 [U, O, C], rows stored per candidate.
    """

    model: ChoiceModel
    heads: tuple[int, int]
    candidates: tuple[int, ...]
    pivots: NDArray[np.bool_]
    rows: list[IntArray]
    choices: list[NDArray[np.uint8]]
    stored_rows: IntArray


@dataclass(frozen=True)
class HeadOptions:
    """The model of a head problem; `bits` int64 [U, O] is what an option stands for, `heads` (layers, a layer)."""

    model: ChoiceModel
    heads: tuple[int, int]
    bits: IntArray


def row_options(problem: RowProblem) -> RowOptions:
    """Check a row problem and price every head of it."""
    for name, value in (("value_dim", problem.value_dim), ("granularity", problem.granularity)):
        if value < 1:
            raise RecipeError(f"{name} is {value}, expected a positive integer; the kernel's block of rows is 8 or 16")
    if problem.spare_groups < 0:
        raise RecipeError(f"spare_groups is {problem.spare_groups}, expected 0 or more; set it to 0")
    row_count = np.shape(problem.costs)[2] if np.ndim(problem.costs) == 4 else 0
    checked = check_problem(problem, row_count * problem.value_dim)
    group = problem.granularity
    ragged = [bits for bits in checked.candidates if group * problem.value_dim * bits % 8]
    if ragged:
        raise RecipeError(
            f"{group} rows of {problem.value_dim} values take no whole number of bytes at {ragged} bits; use a "
            "granularity that is a multiple of 8, or other candidates"
        )
    per_head = checked.pivots.sum(axis=1)
    if (per_head % group).any():
        head = int(np.flatnonzero(per_head % group)[0])
        layer, head_in_layer = divmod(head, checked.heads[1])
        raise InfeasibleError(
            f"head {head_in_layer} of layer {layer} has {per_head[head]} pivot rows, expected a multiple of the "
            f"granularity {group}; bring the pivots to whole groups with round_pivots, or lower the granularity"
        )
    batches: dict[int, IntArray] = {int(count): np.flatnonzero(per_head == count) for count in np.unique(per_head)}
    count = len(per_head)
    rows = [np.flatnonzero(~pivots) for pivots in checked.pivots]
    costs: list[FloatArray] = [np.zeros(0)] * count
    coded: list[IntArray] = [np.zeros(0, np.int64)] * count
    choices: list[NDArray[np.uint8]] = [np.zeros((0, 0), np.uint8)] * count
    stored: list[IntArray] = [np.zeros((0, 0), np.int64)] * count
    for heads in batches.values():
        places = np.stack([rows[head] for head in heads])
        prices = price_heads(
            np.take_along_axis(checked.costs[heads], places[:, :, None], axis=1),
            checked.candidates,
            group,
            problem.spare_groups,
        )
        for line, head in enumerate(heads):
            costs[head], coded[head] = prices.costs[line], prices.row_bits * problem.value_dim
            choices[head], stored[head] = prices.choice[line], prices.stored[line]
    pivot_values = per_head * problem.value_dim
    padding = sum(-len(line) % group for line in rows) * problem.value_dim * checked.candidates[0]
    remedy = f"add a candidate below {checked.candidates[0]} bits"
    if padding:
        remedy += f", or lower the granularity {group} (its padding takes {padding:,} of these bits)"
    if per_head.any():
        remedy += f", or take fewer pivots ({int(per_head.sum()):,} rows at {problem.pivot_charge} bits)"
    model, kept = _model(
        checked,
        costs,
        [line + extra * problem.pivot_charge for line, extra in zip(coded, pivot_values, strict=True)],
        [line + extra * PIVOT_BITS for line, extra in zip(coded, pivot_values, strict=True)],
        checked.pivots.size * problem.value_dim,
        remedy,
    )
    stored_rows = np.zeros((*model.costs.shape, len(checked.candidates)), np.int64)
    for head, keep in enumerate(kept):
        choices[head] = choices[head][keep]
        stored_rows[head, : len(keep)] = stored[head][keep]
    return RowOptions(model, checked.heads, checked.candidates, checked.pivots, rows, choices, stored_rows)


def head_options(problem: HeadProblem) -> HeadOptions:
    """Check a head problem; its options are the candidates, or the pivot alone."""
    if problem.elements < 1:
        raise RecipeError(f"elements is {problem.elements}, expected the values of a head, K * V; pass that")
    checked = check_problem(problem, problem.elements)
    precisions = np.array([*checked.candidates, PIVOT_BITS], np.int64)
    if problem.stored_bytes is None:
        stored_bits = problem.elements * precisions
    else:
        stored_bits = 8 * check_integers(problem.stored_bytes, "stored_bytes")
    lines = stored_bits[:-1]
    if stored_bits.shape != precisions.shape or (np.diff(lines) <= 0).any() or (stored_bits % 8).any():
        raise DataError(
            f"the bytes a head stores are {(stored_bits / 8).tolist()}, expected {len(precisions)} whole numbers, "
            "rising with the candidates and the pivot's last; pass stored_bytes that fit the candidates"
        )
    charge = stored_bits if problem.charge_stored else problem.elements * precisions
    pivot_charge = stored_bits[-1] if problem.charge_stored else problem.elements * problem.pivot_charge
    candidates = np.arange(len(checked.candidates))
    model, kept = _model(
        checked,
        [np.zeros(1) if pivot else line for pivot, line in zip(checked.pivots, checked.costs, strict=True)],
        [np.array([pivot_charge]) if pivot else charge[:-1] for pivot in checked.pivots],
        [stored_bits[-1:] if pivot else lines for pivot in checked.pivots],
        len(checked.pivots) * problem.elements,
        f"add a candidate below {checked.candidates[0]} bits, or take fewer pivots",
    )
    bits = np.full(model.costs.shape, PIVOT_BITS, np.int64)
    for head, keep in enumerate(kept):
        if not checked.pivots[head]:
            bits[head, : len(keep)] = precisions[candidates[keep]]
    return HeadOptions(model, checked.heads, bits)


def _model(
    checked: Checked,
    costs: list[FloatArray],
    charge: list[IntArray],
    stored: list[IntArray],
    elements: int,
    remedy: str,
) -> tuple[ChoiceModel, list[IntArray]]:
    """Drop options outside the limits of their head and pad the lists to tables; also the options kept, per head."""
    limits = checked.limits
    kept = []
    for head, line in enumerate(charge):
        floor, cap = int(limits.head_floor[head]), int(limits.head_cap[head])
        keep = np.flatnonzero((line >= floor) & (line <= cap))
        if not len(keep):
            layer, place = divmod(head, checked.heads[1])
            name = "cap" if cap < line[0] else "floor"
            limit = f"cap of {cap:,}" if cap < UNLIMITED else f"floor of {floor:,}"
            if floor > 0 and cap < UNLIMITED:
                limit = f"floor of {floor:,} and cap of {cap:,}"
            raise InfeasibleError(
                f"head {place} of layer {layer} cannot meet its {limit} bits: it takes from {line[0]:,} to "
                f"{line[-1]:,} bits in {len(line)} steps; {'raise' if name == 'cap' else 'lower'} the {name} of head "
                f"{place} of layer {layer}, or refine the granularity"
            )
        kept.append(keep)
    width = max(len(keep) for keep in kept)
    shape = (len(kept), width)
    tables = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for head, keep in enumerate(kept):
        tables[0][head, : len(keep)] = costs[head][keep]
        for table, source in ((tables[1], charge), (tables[2], stored)):
            table[head, : len(keep)] = source[head][keep]
            table[head, len(keep) :] = source[head][keep[-1]]
    model = ChoiceModel(
        *tables,
        limits.layer,
        limits.rank,
        int(limits.rank.max()) + 1,
        checked.budget,
        limits.layer_floor,
        limits.layer_cap,
        elements,
        remedy,
    )
    return model, kept
