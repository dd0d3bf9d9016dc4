"""Solving again from an artifact (``reuse=DIR``): its tables in place of model and text, and what they fix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from stepquant.artifact import is_artifact, read_tables
from stepquant.errors import RecipeError
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan, load_plan
from stepquant.recipe import Recipe, flatten
from stepquant.swap import read_whole

FIXED = ("seed", "data", "samples")
"""Settings that shaped the tables and nothing else; a plan that reuses them records the artifact's own."""

Section = TypeVar("Section")


@dataclass(frozen=True)
class Reused:
    """What is taken from an artifact.

    Attributes:
        place: the directory, as it was given.
        plan: the plan that the tables were made for; model identity and settings come from it.
        products: calibration products by name, with their keys.
        base_key: what the calibration depended on.
    """

    place: str
    plan: LayoutPlan
    products: dict[str, tuple[str, Product]]
    base_key: dict[str, object]

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe's keys that shaped the plan, dotted."""
        return dict(flatten(self.plan.settings))


def open_reused(recipe: Recipe) -> Reused | None:
    """The artifact that a recipe reuses, None where it reuses none.

    Raises:
        RecipeError: the directory is none, or holds no artifact.
        ArtifactError: the artifact is damaged.
    """
    if recipe.reuse is None:
        return None
    place = Path(recipe.reuse).expanduser()
    expected = "expected the output directory of an earlier python -m stepquant.compile"
    if not place.is_dir():
        raise RecipeError(f"reuse={recipe.reuse} is {'a file' if place.exists() else 'no directory'}; {expected}")
    if not is_artifact(place):
        raise RecipeError(f"reuse={recipe.reuse} holds no plan; {expected}")
    plan, (products, base_key) = read_whole(place, lambda: (load_plan(place), read_tables(place)))
    return Reused(recipe.reuse, plan, products, base_key)


def adopt(recipe: Recipe, reused: Reused) -> Recipe:
    """The recipe with what the artifact fixes: its calibration, text, samples and seed.

    Raises:
        RecipeError: naming a key that the user wrote and that says something else.
    """
    made, settings = reused.plan.provenance, reused.settings
    for key, found in (("calibration", made.get("calibration")), ("model.weights", made.get("weights"))):
        asked = recipe.select(key)[key]
        if found is not None and asked != found and (key == "calibration" or key in recipe.written):
            raise RecipeError(
                f"{key} is {asked!r}, but reuse={reused.place} was made with {found!r}; give {key}={found}, or compile "
                "without reuse"
            )
    # A group's name (data=wikitext2) says which text; the other keys that it sets were not asked for.
    for key in sorted("data.source" if key == "data" else key for key in recipe.written):
        if key.partition(".")[0] in FIXED and recipe.select(key)[key] != settings.get(key):
            was = f"was calibrated with {settings[key]!r}" if key in settings else "reads no text"
            raise RecipeError(
                f"{key} is {recipe.select(key)[key]!r}, but reuse={reused.place} {was}; leave {key} out, or compile "
                "without reuse"
            )
    return replace(
        recipe, seed=settings.get("seed", recipe.seed),
        data=replace(_section(recipe.data, "data", settings), path=None),
        samples=_section(recipe.samples, "samples", settings),
    )  # fmt: skip


def _section(section: Section, name: str, settings: Mapping[str, Any]) -> Section:
    """A section with the artifact's values, each checked as a recipe's own."""
    found = {
        item.name: item.metadata["check"](f"{name}.{item.name}", settings[f"{name}.{item.name}"])
        for item in fields(section) if f"{name}.{item.name}" in settings  # type: ignore[arg-type]
    }  # fmt: skip
    return replace(section, **found)  # type: ignore[type-var]


def _takes(recipe: Recipe, key: str, value: Any) -> bool:
    """Whether a recipe of this version can say this: an artifact may be of one that could say more."""
    section, _, name = key.partition(".")
    item = next((f for f in fields(getattr(recipe, section)) if f.name == name), None) if name else None
    try:
        if item is not None:
            item.metadata["check"](key, value)
    except RecipeError:
        return False
    return True


def needs_states(recipe: Recipe, reused: Reused, reads: Collection[str]) -> RecipeError:
    """The refusal of settings for which the artifact's tables do not do.

    Args:
        reads: keys that shape the tables that are missing.
    """
    asked, made = dict(flatten(recipe.to_dict())), reused.settings
    differ = [key for key in sorted(reads) if key in made and asked.get(key) != made[key]]
    if not differ:
        version = reused.plan.provenance.get("stepquant", "an unknown version")
        return RecipeError(
            f"reuse={reused.place} holds no tables that this stepquant can use (it was made by {version}); compile "
            "without reuse"
        )
    first = differ[0]
    others = f" (and {', '.join(differ[1:])} differ too)" if differ[1:] else ""
    gone = [key for key in differ if not _takes(recipe, key, made[key])]
    back = f"set {' '.join(f'{k}={made[k]}' for k in differ)}, or compile without reuse"
    return RecipeError(
        f"{first} is {asked.get(first)!r}, but reuse={reused.place} was made with {made[first]!r}{others}, and another "
        "value needs state samples, which an artifact does not hold; "
        + (f"this stepquant has no {gone[0]}={made[gone[0]]}: compile without reuse" if gone else back)
    )
