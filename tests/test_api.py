"""The Python API, and what the runtime may not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stepquant
from stepquant.errors import RecipeError

RUNTIME = ("stepquant.plan", "stepquant.layout", "stepquant.memory", "stepquant.accounting", "stepquant.codec.packed",
           "stepquant.codec.window", "stepquant.codec.registry")  # fmt: skip
FORBIDDEN = ("hydra", "omegaconf", "pulp", "ortools", "transformers", "plotly", "scipy")


def test_compile_and_load_from_python(tmp_path):
    done = stepquant.compile("qwen_6bit", {"calibration": "synthetic", "method": "paper",
                                           "output": str(tmp_path / "plan"), "cache.enabled": False})  # fmt: skip
    assert stepquant.load_plan(tmp_path / "plan").hash == done.plan.hash
    assert done.summary["bytes_per_request"]["total"] == 29_999_104


def test_a_mistake_is_the_same_error_as_on_the_command_line():
    with pytest.raises(RecipeError, match="qwen_6bit"):
        stepquant.compile("qwen_6bits")


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stepquant.nothing


def test_the_runtime_imports_no_solver_hydra_or_transformers():
    code = f"import sys\nfor m in {RUNTIME}: __import__(m)\nprint([n for n in {FORBIDDEN} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
