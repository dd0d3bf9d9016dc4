"""Shifts, masks and conversions on words of four codes: the innermost building blocks of the generated kernels.

A tile of codes is an int8 tensor whose fastest axis holds the four slots of a word, so that four neighbouring elements
of a thread are one register. Triton works on bytes one by one; the inline assembly here does whole words (`pack=4`),
which is what makes unpacking cheap. Triton's interpreter has no assembly and takes the plain branch.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

PLAIN = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even, in the low mantissa bits
SCALE_MIN = tl.constexpr(2.0**-24)  # FP16 clamp of every stored scale
SCALE_MAX = tl.constexpr(65504.0)


@triton.jit
def pick(x, shift: tl.constexpr, mask: tl.constexpr):
    """Bits `mask` of every byte after shifting the word left by `shift` (right where negative)."""
    if PLAIN:
        x = x.to(tl.uint8, bitcast=True)
        x = (x << shift) if shift > 0 else (x >> -shift)
        x = (x & mask).to(tl.int8, bitcast=True)
    else:
        move: tl.constexpr = f"shl.b32 t, $1, {shift};" if shift > 0 else f"shr.u32 t, $1, {-shift};"
        asm: tl.constexpr = f"{{ .reg .b32 t; {move} and.b32 $0, t, {mask * 0x01010101}; }}"
        x = tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)
    return x


@triton.jit
def bytes_to_float(z):
    """Signed bytes as exact floats: each byte becomes the low mantissa bits of 2^23 + 128 + z (one permute a value)."""
    if PLAIN:
        x = z.to(tl.float32)
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 t; xor.b32 t, $4, 0x80808080; "
            "prmt.b32 $0, t, 0x4B000000, 0x7650; prmt.b32 $1, t, 0x4B000000, 0x7651; "
            "prmt.b32 $2, t, 0x4B000000, 0x7652; prmt.b32 $3, t, 0x4B000000, 0x7653; }",
            "=r,=r,=r,=r,r", [z], dtype=tl.float32, is_pure=True, pack=4,
        ) - 8388736.0  # fmt: skip
    return x


@triton.jit
def float_to_bytes(x):
    """Integers -128..127 held as floats, as signed bytes: the low byte of 1.5 * 2^23 + x (three permutes a word)."""
    if PLAIN:
        z = x.to(tl.int32).to(tl.int8)
    else:
        z = tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; prmt.b32 t, $1, $2, 0x0040; prmt.b32 s, $3, $4, 0x0040; prmt.b32 $0, t, s, 0x5410; }",
            "=r,r,r,r,r", [x + ROUND], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return z


@triton.jit
def reciprocal(x):
    """1 / x to within one unit in the last place, in one instruction; x is a normal number."""
    if PLAIN:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def square_root(x):
    """sqrt(x) to within a unit in the last place or two."""
    if PLAIN:
        y = tl.sqrt(x)
    else:
        y = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def to_scale(x):
    """FP16 within [2^-24, 65504]: what is stored, and what everything that follows uses."""
    return tl.minimum(tl.maximum(x, SCALE_MIN), SCALE_MAX).to(tl.float16)


@triton.jit
def power_of_two(exponent):
    """2^exponent of an int32 tensor as float."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
