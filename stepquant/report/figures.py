"""The figures of a report, as plotly JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stepquant.passes.gate_statistics import half_life
from stepquant.plan import LayoutPlan
from stepquant.report.evidence import Evidence, number
from stepquant.report.style import (
    ACCENT,
    MUTED,
    PRECISION_COLOURS,
    SCALE,
    SECOND,
    THIRD,
    figure_json,
    layout,
    plain,
    precision_name,
)
from stepquant.report.tradeoff import Tradeoff

MOST_POINTS = 6000  # of a scatter; more are thinned out evenly at random, with a fixed seed
Figure = dict[str, Any]


def bits_map(plan: LayoutPlan) -> Figure:
    """Precision of every head: one colour a precision where a head has one, mean bits where its rows differ."""
    by_head = bool((plan.bits == plan.bits[..., :1]).all())
    trace = _head_map(plan) if by_head else _mean_map(plan)
    layers, heads = plan.bits.shape[:2]
    gap = 1 if max(layers, heads) <= 64 else 0
    trace |= {"type": "heatmap", "x": list(range(heads)), "y": list(range(layers)), "xgap": gap, "ygap": gap}
    every = -(-layers // 24)
    y = {"title": "layer of the model", "autorange": "reversed", "showgrid": False, "tickmode": "array",
         "tickvals": list(range(0, layers, every)),
         "ticktext": [str(i) for i in plan.geometry.layers[::every]]}  # fmt: skip
    x = {"title": "value head", "showgrid": False}
    return figure_json([trace], layout(120 + max(130, min(620, 11 * layers if layers > 12 else 26 * layers)), x, y))


def _counts(plan: LayoutPlan, layer: int, head: int) -> str:
    values, counts = plan.bits[layer, head].unique(return_counts=True)
    return ", ".join(f"{int(n)} x {precision_name(int(b))}" for b, n in zip(values, counts, strict=True))


def _head_map(plan: LayoutPlan) -> Figure:
    bits = plan.bits[..., 0]
    found = sorted(int(b) for b in bits.unique())
    index = torch.zeros(64, dtype=torch.int64)
    index[found] = torch.arange(len(found))
    scale: list[list[Any]] = []
    for i, b in enumerate(found):
        scale += [[i / len(found), PRECISION_COLOURS[b]], [(i + 1) / len(found), PRECISION_COLOURS[b]]]
    text = [[f"layer {layer}, head {h}: {precision_name(int(b))}" for h, b in enumerate(row)]
            for layer, row in zip(plan.geometry.layers, bits, strict=True)]  # fmt: skip
    return {
        "z": index[bits.long()].tolist(), "zmin": -0.5, "zmax": len(found) - 0.5, "colorscale": scale, "text": text,
        "hovertemplate": "%{text}<extra></extra>",
        "colorbar": {**_COLORBAR, "tickvals": list(range(len(found))), "ticktext": [precision_name(b) for b in found]},
    }  # fmt: skip


def _mean_map(plan: LayoutPlan) -> Figure:
    mean = plan.bits.double().mean(-1)
    text = [[f"layer {layer}, head {h}: {_counts(plan, i, h)}" for h in range(plan.bits.shape[1])]
            for i, layer in enumerate(plan.geometry.layers)]  # fmt: skip
    return {
        "z": [[round(float(m), 3) for m in row] for row in mean], "colorscale": SCALE, "text": text,
        "hovertemplate": "%{text}<br>mean %{z:.2f} bits<extra></extra>",
        "colorbar": {**_COLORBAR, "title": {"text": "mean bits", "side": "right"}},
    }  # fmt: skip


_COLORBAR: Figure = {"thickness": 12, "outlinewidth": 0, "len": 1.0, "tickfont": {"color": MUTED}}


def thinned(count: int, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Indices of at most `most` of `count` points, always the same ones, ascending."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def half_lives(evidence: Evidence) -> tuple[Figure, dict[str, Any]] | None:
    """Half-life of every unit against its precision, with medians; and facts for the caption. None without tables."""
    plan = evidence.plan
    if "gate_statistics" not in evidence.products:
        return None
    life = half_life(evidence.products["gate_statistics"]["mean_log_gate"])
    by_head = life.dim() == 2 and bool((plan.bits == plan.bits[..., :1]).all())
    bits = plan.bits[..., 0] if by_head else plan.bits
    if life.dim() < bits.dim():
        life = life.unsqueeze(-1)
    if life.dim() != bits.dim() or any(n not in (1, m) for n, m in zip(life.shape, bits.shape, strict=True)):
        evidence.notes["half_lives"] = "The gate statistics are of another shape than the plan."
        return None
    lives, precisions = life.expand(bits.shape).flatten().numpy(), bits.flatten().numpy()
    finite = np.isfinite(lives) & (lives > 0)
    found = sorted(int(b) for b in np.unique(precisions))
    shown = thinned(len(lives))
    shown = shown[finite[shown]]
    jitter = np.random.default_rng(1).uniform(-0.32, 0.32, len(lives))
    traces: list[Any] = []
    for position, b in enumerate(found):
        of = shown[precisions[shown] == b]
        traces.append({
            "type": "scatter", "mode": "markers", "name": precision_name(b), "x": _short(lives[of]),
            "y": (position + jitter[of]).round(3).tolist(),
            "marker": {"color": PRECISION_COLOURS[b], "size": 5 if len(shown) > 1500 else 7, "opacity": 0.8,
                       "line": {"width": 0.4, "color": MUTED}},
            "hovertemplate": precision_name(b) + ", half-life %{x:.3g} tokens<extra></extra>",
        })  # fmt: skip
    medians = [float(np.median(lives[finite & (precisions == b)])) if (finite & (precisions == b)).any() else None
               for b in found]  # fmt: skip
    traces.append({
        "type": "scatter", "mode": "markers", "name": "median", "x": medians, "y": list(range(len(found))),
        "marker": {"symbol": "line-ns", "size": 34, "color": THIRD, "line": {"width": 3, "color": THIRD}},
        "hovertemplate": "median half-life %{x:.3g} tokens<extra></extra>",
    })  # fmt: skip
    y = {"tickmode": "array", "tickvals": list(range(len(found))), "ticktext": [precision_name(b) for b in found],
         "range": [-0.6, len(found) - 0.4], "showgrid": False}  # fmt: skip
    look = layout(120 + 74 * len(found), {"title": "half-life of the gate, tokens", "type": "log", **_DECADES}, y)
    facts = {"unit": "head" if by_head else "row", "units": len(lives), "shown": len(shown),
             "infinite": int((~finite).sum()),
             "medians": {precision_name(b): m for b, m in zip(found, medians, strict=True)}}  # fmt: skip
    return figure_json(traces, look), facts


_DECADES: Figure = {"dtick": 1, "tickformat": "~g"}


def _short(values: NDArray[np.float64]) -> list[float]:
    """Four significant digits: the page needs no more, and is smaller for it."""
    return [float(f"{v:.4g}") for v in values]


def distortion(plan: LayoutPlan) -> Figure | None:
    """Predicted cost by layer."""
    costs = [number(c) for c in plan.predicted.get("by_layer") or ()]
    if len(costs) != plan.geometry.num_delta_layers or None in costs:
        return None
    names = [str(i) for i in plan.geometry.layers]
    bar = {"type": "bar", "x": names, "y": costs, "marker": {"color": ACCENT},
           "hovertemplate": "layer %{x}: %{y:.4g} a token<extra></extra>"}  # fmt: skip
    x = {"title": "layer of the model", "type": "category", "showgrid": False}
    return figure_json([bar], layout(280, x, {"title": "predicted cost a token", "rangemode": "tozero"}))


def pareto(curve: Tradeoff) -> Figure:
    """Predicted cost against nominal bits, the plan, and uniform precisions."""
    keep = curve.costs > 0
    traces: list[Any] = [
        {"type": "scatter", "mode": "lines", "name": "best at every budget", "x": _short(curve.bits[keep]),
         "y": _short(curve.costs[keep]), "line": {"color": ACCENT, "width": 2},
         "hovertemplate": "%{x:.3f} bits: %{y:.4g}<extra></extra>"}
    ]  # fmt: skip
    uniform = [(b, c) for b, c in curve.uniform if c > 0]
    traces.append({
        "type": "scatter", "mode": "markers", "name": "one precision everywhere, no pivots",
        "x": [b for b, _ in uniform], "y": [c for _, c in uniform],
        "marker": {"color": MUTED, "size": 9, "symbol": "square"},
        "hovertemplate": "uniform %{x} bits: %{y:.4g}<extra></extra>",
    })  # fmt: skip
    traces.append({
        "type": "scatter", "mode": "markers", "name": "this plan", "x": [curve.chosen[0]], "y": [curve.chosen[1]],
        "marker": {"color": SECOND, "size": 15, "symbol": "star", "line": {"width": 1, "color": MUTED}},
        "hovertemplate": "this plan, %{x:.3f} bits: %{y:.4g}<extra></extra>",
    })  # fmt: skip
    x, y = {"title": "nominal bits a value"}, {"title": "predicted cost a token", "type": "log", **_DECADES}
    return figure_json(traces, layout(360, x, y, showlegend=True))


def slot_bytes(summary: dict[str, Any]) -> Figure:
    """One slot: FP32, BF16 and the plan's parts, MiB."""
    size = summary["bytes_per_request"]
    names = ["this plan", "BF16", "FP32"]
    parts = [("codes", ACCENT), ("scales", THIRD), ("pivots", SECOND), ("padding", MUTED)]
    full = {"state": ([None, size["fp32"] / 2, size["fp32"]], "#9aa3ad")}
    columns = {**{n: ([size[n], None, None], c) for n, c in parts if size[n]}, **full}
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": names,
         "x": [None if v is None else round(v / 2**20, 4) for v in values], "marker": {"color": colour},
         "hovertemplate": "%{y}, " + name + ": %{x:.3f} MiB<extra></extra>"}
        for name, (values, colour) in columns.items()
    ]  # fmt: skip
    x, y = {"title": "MiB of recurrent state a slot"}, {"showgrid": False}
    return figure_json(traces, layout(230, x, y, barmode="stack", showlegend=True))


