"""Output sensitivity F_h: increase of the model's KL per unit of squared output error of a head (design 2.5 a).

``gradient``: to second order KL = 1/2 E[(g . dy)^2] with g = dL/dy of the model's own sampled next tokens (the Fisher
information; labels drawn from the model, not the text). Errors of different elements are taken as uncorrelated, so
F_h = 1/2 E[g^2], one backward a segment, no noise to average out, every head at once.

``local``: no backward through the model. Within each layer the same product of a random unit cotangent, from the
module's output (in units of the residual stream's RMS) back to y through output projection, gate and norm. It knows
how a head's output enters the residual stream, not what later layers make of it.

How gradients are had is in `stepquant.passes.gradients`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product

GRADIENT_TOKENS = 8192  # enough for second moments a head; a backward pass costs three forwards


class Sensitivity:
    """`sensitivity` `[L, H]`, of one squared output element a token; nats for ``gradient``, relative for ``local``."""

    name, version = "sensitivity", 2
    reads: tuple[str, ...] = ("temporal.sensitivity", "seed")
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return context.recipe.temporal.sensitivity != "none"

    def start(self, context: Context, place: Path | None = None) -> SensitivityObservation:
        return SensitivityObservation(context)


class SensitivityObservation:
    """Sums of squared gradients at every head's output, over the first segments."""

    def __init__(self, context: Context) -> None:
        g, self.kind = context.geometry, context.recipe.temporal.sensitivity
        self.tokens = context.recipe.data.length
        self.segments = -(-GRADIENT_TOKENS // self.tokens)
        self.total = torch.zeros(g.num_delta_layers, g.num_heads, dtype=torch.float64)
        self.count = torch.zeros(g.num_delta_layers, dtype=torch.float64)

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        """Traces say nothing about sensitivity."""

    def wanted_segments(self, segments: range) -> list[int]:
        return [segment for segment in segments if segment < self.segments]

    def take_gradient(self, layer: int, segment: int, gradient: Tensor) -> None:
        self.total[layer] += gradient.square().sum((0, 2), dtype=torch.float64).cpu()
        self.count[layer] += gradient.shape[0] * gradient.shape[2]

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.total, self.count = state["total"], state["count"]

    def finish(self) -> Product:
        return Product({"sensitivity": 0.5 * self.total / self.count.clamp_min(1).view(-1, 1)}, {"kind": self.kind})
