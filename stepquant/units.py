"""Byte sizes as people write them: ``24MiB``, ``80GiB``, ``1.5GB``, ``4096``."""

from __future__ import annotations

import math
import re

from stepquant.errors import RecipeError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | float | str) -> int:
    """Return a size in bytes.

    Args:
        value: a whole number of bytes, or a string with an optional unit: ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of
            1,024; also ``K``, ``M``, ``G``, ``T``) or ``kB``, ``MB``, ``GB``, ``TB`` (powers of 1,000).

    Raises:
        RecipeError: when it is no size, or not a whole number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RecipeError(f"{value!r} is no size in bytes; expected e.g. 25165824, 24MiB or 80GiB")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = _FACTORS.get(match.group(2).lower()) if match else None
        if match is None or factor is None:
            raise RecipeError(f"{value!r} is no size in bytes; expected e.g. 25165824, 24MiB or 80GiB")
        digits = match.group(1).replace("_", "")
        if len(digits) > 20:
            raise RecipeError(
                f"{value[:40]}... is no size in bytes: {len(digits)} digits; expected e.g. 24MiB or 80GiB"
            )
        if "." not in digits:
            return int(digits) * factor
        return round(float(digits) * factor)
    if not math.isfinite(value) or value != int(value) or value < 0:
        raise RecipeError(f"{value!r} is not a whole number of bytes")
    return int(value)


def format_bytes(size: int) -> str:
    """Return a size for people to read, in KiB, MiB or GiB with three decimals at most."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.3f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size} B"
