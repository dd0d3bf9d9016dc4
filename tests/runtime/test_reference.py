"""The torch operations against the codec's readable references."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from stepquant.codec.packed import PackedCodec
from stepquant.codec.window import WriteWindow
from stepquant.runtime.window import WindowBuffers
from tests.runtime.plans import HEADS, K, V, kernels_of, layout_of, token_of

FAMILIES: tuple[Literal["gdn", "kda"], ...] = ("gdn", "kda")


def exact(family: str, t: dict) -> tuple[torch.Tensor, ...]:
    """q, k, v, log gate and beta `[B, H, ...]` as `WriteWindow` takes them."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (t["q"], t["k"]))
    q, k = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (q * K**-0.5, k))
    a = (t["a"] + t["dt_bias"]).unflatten(-1, (HEADS, -1))
    gate = -t["A_log"].exp().unsqueeze(-1) * torch.nn.functional.softplus(a)
    return q, k, t["v"], gate.squeeze(-1) if family == "gdn" else gate, torch.sigmoid(t["b"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("buffer", ["fp32", "fp16", "int8"])
def test_decode_is_the_written_down_algebra(family: Literal["gdn", "kda"], window: int, buffer: str) -> None:
    layout, w, codec = layout_of(family)
    kernels, packed = kernels_of(family, window, buffer), PackedCodec(layout, 1, w[1], codec)
    g = torch.Generator().manual_seed(1)
    pages = torch.full((4, int(layout.layer_bytes[1])), 255, dtype=torch.uint8)
    slots = torch.tensor([2, -1, 1])
    first = torch.randn(3, HEADS, K, V, generator=g) * 0.1
    kernels.pack(1, pages, slots, first)
    base = packed.unpack(pages[[2, 1]])
    buffers = WindowBuffers.allocate(kernels.spec, 3, "cpu")
    starts = [0, min(2, window - 1)]
    phases, pending = torch.tensor([starts[0], 0, starts[1]]), torch.zeros(3, dtype=torch.int64)
    windows = [WriteWindow(window, buffer, start) for start in starts]
    folds = 0
    for _ in range(9):
        token = token_of(family, 3, g)
        out = torch.full((3, HEADS, V), torch.nan)
        if window == 1:
            kernels.step(1, pages, slots, **token, scale=K**-0.5, out=out)
        else:
            kernels.window_step(
                1, pages, slots, **token, scale=K**-0.5, out=out, buffers=buffers, rows=torch.tensor([0, 1, 2]),
                phases=phases, pending=pending,
            )  # fmt: skip
        assert bool((out[1] == 0).all())
        for i, place in enumerate((0, 2)):
            inputs = (x[place] for x in exact(family, token))
            state, y, new = windows[i].step(base[i], *inputs)
            assert torch.allclose(out[place], y, rtol=1e-4, atol=1e-5)
            if new:
                expected = packed.pack(state[None])
                assert torch.allclose(packed.unpack(expected), packed.unpack(pages[slots[place]][None]), atol=1e-3)
                state, folds = packed.unpack(pages[slots[place]][None])[0], folds + 1
            base[i] = state
        pending = torch.where(phases == window - 1, 0, pending + 1)
        phases = (phases + 1) % window
    assert folds >= 4
    if window > 1:
        kernels.flush(1, pages, slots, buffers, torch.tensor([0, 1, 2]), phases, pending)
        for i, place in enumerate((0, 2)):
            if pending[place] > 0:
                expected = packed.unpack(packed.pack(windows[i].fold(base[i])[None]))
                assert torch.allclose(expected, packed.unpack(pages[slots[place]][None]), atol=1e-3)
    assert bool((pages[[0, 3]] == 255).all())
