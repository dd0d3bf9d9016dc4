"""What slow gates leave of a state that is requantised for thousands of tokens: floats stick, scaled codes do not.

Within a quarter, since FP16 scales have steps of their own.
"""

from __future__ import annotations

import math

import pytest
import torch

from stepquant.codec.registry import StateCodec, make_codec
from stepquant.codec.spec import CodecSpec

HEADS, ROWS, COLUMNS, TOKENS = 1, 32, 32, 2048
LOG_GATE = -0.001  # a half-life of 693 tokens: one gate is less than half a unit in the last place of BF16


def left(codec: StateCodec, window: int) -> float:
    """Share of a state's norm that is left after TOKENS tokens that write nothing."""
    state = codec.roundtrip(torch.randn(1, HEADS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))
    start = state.norm()
    for _ in range(TOKENS // window):
        state = codec.roundtrip(state * math.exp(window * LOG_GATE))
    return float(state.norm() / start)


class BFloat16:
    """A BF16 state."""

    def roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()


def test_a_bf16_state_that_is_rounded_at_every_token_never_forgets() -> None:
    assert left(BFloat16(), 1) == 1


def test_a_window_lets_gates_through_to_a_bf16_state() -> None:
    assert left(BFloat16(), 8) == pytest.approx(math.exp(TOKENS * LOG_GATE), rel=0.25)


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize(("kind", "bits"), [("rowwise", 8), ("rowwise", 4), ("dual_axis", 4), ("dual_axis", 6)])
def test_gates_shrink_the_scale_of_codes(kind: str, bits: int, window: int) -> None:
    spec = CodecSpec(kind=kind, refits=0)  # type: ignore[arg-type]
    codec = make_codec(torch.full((HEADS, ROWS), bits, dtype=torch.uint8), torch.ones(HEADS, ROWS), spec, COLUMNS)
    within = 0.25 if window > 1 else 0.3  # at every token, scales of FP16 and no refit: 0.29 at 4 bits
    assert left(codec, window) == pytest.approx(math.exp(TOKENS * LOG_GATE), rel=within)


@pytest.mark.parametrize("refits", [0, 1])
@pytest.mark.parametrize(
    ("codebook", "menu"), [("head", [2]), ("head", [4]), ("shared", [2]), ("shared", [2, 4, 6, 2]), ("shared", [2, 16])]
)
def test_what_is_stored_again_and_again_stays(codebook: str, menu: list[int], refits: int) -> None:
    """No gate, nothing written: after some folds a state no longer changes, and most of it is left.

    A scale that is a fixed share of the largest or of the mean value would shrink or swell it by that share each time.
    """
    bits = torch.tensor(menu, dtype=torch.uint8).repeat(ROWS // len(menu))[None]
    codec = make_codec(bits, torch.ones(HEADS, ROWS), CodecSpec(codebook=codebook, refits=refits), COLUMNS)  # type: ignore[arg-type]
    x = torch.randn(1, HEADS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    sizes = []
    for _ in range(64):
        x = codec.roundtrip(x)
        sizes.append(float(x.norm()))
    assert sizes[-1] == pytest.approx(sizes[31], rel=0.01)
    assert 0.6 < sizes[-1] / sizes[0] < 1.5
