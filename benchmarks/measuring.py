"""What the studies of the tiny models share: solving recipes without Hydra and measuring variants on held-out text.

Needs neither Hydra nor a solver's package, so that the studies also run on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

from stepquant.evaluation.drift import DriftRun, VariantResult
from stepquant.evaluation.streams import load_streams
from stepquant.evaluation.variants import Variant
from stepquant.passes.cache import Cache
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe

PIVOTS = {"gdn": 1, "kda": 38}
TOGETHER = 6  # variants measured between two reports


def add_arguments(parser: argparse.ArgumentParser, streams: int) -> None:
    """Arguments of every study."""
    parser.add_argument("--models", nargs="+", choices=sorted(PIVOTS), default=sorted(PIVOTS))
    parser.add_argument("--streams", type=int, default=streams)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=1024)
    parser.add_argument("--segments", type=int, default=16, help="calibration segments of 1,024 tokens")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", default="~/.cache/stepquant")
    parser.add_argument("--commit", default="", help="of the code, for the record")


def recipe(family: str, bits: float, args: argparse.Namespace, **keys: Any) -> Recipe:
    """A recipe of a built-in model; `keys` as they stand in a recipe."""
    return Recipe.from_config({
        "name": f"{family}_{bits}", "model": {"path": f"builtin:tiny_{family}", "device": args.device},
        "budget": {"bits": bits}, "pivots": {"count": PIVOTS[family]}, "cache": {"dir": args.cache},
        "data": {"segments": args.segments}, **keys,
    })  # fmt: skip


def solve(made: Recipe) -> tuple[LayoutPlan, Pipeline]:
    """Plan and products of one recipe, everything but the solve from the cache after the first."""
    context = Context.open(made, Progress(quiet=True))
    pipeline = Pipeline(context)
    pipeline.run()
    return make_plan(context, pipeline), pipeline


def open_run(family: str, args: argparse.Namespace, **text: int) -> DriftRun:
    """Model and held-out streams; `text` overrides streams, prefill and decode."""
    context = Context.open(recipe(family, 6, args), Progress(quiet=True))
    counts = {name: text.get(name, getattr(args, name)) for name in ("streams", "prefill", "decode")}
    streams = load_streams(context.model, **counts)
    batch = counts["streams"] if context.device.type == "cuda" else min(counts["streams"], 8)
    return DriftRun(context.model, streams, batch, Cache(Path(args.cache).expanduser()))


def measure(family: str, variants: Sequence[Variant], args: argparse.Namespace) -> dict[str, VariantResult]:
    """Figures of some variants by name, on a GPU in this process and otherwise spread over processes."""
    run = open_run(family, args)
    found: dict[str, VariantResult] = {}
    if run.loaded.device.type == "cuda":
        for start in range(0, len(variants), TOGETHER):
            for result in run.evaluate(variants[start : start + TOGETHER]):
                found[result.variant.name] = result
                print(f"{family} {result.variant.name}: KL {float(result.figures.kl.mean()):.3e}", flush=True)
        return found
    shares = [list(variants[i :: args.workers]) for i in range(args.workers)]
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        for job in [pool.submit(_share, family, share, args) for share in shares if share]:
            found.update({result.variant.name: result for result in job.result()})
    return found


def _share(family: str, variants: list[Variant], args: argparse.Namespace) -> list[VariantResult]:
    torch.set_num_threads(1)
    return open_run(family, args).evaluate(variants)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Where and on what a study ran."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    return {
        "device": device, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "commit": args.commit, "streams": args.streams, "prefill": args.prefill,
        "decode": args.decode, "segments": args.segments,
    }  # fmt: skip
