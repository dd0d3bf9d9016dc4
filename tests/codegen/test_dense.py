"""The codec of the prefill boundary: pages byte for byte, dense states bit for bit, both state layouts."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.cases import Case

CASES = [
    ("qwen_6bit", 32, 64, False), ("qwen_6bit", 32, 64, True), ("qwen_4bit", 96, 192, False),
    ("kimi_6bit", 128, 128, True), ("kimi_4bit", 32, 48, False), ("kimi_4bit", 32, 48, True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "K", "V", "v_first"), CASES)
def test_pack_and_unpack(name: str, K: int, V: int, v_first: bool) -> None:
    case = Case.make(name, K, V)
    kernels, codec, x = case.kernels(), case.torch_codec, case.states(2)
    want = codec.pack(x)
    state = torch.stack([x[0], torch.full_like(x[0], torch.nan), x[1]])
    state = state.transpose(-1, -2).contiguous() if v_first else state
    pages = torch.full((5, want.shape[1]), 255, dtype=torch.uint8)
    slots = torch.tensor([3, -1, 1])
    kernels.pack(0, pages, slots, state, v_first)
    used = int(case.layout.sizes[0].sum())
    assert float((pages[[3, 1]] == want)[:, :used].float().mean()) > 1 - 1e-4
    assert bool((pages[[0, 2, 4]] == 255).all())
    back = torch.full_like(state, torch.nan)
    kernels.unpack(0, pages, slots, back, v_first)
    back = back.transpose(-1, -2) if v_first else back
    torch.testing.assert_close(back[[0, 2]], codec.unpack(pages[[3, 1]]), rtol=1e-6, atol=0)
    assert bool(back[1].isnan().all())
