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
from stepquant.files import read_tensors, write_tensors, write_text
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe

TABLES, RECIPE = "tables.safetensors", "recipe.yaml"


def write_artifact(
    directory: Path, plan: LayoutPlan, recipe: Recipe, products: dict[str, tuple[str, Product]], base_key: object
) -> None:
    """Write an artifact; plan.json comes last and carries the hash of what it belongs to.

    Args:
        products: calibration products by name, with their keys.
        base_key: what the calibration depended on, so that a reuse can tell what still holds.
    """
    tensors = {f"{name}/{item}": t for name, (_, product) in products.items() for item, t in product.tensors.items()}
    head = {"base": base_key, "products": {n: {"key": key, "facts": p.facts} for n, (key, p) in products.items()}}
    write_tensors(directory / TABLES, tensors, {"stepquant": json.dumps(head, sort_keys=True)})
    write_text(directory / RECIPE, recipe_yaml(recipe))
    plan.save(directory)


def read_tables(directory: Path) -> tuple[dict[str, tuple[str, Product]], dict[str, object]]:
    """Calibration products of an artifact with their keys, and what they depended on.

    Raises:
        ArtifactError: when the tables are missing, damaged, or hold NaN.
    """
    path = directory / TABLES
    tensors = read_tensors(path, "the calibration tables")
    try:
        with safe_open(str(path), framework="pt") as file:
            head = json.loads((file.metadata() or {})["stepquant"])
        products = {n: (str(e["key"]), Product({}, dict(e["facts"]))) for n, e in head["products"].items()}
        base = dict(head["base"])
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: its header is not that of calibration tables ({error!r}); compile again"
        ) from None
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
