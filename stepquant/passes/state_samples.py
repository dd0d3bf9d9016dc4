"""State samples: reference states X_t every few updates, a seeded sample of them per layer (design 2.1).

Which (segment, update) pairs a layer keeps is drawn before the run, uniformly without replacement from all of them:
the distribution of a reservoir, but independent of the order in which batches arrive, and only the segments that
hold a sample are replayed, by the chunked form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepquant.codec.chunks import states_every
from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product


def draw_positions(segments: int, length: int, every: int, count: int, seed: int) -> Tensor:
    """Sorted distinct `[n, 2]` pairs (segment, updates done), n = min(count, segments * (length // every))."""
    steps = length // every
    total = segments * steps
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(total, generator=generator)[: min(count, total)].sort().values
    return torch.stack([chosen // max(steps, 1), (chosen % max(steps, 1) + 1) * every], 1)


class StateSamples:
    """FP32 states `states.<layer>` `[n, H, K, V]` and their positions."""

    name, version = "state_samples", 1
    reads: tuple[str, ...] = ("samples.every", "samples.per_layer", "seed")
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return True

    def start(self, context: Context) -> SampleObservation:
        return SampleObservation(context)


class SampleObservation:
    """Samples collected so far."""

    def __init__(self, context: Context) -> None:
        recipe, layers = context.recipe, context.geometry.num_delta_layers
        self.every = recipe.samples.every
        self.positions = [
            draw_positions(
                recipe.data.segments,
                recipe.data.length,
                self.every,
                recipe.samples.per_layer,
                recipe.seed * 100_003 + layer,
            )
            for layer in range(layers)
        ]
        g = context.geometry
        self.states = [torch.zeros(len(p), g.num_heads, g.key_dim, g.value_dim) for p in self.positions]

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        positions = self.positions[layer]
        here = (positions[:, 0] >= segments.start) & (positions[:, 0] < segments.stop)
        if not bool(here.any()):
            return
        rows = here.nonzero().flatten()
        local = (positions[rows, 0] - segments.start).tolist()
        used = sorted(set(local))
        stop = int(positions[rows, 1].max())
        wanted: dict[int, list[tuple[int, int]]] = {}
        for row, segment in zip(rows.tolist(), local, strict=True):
            wanted.setdefault(int(positions[row, 1]), []).append((row, used.index(segment)))
        pick = torch.tensor(used, device=trace.k.device)
        k, v, gate, beta = (x.detach()[pick, :stop].float() for x in (trace.k, trace.v, trace.log_gate, trace.beta))
        for done, states in states_every(k, v, gate, beta, self.every):
            for row, index in wanted.get(done, ()):
                self.states[layer][row] = states[index].cpu()

    def state(self) -> dict[str, Tensor]:
        return {f"states.{layer}": states for layer, states in enumerate(self.states)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.states = [state[f"states.{layer}"] for layer in range(len(self.states))]

    def finish(self) -> Product:
        tensors = self.state()
        tensors.update({f"positions.{layer}": p for layer, p in enumerate(self.positions)})
        return Product(tensors, {"per_layer": len(self.positions[0])})
