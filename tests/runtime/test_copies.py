"""The Triton copies and counters in the interpreter, against what their torch branch does."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepquant.errors import BackendError
from stepquant.runtime import copies as plain

SOURCE = torch.tensor([1, 2, -1, 3], dtype=torch.int32)
TARGET, MASK = torch.tensor([4, 5, 3, 0]), torch.tensor([True, False, True, True])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module's kernels, decorated for the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.find_spec("stepquant.runtime.copies")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", [3, 300, 40000])
def test_pages(kernels: ModuleType, words: int) -> None:
    pages = torch.randint(0, 255, (6, 8 * words), dtype=torch.uint8)
    expected = pages.clone()
    plain.copy_rows(expected, SOURCE, TARGET, MASK)
    piece = -(-words // plain.PROGRAMS)
    kernels._copy_rows[(plain.PROGRAMS, 4)](
        pages.view(torch.int64), piece, words, SOURCE, TARGET, MASK, piece, words, WORDS=1024
    )
    assert torch.equal(pages, expected)
    assert torch.equal(pages[4], pages[1])


@pytest.mark.parametrize("words", [3, 300, 20000])
def test_clearing(kernels: ModuleType, words: int) -> None:
    """Rows with a stride of their own, one of them named twice and one left out; what lies between them stays."""
    pages = torch.randint(1, 255, (6, 8 * (words + 2)), dtype=torch.uint8)
    rows, index = pages[:, : 8 * words], torch.tensor([4, -1, 1, 4])
    expected = pages.clone()
    plain.clear_rows(expected[:, : 8 * words], index)
    grid = (-(-words // plain.CLEARED), 4)
    kernels._clear_rows[grid](rows.view(torch.int64), words + 2, index, words, CLEARED=plain.CLEARED, WORDS=plain.WORDS)
    assert torch.equal(pages, expected)
    assert bool((pages[[1, 4], : 8 * words] == 0).all())
    assert bool((pages[[0, 2, 3, 5]] > 0).all() & (pages[:, 8 * words :] > 0).all())


def test_layers_of_convolution_states(kernels: ModuleType) -> None:
    conv = torch.randn(3, 6, 8, 3).bfloat16()
    expected = conv.clone()
    plain.copy_rows(expected, SOURCE, TARGET, MASK)
    words, size = conv.flatten(2).view(torch.int64), 8 * 3 * 2 // 8
    kernels._copy_rows[(3, 4)](words, words.stride(0), size, SOURCE, TARGET, MASK, size, 3 * size, WORDS=1024)
    assert torch.equal(conv, expected)
    assert torch.equal(conv[:, 0], conv[:, 3])


def products_of(source: ASTSource) -> list[str]:
    """Types of the products of a kernel compiled for a GPU."""
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    return [kind.split("<")[0] for kind in re.findall(r"arith\.muli .* : (\S+)", text)]


def test_offsets_are_64_bit() -> None:
    """Slots and pieces are widened before they are multiplied, whatever integers they come as."""
    signature = {"base": "*i64", "stride_piece": "i32", "stride_row": "i32", "source": "*i32", "target": "*i32",
                 "mask": "*i1", "piece_words": "i32", "row_words": "i32", "WORDS": "constexpr"}  # fmt: skip
    source = ASTSource(fn=plain._copy_rows, signature=signature, constexprs={(8,): 64})
    assert len(products_of(source)) >= 3
    assert set(products_of(source)) == {"i64"}
    signature = {"base": "*i64", "stride_row": "i32", "index": "*i32", "row_words": "i32", "CLEARED": "constexpr",
                 "WORDS": "constexpr"}  # fmt: skip
    source = ASTSource(fn=plain._clear_rows, signature=signature, constexprs={(4,): 128, (5,): 64})
    assert set(products_of(source)) == {"i64"}


def test_rows_that_are_no_words_are_refused() -> None:
    with pytest.raises(BackendError, match="rows of 12 bytes"):
        plain.copy_rows(torch.zeros(3, 12, dtype=torch.uint8), SOURCE, TARGET, MASK)


def test_counting_a_token(kernels: ModuleType) -> None:
    slots = torch.tensor([2, -1, 0, 5], dtype=torch.int32)
    phases, pending = torch.tensor([3, 0, 1, 1], dtype=torch.int32), torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    table = torch.full((3, 6), 9, dtype=torch.int32)
    expected = table.clone()
    plain.advance(expected, slots, phases, pending, 4)
    kernels._advance[(4,)](table, 6, slots, phases, pending, W=4)
    assert torch.equal(table, expected)
    assert table[1:, 2].tolist() == [0, 0]
    assert table[1:, 5].tolist() == [2, 2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_containment(kernels: ModuleType, value: float) -> None:
    slots = torch.tensor([2, -1, 0, 5], dtype=torch.int32)
    out = torch.randn(4, 2, 700).bfloat16()
    out[3, 1, 650] = out[1, 0, 0] = value
    pages = torch.randint(1, 255, (6, 8 * 1500), dtype=torch.uint8)
    table, counter = torch.ones(3, 6, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    expected, table_expected, counted = pages.clone(), table.clone(), counter.clone()
    plain.contain(out, slots, expected, table_expected, counted)
    kernels._contain[(4,)](out, slots, pages.view(torch.int64), 1500, 1500, table, 6, counter, 1400, WORDS=1024)
    assert int(counter) == int(counted) == 1
    assert torch.equal(pages, expected)
    assert torch.equal(table, table_expected)
    assert bool((pages[5] == 0).all())
    assert bool((pages[:5] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quiet_rows(kernels: ModuleType, dtype: torch.dtype) -> None:
    rows = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1], rows[2, 5] = torch.nan, torch.nan  # what a broken state does to logits; a single one is the sampler's
    padded = torch.full((4, 3100), 7, dtype=dtype)
    padded[:, :3000] = rows
    flags = torch.ones(4, dtype=torch.bool)
    kernels._quiet_rows[(4,)](padded, 3100, 3000, flags, BLOCK=1024)
    assert flags.tolist() == [False, True, False, False]
    assert torch.equal(plain.quiet_rows(rows), flags)
    assert torch.equal(padded[:, :3000].nan_to_num(9), rows.nan_to_num(9))
    assert bool((padded[1, :3000] == 0).all())
    assert bool((padded[:, 3000:] == 7).all())
