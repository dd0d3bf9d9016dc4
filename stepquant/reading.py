"""What every reader of a file from outside does first: an ordinary file, of bounded size; strict and shallow JSON.

A directory from elsewhere may hold anything under a file's name: a pipe that nobody writes to, a link to /dev/zero,
JSON nested a thousand levels deep. None of it may hang a command, fill the memory or end in a traceback.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from stepquant.errors import ArtifactError

MAX_JSON_BYTES = 64 * 2**20  # far above any plan; a larger file is not one of ours
MAX_DEPTH = 64  # levels of lists and objects; a plan has six
MAX_PLAN_BYTES = 256 * 2**20  # of plan.safetensors; the largest models' have a few MiB
MAX_TABLE_BYTES = 4 * 2**30  # of tables.safetensors
KINDS = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
         stat.S_ISBLK: "a device"}  # fmt: skip


def check_file(path: Path, what: str, most: int | None = None) -> None:
    """Refuse what is no ordinary file (links to one will do) or larger than `most` bytes, before it is opened.

    Raises:
        ArtifactError: naming the file, what it is and what was expected.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: {what} is missing; compile the plan again or check the directory") from None
    except OSError as error:
        raise ArtifactError(f"{path}: {what} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in KINDS.items() if test(status.st_mode)), "something else")
        raise ArtifactError(f"{path}: {what} cannot be read: it is {kind}, expected an ordinary file; compile again")
    if most is not None and status.st_size > most:
        raise ArtifactError(f"{path}: {what} has {status.st_size} bytes; expected at most {most}")


def read_value(path: Path, what: str, most: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON value.

    Raises:
        ArtifactError: if the file is missing, no ordinary file, too large, or not strict JSON (`parse_json`).
    """
    check_file(path, what, most)
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        return parse_json(data)
    except OSError as error:
        raise ArtifactError(f"{path}: {what} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        found = str(error).partition(" in position")[0][:200]
        raise ArtifactError(f"{path}: {what} is not valid JSON ({found}); compile the plan again") from None


def parse_json(data: bytes | str) -> Any:
    """A JSON value from text.

    Raises:
        ValueError: not UTF-8, not JSON, NaN, a number beyond a double, a key that appears twice, half a surrogate pair,
            or nested deeper than `MAX_DEPTH`.
        RecursionError: nested so deep that the parser gives up.
    """
    text = data.decode() if isinstance(data, bytes) else data
    value = json.loads(
        text, parse_constant=_no_constant, parse_float=_finite, parse_int=_bounded, object_pairs_hook=_no_duplicates
    )
    _check_depth(value)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, expected finite numbers")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:40]}, expected finite numbers")
    return value


def _bounded(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"it holds a number of {len(text)} digits")
    return int(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)[:80]!r} appears twice")
    return found
