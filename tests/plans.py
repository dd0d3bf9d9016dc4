"""Plans for tests: a small one made by hand, and full-size synthetic ones compiled in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepquant.codec.spec import CodecSpec
from stepquant.config import compose_recipe
from stepquant.geometry import Geometry
from stepquant.layout import PageLayout
from stepquant.passes.compile import Compiled, compile_recipe
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.plan import LayoutPlan

GEOMETRY = Geometry("gdn", "qwen3_5_text", (0, 2), 4, 2, 16, 32, conv_bytes=640, kv_bytes_per_token=64, num_layers=4)


def small_plan(**changes: Any) -> LayoutPlan:
    """Two layers of four heads of 16 x 32, one precision a head."""
    bits = np.array([[4, 6, 8, 16], [2, 4, 6, 8]], dtype=np.uint8)[:, :, None].repeat(16, -1)
    layout = PageLayout(GEOMETRY, bits, "head")
    values: dict[str, Any] = {
        "name": "small", "geometry": GEOMETRY, "codec": CodecSpec(), "bits": torch.from_numpy(bits),
        "w": torch.ones(2, 4, 16), "permutation": torch.from_numpy(layout.permutation),
        "budget": {"bits": 6.0, "pivots": 1},
        "predicted": {"solver": "dp", "status": "optimal", "gap": 0.0, "unit": "head", "candidates": [2, 4, 6, 8],
                      "cost": 3.0, "predicted_cost_per_token": 3.0, "by_layer": [1.0, 2.0]},
        "settings": {"temporal": {"horizon": 2048, "weight": "gate", "sensitivity": "none"}},
        "provenance": {"calibration": "trace"},
    }  # fmt: skip
    return LayoutPlan(**{**values, **changes})


def synthetic_plan(recipe: str, *overrides: str) -> LayoutPlan:
    """A shipped recipe's plan from synthetic statistics; nothing is read or written."""
    made = compose_recipe(recipe, ["calibration=synthetic", "cache.enabled=false", *overrides])
    context = Context.open(made, Progress(quiet=True))
    pipeline = Pipeline(context)
    pipeline.run()
    return make_plan(context, pipeline)


def compiled(directory: Path, recipe: str, *overrides: str) -> Compiled:
    """The same compiled into an artifact directory."""
    made = compose_recipe(
        recipe, ["calibration=synthetic", "cache.enabled=false", f"output={directory}", *overrides]
    )  # fmt: skip
    return compile_recipe(made, quiet=True)
