"""A prompt in pieces: the chunked delta rule over any split is the whole; packing between costs what it must."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepquant.codec.chunks import delta_rule
from stepquant.codec.packed import PackedCodec
from stepquant.codec.recurrence import replay
from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape

H, K, V, T = 2, 16, 32, 150


def segment(seed: int, kda: bool) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, T, H, *shape, generator=g, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(K), dim=-1) for _ in range(2))
    gate = -torch.rand(1, T, H, *([K] if kda else []), generator=g, dtype=torch.float64) * 0.05
    return q, k, draw(V), gate, torch.rand(1, T, H, generator=g, dtype=torch.float64)


def pieces(inputs: tuple[Tensor, ...], cuts: list[int]) -> list[tuple[Tensor, ...]]:
    edges = [0, *cuts, T]
    return [tuple(x[:, a:b] for x in inputs) for a, b in pairwise(edges)]


splits = st.lists(st.integers(1, T - 1), max_size=6, unique=True).map(sorted)


@pytest.mark.parametrize("kda", [False, True])
@settings(max_examples=25, deadline=None)
@given(cuts=splits, seed=st.integers(0, 100))
def test_any_split_is_the_whole(kda: bool, cuts: list[int], seed: int) -> None:
    inputs = segment(seed, kda)
    y, whole = replay(*inputs)
    state, parts = None, []
    for piece in pieces(inputs, cuts):
        out, state = delta_rule(*piece, state)
        parts.append(out)
    assert state is not None
    torch.testing.assert_close(state, whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(torch.cat(parts, 1), y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kda", [False, True])
@settings(max_examples=25, deadline=None)
@given(cuts=splits, seed=st.integers(0, 100))
def test_packing_between_pieces_adds_no_more_than_its_own_error(kda: bool, cuts: list[int], seed: int) -> None:
    """(I - beta k k^T) D contracts for unit keys and beta in [0, 1]: errors of the boundaries at most add up."""
    inputs, rng = segment(seed, kda), np.random.default_rng(seed)
    bits = rng.choice(np.array([4, 6, 8, 16], np.uint8), (1, H, K))
    codec = PackedCodec(
        PageLayout(StateShape(H, K, V), bits, "shared"), 0, torch.ones(H, K), CodecSpec(codebook="shared")
    )
    _, whole = replay(*inputs)
    state, allowed, steps = None, 0.0, pieces(inputs, cuts)
    for index, piece in enumerate(steps):
        _, state = delta_rule(*piece, state)
        if index + 1 < len(steps):
            exact, state = state, codec.unpack(codec.pack(state.float())).double()
            allowed += float((state - exact).norm())
            assert float((state - exact).norm()) < 0.1 * float(exact.norm())
    assert state is not None
    assert float((state - whole).norm()) <= allowed * (1 + 1e-6) + 1e-9
