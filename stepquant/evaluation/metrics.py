"""Figures of one token and their statistics over streams.

Per decode token: KL(reference || variant) in nats, excess NLL (variant minus reference) in nats, and whether the two
agree on the most likely token. A stream is the unit of replication: figures are means over its tokens first, and
intervals are over streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 256
"""Tokens of the first and the last stretch that are reported on their own (appendix B.2)."""
SPANS = ("first", "last", "all")


@dataclass
class TokenFigures:
    """Per decode token, `[B, D]`: kl and excess_nll float64, top1 bool."""

    kl: Tensor
    excess_nll: Tensor
    top1: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, for the cache."""
        return {"kl": self.kl, "excess_nll": self.excess_nll, "top1": self.top1}


def compare_logits(reference: Tensor, variant: Tensor, targets: Tensor) -> TokenFigures:
    """Figures of tokens from two sets of logits.

    In float64: with probabilities rounded to float32 the rounding alone is of the order of the smallest KL of interest.

    Args:
        reference, variant: logits `[B, D, vocabulary]`.
        targets: the tokens that follow, `[B, D]`.
    """
    p, q = reference.double().log_softmax(-1), variant.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    index = targets.unsqueeze(-1)
    excess = (p.gather(-1, index) - q.gather(-1, index)).squeeze(-1)
    return TokenFigures(kl.cpu(), excess.cpu(), (p.argmax(-1) == q.argmax(-1)).cpu())


def join(parts: list[TokenFigures], dim: int) -> TokenFigures:
    """Figures of consecutive tokens (`dim` 1) or of more streams (`dim` 0) together."""
    return TokenFigures(*(torch.cat([getattr(p, n) for p in parts], dim) for n in ("kl", "excess_nll", "top1")))


def span(values: Tensor, name: str) -> Tensor:
    """The first 256, the last 256 or all decode tokens of `[B, D]`; fewer than 256 mean all of them."""
    return values[:, :EDGE] if name == "first" else values[:, -EDGE:] if name == "last" else values


@dataclass(frozen=True)
class Interval:
    """A mean over streams and its 95% interval (Student's t; not a number for a single stream)."""

    mean: float
    low: float
    high: float


def interval(per_stream: Tensor) -> Interval:
    """Mean and interval of one figure a stream, `[B]` float64."""
    from scipy.stats import t

    count, mean = per_stream.numel(), float(per_stream.double().mean())
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(t.ppf(0.975, count - 1)) * float(per_stream.double().std()) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def paired_ratio(ours: Tensor, theirs: Tensor, resamples: int = 2000, seed: int = 0) -> Interval:
    """Ratio of means ours / theirs over the same streams `[B]`, with a seeded bootstrap over streams (95%)."""
    ours, theirs = ours.double(), theirs.double()
    if float(theirs.mean()) == 0:
        return Interval(math.nan, math.nan, math.nan)
    ratio = float(ours.mean() / theirs.mean())
    if ours.numel() < 2:
        return Interval(ratio, math.nan, math.nan)
    pick = torch.randint(0, ours.numel(), (resamples, ours.numel()), generator=torch.Generator().manual_seed(seed))
    drawn = ours[pick].mean(1) / theirs[pick].mean(1).clamp_min(1e-300)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(ratio, low, high)


def summarise(figures: TokenFigures) -> dict[str, object]:
    """The figures of a row: ``kl_first``, ``kl_last``, ``kl_all`` and likewise excess_nll and top1, each with ``_ci``
    `[low, high]`; ``kl_all_median`` (of the streams' means), ``kl_tail`` (share of the KL in the worst hundredth of the
    tokens) and ``kl_body`` (mean without them), since a mean can be a few tokens'; ``streams`` and ``tokens``."""
    row: dict[str, object] = {"streams": figures.kl.shape[0], "tokens": figures.kl.shape[1]}
    for name in ("kl", "excess_nll", "top1"):
        for part in SPANS:
            found = interval(span(getattr(figures, name).double(), part).mean(1))
            row[f"{name}_{part}"] = found.mean
            row[f"{name}_{part}_ci"] = None if math.isnan(found.low) else [found.low, found.high]
    row["kl_all_median"] = float(figures.kl.mean(1).quantile(0.5))
    ordered = figures.kl.flatten().sort(descending=True).values
    worst, total = -(-ordered.numel() // 100), float(ordered.sum())
    row["kl_tail"] = float(ordered[:worst].sum()) / total if total else 0.0
    row["kl_body"] = float(ordered[worst:].mean()) if worst < ordered.numel() else total
    return row
