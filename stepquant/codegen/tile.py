"""The tile that holds a head on the chip, and how vectors go against it.

One program works on one head of one request. Its K x V state is held as one tile of six axes

    [M, G, C, 4, 2, 2] = [m, g, c, i, h, s]     key slot 8m + 4s + i, value column h * J + g * C + c,  J = V/2

which is what the words of a page unpack to (`stepquant.layout`): m, i and s are the rows, g, c and h the columns. G is
1 but in four-level heads, where C columns share a row factor. Vectors live in two forms. *Compact*: flat, in tile
order, rows (m, i, s) and columns (g, c, h), a value a thread; arithmetic on vectors is done here. *Spread*: broadcast
against the tile. Going from one to the other is a `tl.gather` with an identity index: it looks like nothing, but it
keeps Triton from computing a vector in the tile's layout, where each value would be computed by sixteen threads.
M and J are padded to powers of two; padded rows and columns hold zeros.

Codes are in units of an 8-bit code: z = 2^(8-b) q is a signed byte, so that one path serves rows of all precisions.
Prefixes everywhere: p_ pointer, o_ index or offset, n_ count, x a tile of the state, z a tile of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_slots(KP: tl.constexpr):
    """Key slots of the compact rows."""
    o = tl.arange(0, KP)
    return 8 * (o // 8) + 4 * (o % 2) + (o // 2) % 4


@triton.jit
def tile_columns(J: tl.constexpr, VP: tl.constexpr):
    """Value columns of the compact columns, and which exist."""
    o = tl.arange(0, VP)
    return o // 2 + J * (o % 2), o // 2 < J


@triton.jit
def factor_rows(KP: tl.constexpr, G: tl.constexpr):
    """For compact row factors of grouped columns, flat (m, g, i, h, s): compact row, g and h of each."""
    o = tl.arange(0, KP * 2 * G)
    return 8 * (o // (16 * G)) + 2 * ((o // 4) % 4) + o % 2, (o // 16) % G, (o // 2) % 2


@triton.jit
def tile_slots(M: tl.constexpr):
    """Key slots against the tile, `[M, 1, 1, 4, 1, 2]`."""
    o_m, o_i, o_s = tl.arange(0, M), tl.arange(0, 4), tl.arange(0, 2)
    o = 8 * o_m[:, None, None] + o_i[None, :, None] + 4 * o_s[None, None, :]
    return tl.reshape(o, (M, 1, 1, 4, 1, 2))


@triton.jit
def tile_column_index(J: tl.constexpr, G: tl.constexpr, C: tl.constexpr):
    """Value columns against the tile, `[1, G, C, 1, 2, 1]`, and which exist."""
    o_j, o_h = tl.arange(0, G * C), tl.arange(0, 2)
    o = tl.reshape(o_j[:, None] + J * o_h[None, :], (1, G, C, 1, 2, 1))
    inside = tl.reshape((o_j < J)[:, None] & (o_h < 2)[None, :], (1, G, C, 1, 2, 1))
    return o, inside


@triton.jit
def spread_rows(x, M: tl.constexpr, G: tl.constexpr, GROUPED: tl.constexpr):
    """Compact rows (row factors, where grouped) against the tile."""
    if GROUPED:
        x = tl.reshape(tl.gather(x, tl.arange(0, 16 * M * G), 0), (M, G, 1, 4, 2, 2))
    else:
        x = tl.reshape(tl.gather(x, tl.arange(0, 8 * M), 0), (M, 1, 1, 4, 1, 2))
    return x


@triton.jit
def spread_columns(x, G: tl.constexpr, C: tl.constexpr):
    return tl.reshape(tl.gather(x, tl.arange(0, 2 * G * C), 0), (1, G, C, 1, 2, 1))


@triton.jit
def sum_rows(x, y, V: tl.constexpr):
    """Sums over the rows of two tiles, as compact columns."""
    x = tl.sum(tl.sum(x, 5), 3)  # [M, G, C, h], within a thread
    y = tl.sum(tl.sum(y, 5), 3)
    xy = tl.gather(tl.reshape(tl.sum(tl.join(x, y), 0), (2 * V,)), tl.arange(0, 2 * V), 0)
    return tl.split(tl.reshape(xy, (V, 2)))


@triton.jit
def max_rows(x, V: tl.constexpr):
    """Largest value over the rows, as compact columns."""
    return tl.gather(tl.reshape(tl.max(tl.max(tl.max(x, 5), 3), 0), (V,)), tl.arange(0, V), 0)


@triton.jit
def sum_columns(x, M: tl.constexpr, G: tl.constexpr, GROUPED: tl.constexpr):
    """Sums over the columns (of each group, where grouped), as compact rows (row factors)."""
    if GROUPED:
        x = tl.gather(tl.reshape(tl.sum(x, 2), (16 * M * G,)), tl.arange(0, 16 * M * G), 0)
    else:
        x = tl.gather(tl.reshape(tl.sum(tl.sum(tl.sum(x, 4), 1), 1), (8 * M,)), tl.arange(0, 8 * M), 0)
    return x


@triton.jit
def grouped(x, KP: tl.constexpr, G: tl.constexpr, FOUR: tl.constexpr):
    """Compact rows as they go with compact row factors."""
    if FOUR:
        row, _, _ = factor_rows(KP, G)
        x = tl.gather(x, row, 0)
    return x
