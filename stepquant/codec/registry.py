"""One door to every codec: `make_codec` for what a plan says, `bits_per_value` for what it costs to store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stepquant.codec.baselines import (
    NVFP4_BLOCK,
    DampCodec,
    DsqCodec,
    FloatCodec,
    Nvfp4Codec,
    RowwiseCodec,
)
from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.spec import MENU, PIVOT, CodecSpec
from stepquant.errors import RecipeError, closest

FP32 = 32  # the entry of a precision map of kind ``float`` for states kept as they are
FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class StateCodec(Protocol):
    """What evaluation needs of a codec."""

    def roundtrip(self, x: Tensor) -> Tensor:
        """Q(X) of equation 4: `[..., H, K, V]` in and out, the input unchanged (it may be returned itself)."""
        ...


def make_codec(bits: Tensor, w: Tensor, spec: CodecSpec, value_dim: int) -> StateCodec:
    """The codec of one layer's heads.

    Args:
        bits: precision map uint8 `[H, K]`, on the device where the states will be; 16 marks FP16, 32 (kind ``float``
            only) FP32.
        w: row weights float32 `[H, K]`; only the dual-axis codec reads them.
        spec: which codec, and its settings.
        value_dim: value columns V.

    Raises:
        RecipeError: unknown kind, or bits or dimensions that the kind cannot store.
    """
    if spec.kind not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise RecipeError(f"codec.kind is {spec.kind!r}{closest(spec.kind, _MAKERS)}; expected one of {known}")
    check_bits(bits, spec, value_dim)
    return _MAKERS[spec.kind](bits, w, spec, value_dim)


def check_bits(bits: Tensor, spec: CodecSpec, value_dim: int) -> None:
    """Refuse precisions that the codec's kind cannot store.

    Raises:
        RecipeError: naming the kind, the bits found and those it takes.
    """
    menus: dict[str, set[int]] = {"nvfp4": {4, PIVOT}, "damp": {8, PIVOT}, "float": {PIVOT, FP32}}
    menu = menus.get(spec.kind, {*MENU, PIVOT})
    found = set(bits.unique().tolist())
    if found - menu:
        raise RecipeError(f"codec {spec.kind} was given bits {sorted(found - menu)}; it stores {sorted(menu)}")
    if spec.kind == "float" and len(found) > 1:
        raise RecipeError("codec float was given both 16 and 32 bits; it stores a layer in one dtype")
    if spec.kind == "nvfp4" and value_dim % NVFP4_BLOCK:
        raise RecipeError(f"codec nvfp4 needs value columns in multiples of {NVFP4_BLOCK}; the model has {value_dim}")


_MAKERS: dict[str, Callable[[Tensor, Tensor, CodecSpec, int], StateCodec]] = {
    "dual_axis": lambda bits, w, spec, v: DualAxisCodec(bits, w, spec, v),
    "rowwise": lambda bits, w, spec, v: RowwiseCodec(bits, v),
    "dsq": lambda bits, w, spec, v: DsqCodec(bits, v),
    "nvfp4": lambda bits, w, spec, v: Nvfp4Codec(bits, v),
    "damp": lambda bits, w, spec, v: DampCodec(bits, v),
    "float": lambda bits, w, spec, v: FloatCodec(torch.float32 if int(bits.flatten()[0]) == FP32 else torch.float16),
}


def storage_bits(bits: Tensor, spec: CodecSpec, value_dim: int) -> int:
    """Exact bits that a set of heads stores: codes, FP16 pivots, and every scale.

    Dual-axis (design 2.2): codes; per head that has an integer row, one FP16 column vector and one FP16 row factor for
    each of the K rows (V / group of them in a four-level two-bit head of the ``head`` codebook); a head that is a pivot
    as a whole stores no scales. Rowwise and DAMP-like: one FP16 scale an integer row. DSQ: as dual-axis with one row
    factor. NVFP4: an FP8 scale per 16 codes, an FP32 scale a head.

    Args:
        bits: precision map uint8 `[..., H, K]`.
        spec: which codec.
        value_dim: value columns V.
    """
    rows, integer = bits.shape[-1], bits != PIVOT
    codes = int(bits.long().sum()) * value_dim
    if spec.kind == "float":
        return codes
    heads = int(integer.any(-1).sum())
    integer_rows = int(integer.sum())
    if spec.kind in ("rowwise", "damp"):
        return codes + 16 * integer_rows
    if spec.kind == "nvfp4":
        return codes + 8 * integer_rows * (value_dim // NVFP4_BLOCK) + 32 * heads
    scales = 16 * heads * (rows + value_dim)
    if spec.kind == "dual_axis" and spec.codebook == "head":
        scales += 16 * int((bits == 2).all(-1).sum()) * rows * (value_dim // spec.group - 1)
    return codes + scales


def bits_per_value(bits: Tensor, spec: CodecSpec, value_dim: int) -> float:
    """`storage_bits` by state value, for a precision map `[..., H, K]`."""
    return storage_bits(bits, spec, value_dim) / (bits.numel() * value_dim)
