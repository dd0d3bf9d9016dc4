"""Components of the method one by one (tables 4 and E6), as drift instead of task accuracy.

From the plan's own recipe: rowwise INT, Q-Mamba's DSQ, the spatial codec alone, temporal allocation under rowwise
scales with and without pivots, and the plan, all at its nominal bits and requantised after every token; the plan's own
write window, if it has one, stands beside them. The paper's order by accuracy, best first: full,
spatial only, temporal only (or DSQ), temporal without pivots, INT.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stepquant.errors import BackendError, RecipeError
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure
from stepquant.evaluation.metrics import paired_ratio
from stepquant.evaluation.variants import Variant, from_plan, named_variant
from stepquant.plan import LayoutPlan, WindowSpec, load_plan


def analyse(run: AnalysisRun) -> Analysis:
    """Drift of every component at the plan's nominal bits."""
    bits = run.plan.budget.get("bits")
    if not isinstance(bits, int | float) or int(bits) != bits:
        raise RecipeError(f"the plan's nominal budget is {bits!r} bits; the ablation compares at whole bits a value")
    temporal = _compile_temporal(run)
    variants: list[Variant] = [
        replace(from_plan(run.plan, "full"), window=WindowSpec(1)),
        named_variant(f"spatial{int(bits)}", run.plan),
        from_plan(temporal["temporal only"], "temporal only"),
        from_plan(temporal["temporal without pivots"], "temporal without pivots"),
        named_variant(f"qmamba{int(bits)}", run.plan),
        named_variant(f"int{int(bits)}", run.plan),
    ]
    if run.plan.window.length > 1:
        variants.append(from_plan(run.plan, f"full with its write window, {run.plan.window.length} tokens"))
    results = run.drift.evaluate(variants)
    rows: list[dict[str, Any]] = []
    for result in results:
        row: dict[str, Any] = result.row()
        ratio = paired_ratio(result.figures.kl.mean(1), results[0].figures.kl.mean(1))
        row["kl_ratio"], row["kl_ratio_ci"] = ratio.mean, [ratio.low, ratio.high] if ratio.low == ratio.low else None
        rows.append(row)
    order = sorted(rows, key=lambda row: row["kl_all"])
    headline = [
        f"{row['variant']}: {row['bits_per_value']:.3f} bits a value, W = {row['window']}, KL {row['kl_all']:.2e} "
        f"(median stream {row['kl_all_median']:.2e}), {row['kl_ratio']:.2f}x the full method"
        for row in order
    ]
    numbers = {"rows": rows, "order": [row["variant"] for row in order], "bits": bits}
    return Analysis("ablation", numbers, headline, _figure(rows))


def _compile_temporal(run: AnalysisRun) -> dict[str, LayoutPlan]:
    """Plans of the temporal part alone, compiled from the plan's own recipe."""
    from omegaconf import OmegaConf

    from stepquant.artifact import RECIPE
    from stepquant.passes.compile import compile_recipe
    from stepquant.recipe import Recipe

    source = Path(str(run.settings.plan)) / RECIPE
    if not source.is_file():
        raise RecipeError(f"{source} is missing; the ablation compiles its variants from the plan's own recipe")
    data: Any = OmegaConf.to_container(OmegaConf.load(source))
    data["model"]["path"] = str(run.loaded.path) if run.settings.model.path else data["model"]["path"]
    data["method"], data["cache"] = "default", {"dir": run.settings.cache.dir, "enabled": run.settings.cache.enabled}
    recipe = Recipe.from_config(data)
    found = {}
    for label, pivots in (("temporal only", recipe.pivots.count), ("temporal without pivots", 0)):
        output = Path(run.settings.output or "build/analysis/ablation") / label.replace(" ", "_")
        changes = {
            "spatial.codec": "rowwise", "pivots.count": pivots, "window.length": 1, "temporal.weight": "gate",
            "temporal.sensitivity": "none", "name": output.name, "output": str(output),
        }  # fmt: skip
        run.progress.say(f"compiling {label}")
        try:
            compile_recipe(recipe.replace(changes), quiet=True)
        except BackendError as error:  # its settings are the compile's, which this command does not take
            raise BackendError(f"compiling {label} with the settings of {source}: {error}") from error
        found[label] = load_plan(output)
    return found


def _figure(rows: list[dict[str, Any]]) -> Any:
    made = figure("Component ablation", "", "KL (nats a token)", yaxis_type="log")
    ci = [row["kl_all_ci"] or [row["kl_all"]] * 2 for row in rows]
    made.add_bar(x=[row["variant"] for row in rows], y=[row["kl_all"] for row in rows],
                 error_y={"array": [c[1] - row["kl_all"] for c, row in zip(ci, rows, strict=True)]})  # fmt: skip
    return made
