"""Small plans of every kind, with inputs and references for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.dual_axis import Codes
from stepquant.codec.packed import PackedCodec
from stepquant.codec.spec import CodecSpec
from stepquant.layout import PageLayout, StateShape
from stepquant.runtime.step import PackedKernels

MENUS = {"qwen_6bit": (4, 6, 8, 16), "qwen_4bit": (2, 4, 6, 16), "kimi_6bit": (4, 6, 8, 16), "kimi_4bit": (2, 4, 6, 16)}


@dataclass
class Case:
    """One layer of a plan at a small size, on the CPU."""

    name: str
    family: Literal["gdn", "kda"]
    K: int
    V: int
    heads: int
    key_heads: int
    bits: np.ndarray
    w: Tensor
    codec: CodecSpec
    layout: PageLayout

    @classmethod
    def make(cls, name: str, K: int, V: int, rowwise: bool = False, pivots: bool = True, seed: int = 0) -> Case:
        """A recipe's kind of map; `rowwise` gives a GDN plan with rows of different precision."""
        rng = np.random.default_rng(seed)
        gdn = name.startswith("qwen")
        menu = np.array(MENUS[name] if pivots else MENUS[name][:-1], np.uint8)
        if gdn and not rowwise:
            bits = np.repeat(menu[:, None], K, 1)
        else:
            bits = rng.choice(menu, (4, K), p=None if not pivots else [0.32, 0.32, 0.31, 0.05])
            bits[1] = menu[0]  # a head of one precision among the mixed ones
        heads = len(bits)
        refits = 1 if K <= 32 else 0  # the paper's, or the recipes' default
        codec = CodecSpec(
            codebook="head" if gdn and not rowwise else "shared", refits=refits, group=16 if V < 128 else 32
        )
        layout = PageLayout(StateShape(heads, K, V), bits[None], codec.codebook, group=codec.group)
        w = torch.from_numpy(np.exp(rng.normal(0, 0.3, (1, heads, K)))).float()
        key_heads = heads // (2 if heads % 2 == 0 else 3) if gdn else heads
        return cls(name, "gdn" if gdn else "kda", K, V, heads, key_heads, bits, w, codec, layout)

    def kernels(self, window: int = 1, buffer: str = "fp16") -> PackedKernels:
        return PackedKernels(
            self.layout, self.w, self.codec, self.family, self.key_heads, "ab" * 32, window, buffer, "cpu"
        )

    @property
    def torch_codec(self) -> PackedCodec:
        return PackedCodec(self.layout, 0, self.w[0], self.codec)

    def states(self, count: int, seed: int = 1) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(count, self.heads, self.K, self.V, generator=g) * 0.02
        x *= torch.exp(torch.randn(1, self.heads, self.K, 1, generator=g))
        x[:, :, :, 3] = 0  # a column that was never written
        return x

    def token(self, batch: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | float]:
        """Inputs as strided views of packed projections, and an output full of NaN."""
        g = torch.Generator().manual_seed(seed)
        H, HK, K, V = self.heads, self.key_heads, self.K, self.V
        gates = H * (K if self.family == "kda" else 1)
        qkv = torch.randn(batch, 2 * HK * K + H * V + 5, generator=g).to(dtype)
        q, k, v = qkv[:, :-5].split([HK * K, HK * K, H * V], -1)
        ab = torch.randn(batch, gates + H + 3, generator=g).to(dtype)
        return {
            "q": q.unflatten(-1, (HK, K)), "k": k.unflatten(-1, (HK, K)), "v": v.unflatten(-1, (H, V)),
            "a": ab[:, :gates], "b": ab[:, gates:-3],
            "A_log": torch.empty(H).uniform_(1, 16, generator=g).log(),
            "dt_bias": torch.empty(gates).uniform_(-6, -2, generator=g), "scale": K**-0.5,
            "out": torch.full((batch, H, V), torch.nan, dtype=dtype),
        }  # fmt: skip

    def exact(self, t: dict, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """q, k, v, log gate and beta as the recurrence takes them."""
        q, k, v, a, b = (t[n].to(dtype) for n in ("q", "k", "v", "a", "b"))
        repeat = self.heads // self.key_heads
        q = (q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * t["scale"]).repeat_interleave(repeat, 1)
        k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeat, 1)
        gate = torch.nn.functional.softplus(a + t["dt_bias"].to(dtype))
        rate = t["A_log"].to(dtype).exp()
        if self.family == "kda":
            return q, k, v, -rate[:, None] * gate.unflatten(-1, (self.heads, self.K)), b.sigmoid()
        return q, k, v, -rate * gate, b.sigmoid()

    def flips(self, pages: Tensor, state: Tensor) -> tuple[int, int]:
        """Codes of `pages` that differ from the torch codec's on `state`, and how many there are."""
        want, have = self.torch_codec.codec.fit(state.float()), self.torch_codec.unpack_codes(pages)
        integer = torch.from_numpy(self.bits != 16)[None, :, :, None].expand_as(want.codes)
        return int(((want.codes != have.codes) & integer).sum()), int(integer.sum())


def same_scales(case: Case, a: Codes, b: Codes) -> bool:
    """Row factors of coded rows and column scales of heads that have any agree to one FP16 step."""
    coded = torch.from_numpy(case.bits != 16)
    some = coded.any(-1)
    near = {"rtol": 2e-3, "atol": 1e-7}
    rows = torch.isclose(a.r.float(), b.r.float(), **near)[:, coded].all()
    return bool(rows and torch.isclose(a.c.float(), b.c.float(), **near)[:, some].all())


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference.double()).norm() / reference.double().norm())
