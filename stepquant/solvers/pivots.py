"""Pivot rows in whole groups of the kernel's granularity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepquant.errors import DataError, RecipeError
from stepquant.solvers.table import check_costs


def round_pivots(pivots: Any, risk: Any, granularity: int) -> NDArray[np.bool_]:
    """Bring the pivot rows of every head to a multiple of the granularity, at about the same number in all.

    The rows of a head are ranked by risk and cut into groups. A pivot takes away the risk of its row, so a group
    is worth the sum over its rows, and within a head the first group is worth most. Taking the groups that are worth
    most, over all heads, therefore covers the most risk that so many groups can cover: a head whose last group is
    mostly full gains rows, one with a few stragglers loses them.

    Args:
        pivots: bool [L, H, K], the pivots as chosen row by row.
        risk: [L, H, K], what each row costs if it is no pivot, finite and not negative.
        granularity: rows per group.

    Returns:
        bool [L, H, K]; the number of pivots is the multiple of the granularity nearest to the one asked for (half a
        group rounds up), or what fits in whole groups if that is less. Rows of equal risk: pivots first, then in order.

    Raises:
        RecipeError: the granularity is not positive.
        DataError: shapes that differ, or a risk that is not finite or negative.
    """
    if granularity < 1:
        raise RecipeError(f"granularity is {granularity}, expected a positive integer; the kernel takes 8 or 16 rows")
    wanted = np.asarray(pivots)
    weights = check_costs(risk, "the risk of the rows")
    if wanted.dtype != np.bool_ or wanted.ndim != 3 or wanted.shape != weights.shape:
        raise DataError(
            f"the pivots are {wanted.dtype} {list(wanted.shape)} and the risk {list(weights.shape)}, expected bool and "
            "numbers of the same shape [layers, heads, rows]; pass both from the same calibration"
        )
    rows = wanted.shape[2]
    chosen = wanted.reshape(-1, rows)
    flat = weights.reshape(-1, rows)
    order = np.lexsort((~chosen, -flat), axis=1)
    groups = rows // granularity
    ranked = np.take_along_axis(flat, order, axis=1)[:, : groups * granularity]
    worth = ranked.reshape(len(flat), groups, granularity).sum(axis=2)
    count = min((2 * int(wanted.sum()) + granularity) // (2 * granularity), worth.size)
    # Summing in groups may round a later one above an earlier one of equal risk; it must not be taken first.
    worth = np.minimum.accumulate(worth, axis=1)
    taken = np.argsort(-worth.reshape(-1), kind="stable")[:count]
    per_head = np.bincount(taken // max(groups, 1), minlength=len(flat)) * granularity
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(rows), order.shape), axis=1)
    return (place < per_head[:, None]).reshape(wanted.shape)
