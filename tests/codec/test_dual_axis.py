"""The dual-axis fit against its equations (11 to 14, C.1, design 2.2) in float64 numpy, and on real states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.chunks import states_every
from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.spec import PIVOT, CodecSpec, code_step, max_code
from stepquant.models.adapter import load_model
from stepquant.models.capture import capture_delta_rule
from stepquant.models.tiny import stdlib_segments


def half(x):
    """FP16 with the clamp of every stored scale."""
    return np.clip(x, 2.0**-24, 65504).astype(np.float16).astype(np.float64)


def reference(x, bits, w, spec):
    """One head `[K, V]` coded by the equations, in float64."""
    x, w = x.astype(np.float64), w.astype(np.float64)[:, None]
    integer = bits != PIVOT
    step = np.array([code_step(int(b), spec) if b != PIVOT else 1 for b in bits], float)[:, None]
    most = np.array([max_code(int(b), spec) if b != PIVOT else 1 for b in bits], float)[:, None]
    four = spec.codebook == "head" and bool((bits == 2).all())
    magnitude = np.abs(x)
    if four:
        magnitude = magnitude.reshape(len(x), -1, spec.group).mean(-1).repeat(spec.group, 1)
    else:
        magnitude = magnitude.mean(1, keepdims=True)
    r = half(np.sqrt(np.maximum(magnitude, 1e-20) / w))
    wider = bool((integer & (bits > 2)).any())
    cover = np.where((bits == 2) & (spec.refits == 0) & wider, 0.67, 1.0)[:, None]  # of two bits without refits
    bound = cover * np.abs(x) / (r * step * most)
    c = half(bound[integer].max(0)) if integer.any() else half(np.zeros(x.shape[1]))

    def quantise(c):
        scaled = x / (r * step * c)
        if four:
            return np.where(np.abs(scaled) >= 2, 3.0, 1.0) * np.where(scaled < 0, -1.0, 1.0)
        return np.clip(np.round(scaled), -most, most)

    q = quantise(c)
    for _ in range(max(1, spec.refits) if four else spec.refits):
        v = r * step * q
        weight = np.broadcast_to(w**2, v.shape) * integer[:, None]
        numerator, denominator = (weight * v * x).sum(0), (weight * v * v).sum(0)
        c = np.where(denominator > 0, half(numerator / np.where(denominator > 0, denominator, 1)), c)
        q = quantise(c)
    out = r * step * q * c
    out[~integer] = x[~integer].astype(np.float16).astype(np.float64)
    return out


def draw(seed, heads=2, rows=16, columns=64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, rows, columns, generator=g) * torch.rand(heads, rows, 1, generator=g).mul(4).exp()
    x = 0.01 * x * torch.rand(heads, 1, columns, generator=g).mul(2).exp()
    w = torch.rand(heads, rows, generator=g) + 0.5
    return x, w / w.log().mean(-1, keepdim=True).exp()


@given(seed=st.integers(0, 10_000), menu=st.sampled_from([(4,), (8,), (6, 8), (2, 4, 6, 8), (2,)]),
       pivots=st.integers(0, 3), shared=st.booleans(), refits=st.integers(0, 2))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_roundtrip_is_the_equations(seed, menu, pivots, shared, refits):
    spec = CodecSpec(codebook="shared" if shared else "head", refits=refits)
    x, w = draw(seed)
    rng = np.random.default_rng(seed)
    bits = rng.choice(menu, (2, 16)) if shared else np.repeat(rng.choice(menu, (2, 1)), 16, 1)
    if shared:
        bits[:, :pivots] = PIVOT
    codec = DualAxisCodec(torch.as_tensor(bits.astype(np.uint8)), w, spec, 64)
    found = codec.roundtrip(x).double().numpy()
    for head in range(2):
        expected = reference(x[head].numpy(), bits[head], w[head].numpy(), spec)
        # A value within float32 rounding of a boundary may fall on either side: a row factor or a scale by one step of
        # FP16, a code by one, which shifts its column's refit a little.
        near = np.abs(found[head] - expected) <= 2.0**-9 * np.abs(expected) + 1e-9
        assert near.mean() > 0.97
        errors = [np.square(y - x[head].double().numpy()).mean() for y in (found[head], expected)]
        assert errors[0] == pytest.approx(errors[1], rel=2e-2, abs=1e-16)


@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 4, 6, 8]), shared=st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_stored_reads_back_as_the_roundtrip(seed, bits, shared):
    spec = CodecSpec(codebook="shared" if shared else "head")
    x, w = draw(seed)
    codec = DualAxisCodec(torch.full((2, 16), bits, dtype=torch.uint8), w, spec, 64)
    stored = codec.fit(x)
    assert int(stored.codes.abs().max()) <= max_code(bits, spec)
    assert torch.equal(codec.reconstruct(stored), codec.roundtrip(x))


def test_batches_are_coded_one_by_one():
    x, w = draw(3)
    codec = DualAxisCodec(torch.full((2, 16), 6, dtype=torch.uint8), w, CodecSpec(), 64)
    batch = torch.stack([x, 2 * x, -x])
    assert torch.equal(codec.roundtrip(batch)[0], codec.roundtrip(x))
    assert torch.equal(codec.roundtrip(batch)[2], -codec.roundtrip(x))


@pytest.mark.parametrize("bits", [2, 4, 6, 8, PIVOT])
def test_zero_states_stay_small_and_finite(bits):
    codec = DualAxisCodec(torch.full((2, 16), bits, dtype=torch.uint8), torch.ones(2, 16), CodecSpec(), 64)
    out = codec.roundtrip(torch.zeros(2, 16, 64))
    assert bool(torch.isfinite(out).all())
    assert float(out.abs().max()) <= 2.0**-22  # the smallest scales times the two-bit codebook's levels, none of them 0


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def real_states(request):
    """States of a trained model after 64 and 128 tokens of text, `[n, H, K, V]`."""
    from stepquant.passes.context import chunked_delta_rule

    loaded = load_model(f"builtin:{request.param}")
    tokens = stdlib_segments("calibration", 1, 128, 0)
    states = []

    def observer(layer, trace):
        states.extend(s.clone() for _, s in states_every(trace.k, trace.v, trace.log_gate, trace.beta, 64))

    with torch.no_grad(), capture_delta_rule(loaded, observer, chunked_delta_rule):
        loaded.model(input_ids=tokens, use_cache=False)
    return torch.cat(states)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_error_is_never_above_a_head_s_absmax_codec(real_states, bits):
    most = max_code(bits, CodecSpec())
    scale = real_states.abs().amax((-1, -2), keepdim=True) / most
    naive = (real_states / scale).round().clamp(-most, most) * scale
    heads, rows, columns = real_states.shape[1:]
    codec = DualAxisCodec(
        torch.full((heads, rows), bits, dtype=torch.uint8), torch.ones(heads, rows), CodecSpec(), columns
    )
    ours = (codec.roundtrip(real_states) - real_states).square().sum((-1, -2))
    theirs = (naive - real_states).square().sum((-1, -2))
    assert bool((ours <= theirs).all()), float((ours / theirs).max())


@pytest.mark.parametrize("codebook", ["head", "shared"])
def test_heads_of_one_precision_are_what_they_are_beside_others(codebook: str) -> None:
    """A map of one precision is coded by numbers instead of tensors, FP16 alone without a fit: the same values."""
    spec, menu = CodecSpec("dual_axis", codebook, group=16), (2, 3, 4, 6, 8, 16)
    x = torch.randn(len(menu), 24, 32, generator=torch.Generator().manual_seed(7))
    x[:, 3], x[:, :, 5], x[:, 4, 6] = 0, 0, 1e30
    w = torch.rand(len(menu), 24, generator=torch.Generator().manual_seed(8)) + 0.5
    bits = torch.tensor(menu, dtype=torch.uint8)[:, None].repeat(1, 24)
    together = DualAxisCodec(bits, w, spec, 32).roundtrip(x)
    for head in range(len(menu)):
        one = slice(head, head + 1)
        alone = DualAxisCodec(bits[one], w[one], spec, 32)
        assert torch.equal(alone.roundtrip(x[one]), together[one])
        assert torch.equal(alone.reconstruct(alone.fit(x[one])), together[one])


@pytest.mark.parametrize("refits", [0, 1])
def test_heads_are_coded_as_if_alone(refits: int) -> None:
    """A four-level head beside others is fitted its own way, and so are they."""
    x, w = draw(5, heads=3)
    bits = torch.tensor([2, 4, 6], dtype=torch.uint8)[:, None].repeat(1, 16)
    spec = CodecSpec(group=16, refits=refits)
    together = DualAxisCodec(bits, w, spec, 64).roundtrip(x)
    for head in range(3):
        one = slice(head, head + 1)
        torch.testing.assert_close(together[one], DualAxisCodec(bits[one], w[one], spec, 64).roundtrip(x[one]))
