# mypy: ignore-errors
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
def merge(z, x, shift: tl.constexpr, mask: tl.constexpr):
    """z | pick(x, shift, mask), in whole words (an `or` outside of the assembly would take words apart again)."""
    if PLAIN:
        z = z | pick(x, shift, mask)
    else:
        move: tl.constexpr = f"shl.b32 t, $2, {shift};" if shift > 0 else f"shr.u32 t, $2, {-shift};"
        asm: tl.constexpr = f"{{ .reg .b32 t; {move} and.b32 t, t, {mask * 0x01010101}; or.b32 $0, t, $1; }}"
        z = tl.inline_asm_elementwise(asm, "=r,r,r", [z, x], dtype=tl.int8, is_pure=True, pack=4)
    return z


@triton.jit
def blend(x, x_shift: tl.constexpr, y, y_shift: tl.constexpr):
    """Upper nibbles of x and lower nibbles of y, each word shifted left (right where negative) first."""
    if PLAIN:
        z = pick(x, x_shift, 0xF0) | pick(y, y_shift, 0x0F)
    else:
        move_x: tl.constexpr = f"shl.b32 t, $1, {x_shift};" if x_shift > 0 else f"shr.u32 t, $1, {-x_shift};"
        move_y: tl.constexpr = f"shl.b32 s, $2, {y_shift};" if y_shift > 0 else f"shr.u32 s, $2, {-y_shift};"
        asm: tl.constexpr = f"{{ .reg .b32 t, s; {move_x} {move_y} lop3.b32 $0, t, s, 0xF0F0F0F0, 0xE4; }}"
        z = tl.inline_asm_elementwise(asm, "=r,r,r", [x, y], dtype=tl.int8, is_pure=True, pack=4)
    return z


@triton.jit
def set_bits(z, bits: tl.constexpr):
    """Set `bits` in every byte."""
    if PLAIN:
        z = z | bits
    else:
        asm: tl.constexpr = f"or.b32 $0, $1, {bits * 0x01010101};"
        z = tl.inline_asm_elementwise(asm, "=r,r", [z], dtype=tl.int8, is_pure=True, pack=4)
    return z


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
def to_bytes(x):
    """Integers -128..127, held as floats 1.5 * 2^23 + z, as signed bytes: their low bytes (three permutes a word)."""
    if PLAIN:
        z = (x - ROUND).to(tl.int32).to(tl.int8)
    else:
        z = tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; prmt.b32 t, $1, $2, 0x0040; prmt.b32 s, $3, $4, 0x0040; prmt.b32 $0, t, s, 0x5410; }",
            "=r,r,r,r,r", [x], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return z


@triton.jit
def to_codes(x, BITS: tl.constexpr, ARCH: tl.constexpr):
    """The same, clamped to the codes of one precision: two at a time as 16-bit integers where the target can."""
    top: tl.constexpr = 128 - 2 ** (8 - BITS)
    if PLAIN:
        z = tl.minimum(tl.maximum((x - ROUND).to(tl.int32), -top), top).to(tl.int8)
    elif ARCH >= 90:
        high: tl.constexpr = top * 0x00010001
        low: tl.constexpr = (65536 - top) * 0x00010001
        asm: tl.constexpr = (
            f"{{ .reg .b32 t, s, l, h; mov.b32 l, {low}; mov.b32 h, {high}; "
            "prmt.b32 t, $1, $2, 0x5410; prmt.b32 s, $3, $4, 0x5410; min.s16x2 t, t, h; min.s16x2 s, s, h; "
            "max.s16x2 t, t, l; max.s16x2 s, s, l; prmt.b32 $0, t, s, 0x6420; }"
        )
        z = tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [x], dtype=tl.int8, is_pure=True, pack=4)
    else:
        z = to_bytes(tl.minimum(tl.maximum(x - ROUND, -1.0 * top), 1.0 * top) + ROUND)
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
