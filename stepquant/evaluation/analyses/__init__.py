"""The paper's analyses, one module each: a function of an `AnalysisRun` that returns numbers, a table and a figure."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepquant.errors import RecipeError, closest
from stepquant.evaluation import demands
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun
from stepquant.passes.out_of_memory import told

if TYPE_CHECKING:
    from stepquant.evaluation.settings import AnalyseSettings

ANALYSES = {
    "half_life": "accumulated INT6 state error against gate half-life (figures 1b and B1, appendix B.5)",
    "row_impact": "quantising one octile of key rows at a time; equal-norm readout errors (figure 2a, B.3, B.4)",
    "geometry": "outliers of key rows and value columns, and how they persist (figures 2b and 2c, B.6)",
    "exact_read": "what delta feedback does to an error: the exact-read oracle (B.1)",
    "drift": "packing once after the prefill against requantising at every step (B.2)",
    "lifetimes": "lifetime rankings under other texts (figure B3, B.6)",
    "ablation": "components of the method one by one (tables 4 and E6)",
}


def run_analysis(name: str, run: AnalysisRun) -> Analysis:
    """Run an analysis by name.

    Raises:
        RecipeError: an unknown name.
        BackendError: memory ran out; the message names what to set.
    """
    check_name(name)
    length = run.streams.ids.shape[1]
    with told(f"the analysis {name}", lambda: demands.analysis(name, run.settings, run.loaded, length)):
        found: Analysis = import_module(f"{__name__}.{name}").analyse(run)
    return found


def check_settings(name: str, settings: AnalyseSettings) -> None:
    """What an analysis has to say about its settings, before a model is loaded.

    Raises:
        RecipeError: naming the setting.
    """
    check_name(name)
    module = import_module(f"{__name__}.{name}")
    if hasattr(module, "check"):
        module.check(settings)


def check_name(name: str) -> None:
    """Refuse a name that is no analysis.

    Raises:
        RecipeError: with the closest name and the list.
    """
    if name not in ANALYSES:
        known = ", ".join(ANALYSES)
        raise RecipeError(f"unknown analysis {name!r}{closest(name, ANALYSES)}; expected one of {known}")
