"""Running a plan: packed pool, kernels, SGLang plugin, transformers backend.

    stepquant.runtime.wrap(model, "build/tiny_gdn_6bit").generate(...)

Imports neither Hydra, nor a solver, nor transformers' models.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["PackedModel", "wrap"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("stepquant.runtime.transformers"), name)
    raise AttributeError(f"module 'stepquant.runtime' has no attribute {name!r}")
