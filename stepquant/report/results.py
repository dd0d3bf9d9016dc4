"""Sections about what came after the plan: generated kernels and measured quality, where the artifact has them."""

from __future__ import annotations

import json
from typing import Any

from stepquant.report import figures
from stepquant.report.evidence import EVALUATION, Evidence, number
from stepquant.report.html import Markup, pairs, table
from stepquant.report.sections import Figures, figure, note, section

COLUMNS = ("variant", "path", "bits_per_value", "window", "streams", "kl_first", "kl_last", "kl_all",
           "excess_nll_all", "top1_all")  # fmt: skip
MOST_ROWS = 200  # of a kernel table
FIRST = ("name", "title", "file")  # columns that say what a row of it is


def kernels(evidence: Evidence) -> Markup:
    """The kernel plan: its plain values, then one table for every list of objects in it."""
    title = "Kernels"
    missing = evidence.notes.get("kernels")
    if not evidence.kernels:
        return section("kernels", title, note(missing or "No kernels were generated for this plan yet."))
    plain = [(k.replace("_", " "), cell(v)) for k, v in evidence.kernels.items() if not _is_table(v)]
    tables = [_kernel_table(k, v) for k, v in evidence.kernels.items() if _is_table(v)]
    return section("kernels", title, note(missing), pairs(plain), *tables)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and item for item in value)


def _kernel_table(name: str, rows: list[dict[str, Any]]) -> Markup:
    columns = list(dict.fromkeys([*FIRST, *(key for row in rows for key in row)]))
    columns = [c for c in columns if any(c in row for row in rows)]
    more = f" (the first {MOST_ROWS} of {len(rows)})" if len(rows) > MOST_ROWS else ""
    shown = [[cell(row.get(c)) for c in columns] for row in rows[:MOST_ROWS]]
    return table(name.replace("_", " ") + more, [c.replace("_", " ") for c in columns], shown)


def cell(value: Any) -> str:
    """A JSON value for people: whole numbers with separators, others to four digits."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(v, int | float | str) for v in value):
        return ", ".join(cell(v) for v in value)
    if isinstance(value, dict) and all(not isinstance(v, dict | list) for v in value.values()):
        return ", ".join(f"{k.replace('_', ' ')} {cell(v)}" for k, v in value.items()) or "-"
    return json.dumps(value, sort_keys=True)


def measured(evidence: Evidence, drawn: Figures) -> Markup:
    """Quality against the FP32 state, as evaluated."""
    title = "Measured quality"
    rows, missing = evidence.evaluation, evidence.notes.get("quality")
    if not rows:
        text = missing or "Not evaluated yet: python -m stepquant.evaluate plan=DIR."
        return section("quality", title, note(text))
    columns = [c for c in COLUMNS if any(c in row for row in rows)]
    parts = [note(missing)]
    drawing = figures.quality(rows)
    if drawing is not None:
        drawn["quality"] = drawing
        caption = (
            "Teacher-forced decode of held-out text; mean KL divergence from the model with its FP32 state over all "
            "decoded tokens, with 95% intervals over streams. A divergence of zero has no place on this axis."
        )
        parts.append(figure("quality", "KL divergence of every variant", caption))
    names = [c.replace("_", " ").replace("kl", "KL").replace("nll", "NLL") for c in columns]
    body = [[_figure(row, c) for c in columns] for row in rows]
    parts.append(table(f"Rows of {EVALUATION}; KL and excess NLL in nats a token", names, body,
                       sum(c in columns for c in ("variant", "path")), "quality-rows"))  # fmt: skip
    return section("quality", title, *parts)


def _figure(row: dict[str, Any], column: str) -> str:
    value = number(row.get(column))
    if column in ("variant", "path") or value is None:
        return cell(row.get(column))
    if column == "top1_all":
        return f"{value:.2%}"
    if column == "bits_per_value":
        return f"{value:.4g}"
    if column in ("window", "streams"):
        return f"{value:g}"
    ends = row.get(f"{column}_ci")
    pair = [number(e) for e in ends] if isinstance(ends, list) and len(ends) == 2 else [None, None]
    low, high = pair
    return f"{value:.3g}" + (f" [{low:.2g}, {high:.2g}]" if low is not None and high is not None else "")
