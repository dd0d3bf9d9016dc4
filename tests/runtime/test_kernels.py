"""The pool on the generated Triton kernels (in the interpreter) beside the pool on the torch operations."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from stepquant.runtime.pool import PackedPool
from stepquant.runtime.step import PackedKernels
from tests.runtime.plans import HEADS, LAYERS, K, V, kernels_of, layout_of, token_of


@pytest.mark.parametrize(("family", "window"), [("gdn", 1), ("gdn", 4), ("kda", 4)])
def test_the_same_requests_on_both(family: Literal["gdn", "kda"], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, decode at different phases with padding, fork, flush: outputs agree, pages but for codes on an edge."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layout, w, codec = layout_of(family)
    key_heads = 1 if family == "gdn" else HEADS
    triton = PackedKernels(layout, w, codec, family, key_heads, "ab" * 32, window, "fp32", "cpu")
    pools = [PackedPool(layout, kernels, 4, 2, "cpu") for kernels in (triton, kernels_of(family, window))]
    g = torch.Generator().manual_seed(0)
    states = torch.randn(LAYERS, 2, HEADS, V, K, generator=g) * 0.1
    lengths = torch.tensor([6, 7])
    for pool in pools:
        slots = pool.alloc(2)
        assert slots is not None
        pool.begin_extend(slots, torch.tensor([1, 2]), torch.zeros(2), lengths)
        for layer in range(LAYERS):
            pool.extend_layer(layer, slots, states[layer])
    order = torch.tensor([2, -1, 1], dtype=torch.int32)
    for _ in range(3):
        for layer in range(LAYERS):
            token, outs = token_of(family, 3, g), []
            for pool in pools:
                outs.append(torch.full((3, HEADS, V), torch.nan))
                pool.decode(layer, order, **token, scale=K**-0.5, out=outs[-1])
            assert torch.allclose(outs[0], outs[1], rtol=1e-2, atol=1e-2)
            assert bool((outs[0][1] == 0).all())
        assert torch.equal(pools[0].table, pools[1].table)
    for pool in pools:
        made = pool.fork(torch.tensor([1]))
        assert made is not None
        assert torch.equal(pool.pages[int(made)], pool.pages[1])
    assert (pools[0].pages != pools[1].pages).float().mean() < 0.02
    dense = []
    for pool in pools:
        dense.append([pool.kernels.unpack(i, pool.page(i), torch.tensor([3]), torch.zeros(1, HEADS, K, V))
                      for i in range(LAYERS)])  # fmt: skip
    for a, b in zip(*dense, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
