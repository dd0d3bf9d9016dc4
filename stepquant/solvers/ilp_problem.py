"""The problems with side constraints that the integer program solves, and its answers.

Limits are in bits a value, charged as the budget is: padding counts, and a pivot counts `pivot_charge` bits a value
(8 is the nominal rule of design 2.3; 16 charges what it stores). What pivots cost is left out of every cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import DataError, InfeasibleError, RecipeError
from stepquant.solvers.ilp_model import UNLIMITED
from stepquant.solvers.table import FloatArray, IntArray, check_budget, check_candidates, check_costs

#: Bits of an FP16 pivot, and its mark in maps of bits.
PIVOT_BITS = 16


@dataclass(frozen=True)
class RowProblem:
    """Precisions of key rows, in groups of `granularity` rows per head and precision.

    Attributes:
        costs: [L, H, K, C], finite and not negative; entries of pivot rows are not read.
        candidates: [C] ascending ints, bits a value.
        value_dim: values in a row (V).
        budget: bits charged over all rows.
        granularity: stored rows of a head per precision are multiples of it; rows of zeros fill the last group.
        pivots: bool [L, H, K], rows already fixed at FP16, in multiples of the granularity per head (`round_pivots`).
        tensor_parallel: ranks; each has an equal, contiguous share of the heads of a layer, and stores the same
            number of bytes over all layers.
        layer_floor, layer_cap: [L] bits a value; NaN for none.
        head_floor, head_cap: [L, H] bits a value; NaN for none.
        pivot_charge: bits a value that a pivot counts against budget and limits.
        spare_groups: groups beyond the fewest that cover its rows that a head may take, all padding; 0 loses nothing
            where more bits never cost more (see row_pricing).
        time_limit: seconds for the integer program; None for no limit.
        layer_names: [L] indices of the layers in the whole model, for messages; by default their positions.
    """

    costs: Any
    candidates: Any
    value_dim: int
    budget: int
    granularity: int = 16
    pivots: NDArray[np.bool_] | None = None
    tensor_parallel: int = 1
    layer_floor: Any = None
    layer_cap: Any = None
    head_floor: Any = None
    head_cap: Any = None
    pivot_charge: int = 8
    spare_groups: int = 0
    time_limit: float | None = 60.0
    layer_names: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HeadProblem:
    """Precisions of whole heads (GDN), under the same side constraints.

    Attributes:
        costs: [L, H, C], finite and not negative; entries of pivot heads are not read.
        candidates: [C] ascending ints, bits a value.
        elements: values of a head (K * V).
        budget: bits charged over all heads, `elements * precision` a head.
        pivots: bool [L, H], heads already fixed at FP16.
        stored_bytes: [C + 1] bytes of a head at each candidate and as a pivot, scales included; by default the codes
            alone. Two-bit heads store more scales, and pivots none, which equal ranks have to take into account.
        charge_stored: charge `8 * stored_bytes` against budget and limits instead of nominal bits.
        tensor_parallel, layer_floor, layer_cap, head_floor, head_cap, pivot_charge, time_limit, layer_names: as in
            RowProblem.
    """

    costs: Any
    candidates: Any
    elements: int
    budget: int
    pivots: NDArray[np.bool_] | None = None
    stored_bytes: Any = None
    charge_stored: bool = False
    tensor_parallel: int = 1
    layer_floor: Any = None
    layer_cap: Any = None
    head_floor: Any = None
    head_cap: Any = None
    pivot_charge: int = 8
    time_limit: float | None = 60.0
    layer_names: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HeadAllocation:
    """An answer of the integer program.

    Attributes:
        bits: uint8 [L, H] (heads) or [L, H, K] (rows); 16 marks a pivot.
        cost: sum of the chosen costs, pivots left out.
        bound: proven lower bound on it.
        gap: (cost - bound) / max(|cost|, tiny).
        status: "optimal" (no gap but rounding) or "feasible".
        bits_used: bits charged against the budget, padding included.
        budget: bits allowed.
        bytes_per_rank: int64 [tensor_parallel], bytes stored over all layers; all equal.
        solver: "ilp:" and the back end, or "ilp:start" where the start was proven good enough.
        seconds: wall time, pricing included.
    """

    bits: NDArray[np.uint8]
    cost: float
    bound: float
    gap: float
    status: str
    bits_used: int
    budget: int
    bytes_per_rank: IntArray
    solver: str
    seconds: float


@dataclass(frozen=True)
class RowAllocation(HeadAllocation):
    """An answer for rows.

    Attributes:
        counts: int64 [L, H, C + 1], rows of a head at each candidate, pivots last. A stable sort of `bits` puts the
            rows in this order.
        stored: int64 [L, H, C + 1], rows stored, padding included; multiples of the granularity.
        padding_bytes: bytes of the rows of zeros, over all heads.
    """

    counts: IntArray
    stored: IntArray
    padding_bytes: int


@dataclass(frozen=True)
class Limits:
    """Checked side constraints in bits: floors and caps int64 of layers [L] and heads [U], ranks of heads [U].

    `names` [L] are the layers' indices in the whole model, as the keys of caps and floors have them.
    """

    layer_floor: IntArray
    layer_cap: IntArray
    head_floor: IntArray
    head_cap: IntArray
    layer: IntArray
    rank: IntArray
    names: tuple[int, ...]

    def key(self, kind: str, layer: int, head: int | None = None) -> str:
        """The recipe's key of a limit: ``allocation.caps.7/3``."""
        return f"allocation.{kind}s.{self.names[layer]}" + ("" if head is None else f"/{head}")

    def floor_keys(self) -> list[str]:
        """Keys of every floor there is."""
        heads = len(self.layer) // len(self.names)
        return [
            *(self.key("floor", int(layer)) for layer in np.flatnonzero(self.layer_floor)),
            *(self.key("floor", *divmod(int(head), heads)) for head in np.flatnonzero(self.head_floor)),
        ]


