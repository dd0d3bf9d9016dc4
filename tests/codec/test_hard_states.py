"""States at the edges of FP32 and FP16 through codec, pages and windows: what comes back, and whom it touches.

What is promised (docs/hardness.md): a finite state comes back finite; the relative error of coded rows does not depend
on the scale; pivots are plain FP16 values (saturated at 65504, absolute error 2^-25 below 2^-14); NaN and infinities
stay in their own head.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.packed import PackedCodec
from stepquant.codec.recurrence import step
from stepquant.codec.spec import PIVOT, CodecSpec
from stepquant.codec.window import WriteWindow, store
from stepquant.layout import PageLayout, StateShape

H, K, V = 2, 32, 64
BITS = (2, 4, 6, 8)
CODEBOOKS = ("head", "shared")


def drawn(seed: int = 0, batch: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch, H, K, 1, generator=g).mul(3).exp()
    return torch.randn(batch, H, K, V, generator=g) * rows


def codec(bits: int, codebook: str) -> DualAxisCodec:
    g = torch.Generator().manual_seed(9)
    w = 0.2 * torch.randn(H, K, generator=g)
    w = (w - w.mean(-1, keepdim=True)).exp()
    return DualAxisCodec(torch.full((H, K), bits, dtype=torch.uint8), w, CodecSpec(codebook=codebook), V)  # type: ignore[arg-type]


def packed(bits: np.ndarray, codebook: str) -> PackedCodec:
    layout = PageLayout(StateShape(H, K, V), bits[None], codebook)  # type: ignore[arg-type]
    return PackedCodec(layout, 0, torch.ones(H, K), CodecSpec(codebook=codebook))  # type: ignore[arg-type]


def error(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_flat_over_scales(bits: int, codebook: str) -> None:
    """Scales r and c take the square root each, so that 2^-20 .. 2^10 stays inside of FP16's range."""
    x, one = drawn(), codec(bits, codebook)
    base = one.roundtrip(x)
    for power in range(-20, 11):
        out = one.roundtrip(x * 2.0**power)
        assert error(out, x * 2.0**power) == pytest.approx(error(base, x), rel=0.02), power
        if power % 2 == 0 and power >= -4:  # r and c change by a power of two: the same codes, exact multiples
            assert torch.equal(out, base * 2.0**power), power


@pytest.mark.parametrize("power", [-20, -14, -8, 0, 8, 10])
def test_pivots_are_fp16(power: int) -> None:
    x = drawn() * 2.0**power
    out = codec(PIVOT, "shared").roundtrip(x)
    reference = torch.from_numpy(np.clip(x.numpy(), -65504, 65504).astype(np.float16).astype(np.float32))
    assert torch.equal(out, reference)
    small = x.abs() < 2.0**-14
    assert bool(((out - x).abs()[small] <= 2.0**-25).all())
    inside = ~small & (x.abs() <= 65504)
    assert bool(((out - x).abs()[inside] <= 2.0**-11 * x.abs()[inside]).all())


EDGES = {
    "zeros": torch.zeros(H, K, V), "denormals": torch.full((H, K, V), 1e-42), "largest": torch.full((H, K, V), 3.4e38),
    "smallest normal": torch.full((H, K, V), -1.2e-38), "uniform": torch.full((H, K, V), 0.37),
    "checkered": torch.full((H, K, V), 3e38) * (-1.0) ** torch.arange(V),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [*BITS, PIVOT])
def test_edges_come_back_finite_from_codec_and_pages(bits: int, codebook: str, name: str) -> None:
    x = EDGES[name].unsqueeze(0)
    out = codec(bits, codebook).roundtrip(x)
    pages = packed(np.full((H, K), bits, np.uint8), codebook)
    back = pages.unpack(pages.pack(x))
    for y in (out, back):
        assert bool(y.isfinite().all())
        assert bool((y * x >= 0).all())  # nothing changes its sign
    if name in ("zeros", "denormals", "smallest normal"):
        assert float(out.abs().max()) <= 2.0**-46  # two smallest scales and the lowest level of a four-level head
    if name == "uniform":
        assert error(back, x) < 2e-3  # equal weights: one rounding of r and one of c, whatever the bits
    if name in ("largest", "checkered"):
        assert float(out.abs().max()) <= 65504.0**2 * 127 * 1.00001


