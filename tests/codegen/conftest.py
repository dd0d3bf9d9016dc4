"""Kernel tests run in Triton's interpreter: no GPU, plain numpy underneath."""

from __future__ import annotations

import os
import sys

import pytest

_KERNELS = ("blocks", "dense", "folds", "matrix", "pending", "pivot_heads", "planes", "table", "tile", "words")


def _import_interpreted() -> None:
    """Decorate the building blocks for the interpreter, whatever was imported before."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    for name in _KERNELS:
        sys.modules.pop(f"stepquant.codegen.{name}", None)
    for name in _KERNELS:
        __import__(f"stepquant.codegen.{name}")
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


_import_interpreted()


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated files are decorated when they are loaded, inside a test."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
