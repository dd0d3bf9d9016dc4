"""Bits against write window: KL of every pair, and what the buffers' dtype costs.

    python -m benchmarks.windows                    # both built-in models
    python -m benchmarks.windows --draw             # only draw the figure from the kept results

For each model:

- plans of 3 to 8 bits at W = 1 to 16 by the default method, `method=paper` at 4 and 6 bits, a BF16 state; all on
  the same held-out streams, with bits a state value counted with the buffers of one running request spread over one
  and over five slots;
- at W = 8, buffers of FP32, FP16, BF16 and INT8.

Writes results/windows.json after every model, results/windows.md and results/windows.svg.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import about, add_arguments, measure, recipe, solve
from stepquant.evaluation.drift import VariantResult
from stepquant.evaluation.metrics import Interval, paired_ratio
from stepquant.evaluation.variants import Variant, from_plan, named_variant
from stepquant.files import write_json, write_text
from stepquant.memory import window_bytes
from stepquant.plan import LayoutPlan, WindowSpec

HERE = Path(__file__).resolve().parent
BITS, WINDOWS = (3, 4, 5, 6, 8), (1, 2, 4, 8, 16)
BUFFERS = ("fp32", "fp16", "bf16", "int8")


def plan_of(family: str, bits: float, window: int, args: argparse.Namespace) -> LayoutPlan:
    """The default method's plan."""
    sections = {"temporal": {"weight": "rollout", "sensitivity": "local"}, "window": {"length": window}}
    return solve(recipe(family, bits, args, **sections))[0]


def effective_bits(variant: Variant, slots: int) -> float:
    """Bits a state value of a running request that holds `slots` slots, its window buffers counted."""
    running = window_bytes(variant.geometry, variant.window.length, variant.window.dtype)
    return variant.bits_per_value + 8 * running / slots / variant.geometry.elements


def grid(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """KL of every (bits, W), the references, and the buffers' dtypes."""
    paper = {f"paper @ {b}": solve(recipe(family, b, args, method="paper"))[0] for b in (6, 4)}
    plans = {(b, w): plan_of(family, b, w, args) for w in WINDOWS for b in BITS}
    variants = [from_plan(plan, name) for name, plan in paper.items()]
    variants.append(named_variant("bf16", paper["paper @ 6"]))
    variants += [from_plan(plan, f"{b} bits, W = {w}") for (b, w), plan in plans.items()]
    for bits in (4, 6):
        base = from_plan(plans[bits, 8])
        variants += [replace(base, name=f"{bits} bits, W = 8, {d}", window=WindowSpec(8, d)) for d in BUFFERS]  # type: ignore[arg-type]
    results = measure(family, variants, args)
    rows = [row(results[v.name], results["paper @ 6"]) for v in variants]
    for point in rows:
        point["pareto"] = point["method"] == "grid" and not any(better(other, point) for other in rows)
    return {"model": f"tiny_{family}", "rows": rows}


def row(result: VariantResult, paper: VariantResult) -> dict[str, Any]:
    """One line of the table."""
    v, kl = result.variant, result.figures.kl.double().mean(1)
    ratio = paired_ratio(kl, paper.figures.kl.double().mean(1))
    method = v.name.split(" @")[0] if "@" in v.name else "buffers" if v.name.count(",") == 2 else "grid"
    return {
        "name": v.name, "method": "bf16" if v.name == "bf16" else method, "window": v.window.length,
        "buffers": v.window.dtype, "bits_per_value": v.bits_per_value, "kl_all": float(kl.mean()),
        "kl_last": float(result.figures.kl[:, -256:].mean()), "to_paper_6": ratio.mean,
        "to_paper_6_ci": interval(ratio), "effective_bits_1": effective_bits(v, 1),
        "effective_bits_5": effective_bits(v, 5),
    }  # fmt: skip


def interval(ratio: Interval) -> list[float] | None:
    """Its ends, None for a single stream."""
    return [ratio.low, ratio.high] if math.isfinite(ratio.low) else None


def better(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether `a` takes no more bits (at five slots a request) than `b`, and has a lower KL."""
    return a["method"] == "grid" and a["effective_bits_5"] <= b["effective_bits_5"] and a["kl_all"] < b["kl_all"]


def table(models: list[dict[str, Any]]) -> str:
    """KL by bits and W as Markdown; the Pareto front is bold."""
    lines = []
    for model in models:
        found = {row["name"]: row for row in model["rows"]}
        reference = ", ".join(f"{n} {found[n]['kl_all']:.2e}" for n in ("paper @ 6", "paper @ 4", "bf16"))
        lines += [f"{model['model']}: KL by bits and W ({reference})", ""]
        lines += ["| bits | " + " | ".join(f"W = {w}" for w in WINDOWS) + " |", "|---|" + "---|" * len(WINDOWS)]
        for bits in BITS:
            cells = []
            for w in WINDOWS:
                row = found[f"{bits} bits, W = {w}"]
                mark = "**" if row["pareto"] else ""
                cells.append(f"{mark}{row['kl_all']:.2e}{mark} ({row['effective_bits_1']:.2f}, "
                             f"{row['effective_bits_5']:.2f})")  # fmt: skip
            lines.append(f"| {bits} | " + " | ".join(cells) + " |")
        lines += ["", "| buffers, W = 8 | " + " | ".join(BUFFERS) + " |", "|---|" + "---|" * len(BUFFERS)]
        for bits in (4, 6):
            base = found[f"{bits} bits, W = 8, fp32"]["kl_all"]
            kls = [found[f"{bits} bits, W = 8, {d}"]["kl_all"] for d in BUFFERS]
            lines.append(f"| {bits} bits | " + " | ".join(f"{kl:.2e} ({kl / base - 1:+.1%})" for kl in kls) + " |")
        lines.append("")
    return "\n".join(lines)


def draw(models: list[dict[str, Any]], path: Path) -> None:
    """KL against effective bits at five slots a request, one curve a window, the front as a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stepquant"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for ax, model in zip(axes[0], models, strict=True):
        points = [row for row in model["rows"] if row["method"] == "grid"]
        for window in WINDOWS:
            line = [p for p in points if p["window"] == window]
            ax.plot([p["effective_bits_5"] for p in line], [p["kl_all"] for p in line], "o", label=f"W = {window}")
        front = sorted((p["effective_bits_5"], p["kl_all"]) for p in points if p["pareto"])
        ax.plot(*zip(*front, strict=True), "k-", lw=1, label="Pareto front")
        others = {"paper": ("kx", "paper's method, W = 1"), "bf16": ("k+", "BF16 state")}
        for method, (mark, label) in others.items():
            found = [p for p in model["rows"] if p["method"] == method]
            ax.plot([p["effective_bits_5"] for p in found], [p["kl_all"] for p in found], mark, label=label)
        ax.set(yscale="log", title=model["model"], xlabel="bits a state value, buffers spread over five slots",
               ylabel="KL from the FP32-state model, nats a token")  # fmt: skip
        ax.legend()
        ax.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, streams=8)
    parser.add_argument("--draw", action="store_true", help="draw the kept results and measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "windows.json")
    args = parser.parse_args()
    if args.draw:
        models = json.loads(args.out.read_text())["models"]
        draw(models, args.out.with_suffix(".svg"))
        write_text(args.out.with_suffix(".md"), table(models))
        return
    models = []
    for family in args.models:
        models.append(grid(family, args))
        write_json(args.out, {"about": about(args), "models": models})
        print(table(models[-1:]), flush=True)


if __name__ == "__main__":
    main()
