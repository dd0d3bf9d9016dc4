"""Small plans for the runtime's tests: pages of every kind, two layers, on the CPU."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape
from stepquant.runtime.reference import ReferenceKernels

HEADS, K, V, LAYERS = 2, 16, 16, 2


def layout_of(family: Literal["gdn", "kda"], seed: int = 0) -> tuple[PageLayout, Tensor, CodecSpec]:
    """Layout, row weights `[L, H, K]` and codec of a two-layer plan."""
    rng = np.random.default_rng(seed)
    if family == "gdn":
        bits = np.repeat(np.array([[6, 16], [8, 4]], np.uint8)[..., None], K, -1)
        codec = CodecSpec(codebook="head", group=16)
    else:
        bits = rng.choice(np.array([4, 6, 8, 16], np.uint8), (LAYERS, HEADS, K))
        codec = CodecSpec(codebook="shared", group=16)
    layout = PageLayout(StateShape(HEADS, K, V), bits, codec.codebook, group=codec.group)
    w = torch.from_numpy(np.exp(rng.normal(0, 0.3, (LAYERS, HEADS, K)))).float()
    return layout, w, codec


def kernels_of(family: Literal["gdn", "kda"], window: int = 1, buffer: str = "fp32") -> ReferenceKernels:
    """The plan's operations in torch."""
    layout, w, codec = layout_of(family)
    return ReferenceKernels(layout, w, codec, family, 1 if family == "gdn" else HEADS, window, buffer)


def token_of(family: Literal["gdn", "kda"], batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs of one decode step of one layer, as `PackedKernels.step` takes them."""
    keys, gates = (1, HEADS) if family == "gdn" else (HEADS, HEADS * K)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": draw(batch, keys, K), "k": draw(batch, keys, K), "v": draw(batch, HEADS, V), "a": draw(batch, gates),
        "b": draw(batch, HEADS), "A_log": draw(HEADS) * 0.3, "dt_bias": draw(gates) - 2,
    }  # fmt: skip
