"""Two plans side by side: where their precision maps differ, and what that costs in bytes and predicted distortion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from stepquant.accounting import account
from stepquant.codec.spec import PIVOT
from stepquant.errors import ArtifactError
from stepquant.plan import LayoutPlan, load_plan

FIGURES = {
    "total": "bytes a slot", "allocated": "bytes a slot in the pool", "bytes_per_running_request":
    "window bytes a running request", "bits_per_value": "bits a value, stored", "predicted_cost_per_token":
    "predicted cost a token",
}  # fmt: skip


def compare_plans(first: Path, second: Path) -> dict[str, Any]:
    """Differences of two artifacts, JSON-ready.

    Raises:
        ArtifactError: when the plans are for states of different shape.
    """
    a, b = load_plan(first), load_plan(second)
    if a.geometry.family != b.geometry.family:
        raise ArtifactError(
            f"{first} is for {a.geometry.family.upper()} states ({a.geometry.model_type}), {second} for "
            f"{b.geometry.family.upper()} ones ({b.geometry.model_type}); compare plans of one model"
        )
    if a.bits.shape != b.bits.shape or a.geometry.value_dim != b.geometry.value_dim:
        raise ArtifactError(
            f"{first} is for states [layers, heads, rows] {list(a.bits.shape)} x {a.geometry.value_dim} columns, "
            f"{second} for {list(b.bits.shape)} x {b.geometry.value_dim}; compare plans of one model"
        )
    moved: dict[str, int] = {}
    pairs, counts = _pairs(a, b)
    for (old, new), count in zip(pairs, counts, strict=True):
        moved[f"{old}->{new}"] = count
    return {
        "plans": [{"directory": str(path), **_head(plan)} for path, plan in ((first, a), (second, b))],
        "pivots": [_pivots(a, b), _pivots(b, a)],
        "rows": a.bits.numel(),
        "rows_changed": int((a.bits != b.bits).sum()),
        "moves": moved,
        "layers": [
            {"layer": layer, "rows_changed": int((a.bits[i] != b.bits[i]).sum()),
             "mean_bits": [float(p.bits[i].float().mean()) for p in (a, b)],
             "predicted": [_by_layer(p, i) for p in (a, b)]}
            for i, layer in enumerate(a.geometry.layers)
        ],
        "settings": _settings(a, b),
        "same_model": a.fingerprint == b.fingerprint,
    }  # fmt: skip


def _pairs(a: LayoutPlan, b: LayoutPlan) -> tuple[list[tuple[int, int]], list[int]]:
    both = (a.bits.int() * 64 + b.bits.int())[a.bits != b.bits]
    values, counts = both.unique(return_counts=True)
    return [(int(v) // 64, int(v) % 64) for v in values], [int(c) for c in counts]


def _head(plan: LayoutPlan) -> dict[str, Any]:
    figures = account(plan)
    return {"name": plan.name, "synthetic": plan.synthetic, "plan_sha256": plan.hash, "total": figures.slot.total,
            "allocated": figures.slot.allocated, "bytes_per_running_request": figures.running,
            "bits_per_value": figures.bits_per_value,
            "predicted_cost_per_token": plan.predicted.get("predicted_cost_per_token")}  # fmt: skip


def _pivots(plan: LayoutPlan, other: LayoutPlan) -> list[str]:
    """Pivots that only `plan` has: ``layer/head``, or ``layer/head: n rows`` where not the whole head is one."""
    only = (plan.bits == PIVOT) & (other.bits != PIVOT)
    found = []
    for index, head in only.any(-1).nonzero().tolist():
        count = int(only[index, head].sum())
        rows = "" if count == plan.geometry.key_dim else f": {count} rows"
        found.append(f"{plan.geometry.layers[index]}/{head}{rows}")
    return found


def _by_layer(plan: LayoutPlan, index: int) -> float | None:
    costs = plan.predicted.get("by_layer")
    return costs[index] if costs else None


def _settings(a: LayoutPlan, b: LayoutPlan) -> dict[str, list[Any]]:
    """Settings that differ, dotted."""
    from stepquant.recipe import flatten

    flat = [dict(flatten(p.settings)) for p in (a, b)]
    names = sorted(set(flat[0]) | set(flat[1]))
    return {n: [f.get(n) for f in flat] for n in names if flat[0].get(n) != flat[1].get(n)}


def comparison_tables(comparison: dict[str, Any]) -> list[Table]:
    """The comparison as tables."""
    a, b = comparison["plans"]
    title = "plans of one checkpoint" if comparison["same_model"] else "plans of DIFFERENT checkpoints"
    head = Table("", a["directory"], b["directory"], "change", title=title)
    head.add_row("recipe", a["name"], b["name"], "")
    if a["synthetic"] or b["synthetic"]:
        head.add_row("statistics", *["SYNTHETIC" if p["synthetic"] else "calibrated" for p in (a, b)], "")
    for key, label in FIGURES.items():
        head.add_row(label, *[_figure(p[key]) for p in (a, b)], _change(a[key], b[key]))
    for label, found in zip(("pivots only left", "pivots only right"), comparison["pivots"], strict=True):
        if found:
            shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
            head.add_row(label, *((shown, "") if label.endswith("left") else ("", shown)), "layer/head")
    for name, values in comparison["settings"].items():
        head.add_row(name, *[str(v) for v in values], "")
    moves = Table("rows move", "count", title=f"{comparison['rows_changed']} of {comparison['rows']} rows differ")
    for move, count in sorted(comparison["moves"].items(), key=lambda item: -item[1]):
        moves.add_row(f"{move} bits", f"{count:,}")
    layers = Table("layer", "rows changed", "mean bits (FP16: 16)", "then", "predicted cost", "then", title="by layer")
    for entry in comparison["layers"]:
        layers.add_row(str(entry["layer"]), str(entry["rows_changed"]), *[f"{m:.3f}" for m in entry["mean_bits"]],
                       *[_figure(p) for p in entry["predicted"]])  # fmt: skip
    return [head, moves, layers]


def _change(old: float | None, new: float | None) -> str:
    return "-" if not old or new is None or old == new else f"{100 * (new / old - 1):+.1f}%"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
