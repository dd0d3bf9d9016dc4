"""Write windows: every token against the torch reference, folds and flushes against the torch codec."""

from __future__ import annotations

import pytest
import torch

from stepquant.codec.window import WriteWindow
from stepquant.runtime import step as runtime_step
from stepquant.runtime.window import WindowBuffers, bytes_per_request
from tests.codegen.cases import Case, relative

CASES = [
    ("qwen_6bit", 128, 128, 4, "fp16"), ("qwen_4bit", 48, 192, 2, "fp16"), ("qwen_4bit", 32, 64, 4, "int8"),
    ("kimi_6bit", 64, 48, 4, "fp32"), ("kimi_4bit", 48, 96, 4, "fp16"), ("kimi_4bit", 32, 32, 4, "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "K", "V", "window", "buffer"), CASES)
def test_window(name: str, K: int, V: int, window: int, buffer: str) -> None:
    case = Case.make(name, K, V)
    kernels, codec = case.kernels(window, buffer), case.torch_codec
    pages = codec.pack(case.states(5))
    pages[[0, 1, 3]] = 255
    poisoned = pages.clone()
    slots, rows = torch.tensor([4, -1, 2], dtype=torch.int32), torch.tensor([2, 3, 0], dtype=torch.int32)
    buffers = WindowBuffers.allocate(kernels.spec, 4, "cpu")
    everything = (buffers.keys, buffers.us, buffers.key_scale, buffers.u_scale, buffers.ratios, buffers.gammas)
    for x in (*everything, buffers.u_now):
        x.fill_(torch.nan if x.is_floating_point() else 77)
    start = [0, 0, window - 1]  # two requests at different phases; one folds with nothing pending
    phases, pending = torch.tensor(start, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    windows = {i: WriteWindow(window, buffer, start[i]) for i in (0, 2)}
    base = {i: codec.unpack(pages[slots[i].long()][None])[0] for i in windows}
    flipped = total = folds = 0
    for t in range(window + 1):
        token = case.token(3, seed=10 + t)
        inputs = case.exact(token, torch.float32)
        kernels.window_step(0, pages, slots, **token, buffers=buffers, rows=rows, phases=phases, pending=pending)
        assert bool((token["out"][1] == 0).all())
        for i, reference in windows.items():
            state, y, new = reference.step(base[i], *(x[i] for x in inputs))
            assert relative(token["out"][i], y) < 1e-4
            base[i] = state
            if new:
                page = pages[slots[i].long()][None]
                some = case.flips(page, state[None])
                flipped, total, folds = flipped + some[0], total + some[1], folds + 1
                base[i] = codec.unpack(page)[0]
        pending = torch.where(phases == window - 1, 0, pending + 1).int()
        phases = ((phases + 1) % window).int()
    assert folds >= 2
    kernels.flush(0, pages, slots, buffers, rows, phases, pending)
    for i, reference in windows.items():
        if pending[i] > 0:
            some = case.flips(pages[slots[i].long()][None], reference.fold(base[i])[None])
            flipped, total = flipped + some[0], total + some[1]
    assert flipped <= 1e-4 * total
    assert torch.equal(pages[[0, 1, 3]], poisoned[[0, 1, 3]])
    assert all(bool(x[1].isnan().all()) for x in everything if x.is_floating_point())  # a row that nobody owns


PARTS = [("qwen_4bit", 32, 128), ("qwen_6bit", 48, 64), ("kimi_6bit", 32, 128), ("kimi_4bit", 16, 256)]


@pytest.mark.parametrize(("name", "K", "V"), PARTS)
def test_parts_of_a_head(name: str, K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each block of columns (few requests) does what one for a head does, and leaves no count behind."""
    case = Case.make(name, K, V)
    kernels = case.kernels(4)
    pages = case.torch_codec.pack(case.states(3))
    slots, rows = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    phases = torch.tensor([1, 2, 3], dtype=torch.int32)  # the last completes its window
    found = []
    for parts in (V // 32, 1):
        monkeypatch.setattr(runtime_step, "read_parts", lambda spec, batch, parts=parts: parts)
        torch.manual_seed(0)
        buffers = WindowBuffers.allocate(kernels.spec, 3, "cpu")
        changed = (buffers.keys, buffers.us, buffers.ratios, buffers.gammas, buffers.k_now, buffers.u_now)
        for x in changed:
            x.copy_(torch.rand(x.shape) * 0.1)
        token = case.token(3, seed=5)
        kernels.read(0, pages, slots, **token, buffers=buffers, rows=rows, phases=phases, pending=phases)
        found.append((token["out"], *changed))
    monkeypatch.undo()
    assert runtime_step.read_parts(kernels.spec, 3) == V // 32
    assert not kernels.arrivals.any()
    for part, whole in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-7)


def test_flush_with_nothing_pending_changes_nothing() -> None:
    case = Case.make("kimi_6bit", 32, 32)
    kernels = case.kernels(4)
    pages = case.torch_codec.pack(case.states(2))
    before, zero = pages.clone(), torch.zeros(2, dtype=torch.int32)
    buffers = WindowBuffers.allocate(kernels.spec, 2, "cpu")
    kernels.flush(0, pages, torch.tensor([0, 1]), buffers, torch.tensor([0, 1], dtype=torch.int32), zero, zero)
    assert torch.equal(pages, before)


def test_buffer_bytes() -> None:
    for name, buffer in (("qwen_6bit", "fp16"), ("kimi_6bit", "int8"), ("kimi_6bit", "bf16")):
        spec = Case.make(name, 32, 32).kernels(8, buffer).spec
        b = WindowBuffers.allocate(spec, 1, "cpu")
        scales = (b.key_scale, b.u_scale) if buffer == "int8" else ()
        ratios = (b.ratios,) if spec.family == "gdn" else ()
        assert bytes_per_request(spec) == sum(x.nbytes for x in (b.keys, b.us, b.gammas, *scales, *ratios))