def test_one_huge_element_costs_its_row_and_column_only() -> None:
    """Rows and columns that do not hold it keep to the error that their own scales allow."""
    x = drawn(1)
    x[0, 0, 3, 5] = 1e6
    one = codec(8, "head")
    out, plain = one.roundtrip(x), one.roundtrip(torch.where(x > 1e5, 0.0, x))
    assert error(out[0, 0, 3, 5], x[0, 0, 3, 5]) < 0.02
    rest = torch.ones(K, V, dtype=torch.bool)
    rest[3], rest[:, 5] = False, False
    assert error(out[0, 0][rest], x[0, 0][rest]) < 2 * error(plain[0, 0][rest], x[0, 0][rest])
    assert torch.equal(out[:, 1], one.roundtrip(drawn(1))[:, 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_what_is_not_finite_stays_in_its_head(codebook: str, value: float) -> None:
    x = drawn(2, batch=3)
    rng = np.random.default_rng(4)
    bits = rng.choice(np.array([2, 4, 6, 8, 16], np.uint8), (H, K))
    bits = bits if codebook == "shared" else np.repeat(bits[:, :1], K, 1)
    pages = packed(bits, codebook)
    clean, broken = pages.pack(x), x.clone()
    broken[1, 0, 7, 9] = value
    found = pages.pack(broken)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    whole, damaged = pages.unpack(clean), pages.unpack(found)
    assert torch.equal(damaged[[0, 2]], whole[[0, 2]])
    assert torch.equal(damaged[1, 1], whole[1, 1])
    assert not torch.equal(damaged[1, 0].nan_to_num(0.0), whole[1, 0])


@pytest.mark.parametrize("power", range(-30, 17, 4))
def test_int8_buffers_round_to_their_scale(power: int) -> None:
    """Half a step, and what FP16 rounds off the scale times the largest code: 127 * 2^-25 where the scale is tiny."""
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(power + 99)) * 2.0**power
    out = store(x, "int8")
    most, half_ulp = x.abs().amax(-1, keepdim=True), torch.tensor(2.0**-25)
    step = (most / 127).clamp_min(2.0**-24)
    assert bool(((out - x).abs() <= 0.5 * step * 1.001 + 127 * torch.maximum(step * 2.0**-11, half_ulp)).all())
    half = store(x, "fp16")
    assert bool(half.isfinite().all())
    assert float(store(torch.tensor([1e9, -1e9]), "fp16").abs().max()) == 65504.0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("kda", [False, True])
def test_windows_keep_requests_apart(kda: bool, dtype: str) -> None:
    """NaN in one head's value of one request reaches neither another head nor another request, folded or not."""
    g = torch.Generator().manual_seed(3)
    batch, heads, k, v = 2, 3, 16, 32
    base = torch.randn(batch, heads, k, v, generator=g)
    tokens = [
        (*torch.randn(2, batch, heads, k, generator=g).mul(0.2), torch.randn(batch, heads, v, generator=g),
         -torch.rand(batch, heads, *([k] if kda else []), generator=g), torch.rand(batch, heads, generator=g))
        for _ in range(8)
    ]  # fmt: skip

    def run(poison: bool) -> tuple[Tensor, Tensor]:
        window, state, ys = WriteWindow(4, dtype), base, []
        for index, (q, key, value, gate, beta) in enumerate(tokens):
            value = value.clone()
            if poison and index == 2:
                value[1, 2, 5] = math.nan
            state, y, _ = window.step(state, q, key, value, gate, beta)
            ys.append(y)
        return state, torch.stack(ys)

    (clean, ys), (found, zs) = run(False), run(True)
    touched = torch.zeros(batch, heads, dtype=torch.bool)
    touched[1, 2] = True
    assert torch.equal(found[~touched], clean[~touched])
    assert torch.equal(zs[:, ~touched], ys[:, ~touched])
    assert torch.equal(zs[:2], ys[:2])
    assert bool(found[1, 2].isnan().any())


@pytest.mark.parametrize("power", [-20, -10, 0, 10])
def test_windows_are_the_recurrence_at_every_scale(power: int) -> None:
    """State and values scaled alike: outputs scale with them, to rounding."""
    g = torch.Generator().manual_seed(5)
    base = torch.randn(2, 16, 32, generator=g, dtype=torch.float64) * 2.0**power
    window, state, exact = WriteWindow(8, "fp32"), base.float(), base
    for _ in range(19):
        q, key = torch.nn.functional.normalize(torch.randn(2, 2, 16, generator=g, dtype=torch.float64), dim=-1)
        value = torch.randn(2, 32, generator=g, dtype=torch.float64) * 2.0**power
        gate, beta = -torch.rand(2, generator=g, dtype=torch.float64), torch.rand(2, generator=g, dtype=torch.float64)
        exact, want = step(exact, q, key, value, gate, beta)
        state, y, _ = window.step(state, *(t.float() for t in (q, key, value, gate, beta)))
        assert error(y, want) < 1e-5
    assert error(window.fold(state), exact) < 1e-5
