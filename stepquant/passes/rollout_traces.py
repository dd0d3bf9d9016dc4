"""Inputs of the rollouts: every layer's q, k, v and gates on the first tokens of a few segments, with sensitivities."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stepquant.geometry import Geometry
from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product
from stepquant.passes.spill import Fields, LayerStore
from stepquant.recipe import Recipe

SEGMENTS = 2  # evenly spaced among the calibration segments
PREFILL, DECODE = 128, 896  # tokens of a segment that run exactly, and beside the quantised recurrence
FIELDS = ("q", "k", "v", "log_gate", "beta", "sensitivity")


class RolloutTraces:
    """Inputs of every layer on the chosen pieces, `<field>.<layer>` `[S, T, H, ...]`, with F_t `[S, T, H]`."""

    name, version = "rollout_traces", 3
    reads: tuple[str, ...] = ("temporal.sensitivity", "seed")
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return context.recipe.temporal.weight == "rollout"

    def start(self, context: Context, place: Path | None = None) -> TraceObservation:
        return TraceObservation(context, place)


def trace_fields(recipe: Recipe, geometry: Geometry) -> Fields:
    """Dtypes and shapes of a layer's tensors."""
    pieces, tokens = min(SEGMENTS, recipe.data.segments), min(PREFILL + DECODE, recipe.data.length)
    shape = (pieces, tokens, geometry.num_heads)
    rows = (geometry.key_dim,)
    return {
        "q": (torch.float16, shape + rows), "k": (torch.float16, shape + rows),
        "v": (torch.float16, (*shape, geometry.value_dim)),
        "log_gate": (torch.float32, shape + rows if geometry.family == "kda" else shape),
        "beta": (torch.float32, shape), "sensitivity": (torch.float32, shape),
    }  # fmt: skip


class TraceObservation:
    """Keeps the first tokens of a few segments and the squared gradients of their heads' outputs."""

    def __init__(self, context: Context, place: Path | None) -> None:
        recipe, geometry = context.recipe, context.geometry
        total, fields = recipe.data.segments, trace_fields(recipe, geometry)
        pieces, self.tokens = fields["beta"][1][:2]
        self.kind = recipe.temporal.sensitivity
        self.chosen = [index * total // pieces for index in range(pieces)]
        self.store = LayerStore(place, geometry.num_delta_layers, fields, "inputs of the rollouts")

    @property
    def fresh(self) -> bool:
        """Nothing of an earlier run is there."""
        return self.store.fresh

    def wanted_segments(self, segments: range) -> list[int]:
        return [index for index in self.chosen if index in segments]

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        for chosen in self.wanted_segments(segments):
            one, row = chosen - segments.start, self.chosen.index(chosen)
            for name in FIELDS[:-1]:
                self.store.write(layer, name, row, getattr(trace, name)[one : one + 1, : self.tokens])
            if self.kind == "none":
                self.store.write(layer, "sensitivity", row, torch.ones_like(trace.beta[:1, : self.tokens]))

    def take_gradient(self, layer: int, segment: int, gradient: Tensor) -> None:
        sensitivity = 0.5 * gradient.square().mean(-1)
        self.store.write(layer, "sensitivity", self.chosen.index(segment), sensitivity.unsqueeze(0))

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """All of it is in the store."""

    def finish(self) -> Product:
        return self.store.finish({"segments": self.chosen})
