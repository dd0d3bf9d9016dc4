"""Outliers of key rows and value columns, and how they persist (figures 2b and 2c, appendix B.6).

Contrast of an axis: the largest RMS of its channels over their median RMS. The paper: medians of 10.3 (rows) and 19.4
(columns) on Qwen with both above 3 in 98.6% of snapshots; 12.7 and 5.4 on KDA with 84.9%.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stepquant.codec.chunks import states_every
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure, quantiles
from stepquant.models.capture import DeltaTrace

EVERY = 64  # updates between two states that are looked at
SNAPSHOTS = (128, 512, 2048)
CLEAR = 3.0
PAPER = {"gdn": (10.3, 19.4, 0.986), "kda": (12.7, 5.4, 0.849)}


def analyse(run: AnalysisRun) -> Analysis:
    """Contrasts of every head's state at the snapshot positions, and one head's profiles over time."""
    length = run.streams.ids.shape[1] - 1
    positions = sorted({min(p, length) // EVERY * EVERY for p in SNAPSHOTS if p // EVERY} - {0})
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    profiles: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    sharpest = (0.0, torch.zeros(1), (0, 0))
    first = True

    def observe(layer: int, trace: DeltaTrace) -> None:
        nonlocal sharpest
        for done, state in states_every(trace.k, trace.v, trace.log_gate, trace.beta, EVERY):
            row, column = rms_profiles(state)
            if first:
                for head in range(state.shape[1]):
                    profiles.setdefault((layer, head), []).append((row[0, head].cpu(), column[0, head].cpu()))
            if done not in positions:
                continue
            rows.append(contrast(row).flatten().cpu())
            columns.append(contrast(column).flatten().cpu())
            both = torch.minimum(contrast(row), contrast(column))[0]
            best = int(both.argmax())
            if first and float(both[best]) > sharpest[0]:
                sharpest = (float(both[best]), state[0, best].abs().cpu().clone(), (layer, best))

    for stream in run.streams.ids[:, :-1]:
        run.watch(observe, "states", stream.unsqueeze(0))
        first = False
    return _analysis(run, torch.cat(rows), torch.cat(columns), positions, sharpest[1], sharpest[2], profiles)


def rms_profiles(state: Tensor) -> tuple[Tensor, Tensor]:
    """RMS of key rows `[..., K]` and of value columns `[..., V]` of states `[..., K, V]`."""
    square = state.double().square()
    return square.mean(-1).sqrt(), square.mean(-2).sqrt()


def contrast(rms: Tensor) -> Tensor:
    """Largest over median RMS of the last axis (the median by linear interpolation)."""
    return rms.amax(-1) / rms.quantile(0.5, -1).clamp_min(1e-30)


def _analysis(
    run: AnalysisRun, rows: Tensor, columns: Tensor, positions: list[int], surface: Tensor, where: tuple[int, int],
    profiles: dict[tuple[int, int], list[tuple[Tensor, Tensor]]],
) -> Analysis:  # fmt: skip
    family = run.plan.geometry.family
    both = float(((rows > CLEAR) & (columns > CLEAR)).double().mean())
    over_time = profiles[where]
    persistence = [_persistence([profile[axis] for profile in over_time]) for axis in (0, 1)]
    numbers: dict[str, Any] = {
        "snapshots": rows.numel(), "positions": positions, "both_above_3": both,
        "row_contrast": dict(zip(("p10", "median", "p90"), quantiles(rows, (0.1, 0.5, 0.9)), strict=True)),
        "column_contrast": dict(zip(("p10", "median", "p90"), quantiles(columns, (0.1, 0.5, 0.9)), strict=True)),
        "paper": dict(zip(("row_contrast", "column_contrast", "both_above_3"), PAPER[family], strict=True)),
        "shown": {"layer": run.plan.geometry.layers[where[0]], "head": where[1]},
        "top8_kept_rows": persistence[0], "top8_kept_columns": persistence[1],
    }  # fmt: skip
    headline = [
        f"median contrast: key rows {numbers['row_contrast']['median']:.1f}, value columns "
        f"{numbers['column_contrast']['median']:.1f} (paper {PAPER[family][0]} and {PAPER[family][1]})",
        f"both above 3 in {100 * both:.1f}% of {rows.numel():,} snapshots (paper {100 * PAPER[family][2]:.1f}%)",
        f"of the 8 largest rows and columns of the head shown, {100 * persistence[0]:.0f}% and "
        f"{100 * persistence[1]:.0f}% are among the 8 largest again 64 tokens later",
    ]
    return Analysis("geometry", numbers, headline, _figure(surface, over_time, numbers["shown"]))


def _persistence(profiles: list[Tensor]) -> float:
    """Mean share of the eight largest channels that are among the eight largest at the next look."""
    tops = [set(p.topk(min(8, p.numel())).indices.tolist()) for p in profiles]
    kept = [len(a & b) / len(a) for a, b in pairwise(tops)]
    return sum(kept) / len(kept) if kept else 1.0


def _figure(surface: Tensor, over_time: list[tuple[Tensor, Tensor]], shown: dict[str, int]) -> Any:
    from plotly.subplots import make_subplots

    titles = ("|S| (one head)", "row RMS over median, by time", "column RMS over median, by time")
    made = make_subplots(1, 3, specs=[[{"type": "surface"}, {}, {}]], subplot_titles=titles)
    made.add_surface(z=surface.tolist(), showscale=False, colorscale="Greens", row=1, col=1)
    for axis, column in ((0, 2), (1, 3)):
        table = torch.stack([p[axis] / p[axis].quantile(0.5).clamp_min(1e-30) for p in over_time], -1)
        made.add_heatmap(z=table.clamp_max(10).tolist(), x=[EVERY * (i + 1) for i in range(table.shape[1])],
                         colorscale="Viridis", showscale=column == 3, row=1, col=column)  # fmt: skip
        made.update_xaxes(title="tokens", row=1, col=column)
    base = figure(f"State geometry: layer {shown['layer']}, head {shown['head']}", "", "")
    made.update_layout(title=base.layout.title, template="simple_white", width=1300, height=520)
    return made
