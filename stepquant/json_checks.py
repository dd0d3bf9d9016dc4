"""One check for the JSON objects of an artifact: exactly these keys, each of its own type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepquant.errors import ArtifactError, closest, shown
from stepquant.files import kind_name

Kinds = Mapping[str, type | tuple[type, ...]]
AGAIN = "compile the plan again"
MAX_KEY = 80  # characters of a key that may be anything, such as a target's name


def check_object(where: str, entry: Any, kinds: Kinds) -> None:
    """Refuse anything but an object with exactly these keys; strings must be printable, numbers not negative.

    Args:
        where: file and place in it, in front of a key: ``plan.json: `` or ``plan.json: variants[0].``.
        kinds: type or types of every key; only `bool` takes true and false.

    Raises:
        ArtifactError: naming the first thing that is not so.
    """
    if not isinstance(entry, dict):
        raise ArtifactError(f"{where.rstrip('.: ')} is {kind_name(type(entry))}; expected an object; {AGAIN}")
    for key, kind in kinds.items():
        first = kind[0] if isinstance(kind, tuple) else kind
        if key not in entry:
            raise ArtifactError(f"{where}{key} is missing; expected {kind_name(first)}; {AGAIN}")
        if not key.isprintable() or len(key) > MAX_KEY:
            raise ArtifactError(f"{where}{shown(key)} is no name; {AGAIN}")
        value = entry[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and first is not bool):
            raise ArtifactError(f"{where}{key} is {shown(value)}; expected {kind_name(first)}; {AGAIN}")
        if isinstance(value, str) and not value.isprintable():
            raise ArtifactError(f"{where}{key} is {shown(value)}; expected printable characters; {AGAIN}")
        if isinstance(value, int | float) and value < 0:
            raise ArtifactError(f"{where}{key} is {shown(value)}; expected no negative number; {AGAIN}")
    if unknown := sorted(set(entry) - set(kinds)):
        hint = closest(unknown[0], kinds)
        raise ArtifactError(f"{where}{shown(unknown[0])} is unknown{hint}; expected {sorted(kinds)}; {AGAIN}")
