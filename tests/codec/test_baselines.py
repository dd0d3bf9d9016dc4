"""The baseline codecs against independent float64 numpy, one head at a time, loops where loops are clearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.baselines import DAMP_FRACTION, damp_channels, hadamard, round_e2m1
from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.registry import bits_per_value, make_codec, storage_bits
from stepquant.codec.spec import PIVOT, CodecSpec
from stepquant.errors import RecipeError

H, K, V = 3, 16, 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)


def states(seed: int = 0, rows: int = K, cols: int = V) -> torch.Tensor:
    """States with outlier rows and columns, as real ones have."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, H, rows, cols, generator=g, dtype=torch.float64)
    x *= torch.exp(torch.randn(2, H, rows, 1, generator=g, dtype=torch.float64))
    return x * torch.exp(torch.randn(2, H, 1, cols, generator=g, dtype=torch.float64))


def nearest(x: float, grid: np.ndarray) -> float:
    """Nearest entry of an ascending grid; ties to the even index."""
    distance = np.abs(grid - x)
    best = np.flatnonzero(distance == distance.min())
    return float(grid[best[0] if best[0] % 2 == 0 else best[-1]])


def rowwise(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    for i, b in enumerate(bits):
        if b == PIVOT:
            out[i] = np.clip(x[i], -65504, 65504).astype(np.float16)
            continue
        q = 2 ** (int(b) - 1) - 1
        s = float(np.float16(np.clip(np.abs(x[i]).max() / q, 2.0**-14, 65504)))
        out[i] = s * np.clip(np.rint(x[i] / s), -q, q)
    return out


def dsq(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    def fp16(s: np.ndarray) -> np.ndarray:
        return np.clip(s, 2.0**-24, 65504).astype(np.float16).astype(np.float64)

    a = fp16(np.sqrt(np.abs(x).max(1)))
    integer = bits != PIVOT
    c = fp16((np.abs(x)[integer] / a[integer, None]).max(0))
    out = x.astype(np.float16).astype(np.float64)
    for i in np.flatnonzero(integer):
        q = 2 ** (int(bits[i]) - 1) - 1
        out[i] = a[i] * c / q * np.clip(np.rint(x[i] * q / (a[i] * c)), -q, q)
    return out


def nvfp4(x: np.ndarray) -> np.ndarray:
    head = float(np.float32(np.abs(x).max() / (448 * 6)))
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 16):
            block = x[i, j : j + 16]
            scale = nearest(np.abs(block).max() / (6 * head), E4M3) * head
            for n, value in enumerate(block):
                code = nearest(min(abs(value) / scale, 6.0), E2M1) if scale else 0.0
                out[i, j + n] = np.sign(value) * code * scale
    return out


def heads(x: torch.Tensor, function: object, bits: torch.Tensor) -> np.ndarray:
    flat = x.reshape(-1, H, *x.shape[-2:]).numpy()
    return np.stack([[function(s[h], bits[h].numpy()) for h in range(H)] for s in flat]).reshape(x.shape)  # type: ignore[operator]


def mixed(rows: int = K) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    menu = torch.tensor([2, 3, 4, 5, 6, 8, PIVOT], dtype=torch.uint8)
    return menu[torch.randint(0, len(menu), (H, rows), generator=g)]


ONES = torch.ones(H, K)


@pytest.mark.parametrize(("kind", "reference"), [("rowwise", rowwise), ("dsq", dsq)])
@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2, "mixed"])
def test_integer_codecs_match_numpy(kind: str, reference: object, bits: int | str) -> None:
    table = mixed() if bits == "mixed" else torch.full((H, K), bits, dtype=torch.uint8)
    x = states()
    codec = make_codec(table, ONES, CodecSpec(kind=kind), V)  # type: ignore[arg-type]
    kept = x.clone()
    np.testing.assert_allclose(codec.roundtrip(x).numpy(), heads(x, reference, table), rtol=1e-12)
    assert torch.equal(x, kept), "a codec must not change its input"
    single = codec.roundtrip(x.float()).double()
    assert ((single - codec.roundtrip(x)).abs() > 1e-6 * x.abs().amax()).double().mean() < 2e-3  # rounding boundaries


def test_nvfp4_matches_numpy() -> None:
    table = torch.full((H, K), 4, dtype=torch.uint8)
    x = states(3)
    x[0, 0, :2] *= 1e-6  # blocks whose scale vanishes beside the head's
    out = make_codec(table, ONES, CodecSpec(kind="nvfp4"), V).roundtrip(x)
    np.testing.assert_allclose(out.numpy(), heads(x, lambda s, _: nvfp4(s), table), rtol=1e-12)


def test_e2m1_rounds_ties_to_even() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 7.0, -0.75, -5.0])
    assert round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0]


