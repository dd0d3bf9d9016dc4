"""Rules of a recipe that concern several keys at once: the budget's target, the pins of the paper, combinations."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from stepquant.errors import RecipeError, closest
from stepquant.geometry import Geometry
from stepquant.recipe_checks import PRECISIONS
from stepquant.recipe_conflicts import check_allocation, check_pivots, check_two_bits

if TYPE_CHECKING:
    from stepquant.recipe import BudgetSettings, Recipe

TARGETS = ("concurrency", "bytes_per_request", "bits")
"""Keys of ``budget`` that can decide the size of a slot; exactly one does."""

FREE_FORM = ("model.geometry", "allocation.caps", "allocation.floors")
"""Keys whose value is a mapping with its own checks."""

PAPER_PINS: dict[str, Any] = {
    "temporal.horizon": 2048,
    "temporal.weight": "gate",
    "temporal.sensitivity": "none",
    "spatial.gamma": 0.25,
    "spatial.impact": "one_step",
    "spatial.refits": 1,
    "spatial.sample": 0,
    "budget.candidates": None,
    "window.length": 1,
}
"""What ``method=paper`` fixes; an override with another value is refused."""

PAPER_DEFAULTS: dict[str, Any] = {
    "samples.every": 8,
    "allocation.unit": "auto",
    "allocation.granularity": 1,
}
"""What ``method=paper`` sets unless the user overrides it; a contradicting unit is refused once the family is known."""

_FIXED_BITS = {"nvfp4": (4,), "dsq": (2, 4, 6, 8), "damp": (8,)}


def is_known(key: str, known: Collection[str]) -> bool:
    """Whether a dotted key is of the schema: a leaf, or an empty section."""
    return key in known or any(name.startswith(f"{key}.") for name in known)


def candidates_for(budget: BudgetSettings, bits: float | None = None) -> tuple[int, ...]:
    """Candidate precisions of a budget; `bits` where the budget itself does not say them."""
    if budget.candidates is not None:
        return budget.candidates
    bits = budget.bits if bits is None else bits
    if bits is None:
        return PRECISIONS
    return (4, 6, 8) if bits >= 6 else PRECISIONS


def unit_for(unit: str, family: str) -> str:
    """Resolve ``auto``: heads in GDN, rows in KDA."""
    return {"gdn": "head", "kda": "row"}[family] if unit == "auto" else unit


def resolve_target(config: dict[str, Any], explicit: Collection[str]) -> dict[str, Any]:
    """Leave exactly one target in ``budget``: the user's own before the recipe's, bytes or concurrency before bits.

    Raises:
        RecipeError: when two targets compete.
    """
    budget = config.get("budget")
    if not isinstance(budget, Mapping):
        return config
    given = [name for name in TARGETS if budget.get(name) is not None]
    written = [name for name in given if f"budget.{name}" in explicit]
    if len(written) > 1:
        keys = " and ".join(f"budget.{name}" for name in written)
        raise RecipeError(f"{keys} are both given; expected exactly one of {_target_list()}: leave the others out")
    deciding = written or [name for name in given if name != "bits"] or given
    if len(deciding) > 1:
        keys = " and ".join(f"budget.{name}" for name in deciding)
        raise RecipeError(f"{keys} are both set; expected exactly one of {_target_list()}: set the others to null")
    others = {name: None for name in given if name not in deciding}
    return {**config, "budget": {**budget, **others}}


def apply_paper(config: dict[str, Any], explicit: frozenset[str]) -> dict[str, Any]:
    """Set what ``method=paper`` pins.

    Raises:
        RecipeError: when a key that the user wrote contradicts a pin.
    """
    result = copy.deepcopy(config)
    for key, pin in PAPER_PINS.items():
        section, name = key.split(".")
        found = (result.get(section) or {}).get(name)
        if key in explicit and found != pin and not _same_candidates(key, found, result):
            wanted = "by the budget ({4,6,8} from 6 bits up, {2,4,6,8} below)" if pin is None else repr(pin)
            raise RecipeError(
                f"{key} is {found!r}, but method=paper pins it to {wanted}; leave {key} out, or use method=default"
            )
        result[section] = {**(result.get(section) or {}), name: pin}
    for key, value in PAPER_DEFAULTS.items():
        section, name = key.split(".")
        if key not in explicit:
            result[section] = {**(result.get(section) or {}), name: value}
    return result


def _same_candidates(key: str, found: Any, config: Mapping[str, Any]) -> bool:
    if key != "budget.candidates" or not isinstance(found, list | tuple):
        return False
    bits = config["budget"].get("bits")
    if not isinstance(bits, int | float):
        return False
    return sorted(found) == ([4, 6, 8] if bits >= 6 else list(PRECISIONS))


def check(recipe: Recipe) -> None:
    """Check combinations of keys that need no model.

    Raises:
        RecipeError: naming the keys.
    """
    _check_model(recipe)
    _check_budget(recipe)
    if recipe.window.length == "auto" and (recipe.budget.bits is not None or recipe.allocation.mode == "uniform"):
        raise RecipeError(
            "window.length is 'auto', which trades bits against the buffers of a running request, but nothing bounds "
            "their sum; give budget.bytes_per_request or budget.concurrency (allocation.mode=mixed), or a length"
        )
    if recipe.allocation.mode == "uniform":
        _check_uniform(recipe)
    elif recipe.spatial.codec in _FIXED_BITS:
        raise RecipeError(
            f"spatial.codec is {recipe.spatial.codec!r}, which has one precision for the whole state, but "
            "allocation.mode is 'mixed'; set allocation.mode=uniform"
        )
    check_allocation(recipe)
    for name in set(recipe.allocation.caps or {}) & set(recipe.allocation.floors or {}):
        floor, cap = (recipe.allocation.floors or {})[name], (recipe.allocation.caps or {})[name]
        if floor > cap:
            raise RecipeError(
                f"allocation.floors.{name} is {floor}, above allocation.caps.{name} = {cap}; lower the floor"
            )
    check_text(recipe.data.source, recipe.data.path)
    if recipe.calibration == "trace" and recipe.samples.every > recipe.data.length:
        raise RecipeError(
            f"samples.every is {recipe.samples.every}, above data.length ({recipe.data.length} tokens of a segment): "
            "no state would be sampled; lower samples.every, or raise data.length"
        )


def check_text(source: str, path: str | None) -> None:
    """Refuse a file that would not be read, and a missing one that would.

    Raises:
        RecipeError: naming the keys.
    """
    if source == "file" and path is None:
        raise RecipeError("data.path is not set, but data.source is 'file'; give data.path=/path/to/text")
    if source != "file" and path is not None:
        raise RecipeError(f"data.path is {path!r}, but data.source={source} reads no file; set data.source=file")


def _check_model(recipe: Recipe) -> None:
    model = recipe.model
    if recipe.reuse is None and model.path is None:
        if recipe.calibration == "trace":
            raise RecipeError("model.path is not set; give model.path=/path or calibration=synthetic")
        if model.geometry is None:
            raise RecipeError(
                "model.path and model.geometry are not set; calibration=synthetic needs a checkpoint's configuration "
                "(model.path=/path) or the recipe's own model.geometry"
            )
    if model.device_map == "auto" and model.device == "cpu":
        raise RecipeError("model.device_map is 'auto', but model.device is 'cpu'; leave one of them out")
    if model.device_map == "auto" and model.loading == "layerwise":
        raise RecipeError(
            "model.loading is 'layerwise', which holds one layer at a time, but model.device_map is 'auto'; "
            "set model.device_map=null or model.loading=whole"
        )
    family = model.geometry.family if model.geometry else None
    if family and model.expect_family and family != model.expect_family:
        raise RecipeError(f"model.expect_family is {model.expect_family!r}, but model.geometry.family is {family!r}")


def _check_budget(recipe: Recipe) -> None:
    budget = recipe.budget
    if budget.bits is None and budget.bytes_per_request is None and budget.concurrency is None:
        raise RecipeError(f"budget has no target; expected exactly one of {_target_list()}")
    if budget.bits is not None:
        low, high = recipe.candidates()[0], recipe.candidates()[-1]
        if not low <= budget.bits <= high:
            raise RecipeError(
                f"budget.bits is {budget.bits:g}, outside budget.candidates {list(recipe.candidates())}; "
                f"expected {low} to {high}, or other candidates"
            )
    if budget.concurrency is not None:
        if budget.gpu_memory is None:
            raise RecipeError(
                "budget.gpu_memory is not set, but budget.concurrency is; give budget.gpu_memory=80GiB (of one GPU)"
            )
        check_weights(recipe)


def check_weights(recipe: Recipe) -> None:
    """Refuse a recipe that does not say what the weights take.

    Raises:
        RecipeError: it has neither the bytes nor a checkpoint.
    """
    if recipe.budget.weights_bytes is None and recipe.model.path is None:
        raise RecipeError(
            "budget.weights_bytes is not set and there is no checkpoint to read it from; give budget.weights_bytes"
        )


def _check_uniform(recipe: Recipe) -> None:
    codec, bits = recipe.spatial.codec, recipe.budget.bits
    allowed = tuple(b for b in _FIXED_BITS.get(codec, PRECISIONS) if b in recipe.candidates())
    if bits is None:
        raise RecipeError(f"budget.{recipe.budget.target} is set, but allocation.mode=uniform needs budget.bits")
    if bits not in allowed:
        raise RecipeError(
            f"budget.bits is {bits:g}; expected one of {', '.join(map(str, allowed)) or 'the candidates'} for "
            f"spatial.codec={codec} with allocation.mode=uniform"
        )


def check_geometry(recipe: Recipe, found: Geometry) -> None:
    """Check a recipe against the geometry of the model; see `Recipe.check_geometry`."""
    expected = recipe.model.expect_family
    if expected and found.family != expected:
        raise RecipeError(
            f"model.expect_family is {expected!r}, but {recipe.model.path or 'the model'} ({found.model_type}) is of "
            f"family {found.family!r}; use a recipe for {found.family} models"
        )
    unit = recipe.unit(found.family)
    if recipe.method == "paper" and unit != unit_for("auto", found.family):
        raise RecipeError(
            f"allocation.unit is {unit!r}, but method=paper pins it to {unit_for('auto', found.family)!r} for "
            f"{found.family}; leave allocation.unit out, or use method=default"
        )
    rows = found.key_dim if unit == "row" else 1
    units = found.num_delta_layers * found.num_heads * rows
    if recipe.pivots.count >= units:
        raise RecipeError(f"pivots.count is {recipe.pivots.count}; the model has {units} units ({unit}s) in all")
    granularity = recipe.allocation.granularity
    if found.key_dim % granularity:
        raise RecipeError(
            f"allocation.granularity is {granularity}, which does not divide the {found.key_dim} key rows"
        )
    if granularity > 1 and unit == "row" and recipe.solver in ("dp", "lagrangian"):
        raise RecipeError(
            f"solver is {recipe.solver!r}, which cannot keep to allocation.granularity={granularity}; "
            "use solver=ilp or solver=auto"
        )
    check_pivots(recipe, unit)
    check_two_bits(recipe, found)
    ranks = recipe.target.tensor_parallel
    if found.num_heads % ranks:
        raise RecipeError(f"target.tensor_parallel is {ranks}, which does not divide the {found.num_heads} value heads")
    for key in ("caps", "floors"):
        for where in getattr(recipe.allocation, key) or {}:
            _check_place(f"allocation.{key}.{where}", where, found)


def _check_place(key: str, where: str, found: Geometry) -> None:
    layer, _, head = where.partition("/")
    if int(layer) not in found.layers:
        raise RecipeError(
            f"{key}: layer {layer} is no delta-rule layer; expected one of {', '.join(map(str, found.layers))}"
            f"{closest(layer, map(str, found.layers))}"
        )
    if head and int(head) >= found.num_heads:
        raise RecipeError(f"{key}: there is no head {head}; expected 0 to {found.num_heads - 1}")


def warnings(recipe: Recipe) -> list[str]:
    """Settings that are allowed but were measured to do worse; see `Recipe.warnings`."""
    found = []
    if recipe.temporal.weight == "transition" and recipe.temporal.sensitivity == "none":
        found.append(
            "temporal.weight=transition without temporal.sensitivity did worse than the paper's cost at 4 bits; "
            "set temporal.sensitivity, or temporal.weight=gate"
        )
    if recipe.calibration == "synthetic":
        found.append("calibration=synthetic: the plan is made from invented statistics; do not serve it")
    return found


def _target_list() -> str:
    return "budget.bits, budget.bytes_per_request, budget.concurrency"
