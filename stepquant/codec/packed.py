"""The packed codec in plain torch: FP32 states to pages and back, byte for byte what the kernels read and write.

Numerics are `DualAxisCodec`'s, bytes are `PageLayout`'s, and this file is the readable reference of the kernels'
unpacking and packing. Every head is first laid out with all parts at full size (the *full form*: whole planes over all
K slots); a page is then a gather of the bytes that exist, and unpacking the inverse gather with zeros elsewhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.dual_axis import Codes, DualAxisCodec
from stepquant.codec.spec import PIVOT, CodecSpec
from stepquant.layout import KERNEL_GRANULARITY, PARTS, PageLayout


def merge_columns(fields: Tensor, width: int, blocked: bool) -> Tensor:
    """Pack fields `[..., K, V]` uint8 of `width` bits (4 or 2) into plane bytes `[..., K * V * width / 8]`.

    Args:
        fields: one field an element, in the low bits.
        width: bits of a field.
        blocked: lay the bytes out for the kernels (`stepquant.layout`); otherwise rows one after another.
    """
    if not blocked:
        halves = _halves(fields, width)
        return (halves if width == 4 else _halves(halves, 4)).flatten(-2)
    x = _halves(fields, width).unflatten(-1, _column_blocks(fields.shape[-1])).unflatten(-4, (-1, 2, 4))
    x = x.movedim((-6, -3, -1, -5, -2, -4), (-6, -5, -4, -3, -2, -1))  # (m, s, i, b, e, l) to (m, b, l, s, e, i)
    if width == 2:
        x = x[..., 0, :, :] | x[..., 1, :, :] << 4
    return _exchange_lanes(x.flatten(-2 if width == 2 else -3), width).flatten(-4)


def split_columns(plane: Tensor, width: int, blocked: bool, key_dim: int) -> Tensor:
    """Inverse of `merge_columns`: plane bytes to fields `[..., K, V]`, in the low bits of uint8."""
    if not blocked:
        x = plane.unflatten(-1, (key_dim, -1))
        return _unhalves(x if width == 4 else _unhalves(x, 4), width)
    columns = plane.shape[-1] * 8 // width // key_dim
    blocks, wide, lanes = _column_blocks(columns)
    x = _exchange_lanes(plane.unflatten(-1, (key_dim // 8, blocks, lanes, -1)), width)
    if width == 4:
        x = x.unflatten(-1, (2, wide, 4))
    else:
        x = x.unflatten(-1, (wide, 4))
        x = torch.stack([x & 15, x >> 4], -3)
    x = x.movedim((-6, -3, -1, -5, -2, -4), (-6, -5, -4, -3, -2, -1))  # (m, b, l, s, e, i) to (m, s, i, b, e, l)
    return _unhalves(x.flatten(-3).flatten(-4, -2), width)


def _column_blocks(columns: int) -> tuple[int, int, int]:
    """Columns of one half as (b, e, l)."""
    half = columns // 2
    block = 16 if half % 16 == 0 else 8
    return half // block, block // 8, 8


def _exchange_lanes(x: Tensor, width: int) -> Tensor:
    """Plane bytes `[..., m, b, l, bytes]` with the lanes and blocks of every row m exchanged as pages have them.

    The same exchange undoes it.
    """
    blocks, lanes = x.shape[-3:-1]
    b, lane = torch.arange(blocks, device=x.device)[:, None], torch.arange(lanes, device=x.device)
    out = torch.empty_like(x)
    for d in range(min(4, x.shape[-4])):  # of rows m = d, d + 4, ...
        if width == 4:
            out[..., d::4, :, :, :] = x[..., d::4, b, lane ^ 2 * d, :]
        else:
            out[..., d::4, :, :, :] = x[..., d::4, b ^ d // 2 if blocks % 2 == 0 else b, lane ^ 4 * (d % 2), :]
    return out


def _halves(x: Tensor, shift: int) -> Tensor:
    """Column j and column j + V/2 in one byte."""
    low, high = x.chunk(2, -1)
    return low | high << shift


def _unhalves(x: Tensor, shift: int) -> Tensor:
    mask = (1 << shift) - 1
    return torch.cat([x & mask, x >> shift & mask], -1)


class PackedCodec:
    """Packs and unpacks the states of one layer.

    Args:
        layout: the pages.
        layer: index of the layer in the layout.
        w: row weights float32 `[H, K]`; their device is the codec's.
        spec: codec settings; its codebook must be the layout's.
    """

    def __init__(self, layout: PageLayout, layer: int, w: Tensor, spec: CodecSpec) -> None:
        if spec.codebook != layout.codebook:
            raise ValueError(f"the layout has the {layout.codebook!r} codebook, the codec {spec.codebook!r}")
        self.layout, self.layer, self.spec = layout, layer, spec
        device = w.device
        bits = torch.from_numpy(layout.bits[layer]).to(device)
        self.codec = DualAxisCodec(bits, w, spec, layout.value_dim)
        self.page_bytes = int(layout.layer_bytes[layer])
        self.groups = layout.value_dim // spec.group if self.codec.four_heads is not None else 1
        self.blocked = layout.granularity % KERNEL_GRANULARITY == 0
        self.order = torch.from_numpy(layout.permutation[layer].astype(np.int64)).to(device).unsqueeze(-1)
        self.shift = torch.where(bits == PIVOT, 0, 8 - bits.int()).unsqueeze(-1)
        self.four = ((bits == 2) & (spec.codebook == "head")).unsqueeze(-1)
        gather, scatter = _byte_maps(layout, layer, self.groups)
        self.gather, self.scatter = torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device)

    def pack(self, x: Tensor) -> Tensor:
        """Pages uint8 `[B, page_bytes]` of float32 states `[B, H, K, V]`."""
        return self.pack_codes(self.codec.fit(x))

    def unpack(self, pages: Tensor) -> Tensor:
        """States float32 `[B, H, K, V]` of pages."""
        return self.codec.reconstruct(self.unpack_codes(pages))

    def pack_codes(self, stored: Codes) -> Tensor:
        """Pages of codes and scales that are there already, `[B, H, ...]`."""
        codes = stored.codes.int()
        codes = torch.where(self.four, (codes - 1) >> 1, codes) << self.shift  # four levels 2u + 1 store u
        codes = self._to_slots(torch.where(self.codec.integer, codes, 0).to(torch.uint8))
        r = stored.r * self.codec.integer  # a pivot row's slot holds zero
        r = r if r.shape[-1] == self.groups else r.expand(*r.shape[:-1], self.groups)
        parts = {
            "high4": merge_columns(codes >> 4, 4, self.blocked),
            "low4": merge_columns(codes & 15, 4, self.blocked),
            "low2": merge_columns(codes >> 2 & 3, 2, self.blocked),
            "top2": merge_columns(codes >> 6, 2, self.blocked),
            "r": self._to_slots(r).transpose(-1, -2).contiguous().view(torch.uint8).flatten(-2),
            "c": stored.c.contiguous().view(torch.uint8),
            "pivots": self._to_slots(stored.pivots).contiguous().view(torch.uint8).flatten(-2),
        }
        full = torch.cat([parts[name] for name in PARTS], -1).flatten(1)
        return torch.nn.functional.pad(full, (0, 1))[:, self.gather]

    def unpack_codes(self, pages: Tensor) -> Codes:
        """Codes and scales `[B, H, ...]` of pages; rows that a part does not store come back as zero."""
        k, v = self.layout.key_dim, self.layout.value_dim
        full = torch.nn.functional.pad(pages, (0, 1))[:, self.scatter].unflatten(1, (self.layout.num_heads, -1))
        parts = dict(zip(PARTS, full.split(_full_sizes(k, v, self.groups), -1), strict=True))
        codes = split_columns(parts["high4"], 4, self.blocked, k) << 4
        codes = codes | split_columns(parts["low4"], 4, self.blocked, k)
        codes = codes | split_columns(parts["low2"], 2, self.blocked, k) << 2
        codes = codes | split_columns(parts["top2"], 2, self.blocked, k) << 6
        codes = self._to_rows(codes).view(torch.int8).int() >> self.shift
        codes = torch.where(self.four, 2 * codes + 1, codes).to(torch.int8)
        r = self._to_rows(_half(parts["r"]).unflatten(-1, (self.groups, k)).transpose(-1, -2))
        if self.groups > 1:  # heads with one factor a row store it once
            r = torch.where(self.four, r, r[..., :1])
        pivots = self._to_rows(_half(parts["pivots"]).unflatten(-1, (k, v)))
        return Codes(codes, r, _half(parts["c"]), pivots)

    def _to_slots(self, x: Tensor) -> Tensor:
        """Rows `[B, H, K, *]` in slot order."""
        return x.gather(-2, self.order.expand(x.shape))

    def _to_rows(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).scatter_(-2, self.order.expand(x.shape), x)


def _half(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16)


def _full_sizes(k: int, v: int, groups: int) -> list[int]:
    """Bytes of each of `PARTS` in the full form of a head."""
    return [k * v // 2, k * v // 2, k * v // 4, k * v // 4, 2 * k * groups, 2 * v, 2 * k * v]


def _byte_maps(layout: PageLayout, layer: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """For each byte of a page its place in the full form, and the reverse; the place past the end reads as zero."""
    sizes = _full_sizes(layout.key_dim, layout.value_dim, groups)
    starts = np.cumsum([0, *sizes])
    page_bytes, full_bytes = int(layout.layer_bytes[layer]), layout.num_heads * int(starts[-1])
    gather, scatter = np.full(page_bytes, full_bytes), np.full(full_bytes, page_bytes)
    row_bytes = {"low2": layout.value_dim // 4, "top2": layout.value_dim // 4, "pivots": 2 * layout.value_dim}
    for head in range(layout.num_heads):
        n8, n6, n4, _ = (int(n) for n in layout.slots[layer, head])
        integer = int(layout.rows[layer, head].sum())
        first = {"low2": n8, "top2": n8 + n6 + n4, "pivots": integer}  # slot at which the part begins
        for index, name in enumerate(PARTS):
            offset, size = layout.part(layer, head, name)
            if not size:
                continue
            start = head * int(starts[-1]) + int(starts[index]) + first.get(name, 0) * row_bytes.get(name, 0)
            gather[offset : offset + size] = np.arange(start, start + size)
            scatter[start : start + size] = np.arange(offset, offset + size)
    return gather, scatter
