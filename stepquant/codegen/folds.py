# mypy: ignore-errors
"""Which requests of a batch complete a window with this token: made once a step, for the folds of all layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_folds(phases, folds, n, W: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ``folds[0]`` counts the requests of phase W - 1, their places in the batch follow in order.

    Args:
        phases: int32 `[n]`; folds: int32 `[n + 1]`.
    """
    count = 0
    for first in range(0, n, BLOCK):
        o = first + tl.arange(0, BLOCK)
        full = (tl.load(phases + o, mask=o < n, other=-1) == W - 1).to(tl.int32)
        tl.store(folds + count + tl.cumsum(full, 0), o, mask=full > 0)
        count += tl.sum(full, 0)
    tl.store(folds, count)
