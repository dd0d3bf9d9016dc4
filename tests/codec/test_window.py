"""Write windows against the float64 recurrence, at ordinary, tiny and zero gates, with drafts, for GDN and KDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.codec.recurrence import replay, step
from stepquant.codec.window import WriteWindow, store

H, K, V = 2, 8, 6
WINDOWS = [1, 2, 4, 8, 16]


def tokens(
    seed: int, length: int, kda: bool, harsh: float = 0.0, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """q, k, v, log_gate, beta of one stream `[T, H, ...]`; a share `harsh` of the gates is e^-1e6 or exactly 0."""
    g = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize(torch.randn(2, length, H, K, generator=g, dtype=torch.float64), dim=-1)
    q, k = unit[0] * K**-0.5, unit[1]
    v = torch.randn(length, H, V, generator=g, dtype=torch.float64)
    shape = (length, H, K) if kda else (length, H)
    gate = -(torch.rand(shape, generator=g, dtype=torch.float64) ** 4) * 3
    pick = torch.rand(shape, generator=g)
    gate = torch.where(pick < harsh, -1e6, gate)
    gate = torch.where(pick < harsh / 2, -torch.inf, gate)
    beta = torch.rand(length, H, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, gate, beta)]


def run(
    length: int, dtype: str, stream: list[torch.Tensor], base: torch.Tensor, phase: int = 0
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Outputs, the final state (flushed) and how many folds there were."""
    window, outputs, folds = WriteWindow(length, dtype, phase), [], 0
    for t in range(stream[0].shape[0]):
        base, y, folded = window.step(base, *(x[t] for x in stream))
        outputs.append(y)
        folds += folded
    return torch.stack(outputs), window.fold(base), folds


def reference(stream: list[torch.Tensor], base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, state = replay(*(x.double()[None] for x in stream), state=base.double()[None])
    return y[0], state[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(WINDOWS), st.integers(1, 40), st.booleans(), st.integers(0, 15),
       st.sampled_from([0.0, 0.2]))  # fmt: skip
def test_windows_are_the_recurrence(seed: int, w: int, length: int, kda: bool, phase: int, harsh: float) -> None:
    stream = tokens(seed, length, kda, harsh)
    base = torch.randn(H, K, V, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    y, state, folds = run(w, "fp32", stream, base, phase)
    expected, final = reference(stream, base)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-12)
    assert folds == (phase % w + length) // w


@pytest.mark.parametrize("kda", [False, True])
def test_single_precision_is_safe_where_gates_vanish(kda: bool) -> None:
    stream = tokens(7, 200, kda, 0.3, torch.float32)
    y, state, _ = run(8, "fp32", stream, torch.randn(H, K, V))
    assert bool(torch.isfinite(y).all() and torch.isfinite(state).all())
    stream = tokens(7, 200, kda, 0.0, torch.float32)
    base = torch.randn(H, K, V)
    expected, final = reference(stream, base)
    y, state, _ = run(8, "fp32", stream, base)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_a_window_of_one_is_the_plain_path_bit_for_bit(kda: bool, dtype: str) -> None:
    stream = tokens(3, 50, kda, dtype=torch.float32)
    base = state = torch.randn(H, K, V)
    window = WriteWindow(1, dtype)
    for t in range(50):
        base, y, folded = window.step(base, *(x[t] for x in stream))
        state, expected = step(state, *(x[t] for x in stream))
        assert folded
        assert torch.equal(base, state)
        assert torch.equal(y, expected)
        base = state = state.half().float()  # any quantiser


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 2e-3), ("bf16", 1.5e-2), ("int8", 3e-2)])
def test_buffer_dtypes_cost_their_own_rounding(kda: bool, dtype: str, bound: float) -> None:
    stream = tokens(11, 256, kda)
    base = torch.randn(H, K, V, dtype=torch.float64)
    y, _, _ = run(8, dtype, stream, base)
    expected, _ = reference(stream, base)
    error = float((y - expected).norm() / expected.norm())
    assert 0 < error < bound


def test_store_int8_has_one_scale_a_vector() -> None:
    x = torch.tensor([[1.0, -127.0, 3.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert store(x, "int8").tolist() == [[1.0, -127.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(WINDOWS[1:]), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_drafts_leave_no_trace_unless_accepted(seed: int, w: int, kda: bool, harsh: float) -> None:
    """Rounds of 1 to 5 drafts of which a prefix is accepted give what decoding the accepted tokens alone gives."""
    g = torch.Generator().manual_seed(seed)
    stream, wrong = tokens(seed, 40, kda, harsh), tokens(seed + 1, 40, kda, harsh)
    start = base = torch.randn(H, K, V, generator=g, dtype=torch.float64)
    expected, _ = reference(stream, base)
    window, at, outputs = WriteWindow(w), 0, []
    while at < 34:
        drafts = int(torch.randint(1, 6, (1,), generator=g))
        good = int(torch.randint(0, drafts + 1, (1,), generator=g))
        for n in range(drafts):
            y = window.draft(base, *(x[at + n] for x in (stream if n < good else wrong)))
            outputs += [y] if n < good else []
        before = at
        base, folded = window.accept(base, good)
        at += good
        assert folded == (at // w > before // w)
        assert window.phase == at % w
    if outputs:
        torch.testing.assert_close(torch.stack(outputs), expected[:at], rtol=1e-10, atol=1e-11)
    _, final = reference([x[:at] for x in stream], start)
    torch.testing.assert_close(window.fold(base), final, rtol=1e-10, atol=1e-11)


def test_drafts_and_steps_mix() -> None:
    """A verify step after plain steps, in the middle of a window, with rounded buffers: same entries, same numbers."""
    for kda in (False, True):
        stream, base = tokens(5, 6, kda), torch.randn(H, K, V, dtype=torch.float64)
        plain, mixed, start = WriteWindow(8, "bf16"), WriteWindow(8, "bf16"), base
        for t in range(3):
            plain.step(base, *(x[t] for x in stream))
            mixed.step(base, *(x[t] for x in stream))
        a = torch.stack([plain.step(base, *(x[t] for x in stream))[1] for t in range(3, 6)])
        b = torch.stack([mixed.draft(base, *(x[t] for x in stream)) for t in range(3, 6)])
        base, folded = mixed.accept(base, 3)
        assert not folded
        assert base is start
        torch.testing.assert_close(a, b, rtol=2e-2 if kda else 1e-11, atol=1e-2 if kda else 1e-12)
        assert mixed.phase == plain.phase == 6
