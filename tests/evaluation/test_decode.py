"""The fast decode of a layer against token-by-token references in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.recurrence import replay, step
from stepquant.codec.registry import StateCodec, make_codec
from stepquant.codec.spec import CodecSpec
from stepquant.codec.window import WriteWindow
from stepquant.evaluation import decode
from stepquant.evaluation.decode import DecodeSettings, Fold, decode_layer
from stepquant.models.capture import DeltaTrace

B, H, K, V = 2, 3, 16, 16


def make_trace(seed: int, length: int, kda: bool, dtype: torch.dtype = torch.float64) -> DeltaTrace:
    g = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize(torch.randn(2, B, length, H, K, generator=g, dtype=torch.float64), dim=-1)
    gate = -(torch.rand((B, length, H, K) if kda else (B, length, H), generator=g, dtype=torch.float64) ** 6) * 2
    gate[:, 5::17] = -1e5
    beta = torch.rand(B, length, H, generator=g, dtype=torch.float64)
    v = torch.randn(B, length, H, V, generator=g, dtype=torch.float64)
    q, k, v, gate, beta = (x.to(dtype) for x in (unit[0] * K**-0.5, unit[1], v, gate, beta))
    return DeltaTrace(0, q, k, v, gate, beta, None, False, False, torch.float32)


def codec_of(bits: int = 6, kind: str = "rowwise") -> StateCodec:
    table = torch.full((H, K), bits, dtype=torch.uint8)
    return make_codec(table, torch.ones(H, K), CodecSpec(kind=kind), V)  # type: ignore[arg-type]


def reference(
    trace: DeltaTrace, codec: StateCodec | None, s: DecodeSettings
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and the base after every writeback, one token at a time with the reference window."""
    outputs, bases = [], []
    for b in range(B):
        stream = [x[b] for x in (trace.q, trace.k, trace.v, trace.log_gate, trace.beta)]
        state, ys, kept = trace.v.new_zeros(H, K, V), [], []
        for t in range(s.prefill):
            state, y = step(state, *(x[t] for x in stream))
            ys.append(y)
        state = state if codec is None else codec.roundtrip(state)
        kept.append(state)
        window = WriteWindow(s.window, s.buffers, phase=s.prefill)
        for t in range(s.prefill, trace.q.shape[1]):
            state, y, folded = window.step(state, *(x[t] for x in stream))
            ys.append(y)
            if folded:
                state = state if codec is None else codec.roundtrip(state)
                kept.append(state)
        outputs.append(torch.stack(ys))
        bases.append(torch.stack(kept))
    return torch.stack(outputs), bases


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.booleans(), st.integers(0, 40),
       st.integers(1, 40), st.sampled_from(["fp32", "bf16", "int8"]), st.booleans())  # fmt: skip
def test_decode_is_the_reference(
    seed: int, window: int, kda: bool, prefill: int, tokens: int, buffers: str, quantised: bool
) -> None:
    trace, codec = make_trace(seed, prefill + tokens, kda), codec_of() if quantised else None
    how = DecodeSettings(prefill, window, buffers)
    folds: list[Fold] = []
    y = decode_layer(trace, codec, how, lambda f: folds.append(replace(f, state=f.state.clone())))
    expected, bases = reference(trace, codec, how)
    close = (y - expected).abs() <= 1e-9
    # A value within rounding of a boundary may fall to the other side in rounded buffers and go its own way from there.
    assert close.double().mean() > (1 - 1e-12 if buffers == "fp32" else 0.9)
    for b in range(B):
        mine = [f for f in folds if f.streams.start == b]
        assert [f.tokens for f in mine] == [
            prefill,
            *(t for t in range(prefill + 1, prefill + tokens + 1) if t % window == 0),
        ]
        if buffers == "fp32":
            torch.testing.assert_close(torch.cat([f.state for f in mine]), bases[b], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kda", [False, True])
def test_without_a_codec_it_is_the_recurrence(kda: bool) -> None:
    trace = make_trace(1, 150, kda)
    expected, _ = replay(trace.q, trace.k, trace.v, trace.log_gate, trace.beta)
    for how in (DecodeSettings(0), DecodeSettings(150), DecodeSettings(67, 8), DecodeSettings(1000, 4)):
        torch.testing.assert_close(decode_layer(trace, None, how), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kda", [False, True])
def test_identity_codec_and_no_codec_are_equal_bit_for_bit(kda: bool) -> None:
    trace, identity = make_trace(2, 100, kda, torch.float32), codec_of(32, "float")
    for window in (1, 8):
        how = DecodeSettings(30, window)
        assert torch.equal(decode_layer(trace, identity, how), decode_layer(trace, None, how))


def test_streams_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one (CPU) and all at once (CUDA) are the same computation; spans of factors leave no seam."""
    trace, how = make_trace(3, 120, True), DecodeSettings(21, 8)
    y = decode_layer(trace, codec_of(), how)
    monkeypatch.setattr(decode, "stream_groups", lambda t: [(slice(0, B), t)])
    torch.testing.assert_close(decode_layer(trace, codec_of(), how), y, rtol=1e-9, atol=1e-10)
    monkeypatch.setattr(decode, "SPAN", 16)
    torch.testing.assert_close(decode_layer(trace, codec_of(), how), y, rtol=1e-9, atol=1e-10)


def test_it_starts_from_a_given_state() -> None:
    trace = make_trace(4, 90, False)
    whole, _ = replay(trace.q, trace.k, trace.v, trace.log_gate, trace.beta)
    names = ("q", "k", "v", "log_gate", "beta")
    _, middle = replay(*(getattr(trace, n)[:, :40] for n in names))
    rest = replace(trace, **{n: getattr(trace, n)[:, 40:] for n in names}, initial_state=middle)
    torch.testing.assert_close(decode_layer(rest, None, DecodeSettings(10)), whole[:, 40:], rtol=1e-10, atol=1e-11)
