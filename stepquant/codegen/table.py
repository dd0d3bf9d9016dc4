# mypy: ignore-errors
"""The per-head table that tells the kernels what a head's part of a page looks like."""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the per-head table, int32 [H, 16]; offsets are bytes in the layer's page.
T_HIGH4, T_LOW4, T_LOW2, T_TOP2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
T_ROW, T_COLUMN, T_PIVOT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
T_NIBBLES, T_EIGHT, T_SIX, T_TWO = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
T_PIVOTS, T_BITS = tl.constexpr(11), tl.constexpr(13)
T_HEAD, T_BYTES = tl.constexpr(14), tl.constexpr(15)  # where a head's part of the page starts, and its bytes
TABLE_WIDTH = 16


@triton.jit
def table_offset(p_table, column: tl.constexpr):
    """A byte offset from the per-head table; all of them are multiples of 16."""
    return tl.multiple_of(tl.load(p_table + column), 16)
