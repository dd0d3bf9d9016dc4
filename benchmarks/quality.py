"""Quality of every way to store the states, on the two built-in models: the table of the README.

    python benchmarks/quality.py                  # both models, all variants, 8 streams of 512 + 1,024 tokens
    python benchmarks/quality.py --models gdn --streams 24

Compiles the plans it needs (cached), evaluates all variants of a model on the same held-out streams, and writes
results/quality.json (every figure) and results/quality.md (the table). Evaluations are cached too: a second run reads.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import stepquant
from stepquant.config import compose_recipe
from stepquant.evaluation.report import markdown_table
from stepquant.evaluation.run import evaluate
from stepquant.evaluation.settings import EvaluateSettings
from stepquant.files import write_json, write_text
from stepquant.passes.compile import compile_recipe
from stepquant.recipe_sections import CacheSettings, ModelSettings

HERE = Path(__file__).resolve().parent
MODELS = ("gdn", "kda")
PIVOTS = {"gdn": 1, "kda": 38}
# Label, recipe, overrides; {f} is the family. The first is what the ratios are to.
PLANS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("paper, 6 bits", "tiny_{f}_6bit", ("method=paper",)),
    ("paper, 4 bits", "tiny_{f}_4bit", ("method=paper",)),
    ("recipe, 6 bits", "tiny_{f}_6bit", ()),
    ("recipe, 4 bits", "tiny_{f}_4bit", ()),
    ("temporal only, 6 bits", "ablation_temporal_6", ("model=tiny_{f}", "pivots.count={pivots}")),
    ("temporal only, 4 bits", "ablation_temporal_4", ("model=tiny_{f}", "pivots.count={pivots}")),
    ("temporal without pivots, 6 bits", "ablation_temporal_no_pivots_6", ("model=tiny_{f}",)),
    ("temporal without pivots, 4 bits", "ablation_temporal_no_pivots_4", ("model=tiny_{f}",)),
    ("DAMP-like", "baseline_damp", ("model=tiny_{f}",)),
)
NAMED = {
    "fp32": "FP32", "bf16": "BF16", "int8": "INT8", "int6": "INT6", "int4": "INT4", "nvfp4": "NVFP4",
    "qmamba6": "DSQ, 6 bits", "qmamba4": "DSQ, 4 bits", "spatial6": "spatial only, 6 bits",
    "spatial4": "spatial only, 4 bits",
}  # fmt: skip


def compile_plans(family: str, build: Path, cache: str) -> dict[str, Path]:
    """Artifact directories by label."""
    found = {}
    for label, recipe, overrides in PLANS:
        name = label.replace(", ", "_").replace(" ", "_")
        output = build / f"{family}_{name}"
        filled = [o.format(f=family, pivots=PIVOTS[family]) for o in overrides]
        filled += [f"name={name}", f"output='{output}'", f"cache.dir='{Path(cache).expanduser()}'"]
        compile_recipe(compose_recipe(recipe.format(f=family), filled), quiet=True)
        found[label] = output
        print(f"{family}: compiled {label}", file=sys.stderr)
    return found


def measure(family: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model."""
    plans = compile_plans(family, args.build, args.cache)
    labels = [*plans, *NAMED.values()]
    first, *others = (str(path) for path in plans.values())
    settings = EvaluateSettings(
        plan=first, against=(*others, *NAMED, *args.also), streams=args.streams, prefill=args.prefill,
        decode=args.decode, workers=args.workers, model=ModelSettings(path=f"builtin:tiny_{family}"),
        cache=CacheSettings(dir=args.cache),
    )  # fmt: skip
    rows = evaluate(settings)
    for row, label in zip(rows, [*labels, *args.also], strict=True):
        row.update(variant=label, model=f"tiny_{family}")
    return rows


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Both models side by side, sorted by the first one's bits and KL."""
    families = list(results)
    heads = [
        f"{f.upper()} {what}" for f in families for what in ("bits/value", "KL (95%)", "KL, worst 1% left out", "top-1")
    ]
    lines = ["| states | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    by_name = {f: {row["variant"]: row for row in rows} for f, rows in results.items()}
    for name in sorted(by_name[families[0]], key=lambda n: by_name[families[0]][n]["kl_all"]):
        cells = []
        for family in families:
            row = by_name[family][name]
            low, high = row["kl_all_ci"] or (0.0, 0.0)
            cells += [f"{row['bits_per_value']:.3f}", f"{row['kl_all']:.2e} ({max(low, 0):.1e} to {high:.1e})",
                      f"{row['kl_body']:.2e}", f"{100 * row['top1_all']:.2f}%"]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=0, help="processes of one thread each; 0: all cores")
    parser.add_argument("--also", nargs="*", default=[], help="more variants, as evaluate's against takes them")
    parser.add_argument("--build", type=Path, default=Path("build/quality"))
    parser.add_argument("--cache", default="~/.cache/stepquant")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    results, seconds = {}, {}
    for family in args.models:
        start = time.perf_counter()
        results[family] = measure(family, args)
        seconds[family] = round(time.perf_counter() - start, 1)
        print(markdown_table(results[family]))
    about = {
        "stepquant": stepquant.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "streams": args.streams, "prefill": args.prefill, "decode": args.decode, "seconds": seconds,
    }  # fmt: skip
    write_json(args.out / "quality.json", {"about": about, "rows": [row for rows in results.values() for row in rows]})
    write_text(args.out / "quality.md", table(results))
    print(table(results))
    print(json.dumps(about))


if __name__ == "__main__":
    main()
