"""Keys that would be ignored or quietly changed beside others: refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepquant.errors import RecipeError

if TYPE_CHECKING:
    from stepquant.recipe import Recipe


def check_allocation(recipe: Recipe) -> None:
    """Refuse settings of a solver where nothing is solved, and limits that no candidate meets.

    Raises:
        RecipeError: naming both keys.
    """
    allocation = recipe.allocation
    if allocation.mode == "uniform":
        for key in ("caps", "floors"):
            if limits := getattr(allocation, key):
                raise RecipeError(
                    f"allocation.{key} is {limits}, but allocation.mode=uniform gives every unit budget.bits; leave "
                    f"allocation.{key} out, or set allocation.mode=mixed"
                )
        if recipe.solver != "auto":
            raise RecipeError(
                f"solver is {recipe.solver!r}, but allocation.mode=uniform leaves nothing to solve; leave solver out, "
                "or set allocation.mode=mixed"
            )
        return
    low, high = recipe.candidates()[0], recipe.candidates()[-1]
    shown = list(recipe.candidates())
    for where, bits in (allocation.caps or {}).items():
        if bits < low:
            raise RecipeError(
                f"allocation.caps.{where} is {bits}, below the lowest of the candidates {shown}; expected at least "
                f"{low}, or give budget.candidates with {bits} among them"
            )
    for where, bits in (allocation.floors or {}).items():
        if bits > high:
            raise RecipeError(
                f"allocation.floors.{where} is {bits}, above the highest of the candidates {shown}; expected at most "
                f"{high}, or give budget.candidates with {bits} among them"
            )


def check_pivots(recipe: Recipe, unit: str) -> None:
    """Refuse a number of pivots that whole groups of rows, or equal ranks, would change.

    Raises:
        RecipeError: with a number that does.
    """
    count = recipe.pivots.count
    granularity = recipe.allocation.granularity if unit == "row" else 1
    ranks = recipe.target.tensor_parallel
    step, why = (granularity, f"allocation.granularity={granularity} cannot store in whole groups of rows")
    if granularity == 1:
        step, why = ranks, f"{ranks} tensor-parallel ranks cannot share equally"
    if count % step:
        near = count - count % step or step
        raise RecipeError(f"pivots.count is {count}, which {why}; expected a multiple of {step}, such as {near}")
