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

LOWEST = 2  # bits of the lowest precision that the packers know


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
            f"head {head_in_layer} of layer {checked.limits.names[layer]} has {per_head[head]} pivot rows, expected a "
            f"multiple of the granularity {group}; bring them to whole groups with round_pivots, or lower it"
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
    remedies = [_lower_candidate(checked)]
    if padding:
        remedies.append(f"lower the granularity {group} (its padding takes {padding:,} of these bits)")
    if per_head.any():
        remedies.append(f"take fewer pivots ({int(per_head.sum()):,} rows at {problem.pivot_charge} bits)")
    model, kept = _model(
        checked,
        costs,
        [line + extra * problem.pivot_charge for line, extra in zip(coded, pivot_values, strict=True)],
        [line + extra * PIVOT_BITS for line, extra in zip(coded, pivot_values, strict=True)],
        checked.pivots.size * problem.value_dim,
        remedies,
        per_head,
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
        [_lower_candidate(checked), *(["take fewer pivots"] if checked.pivots.any() else [])],
        checked.pivots.astype(np.int64),
    )
    bits = np.full(model.costs.shape, PIVOT_BITS, np.int64)
    for head, keep in enumerate(kept):
        if not checked.pivots[head]:
            bits[head, : len(keep)] = precisions[candidates[keep]]
    return HeadOptions(model, checked.heads, bits)


def _lower_candidate(checked: Checked) -> str:
    """The remedy of lower candidates, empty where there are none."""
    lowest = checked.candidates[0]
    return f"add a candidate below {lowest} bits" if lowest > LOWEST else ""


def _model(
    checked: Checked,
    costs: list[FloatArray],
    charge: list[IntArray],
    stored: list[IntArray],
    elements: int,
    remedies: list[str],
    pivots: IntArray,
) -> tuple[ChoiceModel, list[IntArray]]:
    """Drop options outside the limits of their head and pad the lists to tables; also the options kept, per head.

    Args:
        elements: values of all heads.
        remedies: what else than a larger budget helps; empty ones are left out, and floors go first.
        pivots: int64 [U], pivots of every head.
    """
    limits = checked.limits
    kept = []
    for head, line in enumerate(charge):
        keep = np.flatnonzero((line >= limits.head_floor[head]) & (line <= limits.head_cap[head]))
        if not len(keep):
            raise _unreachable(checked, head, line, elements // len(charge), int(pivots[head]))
        kept.append(keep)
    width = max(len(keep) for keep in kept)
    shape = (len(kept), width)
    tables = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for head, keep in enumerate(kept):
        tables[0][head, : len(keep)] = costs[head][keep]
        for table, source in ((tables[1], charge), (tables[2], stored)):
            table[head, : len(keep)] = source[head][keep]
            table[head, len(keep) :] = source[head][keep[-1]]
    floors = limits.floor_keys()
    model = ChoiceModel(
        *tables,
        limits.layer,
        limits.rank,
        int(limits.rank.max()) + 1,
        checked.budget,
        limits.layer_floor,
        limits.layer_cap,
        elements,
        ", or ".join(text for text in (["lower a floor"] if floors else remedies) if text),
        limits.names,
        np.bincount(limits.layer, pivots, len(limits.names)).astype(np.int64),
        floors,
    )
    return model, kept


def _unreachable(checked: Checked, head: int, line: IntArray, size: int, pivots: int) -> InfeasibleError:
    """The refusal of a head's limits that none of its options [O], in bits, meets."""
    limits, (layer, place) = checked.limits, divmod(head, checked.heads[1])
    floor, cap = int(limits.head_floor[head]), int(limits.head_cap[head])
    found = [f"{limits.key('floor', layer, place)} is {floor / size:g}"] if floor else []
    found += [f"{limits.key('cap', layer, place)} is {cap / size:g}"] if cap < UNLIMITED else []
    takes = " or ".join(f"{bits / size:g}" for bits in line)
    if len(line) > 4:
        takes = f"{line[0] / size:g} to {line[-1] / size:g}"
    why = " (an FP16 pivot, charged 8)" if pivots and len(line) == 1 else ""
    kind = "cap" if cap < line[0] else "floor"
    remedy = f"{'raise' if kind == 'cap' else 'lower'} the {kind}" + (", or lower pivots.count" if why else "")
    return InfeasibleError(
        f"{' and '.join(found)} bits a value, but head {place} of layer {limits.names[layer]}{why} takes {takes}; "
        f"{remedy}"
    )
