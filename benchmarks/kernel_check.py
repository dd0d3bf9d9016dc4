"""Check the generated kernels at full size on one GPU; one command, JSON out.

    python benchmarks/kernel_check.py --out results.json [--plans qwen_6bit,...]

A process a plan, so that they compile side by side. Times are `benchmarks.state_update`'s.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arguments import listed, need_gpu
from benchmarks.synthetic import PLANS, Case
from stepquant.codec.recurrence import step
from stepquant.codec.window import WriteWindow
from stepquant.files import write_json
from stepquant.runtime.window import WindowBuffers

EPS = 2.0**-8  # outputs are bfloat16


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


def code_flips(case: Case, got: Tensor, state: Tensor) -> tuple[int, int]:
    """Codes of pages that differ from the torch codec's on `state`, and how many codes there are."""
    codec = case.torch_codec()
    want, have = codec.codec.fit(state.float()), codec.unpack_codes(got)
    integer = (case.bits[0] != 16).to(state.device)[None, :, :, None]
    return int(((want.codes != have.codes) & integer).sum()), int(integer.sum()) * case.V * len(got)


def check_steps(case: Case, results: dict, batches: tuple[int, ...] = (1, 3, 64, 512)) -> None:
    """Batches of 1, 3, 64 and 512, strided inputs, one padded row: output and codes of one step."""
    kernels, codec = case.kernels(), case.torch_codec()
    for batch in batches:
        count = batch + 3
        pages = case.random_pages(count)
        before = pages.clone()
        slots = torch.randperm(count, device=case.device)[:batch].int()
        if batch > 1:
            slots[1] = -1
        t = case.token(batch, torch.float32 if batch == 3 else torch.bfloat16)
        kernels.step(0, pages, slots, **t)
        live = (slots >= 0).nonzero().flatten()
        errors, flips, total = [], 0, 0
        for part in live.split(32):
            rows = slots[part].long()
            q, k, v, g, beta = (x[part] for x in case.exact(t))
            state, y = step(codec.unpack(before[rows]).double(), q, k, v, g, beta)
            errors.append(relative(t["out"][part], y))
            some = code_flips(case, pages[rows], state)
            flips, total = flips + some[0], total + some[1]
        others = torch.ones(count, dtype=torch.bool, device=case.device)
        others[slots[live].long()] = False
        results[f"step_{batch}"] = {
            "output_error": max(errors), "flipped_codes": flips / total,
            "padded_zero": bool((t["out"][slots < 0] == 0).all()),
            "others_untouched": torch.equal(pages[others], before[others]),
        }  # fmt: skip


def check_long(case: Case, results: dict, steps: int) -> None:
    """`steps` in a row, each against float64 from the kernel's own pages, and free-running beside torch's codec."""
    kernels, codec, batch = case.kernels(), case.torch_codec(), 3
    pages = case.random_pages(batch)
    slots = torch.arange(batch, device=case.device, dtype=torch.int32)
    exact = codec.unpack(pages).double()
    simulated, worst, sums = exact.float(), 0.0, torch.zeros(3, device=case.device, dtype=torch.float64)
    for _ in range(steps):
        t = case.token(batch, torch.float32)
        inputs = case.exact(t)
        _, y = step(codec.unpack(pages).double(), *inputs)
        kernels.step(0, pages, slots, **t)
        worst = max(worst, relative(t["out"], y))
        exact, y_exact = step(exact, *inputs)
        state, y_torch = step(simulated, *(x.float() for x in inputs))
        simulated = codec.codec.roundtrip(state)
        sums += torch.stack(
            [(t["out"] - y_exact).square().sum(), (y_torch - y_exact).square().sum(), y_exact.square().sum()]
        )
    kernel, torch_error = (sums[:2] / sums[2]).sqrt().tolist()
    results["long"] = {"steps": steps, "worst_step": worst, "kernel_drift": kernel, "torch_drift": torch_error,
                       "ratio": kernel / torch_error}  # fmt: skip


def check_big_pool(case: Case, results: dict) -> None:
    """The highest slot of a pool beyond 4 GiB."""
    kernels, codec = case.kernels(), case.torch_codec()
    count = 2**32 // int(case.layout.layer_bytes[0]) + 8
    pages = torch.zeros(count, int(case.layout.layer_bytes[0]), dtype=torch.uint8, device=case.device)
    pages[-1:] = case.random_pages(1)
    before, t = pages[-1:].clone(), case.token(1, torch.float32)
    kernels.step(0, pages, torch.tensor([count - 1], device=case.device, dtype=torch.int32), **t)
    _, y = step(codec.unpack(before).double(), *case.exact(t))
    results["big_pool"] = {
        "bytes": pages.numel(),
        "output_error": relative(t["out"], y),
        "others_zero": not bool(pages[:-1].any()),
        "written": not torch.equal(pages[-1:], before),
    }


