"""Evaluate a plan beside other variants: load model and text, measure drift, optionally generate; rows out."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepquant.errors import BackendError, ModelError, RecipeError
from stepquant.evaluation import demands
from stepquant.evaluation.drift import DriftRun, VariantResult
from stepquant.evaluation.metrics import paired_ratio
from stepquant.evaluation.settings import AnalyseSettings, EvaluateSettings, HarnessSettings
from stepquant.evaluation.streams import Streams, load_streams
from stepquant.evaluation.variants import StoragePath, Variant, from_plan, named_variant, unique_names
from stepquant.files import write_text
from stepquant.passes.cache import Cache
from stepquant.passes.destinations import ROWS, check_json
from stepquant.passes.out_of_memory import told
from stepquant.passes.progress import Progress
from stepquant.plan import LayoutPlan, load_plan
from stepquant.plan_match import check_checkpoint
from stepquant.small_operations import small_operations

TRACE_BYTES = 8 * 2**30

if TYPE_CHECKING:
    import torch

    from stepquant.models.adapter import LoadedModel


def evaluate(settings: EvaluateSettings, quiet: bool = False) -> list[dict[str, Any]]:
    """Rows of the plan and of everything in ``against``, the plan first.

    Raises:
        StepQuantError: naming what is missing or does not fit.
    """
    if settings.path == "served" and (settings.layers or settings.greedy):
        key = "layers" if settings.layers else "greedy"
        raise RecipeError(f"{key} is set, but path=served measures the drift only; leave {key} out, or say path=packed")
    if settings.json:
        check_json(Path(settings.json).expanduser(), kind=ROWS)
    plan, progress = _plan(settings), Progress(quiet)
    variants = chosen_variants(settings, plan)
    run = open_run(settings, plan, progress)
    rows = make_rows(evaluate_spread(settings, run, variants), run.streams)
    if settings.greedy:
        with told("greedy generation", lambda: demands.greedy(settings, run.loaded)):
            add_greedy(rows, run.loaded, run.streams, variants, settings.greedy, progress)
    if settings.json:
        write_rows(Path(settings.json).expanduser(), rows)
    return rows


def _plan(settings: EvaluateSettings) -> LayoutPlan:
    if settings.plan is None:
        raise RecipeError("plan is not given; compile one and give plan=DIR, e.g. plan=build/tiny_gdn_6bit")
    return load_plan(settings.plan)


def open_run(settings: EvaluateSettings | AnalyseSettings, plan: LayoutPlan, progress: Progress) -> DriftRun:
    """Model, text and cache of an evaluation."""
    loaded = load_for_plan(settings, plan, progress)
    data = settings.data
    streams = load_streams(loaded, streams=settings.streams, prefill=settings.prefill, decode=settings.decode,
                           source=data.source, path=data.path, split=data.split, seed=data.seed)  # fmt: skip
    cache = Cache(Path(settings.cache.dir).expanduser(), settings.cache.enabled)
    layers = isinstance(settings, EvaluateSettings) and settings.layers
    batch = settings.batch or pick_batch(plan, loaded.device, streams.ids.shape[1])
    return DriftRun(loaded, streams, batch, cache, progress, layers)


def pick_batch(plan: LayoutPlan, device: torch.device, length: int) -> int:
    """Streams of one forward: at most 8 on a CPU, where they run one by one in every layer anyway, and as many as keep
    a layer's trace and the factors made from it under 8 GiB, up to 64, on a GPU, where they run together."""
    g = plan.geometry
    per_stream = 16 * length * g.num_heads * (2 * g.key_dim + g.value_dim)
    return max(1, min(8 if device.type == "cpu" else 64, TRACE_BYTES // per_stream))


def evaluate_spread(settings: EvaluateSettings, run: DriftRun, variants: Sequence[Variant]) -> list[VariantResult]:
    """Results of all variants, their work spread over ``workers`` processes of one thread each on a CPU.

    The processes meet in the cache: each fills in its share, and this one then reads everything.
    """
    count = min(settings.workers or (os.cpu_count() or 1), len(variants))
    if run.loaded.device.type == "cpu" and count > 1 and settings.cache.enabled:
        shares = [list(variants[i::count]) for i in range(count)]
        with ProcessPoolExecutor(count - 1, mp_context=multiprocessing.get_context("spawn")) as pool:
            waiting = [pool.submit(_fill_cache, settings, [v.name for v in share]) for share in shares[1:]]
            run.evaluate(shares[0])
            try:
                for future in waiting:
                    future.result()
            except BrokenProcessPool:
                raise BackendError(
                    f"one of {count} evaluation processes was killed, probably for memory; what was finished is kept: "
                    f"run again with fewer than workers={count}"
                ) from None
    return run.evaluate(variants)


def _fill_cache(settings: EvaluateSettings, names: Sequence[str]) -> None:
    """The share of one process."""
    plan = _plan(settings)
    variants = [v for v in chosen_variants(settings, plan) if v.name in names]
    open_run(settings, plan, Progress(quiet=True)).evaluate(variants)


def chosen_variants(settings: EvaluateSettings | HarnessSettings, plan: LayoutPlan) -> list[Variant]:
    """The plan and what it is compared with; refuses a bad name before anything is loaded."""
    path: StoragePath = settings.path  # type: ignore[assignment]
    tables = None
    if "damp" in settings.against:
        from stepquant.artifact import read_tables

        tables = {name: product for name, (_, product) in read_tables(Path(str(settings.plan)))[0].items()}
    others = [named_variant(name, plan, tables, path) for name in settings.against]
    return unique_names([from_plan(plan, path=path, directory=settings.plan), *others])


def load_for_plan(
    settings: EvaluateSettings | AnalyseSettings | HarnessSettings, plan: LayoutPlan, progress: Progress
) -> LoadedModel:
    """The checkpoint that a plan is for, compared with it before it is loaded.

    Raises:
        RecipeError: one layer at a time.
        ModelError: no path known.
        ArtifactError: another checkpoint or weight format than the plan was made for, without
            ``any_checkpoint=true`` or ``any_weight_format=true``.
    """
    import torch

    from stepquant.models.adapter import load_model

    model, directory = settings.model, Path(str(settings.plan))
    if model.loading == "layerwise":
        raise RecipeError(
            "model.loading is 'layerwise', but decoding reads every layer for every token; leave model.loading out, or "
            "spread the model over several GPUs with model.device_map=auto"
        )
    path = model.path or _builtin_path(directory)
    if path is None:
        raise ModelError("model.path is not set, and a plan carries no paths; give model.path=/path/to/checkpoint")
    check_checkpoint(plan, directory, path, weights=model.weights, any_checkpoint=settings.any_checkpoint,
                     any_weight_format=settings.any_weight_format)  # fmt: skip
    device = model.device if model.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    progress.say(f"loading {path} on {device}")
    with told("loading the model", lambda: demands.loading(model, path, torch.device(device))):
        return load_model(path, device=device, dtype=model.dtype, device_map=model.device_map,
                          weights=model.weights, trust_remote_code=model.trust_remote_code)  # fmt: skip


def _builtin_path(directory: Path) -> str | None:
    """The built-in model named in the artifact's recipe, if it is one."""
    from omegaconf import OmegaConf

    from stepquant.artifact import RECIPE

    recipe = directory / RECIPE
    path = OmegaConf.select(OmegaConf.load(recipe), "model.path") if recipe.is_file() else None
    return str(path) if path and str(path).startswith("builtin:") else None


def make_rows(results: Sequence[VariantResult], streams: Streams) -> list[dict[str, Any]]:
    """Rows with the ratio of each variant's KL to the first one's, paired by stream."""
    rows = []
    for result in results:
        row: dict[str, Any] = result.row()
        ratio = paired_ratio(result.figures.kl.mean(1), results[0].figures.kl.mean(1))
        row["kl_ratio"] = ratio.mean if ratio.mean == ratio.mean else None
        row["kl_ratio_ci"] = [ratio.low, ratio.high] if ratio.low == ratio.low else None
        row["prefill"], row["data"], row["data_fingerprint"] = streams.prefill, streams.source, streams.fingerprint
        rows.append(row)
    return rows


def add_greedy(
    rows: list[dict[str, Any]], loaded: LoadedModel, streams: Streams, variants: Sequence[Variant], tokens: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Add the figures of greedy generation to the rows."""
    from stepquant.evaluation.generate import end_tokens, generate, greedy_figures

    prompts, ends = streams.ids[:, : streams.prefill], end_tokens(loaded)
    with small_operations(loaded.device), progress.bar("greedy", len(variants) + 1) as bar:
        reference = generate(loaded, prompts, tokens, None, ends)
        bar.advance()
        for row, variant in zip(rows, variants, strict=True):
            row.update(greedy_figures(reference, generate(loaded, prompts, tokens, variant, ends)))
            bar.advance()


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as a JSON list."""
    from stepquant.files import dump_json

    write_text(path, dump_json(list(rows)))
