# mypy: ignore-errors
"""Shifts, masks and conversions on words of four codes: the innermost building blocks of the generated kernels.

A word holds a byte of each of four neighbouring slots (i = 0 .. 3). The matrix units take bytes, where a tile is int8
and inline assembly works on four of them at a time (`pack=4`; what it makes of a byte depends on that byte alone, so
that Triton may deal bytes out as it likes). Float tiles start from int32 words, which plain operations shift and mask,
and assembly takes apart and puts together in one instruction a value or less. Triton's interpreter has no assembly and
takes the plain branches.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

PLAIN = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even, in the low mantissa bits
# Assembly of `to_word` from the lower halves of $1 to $4, clamped two at a time between (l, m) and (h, k) ...
CLAMP_PAIRS = tl.constexpr(
    "prmt.b32 t, $1, $2, 0x5410; prmt.b32 s, $3, $4, 0x5410; min.s16x2 t, t, h; min.s16x2 s, s, k; "
    "max.s16x2 t, t, l; max.s16x2 s, s, m; prmt.b32 $0, t, s, 0x6420;"
)
# ... or, where the target has no such minimum, one after another between (a, b, c, d) and (e, f, g, h).
CLAMP_WORDS = tl.constexpr(
    "bfe.s32 t, $1, 0, 16; bfe.s32 s, $2, 0, 16; min.s32 t, t, e; min.s32 s, s, f; max.s32 t, t, a; "
    "max.s32 s, s, b; prmt.b32 l, t, s, 0x0040; bfe.s32 t, $3, 0, 16; bfe.s32 s, $4, 0, 16; "
    "min.s32 t, t, g; min.s32 s, s, h; max.s32 t, t, c; max.s32 s, s, d; prmt.b32 m, t, s, 0x0040; "
    "prmt.b32 $0, l, m, 0x5410;"
)
REACH = tl.constexpr(1 - 2.0**-10)  # of `stepquant.codec.dual_axis`
SCALE_MIN = tl.constexpr(2.0**-24)  # FP16 clamp of every stored scale
SCALE_MAX = tl.constexpr(65504.0)


@triton.jit
def pick(x, shift: tl.constexpr, mask: tl.constexpr):
    """Bits `mask` of every byte after shifting the word left by `shift` (right where negative)."""
    if x.dtype == tl.int32:
        if shift > 0:
            x = x << shift
        elif shift < 0:
            x = (x.to(tl.uint32, bitcast=True) >> -shift).to(tl.int32, bitcast=True)
        x = x & (mask * 0x01010101 - ((mask >> 7) << 32))
    elif PLAIN:
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
    """z | pick(x, shift, mask); bytes in whole words (an `or` outside of the assembly would take words apart)."""
    if x.dtype == tl.int32 or PLAIN:
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
        PACK: tl.constexpr = 1 if x.dtype == tl.int32 else 4
        z = tl.inline_asm_elementwise(asm, "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=PACK)
    return z


@triton.jit
def set_bits(z, bits: tl.constexpr):
    """Set `bits` in every byte."""
    if z.dtype == tl.int32:
        z = z | (bits * 0x01010101)
    elif PLAIN:
        z = z | bits
    else:
        asm: tl.constexpr = f"or.b32 $0, $1, {bits * 0x01010101};"
        z = tl.inline_asm_elementwise(asm, "=r,r", [z], dtype=tl.int8, is_pure=True, pack=4)
    return z


@triton.jit
def raw_float(x, AT: tl.constexpr):
    """Byte `AT` of words of signed bytes z as floats RAW + z: mantissa bits of 2^15 + 128 + z, in one permute."""
    if PLAIN:
        y = (x << (24 - 8 * AT) >> 24).to(tl.float32)
    else:
        y = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, 0x47000000, {0x7404 + 16 * AT};", "=r,r", [x ^ -2139062144], tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return y


@triton.jit
def pair_bytes(x, y, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Lower (HALF = 0) or upper halves of the words x and y, taken in turns, SIZE bytes at a time."""
    if PLAIN:
        x, y = (x >> (16 * HALF)) & 65535, (y >> (16 * HALF)) & 65535
        if SIZE == 1:
            z = (x & 255) | ((x & 65280) << 8) | ((y & 255) << 8) | ((y & 65280) << 16)
        else:
            z = x | (y << 16)
    else:
        order: tl.constexpr = (0x5140 if SIZE == 1 else 0x5410) + 0x2222 * HALF
        z = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {order};", "=r,r,r", [x, y], tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return z


@triton.jit
def scale_raw(x, c):
    """z * c of `raw_float`, c a half as float: one fused multiply-add, exact but for one rounding (RAW has 9 bits)."""
    if PLAIN:
        x = x * c
    else:
        x = tl.fma(x, c, -32896.0 * c)
    return x


@triton.jit
def code_bits(q):
    """Codes held as floats ROUND + q as int32 whose lower half is q."""
    if PLAIN:
        z = (q - ROUND).to(tl.int32)
    else:
        z = q.to(tl.int32, bitcast=True)
    return z


@triton.jit
def low_bytes(x0, x1, x2, x3):
    """The lowest bytes of four int32 as a word."""
    if PLAIN:
        z = (x0 & 255) | ((x1 & 255) << 8) | ((x2 & 255) << 16) | ((x3 & 255) << 24)
    else:
        z = tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; prmt.b32 t, $1, $2, 0x0040; prmt.b32 s, $3, $4, 0x0040; prmt.b32 $0, t, s, 0x5410; }",
            "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return z


