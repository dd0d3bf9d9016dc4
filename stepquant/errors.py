"""Errors that a user can cause and mend: a message names the thing, what was found, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StepQuantError(Exception):
    """Base of all errors that the commands print without a traceback (exit code 2)."""


class RecipeError(StepQuantError):
    """A recipe or an override says something that cannot be done."""


class ModelError(StepQuantError):
    """A checkpoint is of an unknown family, incomplete, or not what its configuration promises."""


class DataError(StepQuantError):
    """Calibration or evaluation text is missing, too short, or unreadable."""


class InfeasibleError(StepQuantError):
    """No assignment meets the constraints; the message names the one to relax."""


class ArtifactError(StepQuantError):
    """An artifact, plan, table or cache entry on disk is not what it claims to be."""


class BackendError(StepQuantError):
    """The environment (GPU, Triton, SGLang, transformers) cannot do what was asked."""


def shown(value: object) -> str:
    """A value found, cut to what a message can hold."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def closest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string.

    Args:
        name: what the user wrote.
        known: the names that would have been accepted.
    """
    match = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
