# mypy: ignore-errors
"""The float tile that holds a block of a head on the chip, and how vectors go against it.

A block (`planes`) is a tile ``[h, (e, l), n]``: 16E value columns against all 8M slots, with the slots in the order

    n = (s, i1, a, d, j)   for slot 8 (4a + d) + 4s + 2 i1 + j,

which is at once how the words of a page unpack and how the matrix units hold a sum of products [columns, slots]. A
thread has 2E columns, and sums over columns of several blocks stay in it until the last.

Dense states go in and out as lines of memory: a warp loads or stores whole ones of 128 bytes or more, 16 bytes a thread
(`tile_from_rows`, `line_words`). Their rows are in the model's order, which need not be that of the slots.

Vectors live in two forms. *Compact*: rows in slot order, row factors as ``[HG, slots]`` (HG = 2 in four-level heads,
where the column halves have their own, otherwise 1), columns in column order; arithmetic on vectors is done here.
*Spread*: against the tile. Constants: M = slots / 8, a power of two; E = B / 8.
Prefixes everywhere: p_ pointer, o_ index or offset, n_ count, x a tile of the state, z a tile of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepquant.codegen.words import low_bytes, pair_bytes, raw_float, to_word


@triton.jit
def tile_columns(J: tl.constexpr, JP: tl.constexpr, PARTS: tl.constexpr = 1, i_part=0):
    """Value columns of the compact columns, and which exist; of a part where PARTS programs share them."""
    WIDTH: tl.constexpr = JP // PARTS
    o = tl.arange(0, 2 * WIDTH)
    at = o % WIDTH + WIDTH * i_part
    return at + J * (o // WIDTH), at < J


@triton.jit
def block_columns(b, J: tl.constexpr, E: tl.constexpr):
    """Value columns of block `b`, ``[h, (e, l)]``."""
    return tl.arange(0, 2)[:, None] * J + (tl.arange(0, 8 * E) + 8 * E * b)[None, :]


@triton.jit
def block_vector(x, b, JP: tl.constexpr, E: tl.constexpr):
    """Compact columns of block `b` against the tile."""
    o = tl.arange(0, 16 * E)
    x = tl.gather(x, o // (8 * E) * JP + o % (8 * E) + 8 * E * b, 0)
    return tl.reshape(x, (2, 8 * E, 1))


@triton.jit
def in_sums(x, M: tl.constexpr, E: tl.constexpr):
    """A tile as it is, dealt out to threads as the matrix units hold sums: plus a product of zeros.

    A tile that was loaded has no layout that words can be made of without handing all of it to every thread.
    """
    left, right = tl.zeros([16 * E, 16], tl.float16), tl.zeros([16, 8 * M], tl.float16)
    return tl.reshape(tl.dot(left, right, tl.reshape(x, (16 * E, 8 * M))), (2, 8 * E, 8 * M))


@triton.jit
def tile_slots(M: tl.constexpr):
    """Slot of every place of the tile's last axis."""
    n, A = tl.arange(0, 8 * M), M // 4
    return 32 * ((n // 8) % A) + 8 * ((n // 2) % 4) + 4 * (n // (16 * A)) + 2 * ((n // (8 * A)) % 2) + n % 2


@triton.jit
def slot_places(M: tl.constexpr):
    """The inverse of `tile_slots`: place of every slot."""
    o, A = tl.arange(0, 8 * M), M // 4
    return 8 * ((2 * ((o // 4) % 2) + (o // 2) % 2) * A + o // 32) + 2 * ((o // 8) % 4) + o % 2


@triton.jit
def tile_from_rows(x, M: tl.constexpr, E: tl.constexpr):
    """A block with its slots in natural order first, ``[slot, h, (e, l)]``, as a tile: no data moves."""
    x = tl.reshape(x, (M // 4, 4, 2, 2, 2, 2, 8 * E))
    return tl.reshape(tl.permute(x, (5, 6, 2, 3, 0, 1, 4)), (2, 8 * E, 8 * M))


@triton.jit
def spread_rows(x, M: tl.constexpr, HG: tl.constexpr):
    """Compact row factors ``[HG, slots]`` against the tile."""
    o = tile_slots(M)[None, :] + tl.zeros([HG, 8 * M], tl.int32)
    return tl.expand_dims(tl.gather(x, o, 1), 1)


@triton.jit
def partial_sums(x, M: tl.constexpr, E: tl.constexpr, HG: tl.constexpr):
    """Sums over the columns that a thread has, ``[HG, l, n]``."""
    x = tl.reshape(x, (2, E, 8, 8 * M))
    if E == 2:
        x = tl.sum(x, 1)
    if HG == 1:
        x = tl.sum(tl.reshape(x, (2, 8, 8 * M)), 0)
    return tl.reshape(x, (HG, 8, 8 * M))


@triton.jit
def total_sums(x, M: tl.constexpr, HG: tl.constexpr):
    """The sums that `partial_sums` began, compact."""
    o = slot_places(M)[None, :] + tl.zeros([HG, 8 * M], tl.int32)
    x = tl.sum(tl.sum(tl.sum(tl.reshape(x, (HG, 2, 2, 2, 8 * M)), 3), 2), 1)
    return tl.gather(x, o, 1)


@triton.jit
def max_slots(x):
    """Largest value over the slots, ``[h, (e, l)]``."""
    return tl.max(x, 2)


@triton.jit
def add_pair(a, b, c, d):
    """Combine function of a reduction that takes two sums at once."""
    return a + c, b + d


@triton.jit
def sum_slots(t, x, y):
    """Sums over the slots of t * x and of t * y, ``[h, (e, l)]``."""
    return tl.reduce((t * x, t * y), 2, add_pair)


@triton.jit
def _word_floats(z):
    """The bytes of words ``[d, l, a, e]`` as `raw_float` gives them, ``[d, l, a, e, j, i1]``."""
    return tl.join(tl.join(raw_float(z, 0), raw_float(z, 1)), tl.join(raw_float(z, 2), raw_float(z, 3)))


@triton.jit
def tile_from_words(z00, z01, z10, z11, M: tl.constexpr, E: tl.constexpr):
    """Tiles of words z_sh as one tile of raw floats ``[h, (e, l), n]``: no data moves."""
    x = tl.join(tl.join(_word_floats(z00), _word_floats(z01)), tl.join(_word_floats(z10), _word_floats(z11)))
    return tl.reshape(tl.permute(x, (6, 3, 1, 7, 5, 2, 0, 4)), (2, 8 * E, 8 * M))


@triton.jit
def _split_bytes(x):
    """Tiles of the four bytes of words."""
    x0, x1 = tl.split(x)  # i1
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    return x00, x01, x10, x11


@triton.jit
def _split_words(x, M: tl.constexpr, E: tl.constexpr):
    """A tile ``[h, (e, l), n]`` as four, x_sh of slot half s and column half h, ``[d, l, a, e, j, i1]``."""
    x = tl.permute(tl.reshape(x, (2, E, 8, 2, 2, M // 4, 4, 2)), (6, 2, 5, 1, 7, 4, 0, 3))  # d, l, a, e, j, i1, h, s
    x0, x1 = tl.split(x)
    x00, x01 = tl.split(x0)
    x10, x11 = tl.split(x1)
    return x00, x01, x10, x11


@triton.jit
def _word(x, limit, BITS: tl.constexpr, ARCH: tl.constexpr, CLAMP: tl.constexpr):
    """The inverse of `_word_floats`, for codes as `to_word` takes them."""
    x0, x1, x2, x3 = _split_bytes(x)
    return to_word(x0, x1, x2, x3, limit, BITS, ARCH, CLAMP)


@triton.jit
def words_from_tile(
    x, limit0, limit1, M: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr, CLAMP: tl.constexpr
):
    """The inverse of `tile_from_words`, for codes as `to_word` takes them; a limit for each slot half."""
    x00, x01, x10, x11 = _split_words(x, M, E)
    z00, z01 = _word(x00, limit0, BITS, ARCH, CLAMP), _word(x01, limit0, BITS, ARCH, CLAMP)
    return z00, z01, _word(x10, limit1, BITS, ARCH, CLAMP), _word(x11, limit1, BITS, ARCH, CLAMP)


@triton.jit
def crumbs_from_tile(x, M: tl.constexpr, E: tl.constexpr):
    """The words of a two-bit plane, ``[d, l, a, e]``, of a tile of places as `four_code` has them."""
    x00, x01, x10, x11 = _split_words(x, M, E)
    x0, x1, x2, x3 = _split_bytes(x00 + 4 * (x01 + 4 * (x10 + 4 * x11)))
    return low_bytes(x0, x1, x2, x3) ^ -1431655766  # 0xAA a byte: places 0 .. 3 are the codes -2 .. 1


@triton.jit
def line_columns(b, J: tl.constexpr, E: tl.constexpr):
    """Value columns of block `b` against lines, ``[l, (h, e)]``."""
    o = tl.arange(0, 2 * E)
    return (tl.arange(0, 8) + 8 * E * b)[:, None] + (o // E * J + o % E * 8)[None, :]


@triton.jit
def _slot_words(z0, z1, E: tl.constexpr):
    """Words of four slots and one column, of both column halves, as words of one slot and four columns.

    Args:
        z0, z1: words ``[d, l, a, e]`` of the column halves h.

    Returns:
        ``[d, l, a, j, i1]``, byte 2h + e of each; where E is 1 the odd bytes repeat the even ones.
    """
    if E == 2:
        x0, y0 = tl.split(z0)
        x1, y1 = tl.split(z1)
    else:
        x0, x1 = tl.reshape(z0, z0.shape[:3]), tl.reshape(z1, z1.shape[:3])
        y0, y1 = x0, x1
    low0, low1 = pair_bytes(x0, y0, 0, 1), pair_bytes(x1, y1, 0, 1)
    high0, high1 = pair_bytes(x0, y0, 1, 1), pair_bytes(x1, y1, 1, 1)
    x0 = tl.join(pair_bytes(low0, low1, 0, 2), pair_bytes(low0, low1, 1, 2))
    return tl.join(x0, tl.join(pair_bytes(high0, high1, 0, 2), pair_bytes(high0, high1, 1, 2)))


@triton.jit
def line_words(z00, z01, z10, z11, slot, M: tl.constexpr, E: tl.constexpr):
    """Words z_sh as words of one row and four columns, ``[l, row]``, where `slot` says which slot a row is in.

    Threads exchange words, not floats: a quarter of the bytes, and rows in any order at no cost.
    """
    x = tl.join(_slot_words(z00, z01, E), _slot_words(z10, z11, E))
    x = tl.reshape(tl.permute(x, (1, 2, 0, 5, 4, 3)), (8, 8 * M))
    return tl.gather(x, slot[None, :] + tl.zeros([8, 8 * M], tl.int32), 1)


@triton.jit
def line_floats(z, M: tl.constexpr, E: tl.constexpr):
    """The bytes of `line_words` as `raw_float` gives them, ``[l, (h, e), row]``: no data moves."""
    if E == 2:
        x0, x1 = tl.join(raw_float(z, 0), raw_float(z, 1)), tl.join(raw_float(z, 2), raw_float(z, 3))
        x = tl.permute(tl.join(x0, x1), (0, 3, 2, 1))
    else:
        x = tl.permute(tl.join(raw_float(z, 0), raw_float(z, 2)), (0, 2, 1))
    return tl.reshape(x, (8, 2 * E, 8 * M))
