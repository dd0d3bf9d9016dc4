"""Keys that would be ignored or quietly changed beside others: refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepquant.codec.spec import CodecSpec, four_level_fault
from stepquant.errors import RecipeError

if TYPE_CHECKING:
    from stepquant.geometry import Geometry
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
        below = count - count % step
        near = f"{below} or {below + step}" if below else str(step)
        raise RecipeError(f"pivots.count is {count}, which {why}; expected a multiple of {step}, such as {near}")


def check_two_bits(recipe: Recipe, found: Geometry) -> None:
    """Refuse, before anything is calibrated, two-bit heads that no kernel would take.

    Raises:
        RecipeError: with the candidates that would do.
    """
    heads = found.family == "gdn" and recipe.unit(found.family) == "head" and recipe.spatial.codec == "dual_axis"
    uniform, candidates = recipe.allocation.mode == "uniform", recipe.candidates()
    if not heads or 2 not in candidates or (uniform and recipe.budget.bits != 2):
        return
    if fault := four_level_fault(found.value_dim, CodecSpec().group):
        others = [bits for bits in candidates if bits != 2]
        key = "budget.bits is 2" if uniform else f"budget.candidates is {list(candidates)}"
        remedy = "budget.bits=4" if uniform else f"budget.candidates=[{','.join(map(str, others or (4, 6, 8)))}]"
        raise RecipeError(f"{key}, but {fault}; give {remedy}, or allocation.unit=row")
