"""Calibration statistics against independent float64 formulas (equations 7, 10, 13, 16 to 18, 20)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.recurrence import replay
from stepquant.codec.spec import CodecSpec
from stepquant.geometry import Geometry
from stepquant.models.capture import DeltaTrace
from stepquant.passes.distortion import row_errors
from stepquant.passes.gate_statistics import GateStatistics, half_life, lifetime
from stepquant.passes.row_impact import RowImpact
from stepquant.passes.row_weights import row_weights
from stepquant.passes.state_samples import StateSamples, draw_positions
from stepquant.recipe import Recipe
from tests.codec.test_recurrence import draw, transition


def context_for(kda, segments=3, length=24, every=4, per_layer=5, heads=2, rows=8, columns=6):
    """The little of a Context that observers read."""
    geometry = Geometry("kda" if kda else "gdn", "test", (0,), heads, heads, rows, columns)
    recipe = Recipe.from_config({
        "model": {"path": "x"}, "budget": {"bits": 6}, "data": {"segments": segments, "length": length},
        "samples": {"every": every, "per_layer": per_layer},
    })  # fmt: skip
    return SimpleNamespace(geometry=geometry, recipe=recipe)


def trace_of(q, k, v, gate, beta):
    q, k, v, gate, beta = (x.float() for x in (q, k, v, gate, beta))
    return DeltaTrace(0, q, k, v, gate, beta, None, False, False, torch.float32)


@given(log_gate=st.floats(-50, 0), horizon=st.integers(1, 4096))
@settings(max_examples=200, deadline=None)
def test_lifetime_is_the_sum(log_gate, horizon):
    expected = math.fsum(math.exp(2 * j * log_gate) for j in range(horizon))
    assert float(lifetime(torch.tensor([log_gate]), horizon)) == pytest.approx(expected, rel=1e-6)


def test_lifetime_at_zero_is_the_horizon_and_half_life_inverts():
    assert float(lifetime(torch.zeros(1), 2048)) == 2048
    assert float(lifetime(torch.tensor([-1e-30], dtype=torch.float64), 2048)) == pytest.approx(2048)
    assert float(half_life(torch.tensor([-math.log(2) / 100], dtype=torch.float64))) == pytest.approx(100)


@pytest.mark.parametrize("kda", [False, True])
def test_streamed_statistics_are_the_means_of_equations_10_and_16(kda):
    context = context_for(kda)
    inputs = draw(1, kda, batch=3, tokens=24)
    gates, impact = GateStatistics().start(context), RowImpact().start(context)
    for segment in range(3):  # streamed in pieces
        trace = trace_of(*(x[segment : segment + 1] for x in inputs))
        gates.observe(0, trace, range(segment, segment + 1))
        impact.observe(0, trace, range(segment, segment + 1))
    q, k, _, gate, beta = inputs
    found = gates.finish()["mean_log_gate"][0]
    torch.testing.assert_close(found, gate.mean((0, 1)), rtol=1e-6, atol=0)
    reads = torch.einsum("bthki,bthk->bthi", transition(k, gate, beta), q)  # A^T q
    torch.testing.assert_close(impact.finish()["omega"][0], reads.square().mean((0, 1)), rtol=1e-6, atol=1e-12)


def test_accumulators_resume_exactly():
    context, inputs = context_for(False), draw(1, False, batch=3, tokens=24)
    whole, first, second = (GateStatistics().start(context) for _ in range(3))
    traces = [trace_of(*(x[i : i + 1] for x in inputs)) for i in range(3)]
    for i in range(3):
        whole.observe(0, traces[i], range(i, i + 1))
    first.observe(0, traces[0], range(1))
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    second.observe(0, traces[1], range(1, 2))
    second.observe(0, traces[2], range(2, 3))
    assert torch.equal(whole.finish()["mean_log_gate"], second.finish()["mean_log_gate"])


@pytest.mark.parametrize("gamma", [0.0, 0.25, 1.0])
def test_row_weights_have_geometric_mean_one_and_the_paper_s_exponent(gamma):
    omega = torch.rand(3, 16, dtype=torch.float64) + 1e-6
    w = row_weights(omega, gamma).double().numpy()
    expected = omega.numpy() ** (gamma / 2)
    expected = expected / np.exp(np.log(expected).mean(-1, keepdims=True))
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    np.testing.assert_allclose(np.log(w).mean(-1), 0, atol=1e-6)


def test_row_weights_survive_rows_that_are_never_read():
    assert bool(torch.isfinite(row_weights(torch.tensor([[0.0, 1.0, 1e-30]]), 0.25)).all())


@pytest.mark.parametrize("kda", [False, True])
def test_state_samples_are_the_states_of_the_replay(kda):
    context = context_for(kda)
    inputs = draw(2, kda, batch=3, tokens=24)
    observation = StateSamples().start(context)
    for start, stop in ((0, 2), (2, 3)):
        observation.observe(0, trace_of(*(x[start:stop] for x in inputs)), range(start, stop))
    product = observation.finish()
    assert len(product["positions.0"]) == 5
    for (segment, done), state in zip(product["positions.0"].tolist(), product["states.0"], strict=True):
        _, expected = replay(*(x[segment : segment + 1, :done] for x in inputs))
        torch.testing.assert_close(state.double(), expected[0], rtol=1e-4, atol=1e-5)


@given(st.integers(1, 9), st.integers(8, 64), st.integers(1, 8), st.integers(1, 100), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_positions_are_distinct_and_in_range(segments, length, every, count, seed):
    positions = draw_positions(segments, length, every, count, seed)
    assert len(positions) == min(count, segments * (length // every))
    assert len({tuple(p) for p in positions.tolist()}) == len(positions)
    if len(positions):
        assert int(positions[:, 0].max()) < segments
        assert int(positions[:, 1].max()) <= length
        assert bool((positions[:, 1] % every == 0).all())


def test_row_errors_are_means_over_samples_and_columns():
    states = torch.randn(3, 2, 16, 32)
    w = row_weights(torch.rand(2, 16), 0.25)
    table = row_errors(states, w, CodecSpec(), (4, 8, 16))
    for index, scale in enumerate((None, None, 16)):
        if scale == 16:
            half = states.double().numpy().astype(np.float16).astype(np.float64)
            expected = ((half - states.double().numpy()) ** 2).mean((0, 3))
            np.testing.assert_allclose(table[..., index].numpy(), expected, rtol=1e-3)
    assert bool((table[..., 0] > table[..., 1]).all())
    assert bool((table[..., 1] > table[..., 2]).all())
