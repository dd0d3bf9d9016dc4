"""Does a state that is requantised for tens of thousands of tokens stay accurate? KL along one long decode.

    python -m benchmarks.long_run                      # both built-in models, 32,768 tokens
    python -m benchmarks.long_run --table              # only write the table from the kept results

For each model, on the same held-out streams:

- the default method at 4 and 6 bits, W = 8; beside it states that no calibration has touched: BF16 and INT8 (a scale a
  row), requantised at every token, and INT4 at W = 8. What grows in all of them is the model's own, which was trained
  on 4,096 tokens;
- the same plan packed only 2,048 tokens before the end, after an exact prefill of all that comes before: what the last
  thousand tokens cost without the errors of the tokens before;
- the FP32 model's own loss along the text.

Writes results/long_run.json after every model, and results/long_run.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import about, add_arguments, open_run, recipe, solve
from stepquant.evaluation.decode import DecodeSettings, decode_layer
from stepquant.evaluation.drift import DriftRun
from stepquant.evaluation.forward import Readout
from stepquant.evaluation.metrics import Interval, paired_ratio
from stepquant.evaluation.variants import Variant, from_plan, named_variant
from stepquant.files import write_json, write_text
from stepquant.models.capture import DeltaTrace, capture_delta_rule

HERE = Path(__file__).resolve().parent
FIRST, LAST = 10_000, 1_000  # tokens whose mean KL is compared
LATE = 2 * LAST + 48  # tokens decoded where the plan is packed late: half of them build up what errors do build up
EVERY = 1024  # tokens of a point of the curves


def variants_of(family: str, args: argparse.Namespace) -> list[Variant]:
    """The plans and what stands beside them, the plan of 4 bits first."""
    sections = {"temporal": {"weight": "rollout", "sensitivity": "local"}, "window": {"length": 8}}
    plans = {bits: solve(recipe(family, bits, args, **sections))[0] for bits in (4, 6)}
    found = [from_plan(plan, f"{bits} bits, W = 8") for bits, plan in plans.items()]
    return found + [replace(named_variant(name, plans[4]), name=label) for name, label in (
        ("int4@8", "INT4, W = 8"), ("bf16", "BF16"), ("int8", "INT8"))]  # fmt: skip


def figures(kl: torch.Tensor) -> dict[str, Any]:
    """What is kept of one variant's KL `[B, D]`."""
    early, late = kl[:, :FIRST].mean(1), kl[:, -LAST:].mean(1)
    ratio = paired_ratio(late, early)
    return {
        "kl_first": float(early.mean()), "kl_last": float(late.mean()), "ratio": ratio.mean, "ratio_ci": ends(ratio),
        "median_ratio": float((late / early).median()), "streams_first": early.tolist(), "streams_last": late.tolist(),
        "kl": [float(part.mean()) for part in kl.split(EVERY, 1)],
        "kl_body": [body(part) for part in kl.split(EVERY, 1)],
    }  # fmt: skip


def body(kl: torch.Tensor) -> float:
    """Mean without the worst hundredth of the tokens."""
    ordered = kl.flatten().sort().values
    return float(ordered[: max(1, ordered.numel() * 99 // 100)].mean())


def ends(ratio: Interval) -> list[float]:
    """Of a ratio's interval."""
    return [ratio.low, ratio.high]


@torch.no_grad()
def loss(run: DriftRun) -> list[float]:
    """Mean NLL of the model with FP32 states along the streams, nats a token."""
    readout, device = Readout(run.loaded), run.loaded.device
    positions, parts = torch.arange(run.streams.prefill, run.streams.ids.shape[1] - 1, device=device), []

    def exact(layer: int, trace: DeltaTrace) -> torch.Tensor:
        return decode_layer(trace, None, DecodeSettings(prefill=trace.q.shape[1]))  # all of it prefill: whole chunks

    for ids in run.streams.ids.to(device).split(run.batch):
        with capture_delta_rule(run.loaded, replace=exact):
            features = readout.features(ids[:, :-1], positions)
        targets = ids[:, run.streams.prefill + 1 :, None]
        pairs = zip(features.split(EVERY, 1), targets.split(EVERY, 1), strict=True)
        nll = [-readout.logits(f).float().log_softmax(-1).gather(-1, t).mean() * ids.shape[0] for f, t in pairs]
        parts.append(torch.stack(nll))
    return (torch.stack(parts).sum(0) / run.streams.ids.shape[0]).tolist()


def study(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    variants = variants_of(family, args)
    run = open_run(family, args)
    found: dict[str, Any] = {"model": f"tiny_{family}", "variants": {}}
    for result in run.evaluate(variants):
        found["variants"][result.variant.name] = figures(result.figures.kl.double())
        print(family, result.variant.name, {k: found["variants"][result.variant.name][k] for k in
              ("kl_first", "kl_last", "ratio", "ratio_ci")}, flush=True)  # fmt: skip
    text, late = run.streams, min(LATE, run.streams.decode)
    run.streams = replace(text, prefill=text.prefill + text.decode - late, decode=late)
    kl = run.evaluate(variants[:1])[0].figures.kl.double()[:, -LAST:].mean(1)
    found["packed_late"] = {"kl_last": float(kl.mean()), "streams_last": kl.tolist()}
    run.streams = text
    return {**found, "nll": loss(run)}


def table(models: list[dict[str, Any]]) -> str:
    """As Markdown: a row a variant."""
    lines = []
    for model in models:
        lines += [f"{model['model']}: mean KL, nats a token", ""]
        lines += ["| states | first 1,024 | first 10,000 | last 1,000 | last 1,000 to first 10,000 (95%) | median of "
                  "streams |", "|---|---|---|---|---|---|"]  # fmt: skip
        for name, row in model["variants"].items():
            lines.append(f"| {name} | {row['kl'][0]:.2e} | {row['kl_first']:.2e} | {row['kl_last']:.2e} | "
                         f"{row['ratio']:.2f} ({row['ratio_ci'][0]:.2f} to {row['ratio_ci'][1]:.2f}) | "
                         f"{row['median_ratio']:.2f} |")  # fmt: skip
        nll, late = model["nll"], model["packed_late"]["kl_last"]
        lines += ["", f"4 bits, W = 8, packed only {LATE:,} tokens before the end: {late:.2e} over the last 1,000.",
                  f"Loss of the FP32 model: {nll[0]:.3f} nats a token in the first 1,024, {nll[-1]:.3f} in the "
                  "last.", ""]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, streams=16)
    parser.set_defaults(decode=32_768)
    parser.add_argument("--table", action="store_true", help="write the kept results' table and measure nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "long_run.json")
    args = parser.parse_args()
    models = json.loads(args.out.read_text())["models"] if args.table else []
    for family in [] if args.table else args.models:
        models.append(study(family, args))
        write_json(args.out, {"about": about(args), "models": models})
    write_text(args.out.with_suffix(".md"), table(models))


if __name__ == "__main__":
    main()
