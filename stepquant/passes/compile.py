"""Compile a recipe: check, run the passes, verify, write the artifact, show what came out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepquant.accounting import packable, why_simulated
from stepquant.artifact import new_artifact, write_artifact
from stepquant.errors import ModelError, RecipeError
from stepquant.files import write_json
from stepquant.passes.codegen import write_kernels
from stepquant.passes.context import Context
from stepquant.passes.destinations import check_json, check_output
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline, passes_for
from stepquant.passes.progress import Progress
from stepquant.passes.reuse import Reused, adopt, open_reused
from stepquant.passes.targets import check_budget, choose_window
from stepquant.passes.verify import verify_plan
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe
from stepquant.run_record import write_run
from stepquant.runtime.launch import serving_command
from stepquant.summary import dry_run_summary, plan_summary, print_summary

if TYPE_CHECKING:
    from stepquant.models.checks import Check


@dataclass
class Compiled:
    """What a compile made.

    Attributes:
        plan: the plan, None after a dry run.
        directory: the artifact, None after a dry run.
        summary: what was printed, with the stable names of ``inspect --json``.
        ran, reused: passes by name.
        model_loaded: whether the model had to be loaded.
    """

    plan: LayoutPlan | None
    directory: Path | None
    summary: dict[str, Any]
    ran: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    model_loaded: bool = False


def compile_recipe(recipe: Recipe, quiet: bool = False) -> Compiled:
    """Run a recipe from checks to the artifact directory ``recipe.output``.

    Raises:
        StepQuantError: naming what cannot be done; nothing half-written is left behind.
    """
    progress = Progress(quiet)
    directory = Path(str(recipe.output)).expanduser()
    check_output(directory, Path(recipe.reuse) if recipe.reuse else None)
    if recipe.json:
        check_json(Path(recipe.json).expanduser(), directory)
    reused = open_reused(recipe)
    if reused:
        recipe = adopt(recipe, reused)
    context = _reused_context(recipe, reused.plan, progress) if reused else Context.open(recipe, progress)
    check_budget(context)
    if recipe.dry_run:
        return _dry_run(context, reused, quiet)
    pipeline, windows = choose_window(Pipeline(context, reused))
    context = pipeline.context
    pipeline.run()
    plan = make_plan(context, pipeline, reused.plan if reused else None, windows)
    verify_plan(context, plan)
    with new_artifact(directory, plan.hash) as place:
        write_artifact(place, plan, context.recipe, pipeline.artifact_products(), pipeline.base_key)
        with progress.step("codegen"):
            made = write_kernels(place, plan, recipe.codegen.targets)
        if recipe.codegen.targets and not made:
            progress.say(f"codegen.targets is not used: there are no kernels: {why_simulated(plan)}")
        with progress.step("report"):
            from stepquant.report import write_report  # plotly is needed here only

            write_report(place)
        run = write_run(place, plan.hash, [cost.to_json() for cost in progress.costs], progress.reused)
    summary = {**plan_summary(plan), "run": run}
    result = Compiled(plan, directory, summary, progress.ran, progress.reused, context.model_loaded)
    _report(result, recipe, quiet)
    return result


def _reused_context(recipe: Recipe, base: LayoutPlan, progress: Progress) -> Context:
    """A context whose geometry is the artifact's: neither model nor text is read."""
    if recipe.model.path is not None and recipe.model.geometry is None:
        from stepquant.passes.context import find_geometry

        found = find_geometry(recipe)
        if found != base.geometry:
            raise RecipeError(
                f"reuse={recipe.reuse} was made for a {base.geometry.model_type} of {base.geometry.num_delta_layers} "
                f"delta-rule layers, model.path={recipe.model.path} is a {found.model_type} of "
                f"{found.num_delta_layers}; leave model.path out, or compile without reuse"
            )
    recipe.check_geometry(base.geometry)
    from stepquant.passes.cache import Cache

    return Context(recipe, base.geometry, Cache(Path(recipe.cache.dir).expanduser(), enabled=False), progress)


def _dry_run(context: Context, reused: Reused | None, quiet: bool) -> Compiled:
    passes = Pipeline(context, reused).planned() if reused else [p.name for p in passes_for(context)]
    summary = dry_run_summary(context, passes)
    checks = _preflight(context)
    summary["checks"] = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks]
    if not quiet:
        print_summary(summary)
        for check in checks:
            print(f"{'ok    ' if check.ok else 'FAILED'} {check.name}: {check.detail}")
    if context.recipe.json:
        write_json(Path(context.recipe.json).expanduser(), summary)
    failed = [check for check in checks if not check.ok]
    if failed:
        raise ModelError(f"{len(failed)} of {len(checks)} checks failed, first {failed[0].name}: {failed[0].detail}")
    return Compiled(None, None, summary)


def _preflight(context: Context) -> list[Check]:
    """The checks of a calibration run that need no weights; none where nothing is calibrated."""
    recipe = context.recipe
    if recipe.calibration == "synthetic" or recipe.reuse or recipe.model.path is None:
        return []
    from stepquant.models.checks import check_all
    from stepquant.passes.trace import trace_bytes

    model, data = recipe.model, recipe.data
    return check_all(
        str(model.path), weights=model.weights, loading=model.loading, device=model.device, device_map=model.device_map,
        source=data.source, data_path=data.path, cache_dir=recipe.cache.dir if recipe.cache.enabled else None,
        cache_bytes=trace_bytes(context),
    )  # fmt: skip


def _report(result: Compiled, recipe: Recipe, quiet: bool) -> None:
    if recipe.json:
        write_json(Path(recipe.json).expanduser(), json.loads(json.dumps(result.summary)))
    if not quiet:
        print_summary(result.summary)
        print(f"artifact: {result.directory}")
        print(f"inspect:  python -m stepquant.inspect {result.directory}")
        if result.plan is not None and packable(result.plan):
            print(f"serve:    {serving_command(result.plan, str(result.directory), recipe.model.path)}")
