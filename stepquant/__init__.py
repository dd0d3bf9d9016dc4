"""stepquant: a compiler for the recurrent states of delta-rule models.

    compiled = stepquant.compile("tiny_gdn_6bit", {"budget.bits": 5})    # as python -m stepquant.compile
    plan = stepquant.load_plan("build/tiny_gdn_6bit")

Everything is imported on first use; the runtime's parts never import Hydra, a solver or transformers' models.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["compile", "load_plan"]

_LAZY = {"load_plan": ("stepquant.plan", "load_plan")}


def __getattr__(name: str) -> Any:
    if name == "compile":  # a module that can be called, so that `python -m stepquant.compile` has the same name
        return importlib.import_module("stepquant.compile")
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'stepquant' has no attribute {name!r}")
