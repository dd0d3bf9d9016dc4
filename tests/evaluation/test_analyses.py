"""The paper's analyses: their arithmetic against brute force, and each of them whole on the smallest models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stepquant.analyse import main
from stepquant.codec.recurrence import replay, step
from stepquant.codec.spec import PIVOT
from stepquant.evaluation.analyses import ANALYSES, geometry, half_life, lifetimes, row_impact
from stepquant.evaluation.analyses.drift import OnceCodec
from stepquant.evaluation.analyses.exact_read import INJECTED, error_outputs
from stepquant.models.adapter import LoadedModel
from tests.evaluation.test_decode import codec_of, make_trace


@pytest.mark.parametrize("kda", [False, True])
def test_accumulated_error_is_the_sum_over_every_update(kda: bool) -> None:
    trace = make_trace(0, 30, kda)
    codec, total = codec_of(6), torch.zeros(3, 16, dtype=torch.float64)
    for b in range(2):
        stream = [x[b] for x in (trace.q, trace.k, trace.v, trace.log_gate, trace.beta)]
        exact = rough = torch.zeros(3, 16, 16, dtype=torch.float64)
        for t in range(30):
            exact, _ = step(exact, *(x[t] for x in stream))
            if t < 2:
                rough = codec.roundtrip(exact) if t == 1 else exact
                continue
            rough = codec.roundtrip(step(rough, *(x[t] for x in stream))[0])
            total += (rough - exact).square().sum(-1)
    torch.testing.assert_close(half_life.accumulated_error(trace, 6), total, rtol=1e-6, atol=1e-12)


def test_cumulative_curve_and_ranks() -> None:
    life = torch.tensor([[3.0, 1.0, 2.0, 4.0], [10.0, 40.0, 30.0, 20.0]])
    error = torch.tensor([[2.0, 0.0, 1.0, 5.0], [1.0, 3.0, 3.0, 1.0]], dtype=torch.float64)
    curve = half_life.cumulative(life, error)
    np.testing.assert_allclose(curve.numpy(), np.cumsum([0 + 1, 1 + 1, 2 + 3, 5 + 3]) / 16)
    assert lifetimes.class_kept(life, life * 7) == 1
    assert lifetimes.class_kept(life[:1], -life[:1]) == 0.5
    groups = row_impact.octile_of_rank(torch.randn(2, 3, 20))
    sizes = torch.stack([(groups == n).sum(-1) for n in range(8)])
    assert set(sizes.unique().tolist()) == {2, 3}
    assert row_impact.octile_of_rank(torch.arange(16.0)).tolist() == [n // 2 for n in range(16)]


def test_equal_norm_octiles_normalise_within_groups() -> None:
    calibrated = torch.arange(32.0).view(1, 2, 16)
    held_out = torch.stack([torch.arange(1.0, 17.0), 100 * torch.arange(1.0, 17.0)]).view(1, 2, 16)
    bits = torch.full((1, 2, 16), 6, dtype=torch.uint8)
    found = row_impact.equal_norm_octiles(calibrated, held_out, bits)
    np.testing.assert_allclose(found, [(2 * n + 1.5) / 8.5 for n in range(8)], rtol=1e-6)
    bits[:, 1] = PIVOT
    np.testing.assert_allclose(row_impact.equal_norm_octiles(calibrated, held_out, bits), found, rtol=1e-6)


def test_masked_rows_alone_are_quantised() -> None:
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[0, 1] = True
    x = torch.randn(3, 2, 4, 8)
    out = row_impact.MaskedCodec(mask, 4).roundtrip(x)
    changed = (out != x).any(-1)
    assert bool(changed[:, 0, 1].all())
    assert int(changed.sum()) == 3


def test_contrast_is_max_over_median() -> None:
    state = torch.zeros(1, 4, 6)
    state[0] = torch.tensor([1.0, 2.0, 3.0, 10.0]).unsqueeze(-1)
    rows, columns = geometry.rms_profiles(state)
    assert float(geometry.contrast(rows)) == pytest.approx(10 / 2.5)
    assert float(geometry.contrast(columns)) == pytest.approx(1)


@pytest.mark.parametrize("kda", [False, True])
def test_exact_read_oracle_against_its_definition(kda: bool) -> None:
    trace = make_trace(5, INJECTED + 40, kda)
    native, oracle = error_outputs(trace, 6)
    names = ("q", "k", "v", "log_gate", "beta")
    _, state = replay(*(getattr(trace, n)[:, :INJECTED] for n in names))
    rough = codec_of(6).roundtrip(state)
    exact, mine, theirs = state, rough, rough
    for t in range(INJECTED, INJECTED + 40):
        q, k, v, gate, beta = (getattr(trace, n)[:, t] for n in names)
        d = (gate if kda else gate.unsqueeze(-1)).exp().unsqueeze(-1)
        read = torch.einsum("bhk,bhkv->bhv", k, d * exact)  # of the exact state
        theirs = d * theirs + k.unsqueeze(-1) * (beta.unsqueeze(-1) * (v - read)).unsqueeze(-2)
        mine, y_mine = step(mine, q, k, v, gate, beta)
        exact, y = step(exact, q, k, v, gate, beta)
        y_theirs = torch.einsum("bhk,bhkv->bhv", q, theirs)
        torch.testing.assert_close(native[:, t - INJECTED], y_mine - y, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(oracle[:, t - INJECTED], y_theirs - y, rtol=1e-6, atol=1e-10)


def test_once_codec_packs_the_boundary_only() -> None:
    codec, x = OnceCodec(codec_of(4), every=3), torch.randn(3, 16, 16)
    changed = [not torch.equal(codec.roundtrip(x), x) for _ in range(6)]
    assert changed == [True, False, False, True, False, False]


@pytest.mark.parametrize("name", sorted(ANALYSES))
def test_every_analysis_runs(
    loaded: LoadedModel, artifact: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        name, f"plan={artifact}", f"model.path={loaded.path}", "model.weights=random:0", "model.device=cpu",
        "streams=2", "prefill=16", f"decode={INJECTED + 64 if name == 'exact_read' else 70}", f"output={tmp_path}",
        f"cache.dir={tmp_path / 'cache'}", f"figure={str(name in ('half_life', 'geometry')).lower()}",
    ]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers
    assert "paper" in capsys.readouterr().out or name in ("drift", "ablation")
    if name in ("half_life", "geometry"):
        page = (tmp_path / "figure.html").read_text()
        assert "plotly" in page
        assert 'src="http' not in page, "a figure must not need the network"
    if name == "ablation":
        assert {row["variant"] for row in numbers["rows"]} == {
            "full", "spatial6", "temporal only", "temporal without pivots", "qmamba6", "int6"}  # fmt: skip
    if name == "drift":
        every, once, _ = numbers["rows"]
        assert once["kl_last"] < every["kl_last"]


def test_mistakes_are_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["halflife", f"plan={artifact}"]) == 2
    assert "did you mean 'half_life'" in capsys.readouterr().err
    assert main(["half_life"]) == 2
    assert "plan is not given" in capsys.readouterr().err
    assert main(["half_life", f"plan={artifact}", "bits=11"]) == 2
    assert "bits is 11" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "row_impact" in capsys.readouterr().out


def test_traces_are_not_kept() -> None:
    """Codecs of the analyses leave their input alone."""
    trace = make_trace(1, 20, False)
    before = replace(trace, v=trace.v.clone(), q=trace.q.clone())
    half_life.accumulated_error(trace, 4)
    assert torch.equal(trace.v, before.v)
    assert torch.equal(trace.q, before.q)
