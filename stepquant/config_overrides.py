"""Overrides of the command line: parsed, refused when one repeats another, spread over the jobs of a sweep."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from stepquant import recipe_rules as rules
from stepquant.errors import RecipeError, shown
from stepquant.recipe import flatten

# reuse=build/qwen_6bit/budget.bits=4, output=~/build: Hydra takes no "=" and no "~" in a value without quotes.
_PATH = re.compile(r"([\w.@/]+)=([\w./~@%+:-][\w./~@%+:=-]*)")


def parse(parser: OverridesParser, text: str) -> Override:
    """One override; KEY=VALUE in Hydra's grammar. A path needs no quotes for its "~" or the "=" of a sweep's directory.

    Raises:
        RecipeError: it is none.
    """
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        if found := _PATH.fullmatch(text):
            return parser.parse_overrides([f"{found[1]}='{found[2]}'"])[0]
        raise RecipeError(
            f"override {text!r} cannot be read; expected KEY=VALUE, with lists as [4,6,8] and quotes around other marks"
        ) from None
    except ValueError:  # of int, for thousands of digits
        raise RecipeError(f"override {shown(text)} cannot be read: a number in it has too many digits") from None


def refuse_repeated(parsed: Sequence[Override]) -> None:
    """Refuse a key that is given twice: Hydra would take the last one without a word."""
    seen: dict[str, str] = {}
    for override in parsed:
        for key in [override.key_or_group] if override.is_sweep_override() else written(override):
            if key in seen:
                raise RecipeError(f"{key} is given twice: {seen[key]} and {override.input_line}; leave one out")
            seen[key] = str(override.input_line)


def expand(parser: OverridesParser, parsed: Sequence[Override]) -> list[tuple[list[Override], list[Override]]]:
    """Split overrides into fixed and swept ones, one pair for every combination."""
    fixed = [override for override in parsed if not override.is_sweep_override()]
    axes = []
    for override in parsed:
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise RecipeError(f"{override.input_line} cannot be enumerated; give values as a,b,c or range(a,b)")
            key = override.get_key_element()
            axes.append([parse(parser, f"{key}={value}") for value in override.sweep_string_iterator()])
            if not axes[-1]:
                raise RecipeError(f"{override.input_line} matches nothing")
    return [(fixed, list(combination)) for combination in itertools.product(*axes)]


def written(override: Override) -> list[str]:
    """Dotted keys that an override sets."""
    key, value = override.key_or_group, override.value()
    if isinstance(value, Mapping) and value and key not in rules.FREE_FORM:
        return [name for name, _ in flatten({str(k): v for k, v in value.items()}, f"{key}.")]
    return [key]
