"""Synthetic plans and inputs at full size for the kernel benchmarks: seeded maps that use up the paper's budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.packed import PackedCodec
from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape
from stepquant.runtime.step import PackedKernels

MODELS = {"qwen": ("gdn", 48, 48, 16, 32), "kimi": ("kda", 20, 32, 32, 512)}  # layers, heads, key heads, pivots
SAMPLE = 16  # the recipes' default
PLANS = ("qwen_6bit", "qwen_4bit", "kimi_6bit", "kimi_4bit")


def budget_map(units: int, bits: int, pivots: int, rng: np.random.Generator) -> np.ndarray:
    """Precisions of `units` units that use up `bits` a unit exactly, pivots counted as 8 bits."""
    values = np.full(units, bits)
    order = rng.permutation(units)
    values[order[:pivots]] = 16
    rest = order[pivots:]
    excess = (8 - bits) * pivots // 2
    pairs = (len(rest) - excess) // 4
    values[rest[:excess]] -= 2
    values[rest[excess : excess + pairs]] += 2
    values[rest[excess + pairs : excess + 2 * pairs]] -= 2
    return values


@dataclass
class Case:
    """A plan's first layers with everything that a check needs."""

    name: str
    family: Literal["gdn", "kda"]
    heads: int
    key_heads: int
    bits: Tensor
    w: Tensor
    codec: CodecSpec
    layout: PageLayout
    device: str
    made: dict[tuple[int, str], PackedKernels] = field(default_factory=dict)

    K = V = 128

    @classmethod
    def make(cls, name: str, layers: int, device: str, seed: int = 0) -> Case:
        model, width = name.split("_")
        family, depth, heads, key_heads, pivots = MODELS[model]
        rng = np.random.default_rng(seed)
        gdn = family == "gdn"
        bits = budget_map(depth * heads * (1 if gdn else cls.K), int(width[0]), pivots, rng)
        bits = bits.reshape(depth, heads, -1)[:layers]
        if gdn:
            bits = bits.repeat(cls.K, -1)
            if not (bits == 16).any():
                bits[0, 7] = 16  # every kind of head in the layers that are checked
        codec = CodecSpec(codebook="head" if gdn else "shared", refits=0, sample=SAMPLE)
        layout = PageLayout(StateShape(heads, cls.K, cls.V), bits, codec.codebook)
        w = torch.from_numpy(np.exp(rng.normal(0, 0.2, bits.shape))).float()
        return cls(name, family, heads, key_heads, torch.from_numpy(bits.astype(np.uint8)), w, codec, layout, device)

    def kernels(self, window: int = 1, buffer: str = "fp16") -> PackedKernels:
        """Made and compiled once for each window and buffer."""
        if (window, buffer) not in self.made:
            self.made[window, buffer] = PackedKernels(
                self.layout, self.w, self.codec, self.family, self.key_heads, "0" * 64, window, buffer, self.device
            )
        return self.made[window, buffer]

    def torch_codec(self, layer: int = 0) -> PackedCodec:
        return PackedCodec(self.layout, layer, self.w[layer].to(self.device), self.codec)

    def random_pages(self, count: int, layer: int = 0) -> Tensor:
        """Pages of random states of a trained model's size, `[count, page_bytes]`."""
        codec, pages = self.torch_codec(layer), []
        for _ in range(0, count, 64):
            x = torch.randn(min(64, count), self.heads, self.K, self.V, device=self.device) * 0.02
            x *= torch.exp(0.7 * torch.randn(1, self.heads, self.K, 1, device=self.device))
            pages.append(codec.pack(x))
        return torch.cat(pages)[:count]

    def token(self, batch: int, dtype: torch.dtype = torch.bfloat16, strided: bool = True) -> dict[str, Tensor | float]:
        """Inputs of one step, as views of a packed projection with spare columns where `strided`."""
        H, HK, K, V, device = self.heads, self.key_heads, self.K, self.V, self.device
        spare = 64 if strided else 0
        qkv = torch.randn(batch, 2 * HK * K + H * V + spare, device=device, dtype=dtype)
        q, k, v = qkv[:, : 2 * HK * K + H * V].split([HK * K, HK * K, H * V], -1)
        gates = H * (K if self.family == "kda" else 1)
        ab = torch.randn(batch, gates + H + spare, device=device, dtype=dtype)
        g = torch.Generator(device=device).manual_seed(1)

        def uniform(n: int, low: float, high: float) -> Tensor:
            return torch.empty(n, device=device).uniform_(low, high, generator=g)

        return {
            "q": q.unflatten(-1, (HK, K)), "k": k.unflatten(-1, (HK, K)), "v": v.unflatten(-1, (H, V)),
            "a": ab[:, :gates], "b": ab[:, gates : gates + H], "A_log": uniform(H, 1, 16).log(),
            "dt_bias": uniform(gates, -6, -2), "scale": K**-0.5,
            "out": torch.full((batch, H, V), torch.nan, device=device, dtype=dtype),
        }  # fmt: skip

    def exact(self, t: dict, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """q, k, v, log gate and beta of a token as the recurrence takes them."""
        q, k, v, a, b = (t[n].to(dtype) for n in ("q", "k", "v", "a", "b"))
        repeat = self.heads // self.key_heads
        q = (q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * t["scale"]).repeat_interleave(repeat, 1)
        k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeat, 1)
        gate = torch.nn.functional.softplus(a + t["dt_bias"].to(dtype))
        a_log = t["A_log"].to(dtype).exp()
        if self.family == "kda":
            return q, k, v, -a_log[:, None] * gate.unflatten(-1, (self.heads, self.K)), b.sigmoid()
        return q, k, v, -a_log * gate, b.sigmoid().to(t["b"].dtype).to(dtype)
