"""Whether a checkpoint is the one that a plan was made for: its shapes, its weights and their format. Loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from stepquant.errors import ArtifactError

if TYPE_CHECKING:
    from stepquant.geometry import Geometry
    from stepquant.plan import LayoutPlan

_NO_FORMAT = ("synthetic", "unknown")  # plans made without a checkpoint


def check_checkpoint(
    plan: LayoutPlan, where: str | Path, path: str | Path, *, weights: str = "checkpoint", any_checkpoint: bool = False,
    any_weight_format: bool = False,
) -> None:  # fmt: skip
    """Compare a checkpoint's configuration and fingerprint with a plan's.

    Args:
        where: the plan's directory, for messages.
        path: ``model.path``; weights: ``model.weights``.
        any_checkpoint: accept other weights of the same shapes and format.
        any_weight_format: accept weights in another format (a plan of BF16 weights for their AWQ version), and with
            them the other fingerprint that this brings.

    Raises:
        ArtifactError: naming what differs and the word that accepts it.
        ModelError: the checkpoint cannot be read.
    """
    from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
    from stepquant.models.families import geometry_from_config
    from stepquant.models.fingerprint import fingerprint

    directory = resolve_checkpoint(path)
    config = read_config(directory)
    geometry = geometry_from_config(config)
    if geometry != plan.geometry:
        raise ArtifactError(
            f"{where} is for a {plan.geometry.model_type} with states {list(plan.bits.shape)}, {path} is another "
            f"{geometry.model_type}: {', '.join(_differences(plan.geometry, geometry))}; compile a plan for it"
        )
    found = weight_format(config)
    if plan.weight_format not in (found, *_NO_FORMAT):
        if not any_weight_format:
            raise ArtifactError(
                f"{where} was made for {plan.weight_format} weights, {path} holds {found} ones, whose states differ; a "
                "plan belongs to its weight format: compile for these, or say any_weight_format=true"
            )
        return
    if any_checkpoint:
        return
    digest = fingerprint(directory, weights=weights)
    if digest != plan.fingerprint:
        raise ArtifactError(
            f"{where} was made for a checkpoint with fingerprint {plan.fingerprint[:23]}, {path} has {digest[:23]}; a "
            "plan belongs to its weights: compile for these, or say any_checkpoint=true"
        )


def _differences(expected: Geometry, found: Geometry) -> Iterator[str]:
    """What differs between two geometries, in words."""
    for field in fields(expected):
        ours, theirs = getattr(expected, field.name), getattr(found, field.name)
        if ours != theirs:
            yield f"{field.name} {theirs} (the plan: {ours})"
