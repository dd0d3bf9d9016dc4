"""The artifact directory: replaced as a whole, read strictly, nothing in it is executed.

plan.json, plan.safetensors     the plan (stepquant.plan)
tables.safetensors              calibration statistics and distortions, for re-solving and reports
recipe.yaml                     the composed recipe, without local paths
kernels/                        generated sources, to read (stepquant.passes.codegen)
run.json                        what every pass took (stepquant.run_record)
evaluation.json                 rows of stepquant.evaluate, kept by a compile that makes the same plan again
report.html                     all of it as one page (stepquant.report)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepquant.errors import ArtifactError, shown
from stepquant.files import dump_tensors, hash_tensors, read_json, read_tensors, write_together
from stepquant.passes.protocol import Product
from stepquant.plan import PLAN_JSON, PLAN_TENSORS, LayoutPlan
from stepquant.reading import MAX_TABLE_BYTES, parse_json, read_value
from stepquant.recipe import Recipe
from stepquant.run_record import RUN_JSON
from stepquant.swap import read_whole, replacing_directory

TABLES, RECIPE, EVALUATION, REPORT, KERNELS = (
    "tables.safetensors", "recipe.yaml", "evaluation.json", "report.html", "kernels",
)  # fmt: skip
ARTIFACT_FILES = (PLAN_JSON, PLAN_TENSORS, TABLES, RECIPE, RUN_JSON, EVALUATION, REPORT, KERNELS)
"""Names in an artifact directory that a compile replaces; anything else in it is left there."""


def is_artifact(directory: Path) -> bool:
    """Whether a directory holds a plan, sound or not."""
    return (directory / PLAN_JSON).is_file() and (directory / PLAN_TENSORS).is_file()


@contextmanager
def new_artifact(directory: Path, plan_hash: str) -> Iterator[Path]:
    """Yield the directory to write an artifact into; it takes `directory`'s place, whole, when the block ends.

    An error on the way, and a kill at any moment, leave the old artifact as it was.

    Args:
        plan_hash: of the plan that will be written; an evaluation of that very plan is kept.

    Raises:
        ArtifactError: the place cannot be written to.
    """
    with replacing_directory(directory, ARTIFACT_FILES) as place:
        if _evaluates(directory / EVALUATION, plan_hash):
            shutil.copy2(directory / EVALUATION, place / EVALUATION)
        yield place


def _evaluates(path: Path, plan_hash: str) -> bool:
    """Whether evaluation.json holds rows of this plan and no other."""
    try:
        rows = read_value(path, "the evaluation")
    except ArtifactError:
        return False
    return bool(rows) and isinstance(rows, list) and all(
        isinstance(row, dict) and row.get("plan_sha256") == plan_hash for row in rows
    )  # fmt: skip


def write_artifact(
    directory: Path, plan: LayoutPlan, recipe: Recipe, products: dict[str, tuple[str, Product]], base_key: object
) -> None:
    """Write the plan, its tables and its recipe: every file whole before the first one takes its name, plan.json last.

    Args:
        products: calibration products by name, with their keys.
        base_key: what the calibration depended on, so that a reuse can tell what still holds.

    Raises:
        ArtifactError: a table that is not finite, or a plan that contradicts itself.
    """
    tensors = {f"{name}/{item}": t for name, (_, product) in products.items() for item, t in product.tensors.items()}
    _check_finite("the calibration's result", tensors, "check the checkpoint and data.source")
    head = {
        "base": base_key, "products": {n: {"key": key, "facts": p.facts} for n, (key, p) in products.items()},
        "plan_sha256": plan.hash, "tensors_sha256": hash_tensors(tensors),
    }  # fmt: skip
    content = {
        TABLES: dump_tensors(tensors, {"stepquant": json.dumps(head, sort_keys=True)}),
        RECIPE: recipe_yaml(recipe).encode(), **plan.files(),
    }  # fmt: skip
    write_together({directory / name: data for name, data in content.items()})


def read_tables(directory: Path) -> tuple[dict[str, tuple[str, Product]], dict[str, object]]:
    """Calibration products of an artifact with their keys, and what they depended on.

    Raises:
        ArtifactError: when the tables are missing, damaged, not finite, or belong to another plan than the directory's.
    """
    return read_whole(directory, lambda: _read_tables(directory))


def _read_tables(directory: Path) -> tuple[dict[str, tuple[str, Product]], dict[str, object]]:
    path = directory / TABLES
    tensors = read_tensors(path, "the file of calibration tables", MAX_TABLE_BYTES)
    try:
        with safe_open(str(path), framework="pt") as file:
            head = parse_json((file.metadata() or {})["stepquant"])
        products = {n: (str(e["key"]), Product({}, dict(e["facts"]))) for n, e in head["products"].items()}
        base, owner, digest = dict(head["base"]), str(head["plan_sha256"]), str(head["tensors_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: its header is not that of calibration tables ({shown(error)}); compile again"
        ) from None
    if hash_tensors(tensors) != digest:
        raise ArtifactError(f"{path}: tensors do not match tensors_sha256 of the header; compile again")
    plan = read_json(directory / PLAN_JSON, "the plan").get("plan_sha256")
    if plan != owner:
        raise ArtifactError(f"{path}: the tables belong to plan {owner[:16]}, {PLAN_JSON} is another; compile again")
    for full, tensor in tensors.items():
        name, _, item = full.partition("/")
        if name not in products:
            raise ArtifactError(f"{path}: tensor {full} belongs to no product of the header; compile again")
        products[name][1].tensors[item] = tensor
    _check_finite(str(path), tensors, "calibrate again")
    return products, base


def _check_finite(where: str, tensors: Mapping[str, Tensor], remedy: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            found = "NaN" if bool(tensor.isnan().any()) else "infinities"
            raise ArtifactError(f"{where}: tensor {name} holds {found}; expected finite numbers: {remedy}")


def recipe_yaml(recipe: Recipe) -> str:
    """The composed recipe as YAML, local paths and machine settings left out so that plans can be shared."""
    from omegaconf import OmegaConf

    data = recipe.to_dict()
    for key in ("output", "reuse", "json", "cache", "dry_run"):
        data.pop(key)
    if not str(data["model"]["path"] or "").startswith("builtin:"):
        data["model"]["path"] = None
    data["data"]["path"] = None
    return OmegaConf.to_yaml(OmegaConf.create(data))
