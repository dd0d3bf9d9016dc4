"""Heads that are kept wholly in FP16 among heads whose rows have precisions of their own: they have no codes at all."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from stepquant.codec.recurrence import step
from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape
from stepquant.runtime.window import WindowBuffers
from tests.codegen.cases import Case, relative

SIZE = 32
pytestmark = [
    pytest.mark.parametrize("family", ["kda", "gdn"]),
    pytest.mark.parametrize("pivots", ["heads", "rows"]),
]


def case_of(family: Literal["kda", "gdn"], pivots: str) -> Case:
    """Three heads, the one in the middle in FP16; with `rows` the first has pivot rows besides."""
    bits = np.full((3, SIZE), 4, np.uint8)
    bits[1] = 16
    if pivots == "rows":
        bits[0, :4] = 16
    codec = CodecSpec(codebook="shared", group=16)
    layout = PageLayout(StateShape(3, SIZE, SIZE), bits[None], "shared", group=16)
    return Case("x", family, SIZE, SIZE, 3, 3, bits, torch.ones(1, 3, SIZE), codec, layout)


def test_dense_states(family: Literal["kda", "gdn"], pivots: str) -> None:
    case = case_of(family, pivots)
    kernels, states, slots = case.kernels(), case.states(1), torch.tensor([2])
    assert kernels.spec.whole
    assert kernels.spec.pivots == pivots
    want = case.torch_codec.pack(states)
    pages = torch.full((5, want.shape[1]), 255, dtype=torch.uint8)
    kernels.pack(0, pages, slots, states)
    used = int(case.layout.sizes.sum())
    assert torch.equal(pages[2, :used], want[0, :used])
    assert bool((pages[[0, 1, 3, 4]] == 255).all())
    assert torch.equal(kernels.unpack(0, pages, slots, torch.zeros_like(states)), case.torch_codec.unpack(want))


@pytest.mark.parametrize("window", [1, 4])
def test_decoding(family: Literal["kda", "gdn"], pivots: str, window: int) -> None:
    """Two windows, and a flush in the middle of a third: outputs from the page's own state, the FP16 head within its
    rounding, and nobody else's page."""
    case = case_of(family, pivots)
    kernels, slots = case.kernels(window), torch.tensor([1])
    pages = torch.full((3, int(case.layout.layer_bytes[0])), 255, dtype=torch.uint8)
    pages[1] = case.torch_codec.pack(case.states(1))[0]
    state = case.torch_codec.unpack(pages[1:2]).double()
    zero = torch.zeros(1, dtype=torch.int32)
    phases, buffers = zero, WindowBuffers.allocate(kernels.spec, 1, "cpu") if window > 1 else None
    for n in range(2 * window + 2):
        token = case.token(1, n)
        state, y = step(state, *case.exact(token))
        if buffers is None:
            kernels.step(0, pages, slots, **token)
        else:
            kernels.window_step(0, pages, slots, **token, buffers=buffers, rows=zero, phases=phases, pending=phases)
            phases = (phases + 1) % window
        assert relative(token["out"], y) < 1e-3
        if int(phases) == 0:
            found = case.torch_codec.unpack(pages[1:2]).double()
            assert relative(found[:, 1], state[:, 1]) < 1e-3
            state = found
    if buffers is not None:
        kernels.flush(0, pages, slots, buffers, zero, phases, phases)
        assert relative(case.torch_codec.unpack(pages[1:2])[:, 1], state[:, 1]) < 1e-3
    assert bool((pages[[0, 2]] == 255).all())
