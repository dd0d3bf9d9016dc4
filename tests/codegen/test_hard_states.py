"""The generated kernels (in the interpreter) and their torch reference on hard states and awkward tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepquant.codec.recurrence import step
from stepquant.runtime.reference import ReferenceKernels
from tests.codegen.cases import Case, relative

CASES = [("qwen_6bit", 32, 64), ("kimi_6bit", 32, 64), ("qwen_4bit", 32, 64), ("kimi_4bit", 16, 32)]
Make = Callable[[Case], Any]


def reference(case: Case) -> ReferenceKernels:
    return ReferenceKernels(case.layout, case.w, case.codec, case.family, case.key_heads)


BOTH = pytest.mark.parametrize("make", [Case.kernels, reference], ids=["triton", "torch"])


@pytest.mark.parametrize("name", ["qwen_6bit", "kimi_6bit"])
def test_a_state_beyond_the_scales_keeps_its_signs(name: str) -> None:
    """Without refits codes are not clamped: where FP16 scales end, the largest values of a column shrink."""
    case = Case.make(name, 32, 64)
    kernels, x = replace(case, codec=replace(case.codec, refits=0)).kernels(), case.states(1) * 1e16
    page = torch.zeros(1, int(case.layout.layer_bytes[0]), dtype=torch.uint8)
    kernels.pack(0, page, torch.tensor([0]), x)
    y = kernels.unpack(0, page, torch.tensor([0]), torch.zeros_like(x))
    large = x.abs() > 0.5 * x.abs().amax(2, keepdim=True)
    assert bool((y[large] * x[large] > 0).all())
    assert 1e11 < float(y.abs().max()) < 1e12


@BOTH
@pytest.mark.parametrize("power", [-20, 4])
@pytest.mark.parametrize(("name", "K", "V"), CASES[:2])
def test_pack_and_step_at_every_scale(name: str, K: int, V: int, power: int, make: Make) -> None:
    """Pages hold what the torch codec would code, and a step is the float64 recurrence, whatever the scale."""
    case = Case.make(name, K, V)
    kernels, codec, x = make(case), case.torch_codec, case.states(2) * 2.0**power
    pages = torch.zeros(3, int(case.layout.layer_bytes[0]), dtype=torch.uint8)
    slots = torch.tensor([2, 1], dtype=torch.int32)
    kernels.pack(0, pages, slots, x)
    state = codec.unpack(pages[[2, 1]])
    assert relative(state, codec.codec.roundtrip(x)) < 1e-3
    t = case.token(2, 7)
    t["v"] = t["v"] * 2.0**power
    kernels.step(0, pages, slots, **t)
    updated, y = step(state.double(), *case.exact(t))
    assert relative(t["out"], y) < 1e-5
    assert relative(codec.unpack(pages[[2, 1]]), codec.codec.roundtrip(updated.float())) < 5e-3


@pytest.mark.parametrize(("name", "K", "V", "make"), [
    *((*case, reference) for case in CASES), ("qwen_4bit", 32, 64, Case.kernels), ("kimi_6bit", 16, 32, Case.kernels),
])  # fmt: skip
def test_edges_are_finite(name: str, K: int, V: int, make: Make) -> None:
    """Zeros, denormals, the largest numbers and uniform rows through pack, unpack and a step."""
    case = Case.make(name, K, V)
    kernels = make(case)
    shape = (case.heads, K, V)
    x = torch.stack([torch.full(shape, value) for value in (0.0, 1e-42, -3e38, 0.37)])
    pages = torch.zeros(5, int(case.layout.layer_bytes[0]), dtype=torch.uint8)
    slots = torch.tensor([4, 3, 2, 1], dtype=torch.int32)
    kernels.pack(0, pages, slots, x)
    back = kernels.unpack(0, pages, slots, torch.full_like(x, torch.nan))
    assert bool(back.isfinite().all())
    assert bool((back * x >= 0).all())
    assert float(back[:2].abs().max()) <= 2.0**-46
    pivot = torch.from_numpy(case.bits == 16)
    assert bool((back[2][pivot] == -65504).all())
    assert relative(back[3], x[3]) < 0.35 if "4bit" in name else relative(back[3], x[3]) < 0.05
    t = case.token(4, 5)
    kernels.step(0, pages, slots, **t)
    assert bool(t["out"].isfinite().all())
    _, y = step(back[[0, 3]].double(), *(z[[0, 3]] for z in case.exact(t)))
    assert relative(t["out"][[0, 3]], y) < 1e-5


@BOTH
@pytest.mark.parametrize(("name", "K", "V"), CASES[:2])
def test_what_is_not_finite_stays_in_its_head(name: str, K: int, V: int, make: Make) -> None:
    """In states that are packed and in values that a step reads: other heads and requests keep their every bit."""
    case = Case.make(name, K, V)
    kernels, x, slots = make(case), case.states(3), torch.tensor([3, 1, 2])
    in_state = {(1, 2): math.nan, (2, 1): math.inf}  # by request and head
    in_value = {(1, 0): math.inf, (2, 3): math.nan}

    def run(poison: bool) -> tuple[Tensor, Tensor, Tensor]:
        pages = torch.zeros(4, int(case.layout.layer_bytes[0]), dtype=torch.uint8)
        state, t = x.clone(), case.token(3, 11)
        t["v"] = t["v"].clone()
        if poison:
            for (request, head), value in in_state.items():
                state[request, head, 5, 7] = value
            for (request, head), value in in_value.items():
                t["v"][request, head, 3] = value
        kernels.pack(0, pages, slots.int(), state)
        packed = pages.clone()
        kernels.step(0, pages, slots.int(), **t)
        return packed, pages, t["out"]

    (packed, pages, out), (clean_packed, clean_pages, clean_out) = run(True), run(False)
    assert torch.equal(pages[0], clean_pages[0])  # nobody's slot
    for request in range(3):
        for head in range(case.heads):
            start, size = int(case.layout.head_offsets[0, head]), int(case.layout.sizes[0, head].sum())
            own = (slots[request], slice(start, start + size))
            sound = (request, head) not in in_state
            assert torch.equal(packed[own], clean_packed[own]) == sound
            sound &= (request, head) not in in_value
            assert torch.equal(out[request, head], clean_out[request, head]) == sound
            assert not sound or torch.equal(pages[own], clean_pages[own])
            assert (request, head) not in in_value or not bool(out[request, head].isfinite().all())


@BOTH
@pytest.mark.parametrize(("name", "K", "V"), CASES[:2])
def test_strided_is_contiguous_bit_for_bit(name: str, K: int, V: int, make: Make) -> None:
    """Views of a packed projection, pages with a gap between slots, a state whose axes lie in another order."""
    case = Case.make(name, K, V)
    kernels, x, size = make(case), case.states(2), int(case.layout.layer_bytes[0])
    slots = torch.tensor([2, 0], dtype=torch.int64)
    tight = torch.zeros(3, size, dtype=torch.uint8)
    wide = torch.zeros(3, size + 64, dtype=torch.uint8)[:, :size]
    kernels.pack(0, tight, slots, x)
    tangled = torch.empty(K, 2, V, case.heads).permute(1, 3, 0, 2).copy_(x)
    assert not tangled.is_contiguous()
    kernels.pack(0, wide, torch.tensor([2, 9, 0, 9])[::2], tangled)
    assert torch.equal(wide, tight)
    t = case.token(2, 3)
    plain = {n: z.contiguous() if isinstance(z, Tensor) else z for n, z in t.items()} | {"out": t["out"].clone()}
    assert not any(t[n].is_contiguous() for n in "qkvab")
    kernels.step(0, wide, slots, **t)
    kernels.step(0, tight, slots, **plain)
    assert torch.equal(wide, tight)
    assert torch.equal(t["out"], plain["out"])


@BOTH
@pytest.mark.parametrize("name", ["qwen_6bit", "kimi_6bit"])
def test_a_square_state_is_not_turned_over(name: str, make: Make) -> None:
    """K = V, where nothing but the numbers tells [K, V] from [V, K]: pivot rows hold rows, and y reads along K."""
    case = Case.make(name, 32, 32)
    kernels, size = make(case), int(case.layout.layer_bytes[0])
    rows = torch.arange(1.0, 33.0)[:, None] * torch.ones(32)  # row k is k + 1 in every column
    x = rows.expand(1, case.heads, 32, 32).clone()
    pages, slots = torch.zeros(2, size, dtype=torch.uint8), torch.tensor([1])
    for v_first, state in ((False, x), (True, x.transpose(-1, -2).contiguous())):
        pages.zero_()
        kernels.pack(0, pages, slots, state, v_first)
        back = kernels.unpack(0, pages, slots, torch.empty_like(x))
        turned = kernels.unpack(0, pages, slots, torch.empty_like(x), True)
        assert torch.equal(turned, back.transpose(-1, -2))
        assert relative(back, x) < 0.1
        assert relative(back, x.transpose(-1, -2)) > 0.5
        t = case.token(1, 2)
        t["b"], t["a"] = torch.full_like(t["b"], -40.0), torch.full_like(t["a"], -60.0)  # nothing written, no decay
        t["q"] = torch.zeros_like(t["q"])
        t["q"][..., 5] = 1.0  # reads row 5: 6 in every column, not 1 .. 32
        t["scale"] = 1.0
        kernels.step(0, pages, slots, **t, l2norm=False)
        stored = back[:, :, 5]  # 6 within the precision of that row, which may be coarse
        assert relative(t["out"].float(), stored) < 1e-2
        assert float((t["out"] - 6.0).abs().max()) < 2
