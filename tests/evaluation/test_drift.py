"""Drift of whole models: against real token-by-token decoding, the identity, the packed path, itself, and its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepquant.codec.recurrence import step
from stepquant.evaluation.drift import DriftRun
from stepquant.evaluation.forward import Readout, run_variant
from stepquant.evaluation.streams import Streams
from stepquant.evaluation.variants import Variant, from_plan, named_variant
from stepquant.models.adapter import LoadedModel
from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.passes.cache import Cache
from stepquant.plan import LayoutPlan


def decode_with_cache(loaded: LoadedModel, tokens: torch.Tensor, prefill: int, variant: Variant) -> torch.Tensor:
    """Logits of real incremental decoding: the model's own cache, its states quantised after every token."""

    def replaced(layer: int, trace: DeltaTrace) -> tuple[torch.Tensor, torch.Tensor]:
        state = trace.initial_state
        if state is None:
            state = trace.v.new_zeros(*trace.q.shape[:1], *trace.q.shape[2:], trace.v.shape[-1])
        outputs = []
        for t in range(trace.q.shape[1]):
            inputs = (trace.q, trace.k, trace.v, trace.log_gate, trace.beta)
            state, y = step(state, *(x[:, t] for x in inputs))
            outputs.append(y)
        codec = variant.codec(layer, state.device)
        return torch.stack(outputs, 1), state if codec is None else codec.roundtrip(state)

    logits = []
    with torch.no_grad(), capture_delta_rule(loaded, replace=replaced):
        out = loaded.model(input_ids=tokens[:, :prefill], use_cache=True)
        for t in range(prefill, tokens.shape[1]):
            out = loaded.model(input_ids=tokens[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4"])
def test_one_forward_gives_the_numbers_of_decoding(
    loaded: LoadedModel, streams: Streams, plan: LayoutPlan, name: str
) -> None:
    variant, readout = named_variant(name, plan), Readout(loaded)
    tokens = streams.ids[:, :-1]
    features = run_variant(loaded, readout, tokens, streams.prefill, variant)
    decoded = decode_with_cache(loaded, tokens, streams.prefill, variant)
    difference = (readout.logits(features) - decoded).square().mean()
    if name == "fp32":
        torch.testing.assert_close(readout.logits(features), decoded, rtol=0, atol=1e-3)
        return
    # The last digit may move a code in one of the two, which is then off by a quantisation step and goes its own way:
    # far less than what all the codes are off from FP32.
    exact = readout.logits(run_variant(loaded, readout, tokens, streams.prefill, None))
    assert difference < 0.05 * (decoded - exact).square().mean()


def test_the_features_give_the_models_logits(loaded: LoadedModel, streams: Streams) -> None:
    readout, tokens = Readout(loaded), streams.ids[:, :-1]
    assert readout.deferred
    with torch.no_grad():
        expected = loaded.model(input_ids=tokens, use_cache=False).logits[:, streams.prefill :]
        found = readout.logits(readout.features(tokens, torch.arange(streams.prefill, tokens.shape[1])))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_identity_is_zero_and_native_is_close(loaded: LoadedModel, streams: Streams, plan: LayoutPlan) -> None:
    names = ("fp32", "native", "fp32@8:fp32", "bf16", "int8", "int4")
    results = DriftRun(loaded, streams).evaluate([named_variant(n, plan) for n in names])
    kl = {n: r.figures.kl for n, r in zip(names, results, strict=True)}
    assert not kl["fp32"].any()
    assert float(kl["native"].mean()) < 1e-7
    assert float(kl["fp32@8:fp32"].mean()) < 1e-7
    assert float(kl["native"].mean()) < float(kl["bf16"].mean()) < float(kl["int8"].mean()) < float(kl["int4"].mean())
    row = results[0].row()
    assert row["kl_all"] == 0.0
    assert row["top1_all"] == 1.0
    assert row["excess_nll_all"] == 0.0


def test_packed_and_simulated_agree(loaded: LoadedModel, streams: Streams, plan: LayoutPlan) -> None:
    for window in (1, 8):
        shaped = replace(plan, window=replace(plan.window, length=window))
        both = [from_plan(shaped, path=p) for p in ("simulated", "packed")]
        simulated, packed = DriftRun(loaded, streams).evaluate(both)
        torch.testing.assert_close(packed.figures.kl, simulated.figures.kl, rtol=0, atol=1e-6)
        assert packed.row()["path"] == "packed"
        assert simulated.row()["path"] == "simulated"
        assert simulated.figures.kl.any()


def test_evaluating_twice_gives_the_same_digits(
    loaded: LoadedModel, streams: Streams, plan: LayoutPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [from_plan(plan), named_variant("int6", plan)]
    first = DriftRun(loaded, streams, batch=2).evaluate(variants)
    cache = Cache(tmp_path)
    again = DriftRun(loaded, streams, batch=2, cache=cache).evaluate(variants)
    calls: list[object] = []
    real = run_variant

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args[4])
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("stepquant.evaluation.drift.run_variant", counted)
    kept = DriftRun(loaded, streams, batch=2, cache=cache).evaluate(variants)
    assert calls == []
    for a, b, c in zip(first, again, kept, strict=True):
        assert torch.equal(a.figures.kl, b.figures.kl)
        assert torch.equal(a.figures.kl, c.figures.kl)
        assert a.row() == c.row()
    DriftRun(loaded, streams, batch=2, cache=cache).evaluate([*variants, named_variant("int4", plan)])
    assert len(calls) == 4, "a new variant costs itself and the reference, once a batch"


def test_layer_errors(loaded: LoadedModel, streams: Streams, plan: LayoutPlan) -> None:
    names = ("fp32", "int8", "int4")
    run = DriftRun(loaded, streams, layer_errors=True)
    results = run.evaluate([named_variant(n, plan) for n in names])
    plain = DriftRun(loaded, streams).evaluate([named_variant("int4", plan)])
    assert torch.equal(results[2].figures.kl, plain[0].figures.kl), "measuring must not change what is measured"
    exact, eight, four = (r.layers for r in results)
    assert len(exact) == loaded.geometry.num_delta_layers
    for a, b, c in zip(exact, eight, four, strict=True):
        assert set(a.values()) == {0.0}
        assert 0 < b["readout_all"] < c["readout_all"]
        assert 0 < b["state_all"] < c["state_all"]
