"""Replay of the recurrence for state samples: launches, bytes and milliseconds of three ways to get the same states.

    python benchmarks/replay.py [--device cpu --heads 2 --length 256]

One layer, four segments, as many samples as a batch of the shipped recipes holds (8 of 64): `states_at` (whole chunks,
then one short chunk for all samples), `states_every` (a chunk every 8 updates), and token by token. Launches and bytes
are counted from torch's operations: outputs and inputs of every operation that is no view. Writes
results/replay_h200.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepquant.codec.chunks import states_at, states_every
from stepquant.codec.recurrence import step
from stepquant.files import write_json
from stepquant.run_record import machine

EVERY, BATCH, SAMPLES = 8, 4, 8
HEADS = {"gdn": 48, "kda": 32}


class Count(TorchDispatchMode):
    """Operations that launch a kernel on a GPU, and the bytes that they read and write: views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        held = {x.untyped_storage().data_ptr() for x in inputs}
        if any(x.untyped_storage().data_ptr() not in held for x in outputs):
            self.launches += 1
            self.bytes += sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
        return result


def draw(family: str, args: argparse.Namespace) -> tuple[list[Tensor], list[int], list[int]]:
    """k, v, log gates and betas of one layer, and the (segment, updates) of the samples."""
    g = torch.Generator(args.device).manual_seed(0)
    heads = args.heads or HEADS[family]
    shape = (BATCH, args.length, heads)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=g, device=args.device)

    k, v = (torch.randn(*shape, 128, generator=g, device=args.device) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    gate = -0.1 * rand(*shape, *([128] if family == "kda" else []))
    chosen = torch.randperm(BATCH * args.length // EVERY, generator=torch.Generator().manual_seed(1))[:SAMPLES].tolist()
    steps = args.length // EVERY
    return [k, v, gate, rand(*shape)], [c // steps for c in chosen], [(c % steps + 1) * EVERY for c in chosen]


def token_by_token(inputs: list[Tensor], rows: list[int], done: list[int]) -> Tensor:
    """The plain recurrence over all segments, states taken where they are wanted."""
    k, v, gate, beta = inputs
    state = k.new_zeros(BATCH, k.shape[2], 128, 128)
    found: dict[int, Tensor] = {}
    for t in range(max(done)):
        state, _ = step(state, k[:, t], k[:, t], v[:, t], gate[:, t], beta[:, t])
        found.update({i: state[row].clone() for i, (row, at) in enumerate(zip(rows, done, strict=True)) if at == t + 1})
    return torch.stack([found[i] for i in range(len(rows))])


def every_eight(inputs: list[Tensor], rows: list[int], done: list[int]) -> Tensor:
    """A chunk every `EVERY` updates, states taken where they are wanted."""
    found: dict[int, Tensor] = {}
    for reached, state in states_every(*inputs, EVERY):  # type: ignore[arg-type]
        found.update({i: state[row] for i, (row, at) in enumerate(zip(rows, done, strict=True)) if at == reached})
    return torch.stack([found[i] for i in range(len(rows))])


def measured(run: Callable[[], Tensor], repeats: int) -> dict[str, Any]:
    """Counts and the median time."""
    with Count() as count:
        run()
    seconds = []
    for _ in range(repeats):
        _wait()
        began = time.perf_counter()
        run()
        _wait()
        seconds.append(time.perf_counter() - began)
    middle = sorted(seconds)[len(seconds) // 2]
    return {"launches": count.launches, "gigabytes": round(count.bytes / 1e9, 3), "ms": round(1000 * middle, 3),
            "terabytes_per_second": round(count.bytes / middle / 1e12, 3)}  # fmt: skip


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "replay_h200.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "length": args.length, "batch": BATCH, "samples": SAMPLES}
    for family in HEADS:
        inputs, rows, done = draw(family, args)
        ways: dict[str, Callable[[], Tensor]] = {
            "states_at": lambda i=inputs, r=rows, d=done: states_at(*i, r, d),  # type: ignore[misc]
            "states_every": lambda i=inputs, r=rows, d=done: every_eight(i, r, d),  # type: ignore[misc]
            "token_by_token": lambda i=inputs, r=rows, d=done: token_by_token(i, r, d),  # type: ignore[misc]
        }
        expected = token_by_token([x.double() for x in inputs], rows, done)
        found[family] = {}
        for name, run in ways.items():
            error = float((run().double() - expected).norm() / expected.norm())
            found[family][name] = {**measured(run, 5 if name != "token_by_token" else 1), "relative_error": error}
            print(family, name, found[family][name], flush=True)
            write_json(args.out, found)


if __name__ == "__main__":
    main()
