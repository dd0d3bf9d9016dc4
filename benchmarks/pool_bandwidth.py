"""What a pool does with whole slots, beside a copy kernel: pack, unpack, copy, clear and flush.

    python -m benchmarks.pool_bandwidth [--plans qwen_6bit,kimi_6bit] [--counts 1,8,64,512] [--out FILE]

GB/s of the bytes that have to move (a dense FP32 state and its page; a page read and written; a page written; a page
read and written and a window buffer read) and its share of what a copy kernel reaches on the same GPU in the same run.
One layer for pack and unpack, four for operations on slots, which cover all layers of a slot at once. `--device cpu`
tries it in Triton's interpreter (TRITON_INTERPRET=1): bytes and names are right there, times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import counts, listed, need_gpu
from benchmarks.kernel_times import copy_bandwidth, set_count
from benchmarks.synthetic import PLANS, Case
from stepquant.codegen.words import PLAIN
from stepquant.files import write_json
from stepquant.runtime.slots import PENDING, PHASE, ROW, SlotStore
from stepquant.runtime.tuning import graph_time
from stepquant.runtime.window import bytes_per_request

LAYERS, WINDOW = 4, 8
Work = tuple[list[Callable[[], Any]], int]  # calls of one operation on disjoint slots, and the bytes that one moves


def slot_work(store: SlotStore, count: int, sets: int) -> dict[str, Work]:
    """Operations on `count` slots of a pool that holds `2 count sets` of them, in use by running requests."""
    order = (torch.randperm(2 * count * sets, device=store.device) + 1).split(count)
    pairs = list(zip(order[::2], order[1::2], strict=True))
    rows = torch.arange(1, count + 1, dtype=torch.int32, device=store.device)
    full = torch.full_like(rows, WINDOW - 1)  # no numbers of the host in a graph
    window = bytes_per_request(store.kernels.spec) * LAYERS

    def flush(slots: torch.Tensor) -> None:
        store.table[ROW, slots], store.table[PHASE, slots], store.table[PENDING, slots] = rows, full, full
        store.flush(slots)

    def each(call: Callable[..., Any], both: bool) -> list[Callable[[], Any]]:
        return [lambda a=a, b=b: call(a, b) if both else call(a) for a, b in pairs]

    return {
        "copy": (each(store.copy, True), 2 * count * store.slot_bytes),
        "clear": (each(store.clear, False), count * store.slot_bytes),
        "flush": (each(flush, False), count * (2 * store.slot_bytes + window)),
    }


def dense_work(case: Case, count: int, sets: int) -> dict[str, Work]:
    """Pack and unpack of one layer."""
    kernels, device = case.kernels(WINDOW), case.device
    pages = case.random_pages(min(count * sets, 16)).repeat(-(-count * sets // 16), 1)[: count * sets].contiguous()
    states = torch.randn(sets, count, case.heads, case.K, case.V, device=device)
    slots = torch.randperm(count * sets, device=device).int().split(count)
    moved = count * (int(case.layout.sizes[0].sum()) + states[0, 0].nbytes)
    return {
        "pack": ([lambda i=i: kernels.pack(0, pages, slots[i], states[i], True) for i in range(sets)], moved),
        "unpack": ([lambda i=i: kernels.unpack(0, pages, slots[i], states[i], True) for i in range(sets)], moved),
    }


def measure(name: str, counts: list[int], device: str, copy: float) -> Iterator[dict[str, Any]]:
    """Rows of a plan: an operation and a number of slots each."""
    case = Case.make(name, LAYERS, device)
    for count in counts:
        sets = min(set_count(int(case.layout.layer_bytes.sum()) * count), 8) if device == "cuda" else 1
        store = SlotStore(case.layout, case.kernels(WINDOW), 2 * count * sets, count, device)
        for x in (b for buffers in store.buffers for b in buffers.arguments):
            x.copy_(torch.rand_like(x, dtype=torch.float32) * 0.1)
        for operation, (calls, moved) in (dense_work(case, count, sets) | slot_work(store, count, sets)).items():
            us = graph_time(calls) if device == "cuda" else _wall(calls)
            row: dict[str, Any] = {"plan": name, "operation": operation, "slots": count, "us": us}
            row["gb_s"] = moved / us / 1e3
            yield row | {"copy_share": row["gb_s"] / copy if copy else None}


def _wall(calls: list[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) * 1e6 / len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=listed(PLANS), default=["qwen_6bit", "kimi_6bit"])
    parser.add_argument("--counts", type=counts, default=[1, 8, 64, 512])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        need_gpu(parser)
    elif not PLAIN:
        parser.error("--device cpu runs in Triton's interpreter: set TRITON_INTERPRET=1")
    copy = copy_bandwidth() if args.device == "cuda" else 0.0
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    for name in args.plans:
        for row in measure(name, args.counts, args.device, copy):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.out:  # after every row: a run that is cut off leaves what it measured
                write_json(args.out, {"gpu": gpu, "copy_gb_s": copy, "rows": rows})


if __name__ == "__main__":
    main()
