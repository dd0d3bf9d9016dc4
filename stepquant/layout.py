"""Which bytes of a slot's page hold what, to the byte.

A slot (one request's recurrent state) owns one page a layer. A layer's page is the concatenation of its heads, in
head order, so that a tensor-parallel rank's page is a plain slice of it. A head is laid out as

    high4 | low4 | low2 | top2 | r fp16 [K] | c fp16 [V] | pivot rows fp16 [P, V]

with r as [V / group, K] in two-bit heads of the ``head`` codebook, and neither r nor c where a whole head is a pivot.

Rows are stored in *slots*, sorted by precision, highest first and stable, so that equal precisions are contiguous and
every plane covers an aligned run of slots:

- ``high4``: the upper nibble of every row of 4, 6 or 8 bits; ``low4``: the lower nibble of 8-bit rows; ``low2``: the
  two bits under the nibble of 6-bit rows; ``top2``: rows of 2 bits. In all of them a code stands in units of an 8-bit
  code, z = 2^(8-b) q in two's complement, so that a row of b bits is the upper b bits of a signed byte. The four levels
  -3, -1, 1, 3 of a two-bit head are stored as -2, -1, 0, 1.

Planes are laid out for the matrix units. With J = V/2, column halves h, and columns of a half in blocks of B = 16 (8
where J is no multiple of 16), name the slots 8m + 4s + i and the columns h J + B b + 8 e + l. Then

    nibble plane    [slots/8, J/B, 8, 2, B/8, 4] = [m, b, l, s, e, i] bytes; bits 4h .. 4h+3 are the nibble of half h
    two-bit plane   [slots/8, J/B, 8, B/8, 4]    = [m, b, l, e, i] bytes; bits 4s + 2h and the next are the two bits

so that unpacking is a shift and a mask of whole words, a thread loads 8 or 16 bytes at a stretch and a warp whole
128-byte lines, and what it gets are the operand registers of an int8 matrix instruction: four slots a register, a
warp's lanes over (l, d) with d = m mod 4. Those lanes load from four lines at once, and lines lie in the same banks of
a multiprocessor's cache. Rows are therefore exchanged within: with ^ for exclusive or, what is written above as (b, l)
lies at

    nibble plane    (b, l ^ 2d)
    two-bit plane   (b ^ (d div 2), l ^ 4 (d mod 2)); where J/B is odd (b, l ^ 4 (d mod 2))

and a quarter of a warp (16 bytes a lane) or half of it (8 bytes) reads every bank once. (Granularities below 8 pack
rows one after another, for accounting; no kernel reads those.)

Counts that are no multiple of the granularity are rounded up from the top: a few rows are kept in slots one precision
wider than they need (their codes do not change), and the last class is rounded up with unused slots. That is the
``padding`` of a `ByteCount`; a plan whose counts obey the granularity has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepquant.codec.spec import PACKED_MENU, PIVOT
from stepquant.errors import RecipeError

CLASSES = (8, 6, 4, 2)  # precisions in slot order
PARTS = ("high4", "low4", "low2", "top2", "r", "c", "pivots")  # in page order
ALIGNMENT = 256  # bytes; where a layer's page may start
GRANULARITIES = (1, 2, 4, 8, 16)
KERNEL_GRANULARITY = 8  # slots that the kernels need in one piece: a word of a two-bit plane


class StateGeometry(Protocol):
    """What the layout needs of a model's geometry."""

    @property
    def num_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...


@dataclass(frozen=True)
class StateShape:
    """The smallest thing that is a `StateGeometry`."""

    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ByteCount:
    """Bytes of one slot. ``total`` is what the codes, scales and pivots take (design 2.4); ``padding`` comes on top
    where counts do not obey the granularity; ``allocated`` is total, padding and the alignment of pages."""

    codes: int
    scales: int
    pivots: int
    padding: int
    total: int
    allocated: int

    def __add__(self, other: ByteCount) -> ByteCount:
        return ByteCount(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))


