"""State samples: reference states X_t every few updates, a seeded sample of them per layer (design 2.1).

Which (segment, update) pairs a layer keeps is drawn before the run, uniformly without replacement from all of them:
the distribution of a reservoir, but independent of the order in which batches arrive, and only the segments that
hold a sample are replayed, by the chunked form (`codec.chunks.states_at`). Samples go to disk as they come.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stepquant.codec.chunks import states_at
from stepquant.geometry import Geometry
from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product
from stepquant.passes.spill import Fields, LayerStore
from stepquant.recipe import Recipe


def draw_positions(segments: int, length: int, every: int, count: int, seed: int) -> Tensor:
    """Sorted distinct `[n, 2]` pairs (segment, updates done), n = min(count, segments * (length // every))."""
    steps = length // every
    total = segments * steps
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(total, generator=generator)[: min(count, total)].sort().values
    return torch.stack([chosen // max(steps, 1), (chosen % max(steps, 1) + 1) * every], 1)


def sample_fields(recipe: Recipe, geometry: Geometry) -> Fields:
    """Dtypes and shapes of a layer's tensors."""
    count = min(recipe.samples.per_layer, recipe.data.segments * (recipe.data.length // recipe.samples.every))
    shape = (count, geometry.num_heads, geometry.key_dim, geometry.value_dim)
    return {"states": (torch.float32, shape), "positions": (torch.int64, (count, 2))}


class StateSamples:
    """FP32 states `states.<layer>` `[n, H, K, V]` and their positions `positions.<layer>` `[n, 2]`."""

    name, version = "state_samples", 2
    reads: tuple[str, ...] = ("samples.every", "samples.per_layer", "seed")
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return True

    def start(self, context: Context, place: Path | None = None) -> SampleObservation:
        return SampleObservation(context, place)


class SampleObservation:
    """Samples collected so far; they are in the store, in order of segments."""

    def __init__(self, context: Context, place: Path | None) -> None:
        recipe, layers = context.recipe, context.geometry.num_delta_layers
        fields = sample_fields(recipe, context.geometry)
        self.positions = [
            draw_positions(
                recipe.data.segments,
                recipe.data.length,
                recipe.samples.every,
                recipe.samples.per_layer,
                recipe.seed * 100_003 + layer,
            )
            for layer in range(layers)
        ]
        self.store = LayerStore(place, layers, fields, "state samples")
        self.fresh = self.store.fresh
        for layer, positions in enumerate(self.positions):
            self.store.write(layer, "positions", 0, positions)

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        positions = self.positions[layer]
        here = ((positions[:, 0] >= segments.start) & (positions[:, 0] < segments.stop)).nonzero().flatten()
        if not len(here):
            return
        rows, done = (positions[here, 0] - segments.start).tolist(), positions[here, 1].tolist()
        k, v, gate, beta = (x.detach().float() for x in (trace.k, trace.v, trace.log_gate, trace.beta))
        self.store.write(layer, "states", int(here[0]), states_at(k, v, gate, beta, rows, done))

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """All of it is in the store."""

    def finish(self) -> Product:
        return self.store.finish({"per_layer": len(self.positions[0])})
