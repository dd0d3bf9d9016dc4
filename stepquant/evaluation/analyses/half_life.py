"""Accumulated INT6 state error against gate half-life (figures 1b and B1, appendix B.5).

After a boundary of two FP32 tokens a separate rowwise INT6 trajectory follows the reference keys, values and gates,
quantised at the boundary and after every update. For every unit u (a head in GDN, a key row in KDA)

    D_u = sum over streams and updates of || (Shat_t - S_t)_u ||_F^2,

against the half-life from calibration. The paper: Spearman's rho 0.800 (Qwen, heads) and 0.802 (KDA, rows); the
longest-lived quarter holds 52.5% and 78.8% of the error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepquant.codec.registry import make_codec
from stepquant.codec.spec import CodecSpec
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure, spearman
from stepquant.evaluation.decode import DecodeSettings, decode_steps, stream_groups
from stepquant.models.capture import DeltaTrace

BOUNDARY = 2
PAPER = {"gdn": {"spearman": 0.8004, "longest_quarter": 0.525}, "kda": {"spearman": 0.8017, "longest_quarter": 0.788}}


def analyse(run: AnalysisRun) -> Analysis:
    """Replay the INT6 trajectory of every layer and relate its error to the half-lives."""
    g, bits = run.plan.geometry, run.settings.bits or 6
    errors = torch.zeros(g.num_delta_layers, g.num_heads, g.key_dim, dtype=torch.float64)

    def observe(layer: int, trace: DeltaTrace) -> None:
        errors[layer] += accumulated_error(trace, bits).cpu()

    run.watch(observe, f"INT{bits} replay")
    units = errors.sum(-1) if g.family == "gdn" else errors
    life = run.half_lives
    curve = cumulative(life, units)
    longest = 1 - float(curve[_three_quarters(curve)])
    rho, paper = spearman(life, units), PAPER[g.family]
    numbers: dict[str, Any] = {
        "spearman": rho, "longest_quarter": longest, "units": units.numel(), "streams": run.streams.ids.shape[0],
        "updates": run.streams.ids.shape[1] - 1 - BOUNDARY, "bits": bits, "paper": paper,
        "half_life": life.flatten().tolist(), "error": units.flatten().tolist(), "cumulative": curve.tolist(),
    }  # fmt: skip
    what = "heads" if g.family == "gdn" else "key rows"
    headline = [
        f"Spearman's rho of half-life and accumulated INT{bits} error: {rho:.3f} over {units.numel():,} {what} "
        f"(paper {paper['spearman']:.3f})",
        f"the longest-lived quarter holds {100 * longest:.1f}% of the error "
        f"(paper {100 * paper['longest_quarter']:.1f}%)",
    ]
    return Analysis("half_life", numbers, headline, _figure(life, units, curve, rho))


def accumulated_error(trace: DeltaTrace, bits: int) -> Tensor:
    """Squared state error summed over streams, updates and value columns, `[H, K]` float64."""
    heads, rows, columns = trace.q.shape[2], trace.q.shape[3], trace.v.shape[3]
    device = trace.q.device
    table = torch.full((heads, rows), bits, dtype=torch.uint8, device=device)
    codec = make_codec(table, torch.ones(heads, rows, device=device), CodecSpec(kind="rowwise"), columns)
    total = torch.zeros(heads, rows, dtype=torch.float64, device=device)
    how = DecodeSettings(BOUNDARY)
    for _, part in stream_groups(trace):
        pairs = zip(decode_steps(part, codec, how), decode_steps(part, None, how), strict=True)
        for (_, _, fold), (_, _, truth) in pairs:
            if fold is not None and truth is not None and fold.tokens > BOUNDARY:
                total += (fold.state - truth.state).square_().sum((0, -1))
    return total


def cumulative(life: Tensor, error: Tensor) -> Tensor:
    """Share of all error in the shortest-lived r units of every group, r = 1 .. n.

    A group is a layer (units are heads) or a head (units are rows): the last axis of `life` and `error`.
    """
    order = life.argsort(-1)
    by_rank = error.gather(-1, order).flatten(0, -2).sum(0)
    return by_rank.cumsum(0) / by_rank.sum()


def _three_quarters(curve: Tensor) -> int:
    return curve.numel() * 3 // 4 - 1


def _figure(life: Tensor, error: Tensor, curve: Tensor, rho: float) -> Any:
    from plotly.subplots import make_subplots

    made = make_subplots(1, 2, subplot_titles=(f"Spearman's rho = {rho:.3f}", "cumulative, by half-life rank"))
    shown = error.flatten() > 1e-15
    made.add_scatter(x=life.flatten()[shown].tolist(), y=error.flatten()[shown].tolist(), mode="markers", name="unit",
                     marker={"size": 5, "opacity": 0.6}, row=1, col=1)  # fmt: skip
    ranks = [(i + 1) / curve.numel() for i in range(curve.numel())]
    made.add_scatter(x=ranks, y=curve.tolist(), mode="lines+markers", name="squared error", row=1, col=2)
    made.add_scatter(x=ranks, y=ranks, mode="lines", name="units", row=1, col=2)
    made.update_xaxes(type="log", title="gate half-life (tokens)", row=1, col=1)
    made.update_yaxes(type="log", title="accumulated squared state error", row=1, col=1)
    made.update_xaxes(title="share of units, shortest-lived first", row=1, col=2)
    made.update_yaxes(title="share of the error", row=1, col=2)
    base = figure("Accumulated state error against gate half-life", "", "")
    made.update_layout(title=base.layout.title, template="simple_white", width=1100, height=520)
    return made
