"""Checks of single recipe values: each takes the dotted key and the value found, and returns the value to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from stepquant.errors import RecipeError, closest
from stepquant.geometry import Geometry
from stepquant.units import parse_bytes

Check = Callable[[str, Any], Any]

PRECISIONS = (2, 4, 6, 8)
"""Bits a value that the packers and kernels know; FP16 pivots come on top."""

MOST_BYTES = 2**50
"""Far above any memory: a larger size is a slip of the keyboard, and its arithmetic would overflow further on."""


def setting(default: Any, check: Check) -> Any:
    """Declare a recipe field: its default and the check that a given value must pass."""
    return field(default=default, metadata={"check": check})


def suggest(name: str, known: Collection[str]) -> str:
    """Like `closest`, but a bare last part (``bits``) also finds its full key (``budget.bits``)."""
    tails = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if len(tails) == 1:
        return f" (did you mean {tails[0]!r}?)"
    return closest(name, known)


def refuse(key: str, value: Any, expected: str) -> RecipeError:
    """Build the error of a value that a key cannot take."""
    return RecipeError(f"{key} is {value!r}; expected {expected}")


def optional(check: Check) -> Check:
    """Let a value also be null."""
    return lambda key, value: None if value is None else check(key, value)


def choice(*allowed: str) -> Check:
    """One of the named words."""

    def check(key: str, value: Any) -> str:
        if value is False and "off" in allowed:
            value = "off"  # YAML 1.1 reads a bare `off` as a boolean
        if value is None and "none" in allowed:
            value = "none"
        if value not in allowed:
            expected = allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"
            raise RecipeError(f"{key} is {value!r}; expected {expected}{closest(str(value), allowed)}")
        return str(value)

    return check


def flag(key: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false")
    return value


def integer(low: int, high: int | None = None) -> Check:
    """A whole number in a range, both ends included."""
    expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise refuse(key, value, expected)
        if value != int(value) or value < low or (high is not None and value > high):
            raise refuse(key, value, expected)
        return int(value)

    return check


def number(low: float, high: float) -> Check:
    """A finite number in a range, both ends included."""

    def check(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise refuse(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def one_of(*allowed: int) -> Check:
    """One of the listed whole numbers."""

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or value not in allowed:
            raise refuse(key, value, f"one of {', '.join(map(str, allowed))}")
        return int(value)

    return check


def one_of_or(word: str, *allowed: int) -> Check:
    """One of the listed whole numbers, or the word."""
    check = one_of(*allowed)
    expected = f"one of {', '.join(map(str, allowed))}, or {word}"

    def either(key: str, value: Any) -> Any:
        if value == word:
            return word
        if isinstance(value, str):
            raise RecipeError(f"{key} is {value!r}; expected {expected}{closest(value, [word])}")
        try:
            return check(key, value)
        except RecipeError:
            raise refuse(key, value, expected) from None

    return either


def text(key: str, value: Any) -> str:
    """A string that is not empty; numbers written bare (a directory called 6) are taken as strings."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise refuse(key, value, "a string that is not empty")
    return str(value)


def pattern(regex: str, expected: str) -> Check:
    """A string of a given form."""
    compiled = re.compile(regex)

    def check(key: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not compiled.fullmatch(str(value)):
            raise refuse(key, value, expected)
        return str(value)

    return check


def size(key: str, value: Any) -> int:
    """A positive size in bytes, as a number or with a unit."""
    try:
        parsed = parse_bytes(value)
    except RecipeError:
        parsed = 0
    if not 1 <= parsed <= MOST_BYTES:
        raise refuse(key, value, "a size in bytes from 1 to 1024TiB, such as 25165824, 24MiB or 80GiB")
    return parsed


def listed(check: Check, expected: str) -> Check:
    """A list whose entries each pass a check; returned as a tuple."""

    def run(key: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refuse(key, value, expected)
        return tuple(check(f"{key}[{index}]", entry) for index, entry in enumerate(value))

    return run


def candidates(key: str, value: Any) -> tuple[int, ...]:
    """Candidate precisions: distinct, ascending, and known to the packers."""
    example = "a list of distinct precisions out of 2, 4, 6, 8, such as [4,6,8]"
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise refuse(key, value, example)
    for entry in value:
        if isinstance(entry, bool) or entry not in PRECISIONS:
            raise RecipeError(f"{key} has {entry!r}; expected {example}")
    if len(set(value)) != len(value):
        raise refuse(key, list(value), example)
    return tuple(sorted(int(entry) for entry in value))


def per_layer(key: str, value: Any) -> dict[str, int]:
    """Bits for a layer (``7``) or a head of a layer (``7/3``), 0-based in the whole model."""
    example = "a mapping from a layer (7) or a head of it (7/3) to bits out of 2, 4, 6, 8, such as {0:8,7/3:6}"
    if not isinstance(value, Mapping):
        raise refuse(key, value, example)
    result = {}
    for where, bits in value.items():
        if not re.fullmatch(r"\d+(/\d+)?", str(where)):
            raise RecipeError(f"{key} has the key {where!r}; expected {example}")
        if isinstance(bits, bool) or bits not in PRECISIONS:
            raise RecipeError(f"{key}.{where} is {bits!r}; expected {example}")
        result[str(where)] = int(bits)
    return result


def geometry(key: str, value: Any) -> Geometry:
    """A mapping with the fields of `Geometry`."""
    if isinstance(value, Geometry):
        return value
    if not isinstance(value, Mapping):
        raise refuse(key, value, f"a mapping with {', '.join(Geometry.__dataclass_fields__)}")
    for name in value:
        if name not in Geometry.__dataclass_fields__:
            known = Geometry.__dataclass_fields__
            raise RecipeError(
                f"unknown key {key}.{name}{closest(str(name), known)}; {key} takes {', '.join(sorted(known))}"
            )
    return Geometry.from_json(dict(value))
