"""The decode step against the float64 recurrence and the torch codec, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch

from stepquant.codec.recurrence import step
from tests.codegen.cases import Case, relative, same_scales

CASES = [
    ("qwen_6bit", 64, 64), ("qwen_6bit", 32, 48), ("qwen_4bit", 32, 64), ("qwen_4bit", 96, 192),
    ("kimi_6bit", 128, 128), ("kimi_6bit", 32, 48), ("kimi_4bit", 48, 96), ("kimi_4bit", 16, 32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "K", "V"), CASES)
def test_step(name: str, K: int, V: int) -> None:
    check(Case.make(name, K, V))


def test_rowwise_gdn_plan() -> None:
    check(Case.make("qwen_6bit", 32, 64, rowwise=True))


def test_plan_without_pivots() -> None:
    check(Case.make("kimi_6bit", 32, 32, pivots=False))


def check(case: Case) -> None:
    kernels, codec = case.kernels(), case.torch_codec
    pages = codec.pack(case.states(5))
    before = pages.clone()
    state = codec.unpack(pages)
    pages[[0, 2, 3]] = 255  # rows of other requests: poison that must neither be read nor written
    poisoned = pages.clone()
    slots = torch.tensor([4, -1, 1], dtype=torch.int32)
    t = case.token(3, seed=3)
    kernels.step(0, pages, slots, **t)
    live, rows = [0, 2], [4, 1]
    updated, y = step(state[rows].double(), *(x[live] for x in case.exact(t)))
    assert relative(t["out"][live], y) < 1e-5
    assert bool((t["out"][1] == 0).all())
    assert torch.equal(pages[[0, 2, 3]], poisoned[[0, 2, 3]])
    flipped, total = case.flips(pages[rows], updated)
    assert flipped <= 1e-4 * total
    want = codec.codec.fit(updated.float())
    assert same_scales(case, codec.unpack_codes(pages[rows]), want)
    pivot = torch.from_numpy(case.bits == 16)
    if pivot.any():
        torch.testing.assert_close(codec.unpack(pages[rows])[:, pivot], updated[:, pivot].float(), rtol=1e-3, atol=1e-6)
    used = int(case.layout.sizes[0].sum())
    assert torch.equal(pages[:, used:], poisoned[:, used:])  # the alignment at the end is nobody's
    assert not torch.equal(pages[rows], before[rows])


def test_model_dtype_and_plain_vectors() -> None:
    """bfloat16 inputs and outputs; q and k that are normalised already."""
    case = Case.make("kimi_6bit", 32, 32)
    kernels, codec = case.kernels(), case.torch_codec
    pages = codec.pack(case.states(2))
    state, t = codec.unpack(pages), case.token(2, 5, torch.bfloat16)
    kernels.step(0, pages, torch.tensor([1, 0]), **t, l2norm=False)
    q, k = (t[n].double() for n in "qk")
    _, _, v, gate, beta = case.exact(t)
    _, y = step(state[[1, 0]].double(), q * t["scale"], k, v, gate, beta)
    assert t["out"].dtype == torch.bfloat16
    assert relative(t["out"], y) < 2e-2
