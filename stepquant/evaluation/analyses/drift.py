"""Prefill against decode (appendix B.2): what packing once costs, and what requantising at every step adds.

The prefill is exact, so its predictions are the reference's. From its end on, three ways: rowwise INT packed once at
the boundary and kept in FP32 from there, the same rewritten after every token, and the plan. The paper reports mean
excess NLL over the first and last 256 compressed reads: 0.102 to 2.102 (Qwen INT6), 0.0228 to 0.1422 (KDA INT6).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepquant.codec.registry import StateCodec
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure
from stepquant.evaluation.metrics import EDGE
from stepquant.evaluation.variants import Variant, from_plan, named_variant
from stepquant.files import hash_tensors

BLOCK = 64  # tokens averaged for the curve


@dataclass
class OnceCodec:
    """Quantises the first state it is given, the packed boundary, and lets later ones pass."""

    codec: StateCodec
    every: int
    calls: int = 0

    def roundtrip(self, x: Tensor) -> Tensor:
        """The first of every `every` calls goes through the codec."""
        first = self.calls % self.every == 0
        self.calls += 1
        return self.codec.roundtrip(x) if first else x


@dataclass(frozen=True)
class OnceVariant(Variant):
    """A variant whose state is packed at the boundary only; `updates` decode tokens follow it."""

    updates: int = field(default=0)

    @property
    def key(self) -> str:
        """Hash of everything that shapes its results."""
        return hash_tensors({"bits": self.bits, f"once {self.spec}": torch.zeros(0)})

    def codec(self, layer: int, device: torch.device) -> StateCodec | None:
        """The codec of one layer: a stream is a boundary and its updates."""
        inner = super().codec(layer, device)
        return None if inner is None else OnceCodec(inner, self.updates + 1)


def analyse(run: AnalysisRun) -> Analysis:
    """Drift of the three variants over the decode tokens."""
    bits = run.settings.bits or 6
    every = named_variant(f"int{bits}", run.plan)
    once = OnceVariant(f"int{bits}, packed once", every.geometry, every.spec, every.bits, every.w,
                       updates=run.streams.decode)  # fmt: skip
    results = run.drift.evaluate([every, once, from_plan(run.plan)])
    rows = [result.row() for result in results]
    curves = {r.variant.name: _blocks(r.figures.kl) for r in results}
    numbers: dict[str, Any] = {"rows": rows, "block": BLOCK, "kl_curves": curves}
    edge = min(EDGE, results[0].figures.kl.shape[1])
    headline = [
        f"{row['variant']}: KL {row['kl_first']:.2e} over the first {edge}, "
        f"{row['kl_last']:.2e} over the last; "
        f"excess NLL {row['excess_nll_first']:+.4f} to {row['excess_nll_last']:+.4f}"
        for row in rows
    ]
    return Analysis("drift", numbers, headline, _figure(curves))


def _blocks(kl: Tensor) -> list[float]:
    """Mean over streams and blocks of tokens; a shorter rest is left out unless it is all there is."""
    mean = kl.mean(0)
    size = min(BLOCK, mean.numel())
    return [float(x) for x in mean[: mean.numel() // size * size].view(-1, size).mean(1)]


def _figure(curves: dict[str, list[float]]) -> Any:
    made = figure("Drift in decode after an exact prefill", "tokens after the prefill", "KL (nats a token)",
                  yaxis_type="log")  # fmt: skip
    for name, curve in curves.items():
        made.add_scatter(x=[BLOCK * (i + 1) for i in range(len(curve))], y=curve, name=name, mode="lines+markers")
    return made
