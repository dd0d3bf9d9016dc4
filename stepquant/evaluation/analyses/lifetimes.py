"""Are lifetimes a property of the model or of the text (figure B3, appendix B.6)?

Half-lives of all units are measured on other texts and ranked; Spearman's rho with the calibration's ranking. The
paper: 0.989 and 0.985 (Qwen: C4, LiveCodeBench), 0.991 and 0.982 (KDA). Of heads in the short, middle and long quarter,
half and quarter of their layer by calibration, the share that keeps its class: 93.6% and 90.1% (Qwen).

Texts: the held-out streams of ``data``, English prose (the interpreter's own language reference), and any files given
in ``texts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepquant.errors import DataError
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure, spearman
from stepquant.models.capture import DeltaTrace
from stepquant.models.data import load_segments
from stepquant.passes.gate_statistics import half_life

PAPER = {"gdn": [0.989, 0.985], "kda": [0.991, 0.982]}


def analyse(run: AnalysisRun) -> Analysis:
    """Half-lives by text and their rank correlations with the calibration's."""
    calibrated = run.half_lives
    found: dict[str, Tensor] = {}
    for name, ids in _texts(run):
        found[name] = measured_half_lives(run, ids)
    family = run.plan.geometry.family
    rows = {
        name: {"spearman": spearman(calibrated, life), "class_kept": class_kept(calibrated, life)}
        for name, life in found.items()
    }
    numbers: dict[str, Any] = {
        "texts": rows, "units": calibrated.numel(), "paper_spearman": PAPER[family],
        "calibrated": calibrated.flatten().tolist(), "measured": {n: x.flatten().tolist() for n, x in found.items()},
    }  # fmt: skip
    headline = [
        f"{name}: Spearman's rho with the calibration {row['spearman']:.3f}, {100 * row['class_kept']:.1f}% keep their "
        f"class (paper {PAPER[family][0]} and {PAPER[family][1]})"
        for name, row in rows.items()
    ]
    return Analysis("lifetimes", numbers, headline, _figure(calibrated, found))


def measured_half_lives(run: AnalysisRun, ids: Tensor) -> Tensor:
    """Half-lives from the mean log gate over streams `[n, T]`, `[L, H]` or `[L, H, K]`."""
    g = run.plan.geometry
    shape = (g.num_delta_layers, g.num_heads) + ((g.key_dim,) if g.family == "kda" else ())
    total, count = torch.zeros(shape, dtype=torch.float64), 0

    def observe(layer: int, trace: DeltaTrace) -> None:
        nonlocal count
        total[layer] += trace.log_gate.double().sum((0, 1)).cpu()
        count += trace.log_gate.shape[1] if layer == 0 else 0

    run.watch(observe, "gates", ids)
    return half_life(total / count)


def class_kept(calibrated: Tensor, measured: Tensor) -> float:
    """Share of units whose class (shortest quarter, middle half, longest quarter of the last axis) is the same."""

    def classes(life: Tensor) -> Tensor:
        rank = life.argsort(-1).argsort(-1)
        quarter = life.shape[-1] / 4
        return (rank >= quarter).long() + (rank >= 3 * quarter).long()

    return float((classes(calibrated) == classes(measured)).double().mean())


def _texts(run: AnalysisRun) -> Iterator[tuple[str, Tensor]]:
    ids = run.streams.ids[:, :-1]
    yield run.streams.source, ids
    if run.loaded.tokenizer is None:
        return
    segments, length = ids.shape
    yield "English prose", _prose(run, segments, length)
    for path in run.settings.texts:
        found = load_segments(run.loaded.tokenizer, source="file", path=path, segments=segments,
                              length=length, keys="streams, prefill or decode", path_key="texts")  # fmt: skip
        yield Path(path).name, found.ids


def _prose(run: AnalysisRun, segments: int, length: int) -> Tensor:
    """Streams of the language reference that `help()` prints."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[key] for key in sorted(topics))
    ids = torch.tensor(run.loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if ids.numel() < length:
        raise DataError(f"the language reference holds {ids.numel():,} tokens; the streams have {length:,}")
    count = min(segments, ids.numel() // length)
    return ids[: count * length].view(count, length)


def _figure(calibrated: Tensor, found: dict[str, Tensor]) -> Any:
    made = figure("Lifetime rankings by text", "rank percentile, calibration", "rank percentile, other text")

    def percentile(life: Tensor) -> list[float]:
        rank = life.flatten().argsort().argsort().double()
        return (100 * rank / max(life.numel() - 1, 1)).tolist()

    for name, life in found.items():
        made.add_scatter(x=percentile(calibrated), y=percentile(life), mode="markers", name=name,
                         marker={"size": 4, "opacity": 0.5})  # fmt: skip
    made.add_scatter(x=[0, 100], y=[0, 100], mode="lines", name="calibration", line={"color": "black", "width": 1})
    return made
