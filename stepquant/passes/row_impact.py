"""Row impact: omega_i = E[g_{t,i}^2] with g_t = A_t^T q_t = D (q - beta k (k^T q)) (equations 10 and 20)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stepquant.codec.recurrence import transition_rows
from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product


class RowImpact:
    """One-step row impact of every key row of every value head, `[L, H, K]`."""

    name, version = "row_impact", 1
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return True

    def start(self, context: Context, place: Path | None = None) -> RowImpactObservation:
        return RowImpactObservation(context)


class RowImpactObservation:
    """Accumulators of `RowImpact`."""

    def __init__(self, context: Context) -> None:
        g = context.geometry
        self.total = torch.zeros(g.num_delta_layers, g.num_heads, g.key_dim, dtype=torch.float64)
        self.count = torch.zeros(g.num_delta_layers, dtype=torch.float64)

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        rows = transition_rows(trace.k.detach(), trace.q.detach(), trace.log_gate.detach(), trace.beta.detach())
        self.total[layer] += rows.square().sum((0, 1), dtype=torch.float64).cpu()
        self.count[layer] += rows.shape[0] * rows.shape[1]

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.total, self.count = state["total"], state["count"]

    def finish(self) -> Product:
        return Product({"omega": self.total / self.count.clamp_min(1).view(-1, 1, 1)})
