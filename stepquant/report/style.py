"""Colours and the common look of figures.

Figures have a transparent background, and the page's style sheet gives text and grid their colours (light, dark,
print); series have colours that read on either.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from stepquant.codec.spec import PIVOT

MUTED = "#7a828c"  # text and lines, should the style sheet not reach them
ACCENT, SECOND, THIRD = "#2f80c2", "#e07b1a", "#3a9d5d"
PRECISION_COLOURS = {2: "#d3e4f3", 3: "#b3d3ea", 4: "#8fc0e2", 5: "#6caad9", 6: "#4a94cf", 8: "#1b5fae", 32: "#6b6b6b",
                     PIVOT: "#e07b1a"}  # fmt: skip
SCALE = [[0.0, "#dbe9f6"], [0.5, "#5fa2d3"], [1.0, "#08396f"]]  # of mean bits
_AXIS: dict[str, Any] = {
    "gridcolor": "#c8cdd3", "linecolor": MUTED, "zeroline": False, "automargin": True,
    "title": {"standoff": 8}, "ticks": "outside", "tickcolor": MUTED, "ticklen": 4,
}  # fmt: skip


def precision_name(bits: int) -> str:
    """``6 bits``, ``FP16``, ``FP32``."""
    return {PIVOT: "FP16", 32: "FP32"}.get(bits, f"{bits} bits")


def plain(text: object) -> str:
    """Text from a plan for a figure, where plotly would take ``<b>`` and ``<a>`` as markup."""
    return escape(str(text), quote=False)


def layout(height: int, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The common layout with its axes."""
    return {
        "template": "none", "height": height, "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": MUTED},
        "margin": {"l": 48, "r": 16, "t": 40 if more.get("showlegend") else 12, "b": 44},
        "hovermode": "closest", "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)",
                   "traceorder": "normal"},
        "xaxis": axis(x), "yaxis": axis(y), **more,
    }  # fmt: skip


def axis(settings: dict[str, Any]) -> dict[str, Any]:
    """An axis in the common look; a plain ``title`` is spread into plotly's form."""
    merged = {**_AXIS, **settings}
    if isinstance(merged["title"], str):
        merged["title"] = {**_AXIS["title"], "text": merged["title"]}
    return merged


def figure_json(traces: list[Any], look: dict[str, Any]) -> dict[str, Any]:
    """A plotly figure, checked by plotly's own schema, as JSON for the page."""
    import plotly.graph_objects as go

    figure = json.loads(go.Figure(data=traces, layout=look).to_json())
    figure["layout"].pop("template", None)
    return figure