def check_codec(case: Case, results: dict) -> None:
    """Pack and unpack against the torch codec, both state layouts."""
    kernels, codec, used = case.kernels(), case.torch_codec(), int(case.layout.sizes[0].sum())
    x = codec.unpack(case.random_pages(8)) + 1e-3 * torch.randn(8, case.heads, 128, 128, device=case.device)
    want, slots = codec.pack(x), torch.arange(8, device=case.device, dtype=torch.int32)
    for v_first in (False, True):
        state = x.transpose(-1, -2).contiguous() if v_first else x
        pages = torch.zeros_like(want)
        kernels.pack(0, pages, slots, state, v_first)
        back = torch.full_like(state, torch.nan)
        kernels.unpack(0, pages, slots, back, v_first)
        back = back.transpose(-1, -2) if v_first else back
        results[f"codec_{'vk' if v_first else 'kv'}"] = {
            "bytes_equal": float((pages == want)[:, :used].float().mean()),
            "flipped_codes": code_flips(case, pages, x)[0] / x.numel(),
            "unpack_error": relative(back, codec.unpack(pages)),
        }


def check_windows(case: Case, results: dict, window: int, buffer: str, batch: int = 24) -> None:
    """Requests at all phases of a window, step by step against the torch reference; folds against the torch codec."""
    kernels, codec, device = case.kernels(window, buffer), case.torch_codec(), case.device
    pages = case.random_pages(batch + 2)
    slots = torch.randperm(batch + 2, device=device)[:batch].int()
    buffers = WindowBuffers.allocate(kernels.spec, batch, device)
    for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios, buffers.k_now, buffers.u_now):
        x.fill_(torch.nan if x.is_floating_point() else 99)
    rows = torch.randperm(batch, device=device).int()
    phases = (torch.arange(batch, device=device) % window).int()
    pending, worst, flips, total = torch.zeros_like(phases), 0.0, 0, 0
    groups = [(phases == p).nonzero().flatten() for p in range(window)]
    windows = [WriteWindow(window, buffer, p) for p in range(window)]
    bases = [codec.unpack(pages[slots[g].long()]) for g in groups]
    for _ in range(2 * window + 1):
        t = case.token(batch)
        inputs = case.exact(t, torch.float32)
        kernels.window_step(0, pages, slots, **t, buffers=buffers, rows=rows, phases=phases, pending=pending)
        for i, g in enumerate(groups):
            state, y, new = windows[i].step(bases[i], *(x[g] for x in inputs))
            worst = max(worst, relative(t["out"][g], y))
            bases[i] = state
            if new:
                some = code_flips(case, pages[slots[g].long()], state)
                flips, total = flips + some[0], total + some[1]
                bases[i] = codec.unpack(pages[slots[g].long()])
        pending = torch.where(phases == window - 1, 0, pending + 1).int()
        phases = ((phases + 1) % window).int()
    results[f"window_{window}_{buffer}"] = {"output_error": worst, "flipped_codes": flips / total}


def parts(case: Case, steps: int) -> dict[str, Callable[[dict], None]]:
    """What is checked of a plan, each in a process of its own."""
    return {
        "steps": lambda r: (check_steps(case, r), check_big_pool(case, r)),
        "long": lambda r: check_long(case, r, steps),
        "codec": lambda r: check_codec(case, r),
        "window 8 fp16": lambda r: check_windows(case, r, 8, "fp16"),
        "window 8 bf16": lambda r: check_windows(case, r, 8, "bf16"),
        "window 4 int8": lambda r: check_windows(case, r, 4, "int8"),
    }


def check(name: str, part: str, steps: int) -> dict:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    case, results, start = Case.make(name, 1, "cuda"), {}, time.time()
    parts(case, steps)[part](results)
    return results | {f"seconds of {part}": time.time() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="kernel_check.json")
    parser.add_argument("--plans", type=listed(PLANS), default=list(PLANS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--one", help="check one part of a plan, PLAN:PART, and print JSON (used by the command itself)"
    )
    args = parser.parse_args()
    need_gpu(parser)
    if args.one:
        print(json.dumps(check(*args.one.split(":"), args.steps)))
        return
    plans = args.plans
    results: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "check": {}}
    command = [sys.executable, __file__, "--steps", str(args.steps), "--one"]
    names = list(parts(Case.make(plans[0], 1, "cpu"), 0))
    jobs = {
        (plan, part): subprocess.Popen([*command, f"{plan}:{part}"], stdout=subprocess.PIPE, text=True)
        for part in names
        for plan in plans
    }
    for (plan, part), job in jobs.items():
        text, _ = job.communicate()
        found = json.loads(text.splitlines()[-1]) if job.returncode == 0 else {part: "failed"}
        results["check"].setdefault(plan, {}).update(found)
        print(plan, part, json.dumps(found), flush=True)
        write_json(Path(args.out), results)  # a run that is cut off leaves what it checked


if __name__ == "__main__":
    main()
