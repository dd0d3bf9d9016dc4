"""Why an integer program has no answer: which constraint to relax, found by leaving constraints out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stepquant.errors import InfeasibleError
from stepquant.solvers.ilp_model import UNLIMITED, Answer, ChoiceModel, Linear, linearise

SHOWN = 12  # floors named in a message


def explain_infeasible(model: ChoiceModel, smallest: int, solve: Callable[[Linear], Answer]) -> InfeasibleError:
    """Return the error that names the constraint to relax.

    Args:
        model: a model that no choice meets, though every layer by itself can meet its limits.
        smallest: least charge that meets floors and caps of layers, equal ranks left aside.
        solve: minimises a Linear; used with the charge as the cost, so that the budget that would do is exact.
    """
    needed = smallest if model.ranks == 1 else _least_charge(model, solve)
    if needed is not None:
        exact = f"{needed:,} bits ({needed / model.elements:.4f} a value)"
        enough = math.ceil(needed / model.elements * 1e4) / 1e4
        return InfeasibleError(
            f"a budget of {model.budget:,} bits ({model.budget / model.elements:.4f} a value) is met by no assignment: "
            f"expected at least {exact}{_reason(model)}; raise budget.bits to {enough:g}"
            + (f", or {model.remedy}" if model.remedy else "")
        )
    ranks = f"equal bytes on {model.ranks} tensor-parallel ranks"
    limited = _limited_layers(model)
    if limited and _least_charge(_without_limits(model, limited), solve) is not None:
        # One layer alone may be what stands in the way; naming all of them would be of little help.
        alone = [layer for layer in limited[:8] if _least_charge(_without_limits(model, [layer]), solve) is not None]
        names = ", ".join(f"layer {model.names[layer]}" for layer in (alone or limited))
        return InfeasibleError(
            f"{ranks} cannot be had together with the floors and caps of {names}; relax the floor or the cap of "
            f"{'one of these' if len(alone or limited) > 1 else names}, or lower tensor_parallel"
        )
    fixed = model.rank_bits(np.zeros(len(model.costs), np.int64)) // 8
    return InfeasibleError(
        f"{ranks} cannot be had, whatever the budget: with the lowest precisions the ranks store {fixed.tolist()} "
        "bytes, and no steps of the heads close the differences; spread the pivots evenly over the ranks, lower "
        "tensor_parallel, relax floors and caps of heads, refine the granularity or allow spare_groups"
    )


def _reason(model: ChoiceModel) -> str:
    causes = []
    if model.ranks > 1:
        causes.append(f"equal bytes on {model.ranks} tensor-parallel ranks")
    if model.floors:
        causes.append(", ".join(model.floors[:SHOWN]) + (" and others" if len(model.floors) > SHOWN else ""))
    return f" with {' and '.join(causes)}" if causes else ""


def _limited_layers(model: ChoiceModel) -> list[int]:
    return np.flatnonzero((model.layer_floor > 0) | (model.layer_cap < UNLIMITED)).tolist()


def _without_limits(model: ChoiceModel, layers: list[int]) -> ChoiceModel:
    floor, cap = model.layer_floor.copy(), model.layer_cap.copy()
    floor[layers], cap[layers] = 0, UNLIMITED
    return replace(model, layer_floor=floor, layer_cap=cap)


def _least_charge(model: ChoiceModel, solve: Callable[[Linear], Answer]) -> int | None:
    """Bits of the smallest budget that the other constraints allow, or None when they allow none.

    Raises:
        InfeasibleError: the solver ran out of time before it knew.
    """
    finite = np.isfinite(model.costs)
    unit = int(np.gcd.reduce((model.charge - model.charge[:, :1])[finite], initial=0)) or 1
    extra = np.where(finite, model.charge - model.charge[:, :1], np.inf)
    free = replace(model, costs=extra, budget=UNLIMITED)
    linear = linearise(free, float(unit))
    if not linear.possible:
        return None
    answer = solve(linear)
    if answer.infeasible:
        return None
    if answer.choice is None or not free.meets(answer.choice):
        raise InfeasibleError(
            f"no assignment was found at a budget of {model.budget:,} bits, and which constraint to relax could not be "
            "settled within the time limit; allow more time, raise the budget, or relax tensor_parallel, floors or caps"
        )
    return int(model.layer_charges(answer.choice).sum())
