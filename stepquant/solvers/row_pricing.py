"""The least cost of a head at every number of bits, when its rows come in whole groups of a precision.

A kernel that takes rows g at a time wants the stored rows of a head, per precision, in multiples of g. Given these
counts, which row gets which precision is a transportation problem with as many sources as candidates, and it is
solved exactly here for every vector of counts: one walks the vectors so that neighbours differ by one group, and
moves one row at a time along the shortest path of the residual graph. Its nodes are the candidates, and the length
of x -> y is the least `cost[row, y] - cost[row, x]` over the rows that have x. That keeps the assignment optimal at
every step (successive shortest paths), for all heads of a batch at once.

Rows that do not fill their last group are padded with rows of zeros, which cost bits and no error. A head takes the
fewest groups that cover its rows, so that rows are promoted into the free places of a higher precision rather than
padded: where more bits never cost more, each further group of padding could be dropped by moving rows up, for
fewer bits and no more cost. `spare_groups` allows further groups for tables where that does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import comb

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import RecipeError
from stepquant.solvers.table import FloatArray, IntArray

#: Vectors of counts a head may have; more take minutes to price.
MAX_VECTORS = 20_000


@dataclass(frozen=True)
class Prices:
    """Options of a batch of heads with equally many rows, one per number of bits that occurs.

    Attributes:
        row_bits: int64 [O], bits of the stored rows per value column, ascending.
        costs: float64 [B, O], the least cost at exactly that number of bits.
        stored: int64 [B, O, C], rows stored per candidate, padding included; multiples of the granularity.
        choice: uint8 [B, O, N], the candidate of every row.
    """

    row_bits: IntArray
    costs: FloatArray
    stored: IntArray
    choice: NDArray[np.uint8]


def price_heads(costs: FloatArray, candidates: tuple[int, ...], granularity: int, spare_groups: int = 0) -> Prices:
    """Price every number of bits that a head can take.

    Args:
        costs: [B, N, C] of the rows that are not pivots, finite and not negative.
        candidates: [C] ascending ints, bits a value.
        granularity: stored rows per precision are multiples of it.
        spare_groups: how many groups more than the fewest that cover the rows a head may take.

    Raises:
        RecipeError: the granularity is too fine, for so many candidates, to go through every vector of counts.
    """
    batch, rows, count = costs.shape
    fewest = -(-rows // granularity)
    totals = range(fewest, fewest + (spare_groups if rows else 0) + 1)
    vectors = sum(comb(total + count - 1, count - 1) for total in totals)
    if vectors > MAX_VECTORS:
        raise RecipeError(
            f"granularity {granularity} gives a head of {rows} rows {vectors:,} ways to share them among the "
            f"candidates {list(candidates)}, expected at most {MAX_VECTORS:,}; use a coarser granularity, fewer "
            "candidates, or the lagrangian solver where rows need not come in groups"
        )
    precisions = np.asarray(candidates, np.int64)
    keys = {int(np.dot(vector, precisions)) for total in totals for vector in compositions(total, count)}
    row_bits = np.array(sorted(keys), np.int64) * granularity
    prices = Prices(
        row_bits,
        np.full((batch, len(row_bits)), np.inf),
        np.zeros((batch, len(row_bits), count), np.int64),
        np.zeros((batch, len(row_bits), rows), np.uint8),
    )
    for total in totals:
        padded = np.concatenate([costs, np.zeros((batch, total * granularity - rows, count))], axis=1)
        for vector, assignment in _walk(padded, total, granularity):
            value = np.take_along_axis(padded, assignment[:, :, None].astype(np.int64), axis=2)[:, :, 0].sum(axis=1)
            option = int(np.searchsorted(row_bits, granularity * np.dot(vector, precisions)))
            better = np.flatnonzero(value < prices.costs[:, option])
            prices.costs[better, option] = value[better]
            prices.stored[better, option] = granularity * np.asarray(vector, np.int64)
            prices.choice[better, option] = assignment[better, :rows]
    return prices


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share `total` groups among `parts` candidates, neighbours differing by one group.

    Starts with everything in the first part and ends with everything in the last one.
    """
    if parts == 1:
        yield (total,)
        return
    for last in range(total + 1):
        inner = list(compositions(total - last, parts - 1))
        # There and back again, so that the step from one `last` to the next is one group as well.
        yield from ((*vector, last) for vector in (inner if last % 2 == 0 else reversed(inner)))


def _walk(costs: FloatArray, total: int, granularity: int) -> Iterator[tuple[tuple[int, ...], NDArray[np.uint8]]]:
    """Every vector of counts in groups, each with an optimal assignment uint8 [B, N] (valid until the next step)."""
    count = costs.shape[2]
    moves = _Moves(costs)
    vectors = list(compositions(total, count))
    yield vectors[0], moves.assignment
    for before, after in pairwise(vectors):
        change = np.subtract(after, before)
        for _ in range(granularity):
            moves.move(int(change.argmin()), int(change.argmax()))
        yield after, moves.assignment


class _Moves:
    """Assignments of a batch of heads, all rows at first in candidate 0, changed by one row at a time.

    `open[x, y]` [B, N] is the cost of moving a row from x to y, infinite for rows that are not in x.
    """

    def __init__(self, costs: FloatArray) -> None:
        batch, rows, count = costs.shape
        pairs = list(permutations(range(count), 2))
        self.assignment = np.zeros((batch, rows), np.uint8)
        self._full = {(x, y): np.ascontiguousarray(costs[:, :, y] - costs[:, :, x]) for x, y in pairs}
        self._open = {(x, y): self._full[x, y].copy() if x == 0 else np.full((batch, rows), np.inf) for x, y in pairs}
        self._paths: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
        for x, y in pairs:
            between = [node for node in range(count) if node not in (x, y)]
            routes = (middle for length in range(count - 1) for middle in permutations(between, length))
            self._paths[x, y] = [list(pairwise((x, *middle, y))) for middle in routes]
        self._count = count

    def move(self, source: int, target: int) -> None:
        """Take one row away from `source` and give one to `target`, in every head, along the cheapest path.

        The paths are few (5 for 4 candidates) and without cycles, so that rounding cannot lead round in circles.
        """
        paths = self._paths[source, target]
        heads = np.arange(len(self.assignment))
        row, length = {}, {}
        for edge in {edge for path in paths for edge in path}:
            row[edge] = self._open[edge].argmin(axis=1)
            length[edge] = self._open[edge][heads, row[edge]]
        cheapest = np.stack([sum(length[edge] for edge in path) for path in paths]).argmin(axis=0)
        for number, path in enumerate(paths):
            chosen = np.flatnonzero(cheapest == number)
            if len(chosen):
                for edge in path:
                    self._reassign(chosen, row[edge][chosen], edge)

    def _reassign(self, heads: IntArray, rows: IntArray, edge: tuple[int, int]) -> None:
        source, target = edge
        self.assignment[heads, rows] = target
        for other in range(self._count):
            if other != source:
                self._open[source, other][heads, rows] = np.inf
            if other != target:
                self._open[target, other][heads, rows] = self._full[target, other][heads, rows]