def quality(rows: list[dict[str, Any]]) -> Figure | None:
    """KL divergence over all decoded tokens, one line a variant, the best on top; None without a positive one."""
    points = sorted((p for p in map(_divergence, rows) if p is not None), key=lambda p: p["kl"], reverse=True)
    if not points:
        return None
    names = list(dict.fromkeys(p["group"] for p in points))
    traces = []
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        of = [p for p in points if p["group"] == name]
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "x": [p["kl"] for p in of],
            "y": [p["label"] for p in of], "marker": {"size": 9, "color": colour},
            "error_x": {"type": "data", "array": [p["high"] - p["kl"] for p in of], "color": MUTED, "thickness": 1.5,
                        "arrayminus": [p["kl"] - p["low"] for p in of], "width": 4},
            "hovertemplate": "%{y}: KL %{x:.3g}<extra></extra>",
        })  # fmt: skip
    labels = list(dict.fromkeys(p["label"] for p in points))
    x = {"title": "KL divergence from FP32, nats a token", "type": "log", **_DECADES}
    y = {"type": "category", "categoryorder": "array", "categoryarray": labels, "ticks": "",
         "range": [-0.6, len(labels) - 0.4]}  # fmt: skip
    return figure_json(traces, layout(110 + 26 * len(labels), x, y, showlegend=len(names) > 1))


