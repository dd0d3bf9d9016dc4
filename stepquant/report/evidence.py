"""What a report shows, read from an artifact: the plan, its tables, and evaluation and kernels where there are any.

Only the plan must be there and sound. Tables may have been left out of a shared artifact, and evaluation and kernels
come later; what is missing or does not belong to this plan is said in the report.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepquant.artifact import EVALUATION, KERNELS, TABLES, read_tables
from stepquant.errors import ArtifactError
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan, load_plan
from stepquant.reading import read_value
from stepquant.summary import plan_summary

KERNEL_PLAN = f"{KERNELS}/kernel_plan.json"


@dataclass
class Evidence:
    """Everything a report is made from.

    Attributes:
        plan: the plan.
        summary: the dictionary of ``inspect --json``.
        products: calibration products by name; empty without tables.
        evaluation: rows of ``stepquant.evaluate``.
        kernels: kernels/kernel_plan.json.
        notes: what could not be shown, by section.
    """

    plan: LayoutPlan
    summary: dict[str, Any]
    products: dict[str, Product] = field(default_factory=dict)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def read_evidence(directory: Path) -> Evidence:
    """Read an artifact.

    Raises:
        ArtifactError: when the plan itself is missing or unsound.
    """
    plan = load_plan(directory)
    found = Evidence(plan, plan_summary(plan))
    if (directory / TABLES).exists():
        try:
            found.products = {name: product for name, (_, product) in read_tables(directory)[0].items()}
        except ArtifactError as error:
            found.notes["tables"] = _local(error, directory)
    else:
        found.notes["tables"] = f"The artifact holds no calibration tables ({TABLES})."
    rows = _read(found, directory, EVALUATION, "quality")
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        found.evaluation = _own(found, rows, EVALUATION, "quality")
    elif rows is not None:
        found.notes["quality"] = f"{EVALUATION} is no list of rows; evaluate again."
    kernels = _read(found, directory, KERNEL_PLAN, "kernels")
    if isinstance(kernels, dict):
        found.kernels = next(iter(_own(found, [kernels], KERNEL_PLAN, "kernels", key="plan")), {})
    elif kernels is not None:
        found.notes["kernels"] = f"{KERNEL_PLAN} is no JSON object; compile again."
    return found


def _read(found: Evidence, directory: Path, name: str, section: str) -> Any:
    path = directory / name
    if not os.path.lexists(path):
        return None
    try:
        return read_value(path, "the file")
    except ArtifactError as error:
        reason = _local(error, directory).removeprefix(f"{name}: ")
        found.notes[section] = f"{name} cannot be read: {reason}"
        return None


def _own(
    found: Evidence, items: list[dict[str, Any]], name: str, section: str, key: str = "plan_sha256"
) -> list[dict[str, Any]]:
    """The items that belong to this plan: those that name a plan, under `key`, must name this one."""
    own = [item for item in items if item.get(key) in (None, found.plan.hash)]
    if len(own) < len(items):
        left = len(items) - len(own)
        found.notes[section] = f"{name} holds figures of another plan ({left} left out); make it again."
    return own


def _local(error: Exception, directory: Path) -> str:
    """The message without the directory, so that no absolute path gets into a report."""
    text = getattr(error, "strerror", None) or str(error)
    return text.replace(f"{directory}/", "")


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
