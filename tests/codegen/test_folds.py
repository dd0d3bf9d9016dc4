"""The list of requests that complete a window, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from stepquant.codegen.folds import list_folds


@pytest.mark.parametrize(("n", "window", "block"), [(1, 4, 16), (16, 8, 16), (50, 4, 16), (100, 2, 32)])
def test_list(n: int, window: int, block: int) -> None:
    phases = torch.randint(0, window, (n + 1,), generator=torch.Generator().manual_seed(n)).int()
    folds = torch.full((n + 2,), -7, dtype=torch.int32)
    phases[n] = window - 1  # beyond the batch
    list_folds[(1,)](phases, folds, n, window, block)
    want = (phases[:n] == window - 1).nonzero().flatten().int()
    assert int(folds[0]) == len(want)
    assert torch.equal(folds[1 : 1 + len(want)], want)
    assert bool((folds[1 + len(want) :] == -7).all())
