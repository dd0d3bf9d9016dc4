# mypy: ignore-errors
"""The float tile that holds a head on the chip, and how vectors go against it.

One program works on one head of one request. Its K x V state is held as one tile of eight axes

    [m, g, c, e, i, l, h, s]     key slot 8m + 4s + i, value column h J + 8 E b + 8 e + 2 l2 + l,  (b, l2) = (g, c)

which is how the words of a page unpack (`stepquant.layout`): m, i and s are the rows, the others the columns; a thread
has 8 rows by 8 columns. There is more than one g in four-level heads only, where the columns of a g and h share a row
factor.

Vectors live in two forms. *Compact*: flat, rows in slot order, columns in column order (halves padded to JP), a value a
thread; arithmetic on vectors is done here. *Spread*: broadcast against the tile. Going from one to the other is a
`tl.gather`, which also keeps Triton from computing a vector in the tile's layout, where many threads would compute each
value. Rows and columns are padded to powers of two; what is padded holds zeros.

Constants: M = slots / 8 and JP, padded; E = B / 8; G = groups in a half (1: not grouped).
Prefixes everywhere: p_ pointer, o_ index or offset, n_ count, x a tile of the state, z a tile of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_columns(J: tl.constexpr, JP: tl.constexpr):
    """Value columns of the compact columns, and which exist."""
    o = tl.arange(0, 2 * JP)
    return o % JP + J * (o // JP), o % JP < J


@triton.jit
def spread_rows(x, M: tl.constexpr, G: tl.constexpr, GROUPED: tl.constexpr):
    """Compact rows (row factors ``[2 G, 8 M]``, where grouped) against the tile."""
    if GROUPED:
        o = tl.arange(0, 16 * M * G)  # m, g, i, h, s
        slot = 8 * (o // (16 * G)) + 4 * (o % 2) + (o // 4) % 4
        factor = G * ((o // 2) % 2) + (o // 16) % G
        x = tl.reshape(tl.gather(x, factor * (8 * M) + slot, 0), (M, G, 1, 1, 4, 1, 2, 2))
    else:
        o = tl.arange(0, 8 * M)  # m, i, s
        x = tl.reshape(tl.gather(x, 8 * (o // 8) + 4 * (o % 2) + (o // 2) % 4, 0), (M, 1, 1, 1, 4, 1, 1, 2))
    return x


@triton.jit
def _place_column(o, JP: tl.constexpr, E: tl.constexpr):
    """Which compact column is at place `o` of the flat order (g, c, e, l, h)."""
    chunk = 2 * (o // (4 * E)) + (o // 2) % 2
    return JP * (o % 2) + 8 * E * (chunk // 8) + 8 * ((o // 4) % E) + chunk % 8


@triton.jit
def _column_place(o, JP: tl.constexpr, E: tl.constexpr):
    """The inverse of `_place_column`."""
    j = o % JP
    chunk = 8 * (j // (8 * E)) + j % 8
    return 4 * E * (chunk // 2) + 4 * ((j // 8) % E) + 2 * (chunk % 2) + o // JP


@triton.jit
def spread_columns(x, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr):
    """Compact columns against the tile."""
    x = tl.gather(x, _place_column(tl.arange(0, 2 * JP), JP, E), 0)
    return tl.reshape(x, (1, G, JP // (2 * E * G), E, 1, 2, 2, 1))


@triton.jit
def _row_slices(x):
    """A tile as eight ``[m, g, c, e, l, h]``, one for each i and s, so that sums over them are chains of fused adds."""
    s0, s1 = tl.split(x)  # [m, g, c, e, i, l, h]
    s0 = tl.reshape(s0, (s0.shape[0], s0.shape[1], s0.shape[2], s0.shape[3], 2, 2, s0.shape[5], s0.shape[6]))
    s1 = tl.reshape(s1, (s1.shape[0], s1.shape[1], s1.shape[2], s1.shape[3], 2, 2, s1.shape[5], s1.shape[6]))
    a, b = tl.split(tl.permute(s0, (0, 1, 2, 3, 6, 7, 4, 5)))
    c, d = tl.split(tl.permute(s1, (0, 1, 2, 3, 6, 7, 4, 5)))
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    c0, c1 = tl.split(c)
    d0, d1 = tl.split(d)
    return a0, a1, b0, b1, c0, c1, d0, d1


@triton.jit
def _chain(x, y):
    """Sum over i and s of x * y; either may be broadcast."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _row_slices(x)
    y0, y1, y2, y3, y4, y5, y6, y7 = _row_slices(y)
    total = x1 * y1 + x0 * y0
    total = x2 * y2 + total
    total = x3 * y3 + total
    total = x4 * y4 + total
    total = x5 * y5 + total
    total = x6 * y6 + total
    return x7 * y7 + total


