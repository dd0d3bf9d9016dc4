"""Reads of few requests, whose heads are shared by programs, over many steps in a CUDA graph with folds aside.

    python -m benchmarks.few_requests [--plans kimi_6bit,qwen_6bit,kimi_4bit,qwen_4bit]

Layers that are given the same must stay the same to the bit for 400 steps, or programs of a head have met; the counts
they wait by must be back at zero. Beside it how far whole heads are from parts: sums differ in their order, so that now
and then a code is its neighbour, and the two part.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.arguments import listed, need_gpu
from benchmarks.synthetic import PLANS, Case
from stepquant.runtime import step as runtime_step
from stepquant.runtime.window import WindowBuffers, allocate_now
from stepquant.runtime.writeback import PAIRS, WritebackStream

WINDOW, LAYERS, STEPS, BATCHES = 8, 6, 400, (1, 2, 5, 11)


def run(case: Case, batch: int) -> tuple[torch.Tensor, bool, torch.Tensor, int]:
    """Outputs of every step, whether all layers agreed in all of them, pages at the end, and counts that were left."""
    torch.manual_seed(batch)
    kernels, start = case.kernels(WINDOW), case.random_pages(batch)
    pages = [start.clone() for _ in range(LAYERS)]
    pairs = [allocate_now(kernels.spec, batch, "cuda") for _ in range(PAIRS)]
    buffers = []
    for i in range(LAYERS):
        k_now, u_now = pairs[i % PAIRS]
        buffers.append(replace(WindowBuffers.allocate(kernels.spec, batch, "cuda"), k_now=k_now, u_now=u_now))
    slots = torch.arange(batch, device="cuda", dtype=torch.int32)
    rows, phases = slots.clone(), (slots * 3 % WINDOW).int().clone()
    pending, token, stream = torch.zeros_like(phases), case.token(batch), WritebackStream()
    outs = [torch.empty_like(token["out"]) for _ in range(LAYERS)]

    def one_step() -> None:
        folds = kernels.list_folds(phases)
        for i in range(LAYERS):
            stream.before_read(i)
            given = {**token, "out": outs[i]}
            kernels.read(0, pages[i], slots, **given, buffers=buffers[i], rows=rows, phases=phases, pending=pending)
            with stream.fold(i):
                kernels.fold(0, pages[i], slots, buffers[i], rows, phases, pending, folds)
        stream.join()
        pending.copy_(torch.where(phases == WINDOW - 1, 0, pending + 1))
        phases.copy_((phases + 1) % WINDOW)

    before = [x.clone() for x in (phases, pending)]
    one_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    for x, y in zip((phases, pending), before, strict=True):
        x.copy_(y)
    for page in pages:
        page.copy_(start)
    found, alike = [], True
    generator = torch.Generator(device="cuda").manual_seed(7)
    for _ in range(STEPS):
        for name in "qkvab":
            x = token[name]
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype))
        graph.replay()
        alike &= all(torch.equal(outs[0], out) for out in outs[1:])
        found.append(outs[0].float())
    return torch.stack(found), alike, pages[0], int(kernels.arrivals.abs().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=listed(PLANS), default=list(PLANS))
    args = parser.parse_args()
    need_gpu(parser)
    choice = runtime_step.read_parts
    for name in args.plans:
        case = Case.make(name, 1, "cuda")
        for batch in BATCHES:
            runtime_step.read_parts = choice
            parts = run(case, batch)
            runtime_step.read_parts = lambda spec, batch: 1
            whole = run(case, batch)
            runtime_step.read_parts = choice
            error = ((parts[0] - whole[0]).flatten(1).norm(dim=1) / whole[0].flatten(1).norm(dim=1)).max()
            bytes_apart = (parts[2] != whole[2]).float().mean()
            print(
                f"{name}, batch {batch}: layers alike {parts[1]} (whole heads {whole[1]}), counts left {parts[3]}; an "
                f"output differs by {error:.1e} at most, {bytes_apart:.1e} of a page's bytes",
                flush=True,
            )
            assert parts[1], "programs of a head have met"
            assert parts[3] == 0, "a count is left"


if __name__ == "__main__":
    main()
