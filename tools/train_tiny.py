"""Train the built-in tiny models (tiny_gdn, tiny_kda) on the text of installed packages.

    python tools/train_tiny.py gather --out TEXT_DIR
    python tools/train_tiny.py train tiny_gdn --text TEXT_DIR --out OUT/tiny_gdn --seconds 400
    python tools/train_tiny.py static tiny_gdn --out OUT/tiny_gdn        # config.json and the tokenizer only

Needs torch, transformers >= 5.17 and, to be fast, a GPU with fla-core (its chunk_kda serves both models: a
GDN head is KDA with the same gate on every channel). The learning rate follows the clock, so a run always ends
on time with a finished schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import tiny_arch as arch
import tiny_kernels
import tiny_text
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

LN2 = math.log(2.0)


def batch(tokens: torch.Tensor, size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """``size`` windows of ``length`` + 1 tokens at random places, int64 [size, length + 1]."""
    starts = torch.randint(tokens.numel() - length, (size, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(length + 1, device=tokens.device)].long()


def loss_of(model: nn.Module, window: torch.Tensor, device: str) -> torch.Tensor:
    """Mean cross-entropy in nats of a [B, T + 1] window, bf16 autocast on a GPU."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def quantiles(values: torch.Tensor) -> dict[str, float]:
    """Minimum, deciles of interest and maximum of a flat tensor."""
    points = {"min": 0.0, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "max": 1.0}
    values = values.flatten().double().cpu()
    return {k: round(torch.quantile(values, q).item(), 3) for k, q in points.items()}


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor, length: int, segments: int, device: str) -> dict[str, Any]:
    """Bits per byte and gate half-lives (tokens) on evenly spaced held-out windows."""
    model.eval()
    starts = torch.linspace(0, tokens.numel() - length - 1, segments).long()
    losses, gates = [], []
    for i in range(0, segments, 4):
        window = torch.stack([tokens[s : s + length + 1] for s in starts[i : i + 4].tolist()]).long()
        with tiny_kernels.recorded_gates() as recorded:
            losses.append(loss_of(model, window, device))
        if i < 16:
            gates.append(recorded)
    means, medians = [], []
    for layer in zip(*gates, strict=True):
        g = torch.cat([x.flatten(0, 1) for x in layer])
        means.append(LN2 / -g.mean(0).clamp(max=-1e-9))
        medians.append(LN2 / -g.median(0).values.clamp(max=-1e-9))
    model.train()
    result: dict[str, Any] = {
        "bits_per_byte": round(torch.stack(losses).mean().item() / LN2, 4),
        "half_life_by_mean_log_gate": quantiles(torch.cat(means)),
        "half_life_by_median_log_gate": quantiles(torch.cat(medians)),
        "units_over_1000_by_mean": int((torch.cat(means) > 1000).sum()),
        "units": torch.cat(means).numel(),
    }
    if means[0].ndim == 1:
        result["half_life_by_mean_per_layer_and_head"] = [[round(x, 2) for x in m.tolist()] for m in means]
    return result


