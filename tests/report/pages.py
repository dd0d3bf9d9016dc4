"""Reading a report: its tags, its text, and the figures embedded in it."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np

SECTIONS = ["compiled", "precisions", "half-lives", "distortion", "tradeoff", "bytes", "capacity", "kernels", "quality"]
FIGURES = {"bits", "half_lives", "distortion", "pareto", "bytes", "capacity"}
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\'&<b>'
ROWS = [
    {"variant": "int6", "bits_per_value": 6.125, "window": 1, "path": "simulated", "streams": 8, "kl_first": 0.01,
     "kl_last": 0.02, "kl_all": 0.015, "kl_all_ci": [0.012, 0.018], "excess_nll_all": 0.002, "top1_all": 0.9731},
    {"variant": "plan W=8", "bits_per_value": 6.4, "window": 8, "path": "packed", "streams": 8, "kl_first": 1e-5,
     "kl_last": 3e-5, "kl_all": 2e-5, "kl_all_ci": None, "excess_nll_all": 1e-6, "top1_all": 0.999},
    {"variant": "fp32", "bits_per_value": 32, "window": 1, "path": "simulated", "streams": 8, "kl_all": 0.0},
]  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, and text by where it stands."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.inside):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def ids(self, tag: str) -> list[str | None]:
        return [a.get("id") for t, a in self.tags if t == tag]


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def array(value: Any) -> list[Any]:
    """A plotly array, which may come as base64 of numbers."""
    if isinstance(value, dict):
        return np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"]).tolist()
    return value