@pytest.mark.parametrize("size", [8, 128, 192])
def test_hadamard_is_an_orthonormal_involution(size: int) -> None:
    matrix = hadamard(size).double()
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-6, rtol=0)
    assert matrix.abs().unique().numel() == (1 if size & (size - 1) == 0 else 2)


def test_damp_rotates_the_value_axis_and_keeps_channels() -> None:
    table = torch.full((H, K), 8, dtype=torch.uint8)
    table[:, ::4] = PIVOT
    x = states(5)
    rotation = hadamard(V).double().numpy()
    expected = heads(x, lambda s, b: rowwise(s @ rotation, np.full(K, 8)) @ rotation, table)
    keep = (table == PIVOT).numpy()[None, :, :, None]
    expected = np.where(keep, x.numpy().astype(np.float16), expected)
    out = make_codec(table, ONES, CodecSpec(kind="damp"), V).roundtrip(x)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_damp_channels_are_the_largest_persistent_errors() -> None:
    error, persistence = torch.rand(2, H, K), torch.rand(2, H, 1)
    bits = damp_channels(error, persistence)
    score = (error * persistence).flatten()
    chosen = (bits == PIVOT).flatten()
    assert int(chosen.sum()) == round(DAMP_FRACTION * score.numel())
    assert float(score[chosen].min()) >= float(score[~chosen].max())


@pytest.mark.parametrize(("bits", "name"), [(32, "fp32"), (16, "fp16")])
def test_float_codecs(bits: int, name: str) -> None:
    x = states().float()
    codec = make_codec(torch.full((H, K), bits, dtype=torch.uint8), ONES, CodecSpec(kind="float"), V)
    out = codec.roundtrip(x)
    assert out is x if name == "fp32" else torch.equal(out, x.half().float())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([4, 6, 8]))
def test_extreme_states_stay_finite(seed: int, bits: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(H, K, V, generator=g) * 10 ** (torch.rand(H, K, V, generator=g) * 60 - 40)
    x[0, 0] = 0
    for kind in ("rowwise", "dsq", "damp", "nvfp4"):
        b = {"damp": 8, "nvfp4": 4}.get(kind, bits)
        codec = make_codec(torch.full((H, K), b, dtype=torch.uint8), ONES, CodecSpec(kind=kind), V)  # type: ignore[arg-type]
        assert bool(torch.isfinite(codec.roundtrip(x)).all()), kind
        assert not codec.roundtrip(torch.zeros(H, K, V)).any()


def test_dual_axis_comes_from_the_same_door() -> None:
    table = mixed()
    spec = CodecSpec(codebook="shared")
    x, w = states().float(), torch.rand(H, K) + 0.5
    assert torch.equal(make_codec(table, w, spec, V).roundtrip(x), DualAxisCodec(table, w, spec, V).roundtrip(x))


@pytest.mark.parametrize(
    ("kind", "bits", "expected"),
    [
        ("rowwise", 8, 8.125),
        ("rowwise", 4, 4.125),
        ("nvfp4", 4, 4 + 8 / 16 + 32 / 16384),
        ("dsq", 6, 6.25),
        ("dual_axis", 6, 6.25),
        ("dual_axis", 2, 2 + 5 * 16 / 128),
        ("damp", 8, 8.125),
        ("float", 16, 16.0),
        ("float", 32, 32.0),
    ],
)
def test_bits_per_value(kind: str, bits: int, expected: float) -> None:
    table = torch.full((2, 4, 128), bits, dtype=torch.uint8)
    assert bits_per_value(table, CodecSpec(kind=kind), 128) == expected  # type: ignore[arg-type]


def test_storage_reproduces_the_papers_byte_counts() -> None:
    qwen = torch.full((48 * 48, 128), 6, dtype=torch.uint8)
    qwen[:32] = PIVOT
    # 32 pivot heads count as 8 bits each, so the other 2,272 heads hold 13,824 - 256 = 13,568 head-bits.
    qwen[32 : 32 + 64] = 5
    assert int(qwen[32:, 0].long().sum()) == 13_568
    assert storage_bits(qwen, CodecSpec(), 128) // 8 == 29_999_104
    kimi = torch.full((20 * 32 * 128,), 6, dtype=torch.uint8)
    kimi[:: 81_920 // 512] = PIVOT
    kimi[1::80] = 5  # 1,024 rows give up the bit that 512 pivots take beyond 8
    assert storage_bits(kimi.view(640, 128), CodecSpec(codebook="shared"), 128) // 8 == 8_257_536


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [("nvfp4", 8, "nvfp4"), ("damp", 4, "damp"), ("rowwise", 7, r"\[7\]"), ("rowise", 8, "did you mean 'rowwise'")],
)
def test_misuse_is_refused_by_name(kind: str, bits: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_codec(torch.full((H, K), bits, dtype=torch.uint8), ONES, CodecSpec(kind=kind), V)  # type: ignore[arg-type]