def save(model: nn.Module, name: str, seed: int, out: Path, record: dict[str, Any]) -> int:
    """Write model.safetensors and training.json; returns the size in bytes of the former."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / "model.safetensors"
    save_file(arch.checkpoint_tensors(model, name, seed), target, metadata={"format": "pt"})
    size = target.stat().st_size
    (out / "training.json").write_text(json.dumps(record | {"checkpoint_bytes": size}, indent=2) + "\n")
    return size


def optimiser(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, and a lower rate for the gates' own parameters."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for key, p in model.named_parameters():
        gate = key.endswith(("A_log", "dt_bias"))
        decay = 0.1 if p.ndim == 2 and not gate and "embed_tokens" not in key else 0.0
        groups.setdefault((0.3 if gate else 1.0, decay), []).append(p)
    settings = [{"params": ps, "lr": lr * s, "peak": lr * s, "weight_decay": d} for (s, d), ps in groups.items()]
    return torch.optim.AdamW(settings, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def train(args: argparse.Namespace) -> None:
    """Train one model until ``args.seconds`` after this call, evaluate and save it."""
    began, name, device = time.monotonic(), args.name, args.device
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    kernel = tiny_kernels.install(name, device)
    if args.require_fla and not kernel.startswith("fla"):
        raise SystemExit(f"{name}: delta rule on {kernel}, expected fla's chunk_kda; install fla-core and einops")
    earlier = {}
    if args.resume is None:
        model = arch.build(name)
        arch.initialise(model, name, args.seed)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
        earlier = {"continued_from": json.loads((args.resume / "training.json").read_text())}
        del earlier["continued_from"]["text"]
    model.to(device).train()
    load = lambda part: torch.from_numpy(np.load(args.text / f"{part}.npy")).to(device)  # noqa: E731
    tokens, held_out = load("train"), load("validation")
    generator = torch.Generator(device).manual_seed(args.seed + (1 if earlier else 0))  # new windows
    opt, parameters = optimiser(model, args.lr), list(model.parameters())
    loss_of(model, batch(tokens, args.batch, args.length, generator), device).backward()  # compiles the kernels
    opt.zero_grad(set_to_none=True)
    start = time.monotonic()
    record: dict[str, Any] = {
        "model": name,
        "parameters": sum(p.numel() for p in parameters),
        "seed": args.seed,
        "kernel": kernel,
        "torch": torch.__version__,
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "settings": {"batch": args.batch, "length": args.length, "lr": args.lr},
        "text": json.loads((args.text / "text.json").read_text()),
    } | earlier
    print(f"{name}: ready after {start - began:.0f} s, {tokens.numel():,} training tokens", flush=True)
    step, good, halfway, scale = 0, None, False, 1.0
    while (progress := (time.monotonic() - start) / (args.seconds - (start - began))) < 1 and step != args.steps:
        rate = scale * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in opt.param_groups:
            group["lr"] = group["peak"] * rate
        loss = loss_of(model, batch(tokens, args.batch, args.length, generator), device)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % args.log_every == 0:
            value = loss.item()
            if math.isfinite(value):
                good = [p.detach().clone() for p in parameters]
            elif good is not None:
                print(f"{name}: loss {value} at step {step}; back to the last good weights, rate halved", flush=True)
                with torch.no_grad():
                    for p, q in zip(parameters, good, strict=True):
                        p.copy_(q)
                opt, scale = optimiser(model, args.lr), scale / 2
            seconds = time.monotonic() - start
            speed = step * args.batch * args.length / seconds
            print(f"{name} {step} {seconds:.0f}s {value / LN2:.3f} bits {speed:,.0f} tokens/s", flush=True)
        if progress > 0.5 and not halfway:
            halfway = True
            state = evaluate(model, held_out, args.length, 16, device)
            save(model, name, args.seed, args.out, record | {"unfinished_after_steps": step} | state)
            print(name, "halfway:", json.dumps(state), flush=True)
    seconds = time.monotonic() - start
    seen = step * args.batch * args.length
    with torch.no_grad():
        for p in parameters:  # evaluate what is saved
            p.copy_(p.bfloat16().float())
    record |= {"steps": step, "tokens": seen, "seconds": round(seconds, 1), "tokens_per_second": round(seen / seconds)}
    record |= evaluate(model, held_out, args.length, args.segments, device)
    size = save(model, name, args.seed, args.out, record)
    print(f"{name}: {size:,} bytes", json.dumps({k: v for k, v in record.items() if k != "text"}), flush=True)


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    gather = sub.add_parser("gather", help="collect training text")
    gather.add_argument("--site", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    gather.add_argument("--max-bytes", type=int, default=400_000_000)
    gather.add_argument("--max-seconds", type=float, default=60.0)
    run = sub.add_parser("train", help="train one model")
    static = sub.add_parser("static", help="write config.json and the tokenizer")
    for p in (run, static):
        p.add_argument("name", choices=arch.NAMES)
    for p in (gather, run, static):
        p.add_argument("--out", type=Path, required=True)
    run.add_argument("--text", type=Path, required=True)
    run.add_argument("--resume", type=Path, help="checkpoint folder to continue from, with a new schedule")
    run.add_argument("--seconds", type=float, default=400.0, help="stop training this long after the start")
    run.add_argument("--steps", type=int, default=-1, help="stop after this many steps, if sooner")
    run.add_argument("--batch", type=int, default=8)
    run.add_argument("--length", type=int, default=4096)
    run.add_argument("--segments", type=int, default=64, help="held-out windows of the final evaluation")
    run.add_argument("--lr", type=float, default=2e-3)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-every", type=int, default=50)
    run.add_argument("--require-fla", action="store_true", help="stop rather than train on the slow fallback")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.command == "gather":
        print(json.dumps(tiny_text.gather(args.site, args.out, arch.SEPARATOR, args.max_bytes, args.max_seconds)))
    elif args.command == "static":
        arch.write_static(args.name, args.out)
    else:
        train(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
