"""The artifact directory: plan, tables, composed recipe. Written atomically, read strictly, nothing in it is executed.

plan.json, plan.safetensors     the plan (stepquant.plan)
tables.safetensors              calibration statistics and distortions, for re-solving and reports
recipe.yaml                     the composed recipe, without local paths
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stepquant.errors import ArtifactError
from stepquant.files import dump_tensors, hash_tensors, read_json, read_tensors, write_together
from stepquant.passes.protocol import Product
from stepquant.plan import PLAN_JSON, LayoutPlan
from stepquant.recipe import Recipe

TABLES, RECIPE = "tables.safetensors", "recipe.yaml"


def write_artifact(
    directory: Path, plan: LayoutPlan, recipe: Recipe, products: dict[str, tuple[str, Product]], base_key: object
) -> None:
    """Write an artifact: every file whole before the first one takes its name, plan.json last.

    An error on the way leaves the old artifact as it was; a kill between two renames leaves one that is refused by
    its hashes.

    Args:
        products: calibration products by name, with their keys.
        base_key: what the calibration depended on, so that a reuse can tell what still holds.
    """
    tensors = {f"{name}/{item}": t for name, (_, product) in products.items() for item, t in product.tensors.items()}
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
        ArtifactError: when the tables are missing, damaged, hold NaN, or belong to another plan than the directory's.
    """
    path = directory / TABLES
    tensors = read_tensors(path, "the calibration tables")
    try:
        with safe_open(str(path), framework="pt") as file:
            head = json.loads((file.metadata() or {})["stepquant"])
        products = {n: (str(e["key"]), Product({}, dict(e["facts"]))) for n, e in head["products"].items()}
        base, owner, digest = dict(head["base"]), str(head["plan_sha256"]), str(head["tensors_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: its header is not that of calibration tables ({error!r}); compile again"
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
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ArtifactError(f"{path}: tensor {full} holds NaN; calibrate again")
        products[name][1].tensors[item] = tensor
    return products, base


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
