"""Decode throughput by the paper's protocol (appendix F.2), of the steps that `serving_plugin.Steps` wrote.

Time is the sum of the intervals between CUDA start events of consecutive decode steps that hold the stated batch, on
the slowest rank; gaps between steps count, prefill and start-up do not. One warm-up run, then three; the median counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

RUNS, WARM_UPS = 3, 1


def longest(values: Sequence[int], wanted: int) -> slice:
    """The longest run of `wanted` in `values`."""
    best, begun = slice(0, 0), None
    for place, value in enumerate([*values, None]):
        if value == wanted and begun is None:
            begun = place
        elif value != wanted and begun is not None:
            if place - begun > best.stop - best.start:
                best = slice(begun, place)
            begun = None
    return best


def run_figures(segments: Sequence[dict[str, list[float]]], batch: int) -> dict[str, Any]:
    """One run on one rank: of its segments between prefills, the longest stretch of steps with the whole batch."""
    parts = [(segment, longest(segment["batch"], batch)) for segment in segments]
    segment, where = max(parts, key=lambda part: part[1].stop - part[1].start)
    steps = segment["interval_ms"][where]
    total = sum(steps)
    return {
        "steps": len(steps), "ms": round(total, 3), "tokens_per_s": round(1e3 * batch * len(steps) / total),
        "step_ms": round(median(steps), 4), "slowest_step_ms": round(max(steps), 4),
        **{f"{name}_ms": round(median(segment[f"{name}_ms"][where]), 4)
           for name in ("forward", "host_forward", "host_interval")},
    }  # fmt: skip


def read_segments(path: Path) -> list[dict[str, list[float]]]:
    """What one rank wrote so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def figures(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Of `RUNS` runs, each a list of ranks: the slowest rank of each, the median run, and all of them."""
    slowest = [max(ranks, key=lambda rank: rank["ms"] / rank["steps"]) for ranks in runs]
    middle = sorted(slowest, key=lambda run: run["tokens_per_s"])[len(slowest) // 2]
    return {**middle, "runs_tokens_per_s": [run["tokens_per_s"] for run in slowest]}
