"""Instructions of the PTX emulator that work on registers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.codegen.ptx_text import BITS, COMPARE, Reg, bits, mask, split, view


class Registers:
    """Registers of all threads of a program, uint64, and the operations on them."""

    count: int
    registers: dict[str, Reg]
    pack_width = 32

    # Operands

    def read(self, text: str, kind: str = "b64") -> Reg:
        if text in self.registers:
            return self.registers[text]
        if text.startswith("%"):  # never written: the compiler does not care what is in it
            return np.zeros(self.count, np.uint64)
        if text.startswith("0f"):
            value = int(text[2:], 16)
        elif text.startswith("{"):
            parts = [self.read(t) for t in split(text[1:-1])]
            width = 64 // len(parts) if kind.endswith("64") else 32 // len(parts)
            total = parts[0] & mask(width)
            for i, part in enumerate(parts[1:], 1):
                total = total | (part & mask(width)) << np.uint64(width * i)
            return total
        else:
            value = int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
        return np.full(self.count, value, np.uint64)

    def get(self, text: str, kind: str) -> np.ndarray:
        if kind[0] == "f" and text.startswith("0x"):
            return view(np.full(self.count, int(text, 16), np.uint64), kind)
        return view(self.read(text, kind), kind)

    def set(self, text: str, x: Reg, on: np.ndarray) -> None:
        if text.startswith("{"):
            parts = split(text[1:-1])
            width = self.pack_width // len(parts)
            for i, part in enumerate(parts):
                self.set(part, (x >> np.uint64(width * i)) & mask(width), on)
        elif text != "_":
            old = self.registers.get(text)
            self.registers[text] = x if on.all() or old is None else np.where(on, x, old)

    def put(self, text: str, x: np.ndarray, kind: str, on: np.ndarray) -> None:
        self.pack_width = BITS[kind]
        self.set(text, bits(x, kind), on)

    # Moves

    def op_mov(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.pack_width = BITS[mods[0]]
        self.set(o[0], self.read(o[1], mods[0]), on)

    def op_cvt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        to, source = mods[-2], mods[-1]
        if to == "f16x2":
            high, low = bits(self.get(o[1], "f32"), "f16"), bits(self.get(o[2], "f32"), "f16")
            self.set(o[0], high << np.uint64(16) | low, on)
        elif to == "bf16x2":
            self.set(
                o[0], bits(self.get(o[1], "f32"), "bf16") << np.uint64(16) | bits(self.get(o[2], "f32"), "bf16"), on
            )
        elif mods[0] == "rzi" and to.startswith("s") and source == "f32":  # saturates, NaN becomes 0
            width = int(to[1:])
            x = np.nan_to_num(np.trunc(self.get(o[1], source).astype(np.float64)), nan=0.0)
            self.put(o[0], np.clip(x, -(2.0 ** (width - 1)), 2.0 ** (width - 1) - 1).astype(np.int64), to, on)
        else:
            assert to[0] in "fb" or source[0] not in "fb" or source.startswith("b"), mods
            if to == "s8":  # a register is wider: its sign goes all the way up
                self.put(o[0], view(self.read(o[1], source), "s8").astype(np.int64), "s32", on)
                return
            self.put(o[0], self.get(o[1], source), to, on)

    def op_selp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[0].replace("f", "b")
        self.set(o[0], np.where(self.read(o[3]) != 0, self.read(o[1], kind), self.read(o[2], kind)), on)

    def op_setp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        a, b = self.get(o[1], mods[-1]), self.get(o[2], mods[-1])
        relation = mods[0]
        result = ~COMPARE[{"neu": "eq"}[relation]](a, b) if relation == "neu" else COMPARE[relation](a, b)
        self.set(o[0], result.astype(np.uint64), on)

    def op_set(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        a, b = self.get(o[1], mods[2]), self.get(o[2], mods[2])
        self.put(o[0], COMPARE[mods[0]](a, b).astype(np.float32), mods[1], on)

    def op_prmt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        both = (self.read(o[1]) & mask(32)) | (self.read(o[2]) & mask(32)) << np.uint64(32)
        selector, total = self.read(o[3]), np.zeros(self.count, np.uint64)
        for i in range(4):
            pick = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (np.uint64(8) * (pick & np.uint64(7))) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
            total |= np.where(pick & np.uint64(8) != 0, sign, byte) << np.uint64(8 * i)
        self.set(o[0], total, on)

    def op_shfl(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        lane = np.arange(self.count) % 32
        b = self.read(o[2]).astype(np.int64)
        source = {"bfly": lane ^ b, "idx": b % 32, "down": lane + b, "up": lane - b}[mods[1]]
        source = np.where((source < 0) | (source > 31), lane, source)
        self.set(o[0].split("|")[0], self.read(o[1])[np.arange(self.count) // 32 * 32 + source], on)

    # Arithmetic

    def _binary(self, mods: list[str], o: list[str], on: np.ndarray, f: Callable[[Any, Any], Any]) -> None:
        kind = mods[-1]
        if kind.endswith("x2"):
            a, b, total = self.read(o[1]), self.read(o[2]), np.zeros(self.count, np.uint64)
            for i in (0, 16):
                part = f(view(a >> np.uint64(i), kind[:-2]), view(b >> np.uint64(i), kind[:-2]))
                total |= bits(part, kind[:-2]) << np.uint64(i)
            self.set(o[0], total, on)
            return
        a, b = self.get(o[1], kind), self.get(o[2], kind)
        self.put(o[0], f(a.astype(np.float64), b.astype(np.float64)) if kind == "bf16" else f(a, b), kind, on)

    def op_add(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, lambda a, b: a + b)

    def op_sub(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, lambda a, b: a - b)

    def op_min(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, np.fmin if mods[-1][0] == "f" else np.minimum)

    def op_max(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, np.fmax if mods[-1][0] == "f" else np.maximum)

    def op_and(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], self.read(o[1]) & self.read(o[2]) & mask(BITS[mods[0]]), on)

    def op_or(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], (self.read(o[1]) | self.read(o[2])) & mask(BITS[mods[0]]), on)

    def op_xor(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], (self.read(o[1]) ^ self.read(o[2])) & mask(BITS[mods[0]]), on)

    def op_not(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], ~self.read(o[1]) & mask(BITS[mods[0]]), on)

    def op_lop3(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        a, b, c = (self.read(x) for x in o[1:4])
        table, total = int(o[4], 0), np.zeros(self.count, np.uint64)
        for i in range(8):
            if table >> i & 1:
                total |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.set(o[0], total & mask(32), on)

    def op_shl(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        n = BITS[mods[0]]
        shift = self.read(o[2]) & mask(32)
        x = np.where(shift < n, self.read(o[1]) << np.minimum(shift, np.uint64(63)), np.uint64(0))
        self.set(o[0], x & mask(n), on)

    def op_shr(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[0]
        shift = np.minimum(self.read(o[2]) & mask(32), np.uint64(BITS[kind] - (kind[0] == "s")))
        x = self.get(o[1], kind).astype(np.int64 if kind[0] == "s" else np.uint64)
        self.put(
            o[0],
            x >> shift.astype(x.dtype) if kind[0] == "s" else np.where(shift < BITS[kind], x >> shift, 0),
            kind,
            on,
        )

    def op_shf(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        both = (self.read(o[1]) & mask(32)) | (self.read(o[2]) & mask(32)) << np.uint64(32)
        shift = self.read(o[3]) & np.uint64(31) if "wrap" in mods else np.minimum(self.read(o[3]), np.uint64(32))
        x = both >> shift if mods[0] == "r" else both << shift >> np.uint64(32)
        self.set(o[0], x & mask(32), on)

    def op_bfe(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        at, n = self.read(o[2]).astype(np.int64), self.read(o[3]).astype(np.int64)
        x = (self.read(o[1]) & mask(32)).astype(np.int64) >> at & (1 << n) - 1
        if mods[0] == "s32":
            x = x - ((x >> n - 1 & 1) << n)
        self.set(o[0], x.astype(np.uint64) & mask(32), on)

    def op_neg(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        if mods[-1] == "f16x2":
            self.set(o[0], self.read(o[1]) ^ np.uint64(0x80008000), on)
            return
        self.put(o[0], -self.get(o[1], mods[-1]), mods[-1], on)

    def op_abs(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.put(o[0], np.abs(self.get(o[1], mods[-1])), mods[-1], on)

    def op_mul(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[-1]
        if kind == "f16x2":
            self._halves(o, on, lambda a, b: a * b)
        elif "wide" in mods:
            wide = np.int64 if kind[0] == "s" else np.uint64
            self.put(o[0], self.get(o[1], kind).astype(wide) * self.get(o[2], kind).astype(wide), f"{kind[0]}64", on)
        elif "hi" in mods:
            wide = np.int64 if kind[0] == "s" else np.uint64
            self.put(o[0], self.get(o[1], kind).astype(wide) * self.get(o[2], kind).astype(wide) >> wide(32), kind, on)
        else:
            self._binary(mods, o, on, lambda a, b: a * b)

    def op_mad(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[-1]
        wide = np.int64 if kind[0] == "s" else np.uint64
        result = f"{kind[0]}64" if "wide" in mods else kind
        product = self.get(o[1], kind).astype(wide) * self.get(o[2], kind).astype(wide)
        self.put(o[0], product + self.get(o[3], result).astype(wide), result, on)

    def op_fma(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        if mods[-1] == "f16x2":
            self._halves(o, on, lambda a, b, c: a * b + c)
            return
        a, b, c = (self.get(x, mods[-1]).astype(np.longdouble) for x in o[1:4])
        exact = a * b + c
        if "sat" in mods:  # what is no number becomes zero
            exact = np.fmin(np.fmax(exact, 0), 1)
        if mods[0] == "rm":
            nearest = exact.astype(np.float32)
            exact = np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
        self.put(o[0], exact, mods[-1], on)

    def _halves(self, o: list[str], on: np.ndarray, f: Callable[..., Any]) -> None:
        """An operation on the two halves of words, each rounded once."""
        words = [self.read(x, "b32") for x in o[1:]]
        low, high = (
            bits(f(*(view(x >> np.uint64(n), "f16").astype(np.float64) for x in words)), "f16") for n in (0, 16)
        )
        self.set(o[0], low | high << np.uint64(16), on)

    def _unary(self, mods: list[str], o: list[str], on: np.ndarray, f: Callable[[Any], Any]) -> None:
        self.put(o[0], f(self.get(o[1], mods[-1]).astype(np.float64)), mods[-1], on)

    def op_rcp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, lambda x: 1 / x)

    def op_sqrt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.sqrt)

    def op_rsqrt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, lambda x: 1 / np.sqrt(x))

    def op_ex2(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.exp2)

    def op_lg2(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.log2)

    def op_div(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, lambda a, b: a / b)
