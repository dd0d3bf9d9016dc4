"""Compiles at full size: seconds, tokens per second and peak memory of every pass, with random weights.

    python benchmarks/scale.py qwen kimi           # Qwen3.8-27B and Kimi-Linear-48B-A3B geometry, 32 x 2,048 tokens
    python benchmarks/scale.py layers              # 8 layers: one at a time within 20 GiB, against the whole
    python benchmarks/scale.py gpus                # 8 layers of Qwen: over all GPUs, against one

Nothing is downloaded; `layers` and `gpus` write a cut-down checkpoint to a temporary directory. Each case runs in a
process of its own, and results/scale_h200.json is written after every pass. Needs neither Hydra nor a solver's package.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stepquant.files import write_json
from stepquant.models.checkpoint import read_config
from stepquant.models.families import geometry_from_config
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.passes.trace import trace_bytes
from stepquant.plan import LayoutPlan
from stepquant.recipe import Recipe
from stepquant.run_record import machine
from stepquant.summary import plan_summary

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "full_attention_interval": 4, "dtype": "bfloat16",
}  # fmt: skip
FULL = (4, 8, 12, 16, 20, 24, 27)
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "vocab_size": 163840, "num_experts": 256, "dtype": "bfloat16",
    "linear_attn_config": {"full_attn_layers": list(FULL), "head_dim": 128, "num_heads": 32,
                           "kda_layers": [i for i in range(1, 28) if i not in FULL], "short_conv_kernel_size": 4},
}  # fmt: skip
CASES = ("qwen", "kimi", "layers", "gpus")
LIMIT_GIB = 20


def recipe(checkpoint: Path, cache: Path, args: argparse.Namespace, kda: bool, **model: Any) -> Recipe:
    """The shipped 6-bit recipe; as large a share of the units as there are pivots where the model is cut down."""
    geometry = geometry_from_config(read_config(checkpoint))
    units = geometry.num_delta_layers * geometry.num_heads * (geometry.key_dim if kda else 1)
    pivots = units * 512 // 81920 if kda else units * 32 // 2304
    return Recipe.from_config({
        "name": checkpoint.name, "budget": {"bits": 6}, "pivots": {"count": pivots},
        "model": {"path": str(checkpoint), "weights": "random:0", "device": args.device, **model},
        "data": {"segments": args.segments, "length": args.length, "batch": args.batch},
        "temporal": {"weight": "rollout", "sensitivity": "local"}, "window": {"length": 8},
        "solver": "lagrangian" if kda else "dp", "cache": {"dir": str(cache)},
    })  # fmt: skip


def write_config(directory: Path, config: dict[str, Any], tiny: bool) -> Path:
    """A checkpoint that is a configuration only; `tiny` keeps the shape of things and none of the size."""
    if tiny:
        small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "linear_num_value_heads": 2,
                 "linear_num_key_heads": 1, "head_dim": 16, "num_attention_heads": 4, "num_experts": 16,
                 "moe_intermediate_size": 16, "pad_token_id": 0}  # fmt: skip
        config = {**config, **{k: v for k, v in small.items() if k in config or k[:3] in ("moe", "pad")}}
        if "linear_attn_config" in config:
            config["linear_attn_config"] = {**config["linear_attn_config"], "num_heads": 2}
        else:
            config["num_hidden_layers"] = min(config["num_hidden_layers"], 8)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    return directory


def passes_of(pipeline: Pipeline, report: dict[str, Any], save: Any) -> LayoutPlan:
    """Run every pass, rollouts as late as they can be, and note what each took."""
    progress = pipeline.context.progress
    late = {"rollout", "pivots", "pivot_distortion", "allocation"}
    for name in [*(n for n in pipeline.passes if n not in late), *(n for n in pipeline.passes if n in late)]:
        pipeline[name]
        report["passes"] = [cost.to_json() for cost in progress.costs]
        save()
    with progress.step("plan"):
        plan = make_plan(pipeline.context, pipeline)
    report["passes"] = [cost.to_json() for cost in progress.costs]
    report["seconds"] = round(sum(cost.seconds for cost in progress.costs), 1)
    summary = plan_summary(plan)
    report["plan"] = {"bits_per_value": summary["bits_per_value"], "notes": summary["notes"],
                      "gate_sampling": plan.provenance["gate_sampling"], "sha256": plan.hash}  # fmt: skip
    save()
    return plan


def full_size(name: str, args: argparse.Namespace, report: dict[str, Any], save: Any, work: Path) -> None:
    """Every pass at the true geometry."""
    config = QWEN if name == "qwen" else KIMI
    checkpoint = write_config(work / name, config, args.tiny)
    context = Context.open(recipe(checkpoint, work / "cache", args, name == "kimi"), Progress())
    began = time.perf_counter()
    report["spilled_bytes"] = trace_bytes(context)
    passes_of(Pipeline(context), report, save)
    report["parameters"] = sum(p.numel() for p in context.model.model.parameters())
    report["wall_seconds"] = round(time.perf_counter() - began, 1)
    save()


def cut_checkpoint(args: argparse.Namespace, work: Path) -> Path:
    """Eight layers of the first geometry as safetensors, with a small vocabulary."""
    from stepquant.models.adapter import load_model

    config = {**QWEN, "num_hidden_layers": 8, "vocab_size": 32768}
    source = write_config(work / "config", config, args.tiny)
    loaded = load_model(source, device=args.device, weights="random:1", tokenizer=False)
    loaded.model.save_pretrained(work / "cut", max_shard_size="2GB")
    return work / "cut"


def compared(name: str, args: argparse.Namespace, report: dict[str, Any], save: Any, work: Path) -> None:
    """The whole model on one device, against one layer at a time or several devices."""
    began = time.perf_counter()
    checkpoint = cut_checkpoint(args, work)
    report["checkpoint_seconds"] = round(time.perf_counter() - began, 1)
    text = Context.open(recipe(work / "config", work / "text", args, False)).data  # without a tokenizer: bytes
    found: dict[str, Pipeline] = {}
    plans: dict[str, LayoutPlan] = {}
    other = {"loading": "layerwise"} if name == "layers" else {"device_map": "auto"}
    for kind, model in (("whole", {}), (name, other)):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            if kind == "layers":
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(LIMIT_GIB * GIB / total, 0)
                report["gpu_limit_gib"] = LIMIT_GIB
        made = recipe(checkpoint, work / kind, args, False, weights="checkpoint", **model)
        context = Context.open(made, Progress())
        vars(context)["data"] = text
        found[kind] = Pipeline(context)
        part: dict[str, Any] = report.setdefault(kind, {})
        plans[kind] = passes_of(found[kind], part, save)
        if kind == "gpus":
            part["parameters_by_device"] = _by_device(context)
        vars(context).pop("model", None)
    report["difference"] = differences(found["whole"], found[name])
    report["same_bits"] = bool(torch.equal(plans["whole"].bits, plans[name].bits))
    report["other_bits"] = int((plans["whole"].bits != plans[name].bits)[..., 0].sum())
    save()


def _by_device(context: Context) -> dict[str, int]:
    counts: dict[str, int] = {}
    for parameter in context.model.model.parameters():
        counts[str(parameter.device)] = counts.get(str(parameter.device), 0) + parameter.numel()
    return counts


def differences(a: Pipeline, b: Pipeline) -> dict[str, float]:
    """Relative Frobenius norm of the difference of every product."""
    found = {}
    for name in a.passes:
        for item, x in a[name].tensors.items():
            if x.is_floating_point() and name != "allocation":
                found[f"{name}.{item}"] = float((x.double() - b[name][item].double()).norm() / x.double().norm())
    for name in (f"states.{layer}" for layer in range(a.context.geometry.num_delta_layers)):
        x, y = (p["state_samples"][name].double() for p in (a, b))
        found[f"state_samples.{name}"] = float((x - y).norm() / x.norm())
    return found


def one_case(name: str, args: argparse.Namespace) -> None:
    """Run one case and write its report after every step."""
    report: dict[str, Any] = {"case": name, "machine": machine(), "tokens": args.segments * args.length}
    target = args.out.with_suffix(f".{name}.json")

    def save() -> None:
        write_json(target, report)

    with tempfile.TemporaryDirectory(prefix="scale", dir=args.work) as work:
        (full_size if name in ("qwen", "kimi") else compared)(name, args, report, save, Path(work))
    report["done"] = True
    save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=CASES, help="qwen, kimi and layers if none is named")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--segments", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a case may take")
    parser.add_argument("--work", default=None, help="where the cache and the cut-down checkpoint go")
    parser.add_argument("--tiny", action="store_true", help="the same steps in a small model, for a CPU")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale_h200.json")
    args = parser.parse_args()
    if args.one:
        one_case(args.cases[0], args)
        return
    for name in args.cases or ("qwen", "kimi", "layers"):
        command = [sys.executable, str(Path(__file__).resolve()), name, "--one", *_options(args)]
        try:
            code = subprocess.run(command, timeout=args.timeout, check=False).returncode
            print(f"{name}: exit code {code}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after {args.timeout:g} s", flush=True)
    found = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name in CASES:
        part = args.out.with_suffix(f".{name}.json")
        if part.is_file():
            found[name] = json.loads(part.read_text())
            part.unlink()
    write_json(args.out, found)


def _options(args: argparse.Namespace) -> list[str]:
    names = ("device", "segments", "length", "batch", "work", "out")
    given = [f"--{name}={getattr(args, name)}" for name in names if getattr(args, name) is not None]
    return [*given, "--tiny"] if args.tiny else given


if __name__ == "__main__":
    main()
