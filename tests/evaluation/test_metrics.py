"""Token figures and their statistics against numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_softmax

from stepquant.evaluation.metrics import compare_logits, interval, join, paired_ratio, span, summarise


def test_token_figures_match_numpy() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 11, generator=g), torch.randn(2, 5, 11, generator=g)
    targets = torch.randint(0, 11, (2, 5), generator=g)
    found = compare_logits(a, b, targets)
    p, q = log_softmax(a.double().numpy(), -1), log_softmax(b.double().numpy(), -1)
    np.testing.assert_allclose(found.kl.numpy(), (np.exp(p) * (p - q)).sum(-1), rtol=1e-12)
    t = targets.numpy()[..., None]
    expected = (np.take_along_axis(p, t, -1) - np.take_along_axis(q, t, -1))[..., 0]
    np.testing.assert_allclose(found.excess_nll.numpy(), expected, rtol=1e-12)
    np.testing.assert_array_equal(found.top1.numpy(), p.argmax(-1) == q.argmax(-1))


def test_equal_logits_give_exactly_zero() -> None:
    a = torch.randn(2, 7, 300) * 20
    found = compare_logits(a, a.clone(), torch.zeros(2, 7, dtype=torch.long))
    assert not found.kl.any()
    assert not found.excess_nll.any()
    assert bool(found.top1.all())


def test_small_divergences_are_not_lost_in_rounding() -> None:
    a = torch.randn(1, 64, 300).double()
    d = 1e-5 * torch.randn(1, 64, 300).double()
    found = compare_logits(a, a + d, torch.zeros(1, 64, dtype=torch.long))
    p = a.softmax(-1)
    expected = 0.5 * ((p * d * d).sum(-1) - (p * d).sum(-1) ** 2)
    torch.testing.assert_close(found.kl, expected, rtol=1e-3, atol=0)


def test_spans() -> None:
    x = torch.arange(600.0).expand(2, 600)
    assert span(x, "first")[0, -1] == 255
    assert span(x, "last")[0, 0] == 344
    assert span(x, "all").shape == (2, 600)
    assert span(x[:, :100], "last").shape == (2, 100)


def test_interval_is_students() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 3.5])
    low, high = stats.t.interval(0.95, 3, x.numpy().mean(), stats.sem(x.numpy().astype(float)))
    found = interval(x)
    np.testing.assert_allclose([found.low, found.high], [low, high], rtol=1e-6)
    assert math.isnan(interval(x[:1]).low)


def test_paired_ratio() -> None:
    theirs = torch.rand(12, generator=torch.Generator().manual_seed(0)) + 0.5
    found = paired_ratio(0.3 * theirs, theirs)
    assert abs(found.mean - 0.3) < 1e-6
    assert found.high - found.low < 1e-6, "a constant ratio has no spread, however much streams differ"
    noisy = paired_ratio(torch.rand(12), theirs)
    assert noisy.low < noisy.mean < noisy.high
    assert paired_ratio(torch.rand(12), theirs) != noisy
    assert math.isnan(paired_ratio(theirs, torch.zeros(12)).mean)


def test_summary_names() -> None:
    a = torch.randn(3, 300, 9)
    one = compare_logits(a, a + 0.1 * torch.randn(3, 300, 9), torch.zeros(3, 300, dtype=torch.long))
    row = summarise(join([one, one], 0))
    assert row["streams"] == 6
    assert row["tokens"] == 300
    ordered = np.sort(join([one, one], 0).kl.numpy().ravel())[::-1]
    assert row["kl_tail"] == pytest.approx(ordered[:18].sum() / ordered.sum())
    assert row["kl_body"] == pytest.approx(ordered[18:].mean())
    for name in ("kl_first", "kl_last", "kl_all", "excess_nll_all", "top1_all"):
        low, high = row[f"{name}_ci"]  # type: ignore[misc]
        assert low <= row[name] <= high  # type: ignore[operator]