@triton.jit
def to_word(x0, x1, x2, x3, limits, BITS: tl.constexpr, ARCH: tl.constexpr, CLAMP: tl.constexpr):
    """Four codes in the lower halves of int32 as the bytes of a word.

    CLAMP: to the codes of a precision; otherwise they are known to be within them. BITS = 0: every row has its own
    precision, codes are in units of an 8-bit code, and `limits` has words with the largest code of a row a byte.
    """
    if not CLAMP:
        z = low_bytes(x0, x1, x2, x3)
    elif PLAIN:
        x0, x1 = _plain_clamp(x0, limits, BITS, 0), _plain_clamp(x1, limits, BITS, 8)
        z = low_bytes(x0, x1, _plain_clamp(x2, limits, BITS, 16), _plain_clamp(x3, limits, BITS, 24))
    elif BITS > 0:
        TOP: tl.constexpr = 2 ** (BITS - 1) - 1
        if ARCH >= 90:
            asm: tl.constexpr = (
                f"{{ .reg .b32 t, s, l, m, h, k; mov.b32 l, {(65536 - TOP) * 0x00010001}; mov.b32 m, l; "
                f"mov.b32 h, {TOP * 0x00010001}; mov.b32 k, h; {CLAMP_PAIRS} }}"
            )
        else:
            asm: tl.constexpr = (
                f"{{ .reg .b32 t, s, l, m, a, b, c, d, e, f, g, h; mov.b32 a, {-TOP}; mov.b32 b, a; mov.b32 c, a; "
                f"mov.b32 d, a; mov.b32 e, {TOP}; mov.b32 f, e; mov.b32 g, e; mov.b32 h, e; {CLAMP_WORDS} }}"
            )
        z = tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        if ARCH >= 90:  # no limit is zero, so minus is not and plus one in both halves
            asm: tl.constexpr = (
                "{ .reg .b32 t, s, l, m, h, k; prmt.b32 h, $5, 0, 0x4140; prmt.b32 k, $5, 0, 0x4342; "
                "not.b32 l, h; not.b32 m, k; add.s32 l, l, 0x00010001; add.s32 m, m, 0x00010001; "
                f"{CLAMP_PAIRS} }}"
            )
        else:
            asm: tl.constexpr = (
                "{ .reg .b32 t, s, l, m, a, b, c, d, e, f, g, h; bfe.u32 e, $5, 0, 8; bfe.u32 f, $5, 8, 8; "
                "bfe.u32 g, $5, 16, 8; bfe.u32 h, $5, 24, 8; neg.s32 a, e; neg.s32 b, f; neg.s32 c, g; neg.s32 d, h; "
                f"{CLAMP_WORDS} }}"
            )
        z = tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r,r", [x0, x1, x2, x3, limits], dtype=tl.int32, is_pure=True, pack=1
        )
    return z


@triton.jit
def _plain_clamp(q, limits, BITS: tl.constexpr, AT: tl.constexpr):
    """What the assembly of `to_word` makes of the code that goes to bit `AT`."""
    if BITS > 0:
        top = 2 ** (BITS - 1) - 1
    else:
        top = (limits >> AT) & 255
    return tl.minimum(tl.maximum(q, -top), top)


@triton.jit
def four_size(y, threshold):
    """Size of the level, 1 or 3, of values of size `y`; without a predicate, of which a thread has only seven."""
    if PLAIN:
        level = tl.where(y >= threshold, 3.0, 1.0)
    else:
        level = 1.0 + 2.0 * tl.inline_asm_elementwise(
            "set.ge.f32.f32 $0, $1, $2;", "=r,r,r", [y, threshold], tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return level


@triton.jit
def four_code(y, inv_c):
    """Place 0 .. 3 of y / c among the levels -3, -1, 1, 3, whose thresholds are -2, 0 and 2, in the low bits of int32.

    `inv_c` is 1 / 8c: the sum is then within 0 .. 1 where y is within the levels' reach, and saturates beyond it. It
    is a step above one half for zero, which counts as positive.
    """
    if PLAIN:
        t = tl.minimum(tl.maximum(y * inv_c + 0.50000006, 0.0), 1.0)
        q = tl.where(t == t, t * 3.9999998, 0.0).to(tl.int32)
    else:
        q = tl.inline_asm_elementwise(
            "{ .reg .f32 t; fma.rn.sat.f32 t, $1, $2, 0f3F000001; fma.rm.f32 $0, t, 0f407FFFFF, 0f4B000000; }",
            "=r,r,r", [y, inv_c], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return q


@triton.jit
def opaque(x: tl.constexpr):
    """A number that the compiler does not know: a loop to it keeps one copy of its body, which the instruction cache
    holds more of."""
    if PLAIN:
        y = x
    else:
        y = tl.inline_asm_elementwise(f"mov.b32 $0, {x};", "=r", [], tl.int32, is_pure=True, pack=1)
    return y


@triton.jit
def reciprocal(x):
    """1 / x to within one unit in the last place, in one instruction; x is a normal number."""
    if PLAIN:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def exponential(x):
    """exp(x) to within two units in the last place near zero; what is below 2^-126 is zero."""
    if PLAIN:
        y = tl.exp(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x * 1.4426950408889634], tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def inverse_root(x):
    """1 / sqrt(x) to within a unit in the last place or two."""
    if PLAIN:
        y = 1.0 / tl.sqrt(x)
    else:
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
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
