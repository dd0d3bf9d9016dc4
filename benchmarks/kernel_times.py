"""Timing kernels by CUDA-graph replay over slot sets that do not fit in the cache; the calls of the packed kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.synthetic import Case
from stepquant.codegen.kernel_plan import KernelPlan, Launch
from stepquant.runtime.tuning import Call, graph_time
from stepquant.runtime.window import WindowBuffers, allocate_now
from stepquant.runtime.writeback import PAIRS, WritebackStream

L2_BYTES = 128 * 2**20  # a replay touches at least twice the L2 cache of an H200 before it comes back to a set
MOST_SETS = 128


def copy_bandwidth() -> float:
    """GB/s of a kernel that reads 2 GiB and writes as many (cudaMemcpy is slower on an H200)."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / graph_time([lambda: torch.neg(x, out=y)]) / 1e3


def set_count(bytes_of_a_set: int) -> int:
    """Disjoint slot sets so that all of them together exceed the L2 cache."""
    return min(MOST_SETS, max(8, -(-L2_BYTES // bytes_of_a_set)))


def slot_sets(count: int, batch: int) -> list[torch.Tensor]:
    order = torch.randperm(count * batch, device="cuda").int()
    return [order[i * batch : (i + 1) * batch].clone() for i in range(count)]


@dataclass
class PackedCalls:
    """Calls of one plan, window and batch, one for each slot set (and phase, where a batch has fewer than W)."""

    inline: list[Call]
    aside: list[Call] = field(default_factory=list)
    read: list[Call] = field(default_factory=list)
    fold: list[Call] = field(default_factory=list)
    make_list: Call = lambda: None
    bytes: float = 0.0


def packed_calls(
    case: Case, window: int, batch: int, launches: dict[str, Launch] | None = None, buffer: str = "fp16"
) -> PackedCalls:
    """The decode step of a plan: W = 1 updates pages, W > 1 reads them and folds one request in W."""
    kernels, page = case.kernels(window, buffer), int(case.layout.layer_bytes[0])
    kernels.launches.update(launches or {})
    moved = step_bytes(kernels, case, window)
    turns = window if batch < window else 1
    count = -(-max(set_count(page * batch), turns) // turns) * turns
    base = case.random_pages(min(count * batch, 64))
    pages = base.repeat(-(-count * batch // len(base)), 1)[: count * batch].contiguous()
    sets, t = slot_sets(count, batch), case.token(batch)
    if window == 1:
        return PackedCalls([lambda s=s: kernels.step(0, pages, s, **t) for s in sets], bytes=batch * moved)
    buffers = WindowBuffers.allocate(kernels.spec, count * batch, "cuda")
    for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios):
        x.copy_(torch.rand_like(x, dtype=torch.float32) * 0.1)
    pairs = [allocate_now(kernels.spec, batch, "cuda") for _ in range(PAIRS)]
    arguments = []
    for i, slots in enumerate(sets):
        rows = torch.arange(i * batch, (i + 1) * batch, device="cuda", dtype=torch.int32)
        phases = ((torch.arange(batch, device="cuda") + i) % window).int()
        k_now, u_now = pairs[i % PAIRS]
        own = replace(buffers, k_now=k_now, u_now=u_now)
        arguments.append((slots, own, rows, phases, kernels.list_folds(phases)))
    stream = WritebackStream()

    def read(i: int) -> None:
        slots, own, rows, phases, _ = arguments[i]
        kernels.read(0, pages, slots, **t, buffers=own, rows=rows, phases=phases, pending=phases)

    def fold(i: int) -> None:
        slots, own, rows, phases, folds = arguments[i]
        kernels.fold(0, pages, slots, own, rows, phases, phases, folds)

    def inline(i: int) -> None:
        read(i)
        fold(i)

    def aside(i: int) -> None:
        stream.before_read(i)
        read(i)
        with stream.fold(i):
            fold(i)
        if i == count - 1:
            stream.join()

    def each(call: Callable[[int], None]) -> list[Call]:
        return [lambda i=i: call(i) for i in range(count)]

    listed = lambda: kernels.list_folds(arguments[0][3])  # noqa: E731
    return PackedCalls(each(inline), each(aside), each(read), each(fold), listed, batch * moved)


def step_bytes(kernels: Any, case: Case, window: int) -> float:
    """Bytes of a request and step that have to move: pages, tokens, window buffers half full, folds once in W."""
    plan = KernelPlan.of(case.layout, kernels.spec, kernels.sources, "", "", "")
    moved = {v.name: v.bytes_read + v.bytes_written for v in plan.variants}
    return float(moved["step"] if window == 1 else moved["read"] + moved["fold"] / window)
