"""What every analysis is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepquant.evaluation.decode import DecodeSettings, decode_layer
from stepquant.evaluation.streams import Streams
from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.passes.gate_statistics import half_life
from stepquant.passes.progress import Progress
from stepquant.passes.protocol import Product
from stepquant.plan import LayoutPlan
from stepquant.small_operations import small_operations

if TYPE_CHECKING:
    from stepquant.evaluation.drift import DriftRun
    from stepquant.evaluation.settings import AnalyseSettings
    from stepquant.models.adapter import LoadedModel


@dataclass
class Analysis:
    """What an analysis found.

    Attributes:
        name: of the analysis.
        numbers: JSON-ready.
        headline: lines for the terminal: what was found, beside the paper's figure where there is one.
        figure: a plotly figure, or None.
    """

    name: str
    numbers: dict[str, Any]
    headline: list[str]
    figure: Any = None


@dataclass
class AnalysisRun:
    """A model, a plan with its calibration tables, and held-out streams.

    Attributes:
        drift: model, streams, cache and progress, for analyses that run whole variants.
        plan: the plan.
        tables: its calibration products by name.
        settings: of the command.
    """

    drift: DriftRun
    plan: LayoutPlan
    tables: dict[str, Product]
    settings: AnalyseSettings

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.drift.loaded

    @property
    def streams(self) -> Streams:
        """Held-out text."""
        return self.drift.streams

    @property
    def progress(self) -> Progress:
        """Where to report."""
        return self.drift.progress

    @property
    def half_lives(self) -> Tensor:
        """Calibrated gate half-lives in tokens, `[L, H]` (GDN) or `[L, H, K]` (KDA)."""
        return half_life(self.tables["gate_statistics"]["mean_log_gate"])

    @property
    def impact(self) -> Tensor:
        """Calibrated row impact omega `[L, H, K]`."""
        return self.tables["row_impact"]["omega"]

    @torch.no_grad()
    def watch(self, observer: Callable[[int, DeltaTrace], None], name: str, ids: Tensor | None = None) -> None:
        """Run the model over streams `[n, T]` (by default the run's), one at a time, and show every layer's trace."""
        ids = self.streams.ids[:, :-1] if ids is None else ids
        layers = self.plan.geometry.num_delta_layers
        with small_operations(self.loaded.device), self.progress.bar(name, ids.shape[0] * layers) as bar:

            def shown(layer: int, trace: DeltaTrace) -> Tensor:
                observer(layer, trace)
                bar.advance()
                return decode_layer(trace, None, DecodeSettings(trace.q.shape[1]))  # exact, in chunks

            with capture_delta_rule(self.loaded, replace=shown):
                for stream in ids:
                    tokens = stream.unsqueeze(0).to(self.loaded.device)
                    self.loaded.model(input_ids=tokens, use_cache=False, logits_to_keep=1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two sets of numbers of any equal shape."""
    from scipy.stats import spearmanr

    return float(spearmanr(a.flatten().double().numpy(), b.flatten().double().numpy()).statistic)


def figure(title: str, x: str, y: str, **layout: Any) -> Any:
    """An empty plotly figure with axis titles, in the style that all analyses share."""
    import plotly.graph_objects as go

    made = go.Figure()
    made.update_layout(
        title=title, xaxis_title=x, yaxis_title=y, template="simple_white", width=900, height=560,
        legend={"bgcolor": "rgba(255,255,255,0.6)"}, **layout,
    )  # fmt: skip
    return made


def quantiles(x: Tensor, points: Iterable[float]) -> list[float]:
    """Quantiles of all elements, by linear interpolation."""
    import numpy as np

    return [float(q) for q in np.quantile(x.double().numpy(), list(points))]
