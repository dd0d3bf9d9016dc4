"""Gate statistics: mean log retention l_u = E[log r_{t,u}] over calibration tokens (equation 16).

A unit is a value head (GDN) or a key row (KDA). The lifetime weight L_u = sum_{j<H} exp(2 j l_u) (equation 7) is a
function of l_u and the horizon, computed where it is used, so that a new horizon reads no trace again.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product


def lifetime(mean_log_gate: Tensor, horizon: int) -> Tensor:
    """L = sum_{j<H} exp(2 j l) = expm1(2 H l) / expm1(2 l), and exactly H at l = 0 (equations 7 and 16).

    Args:
        mean_log_gate: l, at most 0, any shape.
        horizon: H, updates.
    """
    rate = 2.0 * mean_log_gate.double()
    ratio = torch.expm1(rate * horizon) / torch.expm1(rate)
    return torch.where(rate == 0, float(horizon), ratio)


def half_life(mean_log_gate: Tensor) -> Tensor:
    """tau = log 2 / (-l), tokens (appendix B.5); infinite at l = 0."""
    return math.log(2.0) / (-mean_log_gate.double())


class GateStatistics:
    """Sums of log gates, `[L, H]` or `[L, H, K]`, in float64."""

    name, version = "gate_statistics", 1
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return True

    def start(self, context: Context, place: Path | None = None) -> GateObservation:
        return GateObservation(context)


class GateObservation:
    """Accumulators of `GateStatistics`."""

    def __init__(self, context: Context) -> None:
        g = context.geometry
        shape = (g.num_delta_layers, g.num_heads) + ((g.key_dim,) if g.family == "kda" else ())
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.square = torch.zeros(shape, dtype=torch.float64)
        self.count = torch.zeros(g.num_delta_layers, dtype=torch.float64)

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        gates = trace.log_gate.detach().double().flatten(0, 1)
        self.total[layer] += gates.sum(0).cpu()
        self.square[layer] += gates.square().sum(0).cpu()
        self.count[layer] += gates.shape[0]

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "square": self.square, "count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.total, self.square, self.count = state["total"], state["square"], state["count"]

    def finish(self) -> Product:
        count = self.count.clamp_min(1).view(-1, *[1] * (self.total.dim() - 1))
        mean = self.total / count
        variance = (self.square / count - mean.square()).clamp_min(0)
        error = (variance / count).sqrt()  # of the mean, as if tokens were independent
        return Product({"mean_log_gate": mean, "standard_error": error}, {"tokens": int(self.count.max())})
