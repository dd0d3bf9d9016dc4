"""Does calibrated row impact say where errors matter (figure 2a, appendices B.3 and B.4)?

- Octiles: key rows are ranked within each head by calibrated omega and cut into eight groups; one group at a time is
  quantised to rowwise INT4 over the whole model, all other rows kept in FP32, and the rise of perplexity and the KL are
  measured in decode.
- Equal norm: an error of unit norm confined to row i costs g_{t,i}^2 at the next read. Its mean on held-out text,
  relative to the mean of the row's group, by octile of calibrated omega; a group is the integer rows of a head that
  share a precision, eight rows at least. The paper's highest-to-lowest ratios are 117.4 (Qwen) and 35.1 (KDA).
- The P90 / P10 ratio of omega within a head; the paper's median over Qwen's heads is 15.95.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepquant.codec.baselines import round_rows
from stepquant.codec.recurrence import transition_rows
from stepquant.codec.spec import PIVOT, levels
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure
from stepquant.evaluation.metrics import interval
from stepquant.evaluation.variants import Variant, named_variant
from stepquant.files import hash_tensors
from stepquant.models.capture import DeltaTrace

GROUPS = 8
LEAST_ROWS = 8
WARM_UP = 128  # updates before the first read that counts (B.3)
PAPER = {"gdn": 117.4, "kda": 35.1}


@dataclass(frozen=True)
class MaskedCodec:
    """Rowwise INT of the rows in `mask` `[H, K]`; the others stay as they are."""

    mask: Tensor
    bits: int

    def roundtrip(self, x: Tensor) -> Tensor:
        """States `[..., H, K, V]` with the masked rows quantised."""
        limit = torch.tensor(float(levels(self.bits)), device=x.device)
        return torch.where(self.mask.unsqueeze(-1), round_rows(x, limit), x)


@dataclass(frozen=True)
class MaskedVariant(Variant):
    """A variant that quantises only some rows of every layer: `rows` bool `[L, H, K]`."""

    rows: Tensor | None = None
    row_bits: int = 4

    @property
    def key(self) -> str:
        """Hash of everything that shapes its results."""
        assert self.rows is not None
        return hash_tensors({"rows": self.rows, f"masked INT{self.row_bits}": torch.zeros(0)})

    def codec(self, layer: int, device: torch.device) -> MaskedCodec:
        """The codec of one layer."""
        assert self.rows is not None
        return MaskedCodec(self.rows[layer].to(device), self.row_bits)


def analyse(run: AnalysisRun) -> Analysis:
    """Both experiments and the spread of omega."""
    octiles = octile_of_rank(run.impact)
    by_octile = _perplexity(run, octiles)
    equal = _equal_norm(run)
    spread = percentile_ratio(run.impact)
    family = run.plan.geometry.family
    numbers: dict[str, Any] = {
        "octiles": by_octile, "equal_norm": equal, "equal_norm_ratio": equal[-1] / equal[0],
        "paper_equal_norm_ratio": PAPER[family],
        "omega_p90_p10": {name: float(spread.quantile(q)) for name, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))},
    }  # fmt: skip
    low, high = by_octile[0], by_octile[-1]
    headline = [
        f"INT4 in the octile of highest impact costs {high['kl'] / low['kl']:.1f}x the KL of the lowest "
        f"({high['kl']:.2e} against {low['kl']:.2e}; perplexity x {1 + high['ppl_rise']:.5f} against x "
        f"{1 + low['ppl_rise']:.5f})",
        f"equal-norm readout error, highest over lowest octile: {equal[-1] / equal[0]:.1f} (paper {PAPER[family]})",
        f"omega P90 / P10 within a head: median {numbers['omega_p90_p10']['median']:.1f} (paper 15.95 for Qwen)",
    ]
    return Analysis("row_impact", numbers, headline, _figure(by_octile, equal))


def octile_of_rank(score: Tensor, groups: int = GROUPS) -> Tensor:
    """Group 0 .. groups - 1 of every entry by its rank along the last axis (near-equal groups, lowest first)."""
    rank = score.argsort(dim=-1, stable=True).argsort(-1)
    return rank * groups // score.shape[-1]


def percentile_ratio(omega: Tensor) -> Tensor:
    """P90 / P10 of omega over the rows of each head, `[L * H]`."""
    flat = omega.double().flatten(0, -2)
    return flat.quantile(0.9, -1) / flat.quantile(0.1, -1)


def _perplexity(run: AnalysisRun, octiles: Tensor) -> list[dict[str, Any]]:
    base = named_variant("fp32", run.plan)
    variants = [
        MaskedVariant(f"octile {n + 1}", base.geometry, base.spec, base.bits, base.w, rows=octiles == n,
                      row_bits=run.settings.bits or 4)
        for n in range(GROUPS)
    ]  # fmt: skip
    rows = []
    for number, result in enumerate(run.drift.evaluate(variants)):
        kl, excess = interval(result.figures.kl.mean(1)), interval(result.figures.excess_nll.mean(1))
        rows.append({
            "octile": number + 1, "kl": kl.mean, "kl_ci": _pair(kl.low, kl.high), "excess_nll": excess.mean,
            "excess_nll_ci": _pair(excess.low, excess.high), "ppl_rise": math.expm1(excess.mean),
        })  # fmt: skip
    return rows


def _pair(low: float, high: float) -> list[float] | None:
    return None if math.isnan(low) else [low, high]


def _equal_norm(run: AnalysisRun) -> list[float]:
    """Mean relative read error by octile of calibrated impact, within groups of rows of one head and precision."""
    total = torch.zeros_like(run.impact, dtype=torch.float64)

    def observe(layer: int, trace: DeltaTrace) -> None:
        rows = transition_rows(trace.k, trace.q, trace.log_gate, trace.beta)
        rows = rows[:, min(WARM_UP, rows.shape[1] // 4) :]
        total[layer] += rows.square().sum((0, 1), dtype=torch.float64).cpu()

    run.watch(observe, "held-out reads")
    return equal_norm_octiles(run.impact, total, run.plan.bits)


def equal_norm_octiles(calibrated: Tensor, held_out: Tensor, bits: Tensor) -> list[float]:
    """Held-out read error over its group's mean, by octile of the calibrated score, groups weighted equally.

    Args:
        calibrated, held_out: `[L, H, K]`.
        bits: precision map `[L, H, K]`; pivots and groups of fewer than eight rows are left out.
    """
    bins: list[Tensor] = []
    flat = [x.flatten(0, 1) for x in (calibrated, held_out, bits)]
    for score, error, precision in zip(*flat, strict=True):
        for value in precision.unique().tolist():
            inside = precision == value
            if value == PIVOT or int(inside.sum()) < LEAST_ROWS:
                continue
            group = octile_of_rank(score[inside])
            relative = error[inside] / error[inside].mean()
            bins.append(torch.stack([relative[group == n].mean() for n in range(GROUPS)]))
    return [float(x) for x in torch.stack(bins).mean(0)] if bins else [math.nan] * GROUPS


def _figure(octiles: list[dict[str, Any]], equal: list[float]) -> Any:
    right = {"overlaying": "y", "side": "right", "type": "log", "title": "relative read error"}
    made = figure("Row impact: INT4 in one octile at a time, and equal-norm read errors",
                  "octile of calibrated row impact", "KL (nats a token)", yaxis_type="log", yaxis2=right)  # fmt: skip
    x = list(range(1, GROUPS + 1))
    ci = [row["kl_ci"] or [row["kl"], row["kl"]] for row in octiles]
    made.add_scatter(x=x, y=[row["kl"] for row in octiles], mode="lines+markers", name="KL, INT4 in this octile",
                     error_y={"array": [c[1] - row["kl"] for c, row in zip(ci, octiles, strict=True)]})  # fmt: skip
    made.add_scatter(x=x, y=equal, mode="lines+markers", name="equal-norm read error", yaxis="y2")
    return made
