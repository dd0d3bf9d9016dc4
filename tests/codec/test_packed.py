"""Pages round-trip bit for bit to what the simulated codec gives, whatever the map, shape and granularity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.packed import PackedCodec, _exchange_lanes, merge_columns, split_columns
from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape

SHAPES = [(16, 32), (32, 64), (96, 192), (32, 48), (64, 16)]


def states(rng: np.random.Generator, batch: int, heads: int, key_dim: int, value_dim: int) -> torch.Tensor:
    """States with rows, columns and heads of very different size, some exactly zero."""
    x = rng.standard_normal((batch, heads, key_dim, value_dim))
    x *= np.exp(rng.normal(0, 1.5, (1, heads, key_dim, 1)) + rng.normal(0, 1, (1, heads, 1, value_dim)))
    x[:, :, 3] = 0
    x[0, :, :, 5] = 0
    return torch.from_numpy(0.03 * x).float()


def check(bits: np.ndarray, spec: CodecSpec, granularity: int, value_dim: int, rng: np.random.Generator) -> None:
    _, heads, key_dim = bits.shape
    layout = PageLayout(StateShape(heads, key_dim, value_dim), bits, spec.codebook, granularity, spec.group)
    w = torch.from_numpy(np.exp(rng.normal(0, 0.3, (heads, key_dim)))).float()
    for layer in range(len(bits)):
        packed = PackedCodec(layout, layer, w, spec)
        x = states(rng, 2, heads, key_dim, value_dim)
        pages = packed.pack(x)
        assert pages.shape == (2, layout.layer_bytes[layer])
        assert pages.dtype == torch.uint8
        simulated = DualAxisCodec(torch.from_numpy(bits[layer]), w, spec, value_dim).roundtrip(x)
        assert torch.equal(packed.unpack(pages), simulated)
        assert torch.equal(packed.pack_codes(packed.unpack_codes(pages)), pages)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from(SHAPES), st.sampled_from([1, 2, 4, 8, 16]),
    st.lists(st.sampled_from([2, 4, 6, 8, 16]), min_size=1, max_size=5, unique=True), st.integers(0, 2),
)  # fmt: skip
def test_shared_codebook(seed: int, shape: tuple[int, int], granularity: int, menu: list[int], refits: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.choice(np.array(menu, np.uint8), (2, 3, shape[0]))
    check(bits, CodecSpec(codebook="shared", refits=refits), granularity, shape[1], rng)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from(SHAPES), st.sampled_from([8, 16]),
    st.lists(st.sampled_from([2, 4, 6, 8, 16]), min_size=1, max_size=5, unique=True),
)  # fmt: skip
def test_head_codebook(seed: int, shape: tuple[int, int], granularity: int, menu: list[int]) -> None:
    rng = np.random.default_rng(seed)
    bits = np.repeat(rng.choice(np.array(menu, np.uint8), (1, 4, 1)), shape[0], -1)
    check(bits, CodecSpec(codebook="head", group=16), granularity, shape[1], rng)


def test_another_codebook_than_the_layout_s_is_refused() -> None:
    layout = PageLayout(StateShape(1, 16, 32), np.full((1, 1, 16), 4), "shared")
    with pytest.raises(ValueError, match="the layout has the 'shared' codebook, the codec 'head'"):
        PackedCodec(layout, 0, torch.ones(1, 16), CodecSpec(codebook="head"))


@pytest.mark.parametrize("granularity", [1, 8])
def test_row_factors_of_pivots_are_zero_in_a_page(granularity: int) -> None:
    """Kernels read every slot's factor: one of a pivot row would add it to the coded rows' sum."""
    bits = np.array([4, 16, 8, 16] * 4, np.uint8).reshape(1, 1, 16)
    layout = PageLayout(StateShape(1, 16, 32), bits, "shared", granularity)
    packed = PackedCodec(layout, 0, torch.ones(1, 16), CodecSpec(codebook="shared"))
    pages = packed.pack(torch.randn(3, 1, 16, 32, generator=torch.Generator().manual_seed(0)))
    start, size = layout.part(0, 0, "r")
    stored = pages[:, start : start + size].view(torch.float16)[
        :, torch.from_numpy(layout.row_slot()[0, 0].astype(int))
    ]
    pivots = torch.from_numpy(bits[0, 0] == 16)
    assert bool((stored[:, pivots] == 0).all())
    assert bool((stored[:, ~pivots] > 0).all())


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("blocked", [False, True])
def test_planes_invert(width: int, blocked: bool) -> None:
    fields = torch.randint(0, 2**width, (3, 32, 48), dtype=torch.uint8)
    plane = merge_columns(fields, width, blocked)
    assert plane.shape == (3, 32 * 48 * width // 8)
    assert torch.equal(split_columns(plane, width, blocked, 32), fields)


def test_words_lie_as_documented() -> None:
    """Row m = 3 (slots 24 to 31), block b = 1, lane l = 5: exchanged with d = 3."""
    nibbles = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    plane = merge_columns(nibbles, 4, True).view(4, 2, 8, 2, 2, 4)  # m, b, l, s, e, i
    assert plane[3, 1, 5 ^ 6, 0, 1, 3] == nibbles[27, 29] | nibbles[27, 61] << 4
    crumbs = torch.randint(0, 4, (32, 64), dtype=torch.uint8)
    plane = merge_columns(crumbs, 2, True).view(4, 2, 8, 2, 4)  # m, b, l, e, i
    expected = crumbs[25, 29] | crumbs[25, 61] << 2 | crumbs[29, 29] << 4 | crumbs[29, 61] << 6
    assert plane[3, 1 ^ 1, 5 ^ 4, 1, 1] == expected
    odd = torch.randint(0, 4, (32, 32), dtype=torch.uint8)  # one block: nothing to exchange it with
    assert merge_columns(odd, 2, True).view(4, 1, 8, 2, 4)[3, 0, 5 ^ 4, 1, 1] == (
        odd[25, 13] | odd[25, 29] << 2 | odd[29, 13] << 4 | odd[29, 29] << 6
    )


@pytest.mark.parametrize(("width", "lanes", "size"), [(4, 8, 16), (2, 16, 8)])
def test_a_part_of_a_warp_meets_every_bank_once(width: int, lanes: int, size: int) -> None:
    """128 x 128: the lanes (l, d) of a quarter or half of a warp load `size` bytes each from 32 banks of 4 bytes."""
    K = V = 128
    row = V * 8 * width // 8
    where = torch.arange(K * row // 8, dtype=torch.int64)
    plane = _exchange_lanes(where.view(K // 8, V // 32, 8, -1), width).flatten()
    place = torch.empty_like(where)
    place[plane] = where  # where the byte that would lie at i without the exchange lies
    for block in range(V // 32):
        for first in range(0, 32, lanes):
            starts = [place[d * row + block * 8 * size + lane * size] for lane in range(8) for d in range(4)]
            banks = {int(s) % 128 for s in starts[first : first + lanes]}
            assert banks == set(range(0, 128, size))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_are_the_same_on_the_gpu() -> None:
    rng = np.random.default_rng(3)
    bits = rng.choice(np.array([4, 6, 8, 16], np.uint8), (1, 4, 32))
    layout = PageLayout(StateShape(4, 32, 64), bits, "shared")
    w, x = torch.ones(4, 32), states(rng, 2, 4, 32, 64)
    spec = CodecSpec(codebook="shared", refits=0)  # no sums, whose order differs between devices
    cpu, gpu = PackedCodec(layout, 0, w, spec), PackedCodec(layout, 0, w.cuda(), spec)
    pages = cpu.pack(x)
    assert torch.equal(gpu.unpack(pages.cuda()).cpu(), cpu.unpack(pages))
