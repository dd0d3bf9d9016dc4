"""Tensor parallelism 1, 2, 4, 8: the pages of the ranks, end to end, are the page of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stepquant.codec.packed import PackedCodec
from stepquant.codec.spec import CodecSpec
from stepquant.geometry import Geometry
from stepquant.layout import PageLayout
from stepquant.runtime.load import RankPlan, load_rank_plan
from tests.plans import small_plan


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_concatenate(family: str, size: int, tmp_path: Path) -> None:
    heads, k, v, layers = 8, 16, 32, 2
    rng = np.random.default_rng(size)
    if family == "gdn":
        bits = np.repeat(rng.choice(np.array([2, 4, 6, 8, 16], np.uint8), (layers, heads, 1)), k, -1)
        codec = CodecSpec(group=16)
    else:
        bits = rng.choice(np.array([2, 4, 6, 8, 16], np.uint8), (layers, heads, k))
        codec = CodecSpec(codebook="shared")
    w = np.exp(rng.normal(0, 0.3, bits.shape))
    w = torch.from_numpy(w / np.exp(np.log(w).mean(-1, keepdims=True))).float()
    geometry = Geometry(family, "tiny", (0, 1), heads, heads, k, v, num_layers=2)  # type: ignore[arg-type]
    layout = PageLayout(geometry, bits, codec.codebook, group=codec.group)
    plan = replace(
        small_plan(predicted={}), geometry=geometry, codec=codec, bits=torch.from_numpy(bits), w=w,
        permutation=torch.from_numpy(layout.permutation),
    )  # fmt: skip
    plan.save(tmp_path)
    ranks = [load_rank_plan(tmp_path, rank, size) for rank in range(size)]
    x = torch.randn(3, heads, k, v, generator=torch.Generator().manual_seed(1))
    for layer in range(layers):
        whole = codec_of(ranks[0], layer) if size == 1 else PackedCodec(layout, layer, w[layer], codec)
        page, used = whole.pack(x), int(layout.sizes[layer].sum())
        parts = []
        for rank, part in enumerate(ranks):
            own = x[:, rank * heads // size : (rank + 1) * heads // size]
            parts.append(codec_of(part, layer).pack(own)[:, : int(part.layout.sizes[layer].sum())])
        assert torch.equal(torch.cat(parts, 1), page[:, :used])
        assert all(int(part.layout.layer_bytes.sum()) <= part.slot_bytes for part in ranks)
    assert len({part.slot_bytes for part in ranks}) == 1
    assert sum(part.layout.bytes.total for part in ranks) == layout.bytes.total


def codec_of(part: RankPlan, layer: int) -> PackedCodec:
    return PackedCodec(part.layout, layer, part.w[layer], part.plan.codec)