def _align(size: NDArray[np.int64], alignment: int) -> NDArray[np.int64]:
    return -(-size // alignment) * alignment


class PageLayout:
    """The page of a slot for one precision map.

    Args:
        geometry: anything with ``num_heads``, ``key_dim`` and ``value_dim``; both dimensions multiples of 16.
        bits: precision map `[L, H, K]` of 2, 4, 6, 8 or 16 (FP16 pivot row), numpy or torch.
        codebook: ``head`` (one precision a head, four-level two-bit heads) or ``shared`` (rows of a head differ).
        granularity: slots of equal capacity come in multiples of this; the kernels need at least 8.
        group: value columns that share a row factor in a two-bit head of the ``head`` codebook.
        alignment: bytes to which a layer's page is rounded up.

    Attributes:
        permutation: int16 `[L, H, K]`; slot s of a head holds key row ``permutation[l, h, s]``; pivots come last.
        rows: int32 `[L, H, 4]` rows of 8, 6, 4 and 2 bits.
        slots: int32 `[L, H, 4]` slots of each class, rounded to the granularity.
        num_pivots: int32 `[L, H]` FP16 rows of each head.
        offsets: int64 `[L, H, 7]` byte offsets in the layer's page of `PARTS`; -1 where a head lacks the part.
        sizes: int64 `[L, H, 7]` bytes of each part.
        head_offsets: int64 `[L, H]` where each head starts in the layer's page.
        layer_bytes: int64 `[L]` bytes of each layer's page, aligned.
        layer_offsets: int64 `[L]` where a layer's page starts if a slot's pages are laid end to end.

    Raises:
        RecipeError: on a map, granularity or shape that cannot be packed.
    """

    def __init__(
        self,
        geometry: StateGeometry,
        bits: ArrayLike,
        codebook: Literal["head", "shared"],
        granularity: int = KERNEL_GRANULARITY,
        group: int = 32,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.num_heads, self.key_dim, self.value_dim = geometry.num_heads, geometry.key_dim, geometry.value_dim
        self.codebook, self.granularity, self.group, self.alignment = codebook, granularity, group, alignment
        self.bits = np.ascontiguousarray(np.asarray(bits), dtype=np.uint8)
        self._check()
        self.num_layers = self.bits.shape[0]
        order = np.where(self.bits == PIVOT, 0, self.bits)
        self.permutation = np.argsort(-order.astype(np.int16), axis=-1, kind="stable").astype(np.int16)
        self.rows = np.stack([(self.bits == b).sum(-1) for b in CLASSES], -1).astype(np.int32)
        self.num_pivots = (self.bits == PIVOT).sum(-1).astype(np.int32)
        self.whole_pivot = self.num_pivots == self.key_dim
        self.slots = self._slots()
        self.sizes = self._sizes()
        ends = self.sizes.reshape(self.num_layers, -1).cumsum(-1).reshape(self.sizes.shape)
        self.offsets = np.where(self.sizes > 0, ends - self.sizes, -1)
        self.head_offsets = ends[..., -1] - self.sizes.sum(-1)
        self.layer_bytes = _align(ends[:, -1, -1], alignment)
        self.layer_offsets = self.layer_bytes.cumsum() - self.layer_bytes

    def _check(self) -> None:
        shape = (self.num_heads, self.key_dim)
        if self.bits.ndim != 3 or self.bits.shape[1:] != shape or not len(self.bits):
            raise RecipeError(
                f"the precision map has shape {self.bits.shape}; expected [layers, {shape[0]}, {shape[1]}]"
            )
        unknown = sorted(set(np.unique(self.bits).tolist()) - {*PACKED_MENU, PIVOT})
        if unknown:
            raise RecipeError(f"the precision map holds {unknown}; packed pages take {[*PACKED_MENU, PIVOT]}")
        if self.key_dim % 16 or self.value_dim % 16:
            raise RecipeError(
                f"a {self.key_dim} x {self.value_dim} state cannot be packed: both must be multiples of 16"
            )
        if self.granularity not in GRANULARITIES:
            raise RecipeError(f"granularity is {self.granularity}; expected one of {GRANULARITIES}")
        if self.codebook not in ("head", "shared"):
            raise RecipeError(f"codebook is {self.codebook!r}; expected 'head' or 'shared'")
        if self.codebook == "head":
            if (self.bits != self.bits[..., :1]).any():
                raise RecipeError("a head has rows of different precision; the 'head' codebook takes one: use 'shared'")
            if (self.bits == 2).any() and self.value_dim % self.group:
                raise RecipeError(f"{self.value_dim} value columns are no multiple of the two-bit group {self.group}")

    def _slots(self) -> NDArray[np.int32]:
        """Round class counts up from the top; a class takes rows of the next one before it takes unused slots."""
        slots = np.zeros_like(self.rows)
        left = self.rows.sum(-1)
        carried = np.zeros_like(left)  # rows of this class that already sit in wider slots
        for i in range(len(CLASSES)):
            need = np.maximum(self.rows[..., i] - carried, 0)
            slots[..., i] = -(-need // self.granularity) * self.granularity
            used = np.minimum(slots[..., i], left)
            carried = np.maximum(carried - self.rows[..., i], 0) + used - need
            left = left - used
        return slots

    def _sizes(self) -> NDArray[np.int64]:
        n8, n6, n4, n2 = np.moveaxis(self.slots.astype(np.int64), -1, 0)
        v, scaled = self.value_dim, ~self.whole_pivot
        four = (self.codebook == "head") & (n2 > 0)
        factors = self.key_dim * np.where(four, v // self.group, 1)
        return np.stack(
            [(n8 + n6 + n4) * v // 2, n8 * v // 2, n6 * v // 4, n2 * v // 4, scaled * factors * 2, scaled * v * 2,
             self.num_pivots.astype(np.int64) * v * 2], -1,
        )  # fmt: skip

    @cached_property
    def layers(self) -> tuple[ByteCount, ...]:
        """Byte counts of each layer."""
        code_bits = (self.rows.astype(np.int64) * np.array(CLASSES)).sum((1, 2))
        codes = code_bits * self.value_dim // 8
        laid = self.sizes[..., :4].sum((1, 2))
        scales, pivots = self.sizes[..., 4:6].sum((1, 2)), self.sizes[..., 6].sum(1)
        total = codes + scales + pivots
        columns = (codes, scales, pivots, laid - codes, total, self.layer_bytes)
        return tuple(ByteCount(*(int(c[i]) for c in columns)) for i in range(self.num_layers))

    @cached_property
    def bytes(self) -> ByteCount:
        """Byte counts of one slot over all layers."""
        total = self.layers[0]
        for layer in self.layers[1:]:
            total = total + layer
        return total

    def row_slot(self) -> NDArray[np.int16]:
        """Inverse of `permutation`: the slot of key row k, int16 `[L, H, K]`; pivots follow the integer rows."""
        return np.argsort(self.permutation, axis=-1, kind="stable").astype(np.int16)

    def part(self, layer: int, head: int, name: str) -> tuple[int, int]:
        """Byte offset (-1: absent) and size of one part of a head in the layer's page."""
        index = PARTS.index(name)
        return int(self.offsets[layer, head, index]), int(self.sizes[layer, head, index])

    def rank(self, rank: int, size: int) -> PageLayout:
        """The layout of tensor-parallel rank `rank` of `size`: its contiguous run of heads, padding recomputed."""
        if size < 1 or self.num_heads % size or not 0 <= rank < size:
            raise RecipeError(f"{self.num_heads} heads cannot be split over {size} ranks (rank {rank})")
        count = self.num_heads // size
        shape = StateShape(count, self.key_dim, self.value_dim)
        part = self.bits[:, rank * count : (rank + 1) * count]
        return PageLayout(shape, part, self.codebook, self.granularity, self.group, self.alignment)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for plan.json and ``inspect``: settings, bytes, and the parts of every head."""
        heads = [
            [
                {"rows": self.rows[layer, head].tolist(), "slots": self.slots[layer, head].tolist(),
                 "pivots": int(self.num_pivots[layer, head]), "parts": self._parts(layer, head)}
                for head in range(self.num_heads)
            ]
            for layer in range(self.num_layers)
        ]  # fmt: skip
        return {
            "codebook": self.codebook,
            "granularity": self.granularity,
            "group": self.group,
            "alignment": self.alignment,
            "classes": list(CLASSES),
            "bytes": asdict(self.bytes),
            "layers": [{**asdict(b), "heads": h} for b, h in zip(self.layers, heads, strict=True)],
        }

    def _parts(self, layer: int, head: int) -> Mapping[str, list[int]]:
        """Offset and size of the parts that a head has."""
        pairs = {name: list(self.part(layer, head, name)) for name in PARTS}
        return {name: pair for name, pair in pairs.items() if pair[1]}
