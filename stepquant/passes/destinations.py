"""Where commands write, checked before anything is computed: ``output`` and ``json``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepquant.artifact import ARTIFACT_FILES, is_artifact
from stepquant.errors import ArtifactError, RecipeError
from stepquant.reading import read_value
from stepquant.swap import is_working_name


def check_output(directory: Path, reuse: Path | None = None) -> None:
    """Refuse an ``output`` that cannot become an artifact, holds something else than earlier ones, or is the artifact
    that ``reuse`` reads.

    Raises:
        RecipeError: naming what is in the way.
    """
    real = Path(os.path.realpath(directory))
    if reuse is not None and real == Path(os.path.realpath(reuse)):
        raise RecipeError(
            f"output={directory} is the artifact that reuse={reuse} reads, whose plan would be lost; give another "
            f"directory, such as output={directory}_new"
        )
    place = _existing(real)
    if not place.is_dir():
        raise RecipeError(f"output={directory}: {place} is a file; expected a directory or a path for one")
    if real.is_dir():
        other = next((entry for entry in sorted(real.iterdir()) if not _of_an_artifact(entry)), None)
        if other is not None and not is_artifact(real):
            raise RecipeError(
                f"output={directory} holds {other.name!r} and is no artifact of stepquant; expected a new or empty "
                "directory, or an earlier artifact to replace; give output=DIR somewhere else"
            )
        if os.path.ismount(real):
            raise RecipeError(
                f"output={directory} is a mount point, which cannot be replaced as a whole; give a directory in it, "
                f"such as output={directory / 'plan'}"
            )
        place = real.parent
    for written in {place, real if real.is_dir() else place}:
        if not os.access(written, os.W_OK | os.X_OK):
            raise RecipeError(f"output={directory}: {written} cannot be written to; give output=DIR somewhere else")


@dataclass(frozen=True)
class JsonKind:
    """What a command writes to ``json``: its name, and whether a value is such a one."""

    name: str
    known: Callable[[Any], bool]

    def holds(self, path: Path) -> bool:
        """Whether a file holds one, or nothing."""
        try:
            return self.known(read_value(path, f"the {self.name}"))
        except ArtifactError:
            return not path.stat().st_size


def _with_keys(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and set(names) <= set(value)


SUMMARY = JsonKind("summary of a compile", _with_keys("name", "geometry", "bytes_per_request"))
SIZING = JsonKind("sizing of a server", _with_keys("plan", "slot_bytes", "fp32_slot_bytes"))
ROWS = JsonKind(
    "list of an evaluation's rows",
    lambda value: isinstance(value, list) and all(isinstance(row, dict) and "variant" in row for row in value),
)


def check_json(path: Path, output: Path | None = None, kind: JsonKind = SUMMARY) -> None:
    """Refuse a ``json`` that cannot be written, or would take the place of something else than its own kind.

    Args:
        output: of a compile, an artifact already in the making.

    Raises:
        RecipeError: naming what is in the way.
    """
    if path.is_dir():
        raise RecipeError(f"json={path} is a directory; expected a file, such as json={path / 'summary.json'}")
    real = Path(os.path.realpath(path))
    for directory in real.parents:
        inside = real.relative_to(directory).parts[0]
        owned = is_artifact(directory) or (output is not None and directory == Path(os.path.realpath(output)))
        if owned and inside in ARTIFACT_FILES:
            raise RecipeError(
                f"json={path} is a file of the artifact {directory}; give another name, such as "
                f"json={directory / 'summary.json'}"
            )
    place = _existing(real.parent)
    if not place.is_dir():
        raise RecipeError(f"json={path}: {place} is a file; expected a directory or a path for one")
    if not os.access(place, os.W_OK | os.X_OK) or (real.exists() and not os.access(real, os.W_OK)):
        raise RecipeError(f"json={path} cannot be written; give json=FILE somewhere else")
    if real.exists() and not real.is_file():
        raise RecipeError(
            f"json={path} is no ordinary file, which it would replace; give a path for one, or leave it out"
        )
    if real.exists() and not kind.holds(real):
        raise RecipeError(f"json={path} exists and is no {kind.name}; give another name, or delete it if it can go")


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def _of_an_artifact(entry: Path) -> bool:
    """Whether an entry of a directory is what compiles and sweeps put there: other artifacts, work in progress."""
    return is_artifact(entry) or is_working_name(entry.name)
