"""What SGLang's scheduler does with slots while a forward still runs: pages as if the forward had ended first?

    python -m benchmarks.slot_order PLAN OUT.json      (needs a CUDA GPU, not SGLang)

A forward of six decode steps is held up on its stream; on the scheduler's, slot 4 is released, flushed, copied or
saved. Pages and table must be, bit by bit, those of the same calls one after the other; with the plugin's wait and
without it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stepquant.runtime.load import RankPlan, load_rank_plan
from stepquant.runtime.sglang import pool as hooks
from stepquant.runtime.sglang.state import Accept, PluginState, activate
from stepquant.runtime.sglang.versions import VERSIONS
from stepquant.runtime.slots import SlotStore

BATCH, TOKENS, BEFORE, STEPS, TRIES = 8, 19, 3, 9, 5
SLOT, TARGET = 4, 12
CYCLES = 200_000_000  # that the forward is held up, about 0.1 s: everything is launched by then
ACTIONS = ("release", "flush", "copy", "save")


class Forward:
    """A pool, and decode steps of a full batch on random tokens."""

    def __init__(self, rank: RankPlan, kernels: Any) -> None:
        g, generator = rank.plan.geometry, torch.Generator("cuda").manual_seed(1)
        heads, keys, key, value = g.num_heads, rank.num_key_heads, g.key_dim, g.value_dim
        self.layers, self.scale = rank.layout.num_layers, key**-0.5
        self.store = SlotStore(rank.layout, kernels, 2 * BATCH, BATCH, "cuda")
        self.slots = torch.arange(1, BATCH + 1, device="cuda", dtype=torch.int32)
        self.store.begin_extend(
            self.slots, self.slots, torch.zeros_like(self.slots), torch.full_like(self.slots, TOKENS)
        )
        for layer in range(self.layers):
            states = torch.randn(BATCH, heads, value, key, device="cuda", generator=generator) * 0.03
            self.store.extend_layer(layer, self.slots, states)
        gates = heads * (key if g.family == "kda" else 1)

        def half(*shape: int) -> Tensor:
            return torch.randn(BATCH, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        self.tokens = [
            [{"q": half(keys, key), "k": half(keys, key), "v": half(heads, value), "a": half(gates), "b": half(heads)}
             for _ in range(self.layers)] for _ in range(STEPS)
        ]  # fmt: skip
        self.shared = {"A_log": torch.zeros(heads, device="cuda"), "dt_bias": torch.full((gates,), -4.0, device="cuda")}
        self.out = half(heads, value)

    def run(self, first: int, last: int) -> None:
        """Decode steps `first` to `last`, on the current stream."""
        for step in self.tokens[first:last]:
            for layer, token in enumerate(step):
                self.store.decode(layer, self.slots, **token, **self.shared, scale=self.scale, out=self.out)


def pages_after(action: str, forward: Forward, beside: bool) -> tuple[Tensor, Tensor]:
    """Pages and table entries of the two slots after a forward and an action beside it, or after it."""
    running, scheduler, store = torch.cuda.Stream(), torch.cuda.Stream(), forward.store
    forward.run(0, BEFORE)
    torch.cuda.synchronize()
    pool = SimpleNamespace(**{hooks.STORE: store, "stepquant_stream": running})
    cache = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    slot, kept = torch.tensor([SLOT], device="cuda"), None
    with torch.cuda.stream(running):
        torch.cuda._sleep(CYCLES)
        forward.run(BEFORE, STEPS)
    if not beside:
        torch.cuda.synchronize()
    with torch.cuda.stream(scheduler):
        if action == "copy":
            hooks.copy(lambda *_: None, pool, slot, torch.tensor([TARGET], device="cuda"))
        elif action == "save":
            kept = hooks.save(lambda *_: None, pool, slot).packed.pages.clone()
        else:
            request = SimpleNamespace(mamba_pool_idx=slot[0])
            hooks._settle(cache, request, done=action == "release")
    torch.cuda.synchronize()
    some = [SLOT, TARGET]
    return store.pages[some].cpu() if kept is None else kept, store.table[:, some].cpu()


def main() -> None:
    """Every action with and without the wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    plan, out = args.plan, args.out
    rank = load_rank_plan(plan)
    kernels, waits, found = rank.kernels("cuda"), hooks.after_forwards, []
    activate(PluginState(plan, Accept(), VERSIONS["0.5.12"]))
    for action in ACTIONS:
        expected = pages_after(action, Forward(rank, kernels), beside=False)
        for name, wait in (("waits", waits), ("does not wait", lambda pool: None)):
            hooks.after_forwards = wait
            tries = [pages_after(action, Forward(rank, kernels), beside=True) for _ in range(TRIES)]
            equal = sum(all(map(torch.equal, one, expected)) for one in tries)
            found.append({"plan": plan.name, "action": action, "scheduler": name, f"equal_of_{TRIES}": equal})
            print(json.dumps(found[-1]), flush=True)
        hooks.after_forwards = waits
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