@dataclass(frozen=True)
class Checked:
    """What both problems share once checked: costs [U, ..., C], pivots [U, ...], candidates, budget, limits."""

    costs: FloatArray
    pivots: NDArray[np.bool_]
    candidates: tuple[int, ...]
    budget: int
    limits: Limits
    heads: tuple[int, int]


def check_problem(problem: RowProblem | HeadProblem, elements: int) -> Checked:
    """Check what row and head problems share.

    Args:
        problem: either problem.
        elements: values of one head.

    Raises:
        RecipeError, DataError: settings, or tables, that are not what they should be.
        InfeasibleError: heads of a layer cannot be shared equally among the ranks.
    """
    axes = "layers, heads, rows" if isinstance(problem, RowProblem) else "layers, heads"
    dimensions = axes.count(",") + 2
    candidates = check_candidates(problem.candidates)
    shape = np.shape(problem.costs)
    if len(shape) != dimensions or shape[-1] != len(candidates) or 0 in shape:
        raise DataError(
            f"the cost table has shape {list(shape)}, expected [{axes}, {len(candidates)}] with one column per "
            f"candidate of {list(candidates)}; rebuild the table for these candidates"
        )
    pivots = np.zeros(shape[:-1], bool) if problem.pivots is None else np.asarray(problem.pivots)
    if pivots.shape != shape[:-1] or pivots.dtype != np.bool_:
        raise DataError(
            f"the pivots are {pivots.dtype} {list(pivots.shape)}, expected bool {list(shape[:-1])} ([{axes}]); pass "
            "the map of pivots that belongs to this cost table"
        )
    # What a pivot would have cost is not known once the table was made without it.
    costs = check_costs(np.where(pivots[..., None], 0.0, problem.costs), "the cost table")
    layers, heads = shape[:2]
    ranks = problem.tensor_parallel
    if ranks < 1:
        raise RecipeError(f"tensor_parallel is {ranks}, expected at least 1; set target.tensor_parallel=1")
    if heads % ranks:
        raise InfeasibleError(
            f"{heads} heads a layer cannot be shared equally among {ranks} tensor-parallel ranks, expected a divisor "
            f"of {heads}; set target.tensor_parallel to one of {[n for n in range(1, heads + 1) if heads % n == 0]}"
        )
    layer, head = np.divmod(np.arange(layers * heads), heads)
    limits = Limits(
        *_limits(problem.layer_floor, problem.layer_cap, (layers,), elements * heads, "layer"),
        *_limits(problem.head_floor, problem.head_cap, (layers, heads), elements, "head"),
        layer,
        head // (heads // ranks),
        tuple(range(layers)) if problem.layer_names is None else tuple(problem.layer_names),
    )
    if problem.pivot_charge < 0:
        raise RecipeError(f"pivot_charge is {problem.pivot_charge}, expected bits a value, 8 or 16; set it to 8")
    flat = (layers * heads, *shape[2:])
    return Checked(
        costs.reshape(flat),
        pivots.reshape(flat[:-1]),
        candidates,
        check_budget(problem.budget),
        limits,
        (layers, heads),
    )


def _limits(floor: Any, cap: Any, shape: tuple[int, ...], elements: int, name: str) -> tuple[IntArray, IntArray]:
    """Floors and caps in bits, int64 [prod(shape)], from bits a value with NaN for none."""
    found = []
    for kind, given in (("floor", floor), ("cap", cap)):
        values = np.full(shape, np.nan) if given is None else np.asarray(given, np.float64)
        if values.shape != shape or (values < 0).any() or np.isinf(values).any():
            raise RecipeError(
                f"{name}_{kind} has shape {list(values.shape)} and values {values.tolist()!r:.80}, expected "
                f"{list(shape)} finite bits a value, NaN where there is no {kind}; give one per {name}"
            )
        # A limit such as 5.2 bits is a whole number of bits up to rounding in the multiplication.
        bits = values.reshape(-1) * elements
        bits = np.ceil(bits - 1e-6) if kind == "floor" else np.floor(bits + 1e-6)
        found.append(np.where(np.isnan(bits), 0 if kind == "floor" else UNLIMITED, bits).astype(np.int64))
    return found[0], found[1]
