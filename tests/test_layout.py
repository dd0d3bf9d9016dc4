"""Pages: exact byte figures of the paper's models, slots that hold their rows, parts that tile a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepquant.errors import RecipeError
from stepquant.layout import CLASSES, PARTS, ByteCount, PageLayout, StateShape


def budget_map(units: int, bits: int, pivots: int, seed: int = 0) -> np.ndarray:
    """A map of `units` entries that uses up a nominal budget exactly, pivots counted as 8 bits."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(units)
    values = np.full(units, bits)
    values[order[:pivots]] = 16
    rest = order[pivots:]
    excess = (8 - bits) * pivots // 2
    values[rest[:excess]] -= 2
    pairs = (len(rest) - excess) // 8
    values[rest[excess : excess + pairs]] += 2
    values[rest[excess + pairs : excess + 2 * pairs]] -= 2
    return values


def test_qwen_figures() -> None:
    shape = StateShape(48, 128, 128)
    six = np.repeat(budget_map(48 * 48, 6, 32).reshape(48, 48, 1), 128, -1)
    assert PageLayout(shape, six, "head").bytes == ByteCount(
        27_787_264, 1_163_264, 1_048_576, 0, 29_999_104, 29_999_104
    )
    four = np.repeat(budget_map(48 * 48, 4, 32).reshape(48, 48, 1), 128, -1)
    two_bit = int((four[..., 0] == 2).sum())
    assert two_bit > 0
    assert PageLayout(shape, four, "head").bytes.total == 20_561_920 + 768 * two_bit


@pytest.mark.parametrize("granularity", [1, 8, 16])
@pytest.mark.parametrize(("bits", "total"), [(6, 8_257_536), (4, 5_636_096)])
def test_kimi_figures(bits: int, total: int, granularity: int) -> None:
    layout = PageLayout(
        StateShape(32, 128, 128), budget_map(20 * 32 * 128, bits, 512).reshape(20, 32, 128), "shared", granularity
    )
    assert layout.bytes.total == total
    assert (layout.bytes.padding == 0) == (granularity == 1)
    assert layout.bytes.padding < 0.06 * total
    assert layout.bytes.allocated == int(layout.layer_bytes.sum())
    assert not (layout.layer_bytes % 256).any()
    assert sum(layout.rank(r, 4).bytes.total for r in range(4)) == total


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([(16, 16), (32, 48), (96, 192)]),
    st.lists(st.sampled_from([2, 4, 6, 8, 16]), min_size=1, max_size=5),
)  # fmt: skip
def test_slots_hold_their_rows_and_parts_tile_the_page(
    seed: int, granularity: int, dims: tuple[int, int], menu: list[int]
) -> None:
    key_dim, value_dim = dims
    bits = np.random.default_rng(seed).choice(menu, size=(2, 3, key_dim))
    layout = PageLayout(StateShape(3, key_dim, value_dim), torch.from_numpy(bits), "shared", granularity)
    assert not (layout.slots % granularity).any()
    assert (layout.slots.sum(-1) <= key_dim).all()
    for layer in range(2):
        end = 0
        for head in range(3):
            capacity = np.repeat(CLASSES, layout.slots[layer, head])
            stored = bits[layer, head, layout.permutation[layer, head]]
            integer = stored[stored != 16]
            assert (stored[len(integer) :] == 16).all()
            assert len(integer) <= len(capacity)
            assert (capacity[: len(integer)] >= integer).all()
            np.testing.assert_array_equal(np.argsort(layout.row_slot()[layer, head]), layout.permutation[layer, head])
            assert layout.head_offsets[layer, head] == end
            for name in PARTS:
                offset, size = layout.part(layer, head, name)
                assert offset == (end if size else -1)
                end += size
        count = layout.layers[layer]
        assert end == count.total + count.padding
        assert count.allocated - end < 256
    if granularity == 1:
        assert layout.bytes.padding == 0


def test_obedient_counts_have_no_padding() -> None:
    bits = np.repeat(np.array([6, 8, 4, 4, 8, 2, 6, 4, 16, 2, 2, 8, 6, 6, 4, 16]), 8).reshape(1, 1, 128)
    layout = PageLayout(StateShape(1, 128, 128), bits, "shared", 8)
    assert layout.bytes.padding == 0
    assert layout.slots[0, 0].tolist() == [24, 32, 32, 24]
    assert layout.to_json()["layers"][0]["heads"][0]["parts"]["high4"] == [0, 88 * 64]


def test_refusals_name_what_is_wrong() -> None:
    shape = StateShape(1, 16, 16)
    with pytest.raises(RecipeError, match=r"\[3\]"):
        PageLayout(shape, np.full((1, 1, 16), 3), "shared")
    with pytest.raises(RecipeError, match="shape"):
        PageLayout(shape, np.full((1, 2, 16), 4), "shared")
    for rows, columns in ((24, 32), (32, 24)):
        with pytest.raises(
            RecipeError, match=f"a {rows} x {columns} state cannot be packed: both must be multiples of 16"
        ):
            PageLayout(StateShape(1, rows, columns), np.full((1, 1, rows), 4), "shared")
    with pytest.raises(RecipeError, match="different precision"):
        PageLayout(shape, np.array([4, 8] * 8).reshape(1, 1, 16), "head")
    with pytest.raises(RecipeError, match="granularity"):
        PageLayout(shape, np.full((1, 1, 16), 4), "shared", 3)
    with pytest.raises(RecipeError, match="group"):
        PageLayout(shape, np.full((1, 1, 16), 2), "head")
    with pytest.raises(RecipeError, match="ranks"):
        PageLayout(shape, np.full((1, 1, 16), 4), "shared").rank(0, 2)
