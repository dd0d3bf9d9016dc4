"""Sound files to damage: two small artifacts, cache entries of every kind, the progress of a layer-by-layer run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepquant.artifact import EVALUATION, write_artifact
from stepquant.codec.spec import CodecSpec
from stepquant.config import compose_recipe
from stepquant.files import write_json
from stepquant.geometry import Geometry
from stepquant.layout import PageLayout
from stepquant.models.layerwise import Reached, save_progress
from stepquant.passes.cache import Cache
from stepquant.passes.codegen import write_kernels
from stepquant.passes.protocol import Product
from stepquant.passes.spill import LayerStore
from stepquant.plan import LayoutPlan, WindowSpec
from stepquant.run_record import write_run
from tests.plans import small_plan

KEY = "c0ffee" * 10


def by_rows() -> LayoutPlan:
    """A KDA plan whose rows differ, with a write window."""
    geometry = Geometry(
        "kda", "kimi_linear", (0, 1, 3), 2, 2, 16, 32, conv_bytes=96, kv_bytes_per_token=8, num_layers=4
    )
    rng = np.random.default_rng(5)
    bits = rng.choice(np.array([2, 4, 6, 8, 16], np.uint8), (3, 2, 16))
    w = np.exp(rng.normal(0, 0.3, bits.shape))
    w /= np.exp(np.log(w).mean(-1, keepdims=True))
    layout = PageLayout(geometry, bits, "shared")
    return small_plan(
        name="rows", geometry=geometry, codec=CodecSpec(codebook="shared"), bits=torch.from_numpy(bits),
        w=torch.from_numpy(w).float(), permutation=torch.from_numpy(layout.permutation), window=WindowSpec(8, "int8"),
        predicted={"solver": "dp", "cost": 1.0, "unit": "row", "by_layer": [1.0, 2.0, 3.0]},
    )  # fmt: skip


def products(plan: LayoutPlan) -> dict[str, tuple[str, Product]]:
    g = plan.geometry
    shape = (g.num_delta_layers, g.num_heads, g.key_dim)
    gates = shape if g.family == "kda" else shape[:2]
    return {
        "gate_statistics": ("key1", Product({"mean_log_gate": torch.full(gates, -0.5)}, {"tokens": 7})),
        "distortion": ("key2", Product({"row_error": torch.ones(*shape, 3, dtype=torch.float64)},
                                       {"candidates": [4, 8, 16]})),
    }  # fmt: skip


def artifact(place: Path, plan: LayoutPlan) -> Path:
    """A whole artifact: plan, tables, recipe, kernels, run record and evaluation."""
    write_artifact(place, plan, compose_recipe("tiny_gdn_6bit"), products(plan), {"seed": 1})
    write_kernels(place, plan, [])
    passes: list[dict[str, Any]] = [
        {"name": "trace", "seconds": 1.5, "host_peak_bytes": 2**30, "gpu_peak_bytes": [2**31, 5], "tokens": 40,
         "tokens_per_second": 26.7},
        {"name": "codegen", "seconds": 0.5, "host_peak_bytes": 2**30, "gpu_peak_bytes": []},
    ]  # fmt: skip
    write_run(place, plan.hash, passes, ["distortion"])
    row = {
        "variant": "plan", "path": "simulated", "bits_per_value": 6.4, "window": 8, "streams": 8, "kl_first": 1e-3,
        "kl_last": 2e-3, "kl_all": 1.5e-3, "kl_all_ci": [1e-3, 2e-3], "excess_nll_all": 1e-4, "top1_all": 0.99,
        "plan_sha256": plan.hash,
    }  # fmt: skip
    write_json(place / EVALUATION, [row, {**row, "variant": "int8", "kl_all_ci": None}])
    return place


@dataclass
class Corpus:
    """Directories of sound files below one root.

    Attributes:
        artifacts: by name; plans: what each must load as.
        cache: with entries `plain` and `spilled`, and partial results, all under KEY.
        plain, partial: what the cache must give back; spilled: tensors by name.
        progress: directory of a layer-by-layer run's progress; recipes: of recipe files.
    """

    root: Path
    artifacts: dict[str, Path]
    plans: dict[str, LayoutPlan]
    cache: Cache
    plain: Product
    spilled: dict[str, Tensor]
    partial: dict[str, Tensor]
    progress: Path
    reached: Reached
    recipes: Path

    @classmethod
    def make(cls, root: Path) -> Corpus:
        plans = {"heads": small_plan(codec=CodecSpec(group=16), granularity=8), "rows": by_rows()}
        artifacts = {name: artifact(root / name, plan) for name, plan in plans.items()}
        cache = Cache(root / "cache")
        plain = Product({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64)}, {"tokens": 3})
        cache.store("plain", KEY, plain)
        store = LayerStore(
            root / "cache" / "run", 2, {"x": (torch.float32, (4, 8)), "y": (torch.int64, (4,))}, "samples"
        )
        spilled = {}
        for layer in range(2):
            values = torch.randn(4, 8, generator=torch.Generator().manual_seed(layer))
            store.write(layer, "x", 0, values)
            spilled[f"x.{layer}"] = values
        cache.store("spilled", KEY, store.finish({"count": 4}))
        partial = {"gates/sum": torch.rand(5), "segments_done": torch.tensor(3)}
        cache.store_partial(KEY, partial)
        reached = Reached(2, (torch.rand(2, 3), None), {"gates/sum": torch.rand(4)})
        progress = root / "progress"
        progress.mkdir()
        save_progress(progress, KEY, reached)
        recipes = root / "recipes"
        recipes.mkdir()
        (recipes / "mine.yaml").write_text(
            "defaults:\n  - tiny_gdn_6bit\nname: mine\nbudget:\n  bits: 5\nspatial:\n  gamma: 0.5\n"
            "allocation:\n  granularity: 8\ndata:\n  source: builtin\n  segments: 8\n"
        )
        return cls(root, artifacts, plans, cache, plain, spilled, partial, progress, reached, recipes)


def forge(data: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """plan.json's content with hashes that fit whatever it and the tensors say now."""
    from stepquant.files import hash_json, hash_tensors

    geometry = data.get("geometry")
    if isinstance(geometry, dict):
        known = [n for n in Geometry.__dataclass_fields__ if n in geometry]
        geometry = {n: geometry[n] for n in known}
    head = {"geometry": geometry, "granularity": data.get("granularity")}
    for name, fields in (("codec", ("kind", "codebook", "refits", "group", "sample")), ("window", ("length", "dtype"))):
        value = data.get(name)
        order = list(CodecSpec.__dataclass_fields__) if name == "codec" else list(fields)
        head[name] = {n: value[n] for n in order if n in value} if isinstance(value, dict) else value
    data = {k: v for k, v in data.items() if k != "json_sha256"}
    data["tensors_sha256"] = hash_tensors(tensors)
    data["plan_sha256"] = hash_tensors({**tensors, repr(sorted(head.items(), key=lambda i: i[0])): torch.zeros(0)})
    return {**data, "json_sha256": hash_json(json.loads(json.dumps(data)))}
