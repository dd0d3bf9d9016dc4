"""Typed schema of a recipe: what `conf/` and `recipes/` compose, checked value by value and refused by name.

`Recipe.from_config` takes Hydra's composed configuration or a plain mapping; everything left out takes the default
written in `recipe_sections`. Rules about several keys at once (targets of the budget, the pins of ``method=paper``) are
in `recipe_rules`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from stepquant import recipe_rules as rules
from stepquant.errors import RecipeError
from stepquant.geometry import Family, Geometry
from stepquant.recipe_checks import choice, flag, integer, optional, pattern, setting, suggest, text
from stepquant.recipe_sections import (
    MOST_SEED,
    AllocationSettings,
    BudgetSettings,
    CacheSettings,
    CodegenSettings,
    DataSettings,
    ModelSettings,
    PivotSettings,
    SampleSettings,
    SolverSettings,
    SpatialSettings,
    TargetSettings,
    TemporalSettings,
    WindowSettings,
)


@dataclass(frozen=True)
class Recipe:
    """A whole recipe. Build it with `from_config`, which checks it; the constructor itself does not."""

    name: str = setting("unnamed", pattern(r"[A-Za-z0-9][A-Za-z0-9._+-]*", "a name of letters, digits, '.', '_', '-'"))
    method: str = setting("default", choice("default", "paper"))
    seed: int = setting(0, integer(0, MOST_SEED))
    dry_run: bool = setting(False, flag)
    output: str | None = setting(None, optional(text))
    reuse: str | None = setting(None, optional(text))
    json: str | None = setting(None, optional(text))
    calibration: str = setting("trace", choice("trace", "synthetic"))
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    samples: SampleSettings = field(default_factory=SampleSettings)
    temporal: TemporalSettings = field(default_factory=TemporalSettings)
    spatial: SpatialSettings = field(default_factory=SpatialSettings)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    pivots: PivotSettings = field(default_factory=PivotSettings)
    allocation: AllocationSettings = field(default_factory=AllocationSettings)
    solver: str = setting("auto", choice("auto", "dp", "lagrangian", "ilp"))
    solver_options: SolverSettings = field(default_factory=SolverSettings)
    window: WindowSettings = field(default_factory=WindowSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    codegen: CodegenSettings = field(default_factory=CodegenSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)

    written: ClassVar[frozenset[str]] = frozenset()
    """Dotted keys that the user wrote, for messages and for settings that ``reuse`` fixes; no part of the recipe."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, explicit: Collection[str] | None = None) -> Recipe:
        """Check a configuration and build the recipe.

        Args:
            config: nested mapping, or OmegaConf's DictConfig (interpolations are resolved).
            explicit: dotted keys that the user wrote themselves; ``method=paper`` refuses those that contradict it and
                quietly replaces others. By default every key of a plain mapping counts as written, and none of a
                DictConfig, which carries defaults.

        Raises:
            RecipeError: naming the key, the value found, and what was expected.
        """
        plain = plain_config(config)
        if explicit is None:
            explicit = dict(flatten(plain)) if isinstance(config, dict) else ()
        flat = dict(flatten(plain))
        unknown = next((key for key in flat if not rules.is_known(key, cls.keys())), None)
        if unknown is not None:
            raise RecipeError(
                f"unknown key {unknown}{suggest(unknown, cls.keys())}; "
                "see conf/config.yaml, or the output of --cfg job, for the keys of a recipe"
            )
        plain = rules.resolve_target(plain, explicit)
        if plain.get("method") == "paper":
            plain = rules.apply_paper(plain, frozenset(explicit))
        recipe = _build(cls, "", plain)
        if recipe.output is None:
            object.__setattr__(recipe, "output", f"build/{recipe.name}")
        object.__setattr__(recipe, "written", frozenset(explicit))
        rules.check(recipe)
        return recipe

    @staticmethod
    def keys() -> tuple[str, ...]:
        """Every dotted key of the schema."""
        return _KEYS

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dictionary (numbers, strings, lists, null): `from_config` takes it back."""
        return {item.name: _simple(getattr(self, item.name)) for item in fields(self)}

    def select(self, *keys: str) -> dict[str, Any]:
        """Values of some dotted keys or whole sections, flat: what a pass hashes of a recipe.

        Raises:
            KeyError: when a key is none of the schema's.
        """
        chosen: dict[str, Any] = {}
        data = self.to_dict()
        for key in keys:
            node: Any = data
            for part in key.split("."):
                node = node[part]
            chosen[key] = node
        return chosen

    def replace(self, changes: Mapping[str, Any]) -> Recipe:
        """A checked copy with other values for dotted keys, e.g. ``{"budget.bits": 4}``."""
        data = self.to_dict()
        for key, value in changes.items():
            *sections, last = key.split(".")
            node = data
            for part in sections:
                node = node.setdefault(part, {})
            node[last] = value
        return Recipe.from_config(data, explicit=tuple(changes))

    def candidates(self, bits: float | None = None) -> tuple[int, ...]:
        """Candidate precisions: the recipe's own, or by the budget ({4,6,8} from 6 bits up, {2,4,6,8} below).

        Args:
            bits: bits a value, where the budget was given as bytes or concurrency.
        """
        return rules.candidates_for(self.budget, bits)

    def unit(self, family: Family) -> str:
        """Unit of the allocation, ``head`` or ``row``, with ``auto`` resolved for a family."""
        return rules.unit_for(self.allocation.unit, family)

    def check_geometry(self, found: Geometry) -> None:
        """Check the recipe against the model found: family, pivots, layers of caps, tensor-parallel ranks.

        Raises:
            RecipeError: naming the key and what the model has.
        """
        rules.check_geometry(self, found)

    def warnings(self) -> list[str]:
        """Settings that are allowed but known to do worse than the alternative."""
        return rules.warnings(self)


Section = TypeVar("Section")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted key, value)`` of every leaf of a nested mapping; free-form mappings stay leaves."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in rules.FREE_FORM:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def plain_config(config: Any, what: str = "recipe") -> dict[str, Any]:
    """A composed configuration as a dictionary, interpolations resolved.

    Raises:
        RecipeError: a value is missing, refers to a key that is not there, or, in a recipe, asks for a resolver.
    """
    if not isinstance(config, dict):
        from omegaconf import DictConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        from stepquant.yaml_checks import refuse_resolvers

        if isinstance(config, DictConfig):
            if what == "recipe":  # given away with artifacts
                refuse_resolvers(OmegaConf.to_container(config))
            try:
                config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            except OmegaConfBaseException as error:
                raise RecipeError(f"{what} cannot be resolved: {str(error).splitlines()[0]}") from None
    if not isinstance(config, Mapping):
        raise RecipeError(f"{what} is {config!r}; expected a mapping of keys to values")
    return {str(key): value for key, value in config.items()}


def _build(cls: type[Section], prefix: str, values: Mapping[str, Any]) -> Section:
    given: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name not in values:
            continue
        key, value = f"{prefix}{item.name}", values[item.name]
        if "check" in item.metadata:
            if value is None and prefix == "" and item.name == "name":
                continue
            given[item.name] = item.metadata["check"](key, value)
        elif value is None:
            continue
        elif not isinstance(value, Mapping):
            raise RecipeError(f"{key} is {value!r}; expected keys under it, such as {key}.{_first_key(item)}=...")
        else:
            given[item.name] = _build(item.default_factory, f"{key}.", value)  # type: ignore[arg-type]
    return cls(**given)


def _first_key(item: Any) -> str:
    return fields(item.default_factory)[0].name


def _simple(value: Any) -> Any:
    if isinstance(value, Geometry):
        return value.to_json()
    if is_dataclass(value):
        return {item.name: _simple(getattr(value, item.name)) for item in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _all_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(cls):
        if item.default_factory is not MISSING:
            yield from _all_keys(item.default_factory, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


_KEYS = tuple(_all_keys(Recipe))
