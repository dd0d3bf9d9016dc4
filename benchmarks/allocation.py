"""Is the allocation's cost model right? Sensitivities against injected noise, predicted cost against measured KL.

    python -m benchmarks.allocation                   # both built-in models, 8 streams of 512 + 1,024 tokens
    python -m benchmarks.allocation --models kda --streams 4 --decode 512

For each model, at W = 1:

- plans of 3 to 8 bits under every cost model (gate, transition, rollout; no, gradient, local sensitivity) and the
  default codec, measured on the same held-out streams; Spearman's correlation of measured KL with the default cost
  model's prediction;
- KL of every cost model as a ratio to ``method=paper`` (its own codec too) at the same bits, paired streams;
- gradient and local sensitivities against the reference, noise at one head at a time: rank correlation and seconds.

Writes results/allocation.json after every model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.measuring import about, add_arguments, measure, recipe, solve
from stepquant.evaluation.metrics import paired_ratio
from stepquant.evaluation.noise import noise_sensitivity
from stepquant.evaluation.streams import load_streams
from stepquant.evaluation.variants import from_plan
from stepquant.files import write_json
from stepquant.passes.context import Context
from stepquant.passes.costs import cost_per_token, cost_table
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe

HERE = Path(__file__).resolve().parent
GATE = ("gate", "none")
COST_MODELS = (GATE, ("transition", "none"), ("transition", "gradient"), ("rollout", "gradient"), ("rollout", "local"))
DEFAULT = ("rollout", "local")
BITS = (3, 4, 5, 6, 8)


def of_cost(family: str, bits: float, cost: tuple[str, str], args: argparse.Namespace) -> Recipe:
    """A recipe under one cost model; the codec is the default's throughout."""
    return recipe(family, bits, args, temporal={"weight": cost[0], "sensitivity": cost[1]})


def predicted(plan: LayoutPlan, judge: Pipeline) -> float:
    """Cost of a plan's precision map under the judge's cost model, nats a token with its units."""
    source = "pivot_distortion" if "pivot_distortion" in judge else "distortion"
    where = {b: i for i, b in enumerate(judge[source].facts["candidates"])}
    index = plan.bits.long().apply_(lambda b: where[b]).unsqueeze(-1)
    return cost_per_token(judge.context, float(cost_table(judge.context, judge, source).gather(-1, index).sum()))


def study(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    solved = {(cost, bits): solve(of_cost(family, bits, cost, args)) for cost in COST_MODELS for bits in BITS}
    names = [(f"{' + '.join(cost)} @ {bits}", plan) for (cost, bits), (plan, _) in solved.items()]
    paper = {bits: solve(recipe(family, bits, args, method="paper"))[0] for bits in BITS}
    everything = [*names, *((f"paper @ {bits}", plan) for bits, plan in paper.items())]
    results = measure(family, [from_plan(plan, name) for name, plan in everything], args)
    papers = {bits: results[f"paper @ {bits}"].figures.kl.double().mean(1) for bits in BITS}
    judge = solved[DEFAULT, 6][1]
    rows = []
    for (name, plan), (cost, bits) in zip(names, solved, strict=True):
        kl = results[name].figures.kl.double().mean(1)
        ratio = paired_ratio(kl, papers[bits])
        rows.append({"weight": cost[0], "sensitivity": cost[1], "bits": bits, "kl_all": float(kl.mean()),
                     "kl_median": float(kl.median()), "to_paper": ratio.mean, "to_paper_ci": [ratio.low, ratio.high],
                     "predicted_by_default": predicted(plan, judge)})  # fmt: skip
        print(f"{family} {name:28s} KL {rows[-1]['kl_all']:.3e}  x {ratio.mean:.3f} of the paper's  "
              f"predicted {rows[-1]['predicted_by_default']:.3e}")  # fmt: skip
    rank = spearmanr([r["kl_all"] for r in rows], [r["predicted_by_default"] for r in rows])[0]
    found = {"model": f"tiny_{family}", "rows": rows, "spearman_predicted_kl": float(rank),
             "paper": {str(bits): float(kl.mean()) for bits, kl in papers.items()}}  # fmt: skip
    print(f"{family} Spearman of predicted cost and measured KL over {len(rows)} plans: {rank:.4f}")
    return {**found, "sensitivity": sensitivities(family, args)}


def sensitivities(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Gradient and local estimates against injected noise."""
    context = Context.open(of_cost(family, 6, GATE, args), Progress(quiet=True))
    tokens = load_streams(context.model, streams=2, prefill=8, decode=args.noise_tokens - 8).ids[:, :-1]
    start = time.perf_counter()
    noise = noise_sensitivity(context.model, tokens, context.delta_rule)
    found: dict[str, Any] = {"noise_seconds": round(time.perf_counter() - start, 1), "noise": noise.tolist()}
    for kind in ("gradient", "local"):
        estimate = Pipeline(Context.open(of_cost(family, 6, ("transition", kind), args), Progress(quiet=True)))[
            "sensitivity"
        ]["sensitivity"]
        rank = float(spearmanr(noise.flatten(), estimate.flatten())[0])
        found[kind] = {
            "spearman": rank,
            "median_ratio": float((estimate / noise).median()),
            "values": estimate.tolist(),
        }
        print(f"{family} sensitivity {kind}: Spearman {rank:.3f} with injected noise")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, streams=8)
    parser.add_argument("--noise-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "allocation.json")
    args = parser.parse_args()
    found = []
    for family in args.models:
        start = time.perf_counter()
        found.append({**study(family, args), "seconds": round(time.perf_counter() - start, 1)})
        write_json(args.out, {"about": about(args), "models": found})


if __name__ == "__main__":
    main()