def _divergence(row: dict[str, Any]) -> dict[str, Any] | None:
    kl, bits, window = number(row.get("kl_all")), number(row.get("bits_per_value")), number(row.get("window")) or 1
    if kl is None or kl <= 0:
        return None
    ends = row.get("kl_all_ci")
    low, high = (number(e) for e in ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
    label = plain(row.get("variant", "?")) + ("" if bits is None else f", {bits:.4g} bits")
    group = "requantised after every token" if window <= 1 else f"write window {window:g}"
    low = kl if low is None else min(kl, max(low, kl / 10))  # an interval that reaches zero ends inside the axis
    return {"kl": kl, "low": low, "high": max(kl, high or kl), "label": label, "group": group}


_COLOURS = [ACCENT, SECOND, THIRD, "#8e63b5", "#c44e52"]


def serving_frame() -> Figure:
    """Memory against running requests: empty lines that the page fills from its inputs."""
    lines = [("FP32", MUTED, "solid"), ("BF16", THIRD, "solid"), ("this plan", ACCENT, "solid"),
             ("memory given", SECOND, "dash")]  # fmt: skip
    traces = [
        {"type": "scatter", "mode": "lines", "name": name, "x": [0, 1], "y": [0, 1],
         "line": {"color": colour, "width": 2, "dash": dash},
         "hovertemplate": name + ", %{x:,.0f} requests: %{y:.2f} GiB<extra></extra>"}
        for name, colour, dash in lines
    ]  # fmt: skip
    x, y = {"title": "running requests", "rangemode": "tozero"}, {"title": "GiB", "rangemode": "tozero"}
    return figure_json(traces, layout(330, x, y, showlegend=True))