@triton.jit
def sum_rows(x, p, y, q, JP: tl.constexpr, E: tl.constexpr):
    """Sums over the rows of x * p and of y * q, as compact columns; x and y are tiles, p and q may be row vectors."""
    xy = tl.reshape(tl.sum(tl.join(_chain(x, p), _chain(y, q)), 0), (4 * JP,))
    o = tl.arange(0, 4 * JP)
    return tl.split(tl.reshape(tl.gather(xy, 2 * _column_place(o // 2, JP, E) + o % 2, 0), (2 * JP, 2)))


@triton.jit
def max_rows(x, JP: tl.constexpr, E: tl.constexpr):
    """Largest value over the rows, as compact columns."""
    x = tl.reshape(tl.max(tl.max(tl.max(x, 7), 4), 0), (2 * JP,))
    return tl.gather(x, _column_place(tl.arange(0, 2 * JP), JP, E), 0)


@triton.jit
def sum_columns(x, M: tl.constexpr, G: tl.constexpr, GROUPED: tl.constexpr):
    """Sums over the columns (of each group, where grouped), as compact rows (row factors)."""
    if GROUPED:
        f = tl.arange(0, 16 * M * G)
        slot, g, h = f % (8 * M), (f // (8 * M)) % G, f // (8 * M * G)
        place = 16 * G * (slot // 8) + 16 * g + 4 * (slot % 4) + 2 * h + (slot // 4) % 2
        x = tl.sum(tl.sum(tl.sum(x, 5), 3), 2)  # [m, g, i, h, s]
        x = tl.gather(tl.reshape(x, (16 * M * G,)), place, 0)
    else:
        o = tl.arange(0, 8 * M)
        x = tl.sum(tl.sum(tl.sum(x, 6), 5), 3)  # within a thread: [m, g, c, i, s]
        x = tl.reshape(tl.sum(tl.sum(x, 2), 1), (8 * M,))
        x = tl.gather(x, 8 * (o // 8) + 2 * (o % 4) + (o // 4) % 2, 0)
    return x


@triton.jit
def grouped(x, KP: tl.constexpr, G: tl.constexpr, FOUR: tl.constexpr):
    """Compact rows as they go with compact row factors."""
    if FOUR:
        x = tl.gather(x, tl.arange(0, KP * 2 * G) % KP, 0)
    return x


@triton.jit
def tile_slots(M: tl.constexpr):
    """Key slots against the tile."""
    m, i, s = tl.arange(0, M)[:, None, None], tl.arange(0, 4)[None, :, None], tl.arange(0, 2)[None, None, :]
    return tl.reshape(8 * m + 4 * s + i, (M, 1, 1, 1, 4, 1, 1, 2))


@triton.jit
def tile_column_index(J: tl.constexpr, JP: tl.constexpr, E: tl.constexpr, G: tl.constexpr):
    """Value columns against the tile, and which exist."""
    chunk = 2 * tl.arange(0, JP // (2 * E))[:, None] + tl.arange(0, 2)[None, :]
    j = 8 * E * (chunk // 8)[:, None, :] + 8 * tl.arange(0, E)[None, :, None] + (chunk % 8)[:, None, :]
    h = tl.arange(0, 2)[None, None, None, :]
    shape: tl.constexpr = (1, G, JP // (2 * E * G), E, 1, 2, 2, 1)
    return tl.reshape(j[:, :, :, None] + J * h, shape), tl.reshape((j < J)[:, :, :, None] & (h < 2), shape)
