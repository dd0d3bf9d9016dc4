"""Runs the PTX of a compiled kernel on a CPU: what Triton's compiler made of a kernel, inline assembly included.

All threads of a program go in step, so this finds wrong code and wrong assembly but no missing barrier. A register is a
uint64 array with an entry for every thread; memory is one array of bytes. Only what Triton emits for this package's
kernels is understood; anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Reg = np.ndarray
_BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
         "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1}  # fmt: skip
_UINT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


class Memory:
    """Global memory: numpy arrays by address."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.bytes, self.used = np.zeros(size, np.uint8), 256

    def put(self, x: np.ndarray) -> int:
        """Copy an array in; returns its address."""
        raw = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        at, self.used = self.used, self.used + -(-raw.size // 256) * 256 + 256
        assert self.used <= self.bytes.size, "the emulator's memory is full"
        self.bytes[at : at + raw.size] = raw
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        """The bytes at an address as an array of the shape and type of `like`."""
        return self.bytes[at : at + like.nbytes].copy().view(like.dtype).reshape(like.shape)


def view(x: Reg, kind: str) -> np.ndarray:
    """The values of a register read as a PTX type."""
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if kind == "pred":
        return x != 0
    narrow = x.astype(_UINT[_BITS[kind]])
    if kind[0] == "f":
        return narrow.view({16: np.float16, 32: np.float32, 64: np.float64}[_BITS[kind]])
    return narrow.view(narrow.dtype.name.replace("uint", "int")) if kind[0] == "s" else narrow


def bits(x: np.ndarray, kind: str) -> Reg:
    """Values as the bits of a register."""
    if kind == "bf16":  # round to nearest even
        u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        return (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    if kind == "pred":
        return x.astype(np.uint64)
    if kind[0] == "f":
        x = np.asarray(x).astype({16: np.float16, 32: np.float32, 64: np.float64}[_BITS[kind]])
        return x.view(_UINT[_BITS[kind]]).astype(np.uint64)
    return np.asarray(x).astype(np.int64 if kind[0] == "s" else np.uint64).astype(np.uint64) & _mask(_BITS[kind])


def _mask(n: int) -> np.uint64:
    return np.uint64((1 << n) - 1)


def _split(text: str) -> list[str]:
    """Operands of an instruction; braces and brackets stay together."""
    found, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and not depth:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()]


def parse(ptx: str) -> tuple[list[str], list[tuple[str, str, list[str]]], dict[str, int]]:
    """Parameter types, instructions (guard, opcode, operands) and labels of the only entry of a module."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"\.branchtargets[^;]*;", lambda m: " ".join(m[0].split()), ptx)
    head, body = ptx[ptx.index(".entry") :].split("{", 1)
    params = re.findall(r"\.param \.(\w+)", head)
    code: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    lines = body.split("\n}")[0].splitlines()
    for text in (part for line in lines if not line.strip().startswith(".") for part in line.split(";")):
        text = " ".join(text.split())
        if (m := re.match(r"(\$\w+):", text)) is not None:
            labels[m[1]] = len(code)
            continue
        text = re.sub(r"^\{ ?(?=[.@a-z]|$)", "", text)  # the scope of inline assembly
        if (m := re.match(r"(\w+): \.branchtargets (.*)", text)) is not None:
            code[-1] = ("", "brx", [code[-1][2][0], m[2]])
            continue
        if re.match(r"\w+:$", text):
            continue
        if text and not text.startswith((".", "}")):
            m = re.match(r"(?:@(!?[%\w]+) )?([a-z][\w.:]*)\s*(.*)$", text)
            assert m, f"cannot read {text!r}"
            code.append((m[1] or "", m[2], _split(m[3]) if m[3] else []))
    return params, code, labels


class Program:
    """One program of a kernel.

    Args:
        module: what `parse` returned.
        warps: its warps; arguments: bits of its parameters in order; program_id: its place in the grid.
    """

    def __init__(
        self, module: Any, warps: int, memory: Memory, arguments: Sequence[int], program_id: Sequence[int]
    ) -> None:
        self.params, self.code, self.labels = module
        self.count, self.memory, self.shared = 32 * warps, memory, np.zeros(1 << 17, np.uint8)
        self.arguments = [*arguments, *[0] * (len(self.params) - len(arguments))]
        thread = np.arange(self.count, dtype=np.uint64)
        self.registers: dict[str, Reg] = {"%tid.x": thread, "%laneid": thread % 32, "global_smem": thread * 0}
        for axis, i in zip("xyz", [*program_id, 0, 0], strict=False):
            self.registers[f"%ctaid.{axis}"] = thread * 0 + np.uint64(i)
        self.executed = 0

    def run(self) -> None:
        """Of the threads that have parted ways, those furthest behind go on, until they have caught up."""
        places = np.zeros(self.count, np.int64)
        with np.errstate(all="ignore"):
            while (at := int(places.min())) < len(self.code):
                guard, op, operands = self.code[at]
                self.executed += 1
                active = places == at
                on = active
                if guard:
                    on = on & ((self.registers[guard.strip("!")] != 0) ^ guard.startswith("!"))
                places[active] = at + 1
                name = op.split(".")[0]
                if name == "bra":
                    places[on] = self.labels[operands[0]]
                elif name == "brx":
                    targets = [self.labels[x] for x in _split(operands[1])]
                    places[on] = np.array(targets)[self.read(operands[0])[on].astype(np.int64)]
                elif name == "ret":
                    places[on] = len(self.code)
                else:
                    getattr(self, f"op_{name}")(op.split(".")[1:], operands, on)

    # Operands

    def read(self, text: str, kind: str = "b64") -> Reg:
        if text in self.registers:
            return self.registers[text]
        if text.startswith("%"):  # never written: the compiler does not care what is in it
            return np.zeros(self.count, np.uint64)
        if text.startswith("0f"):
            value = int(text[2:], 16)
        elif text.startswith("{"):
            parts = [self.read(t) for t in _split(text[1:-1])]
            width = 64 // len(parts) if kind.endswith("64") else 32 // len(parts)
            total = parts[0] & _mask(width)
            for i, part in enumerate(parts[1:], 1):
                total = total | (part & _mask(width)) << np.uint64(width * i)
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
            parts = _split(text[1:-1])
            width = self.pack_width // len(parts)
            for i, part in enumerate(parts):
                self.set(part, (x >> np.uint64(width * i)) & _mask(width), on)
        elif text != "_":
            old = self.registers.get(text)
            self.registers[text] = x if on.all() or old is None else np.where(on, x, old)

    def put(self, text: str, x: np.ndarray, kind: str, on: np.ndarray) -> None:
        self.pack_width = _BITS[kind]
        self.set(text, bits(x, kind), on)

    # Moves

    def op_mov(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.pack_width = _BITS[mods[0]]
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
        else:
            assert to[0] in "fb" or source[0] not in "fb" or source.startswith("b"), mods
            self.put(o[0], self.get(o[1], source), to, on)

    def op_selp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[0].replace("f", "b")
        self.set(o[0], np.where(self.read(o[3]) != 0, self.read(o[1], kind), self.read(o[2], kind)), on)

    def op_setp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        a, b = self.get(o[1], mods[-1]), self.get(o[2], mods[-1])
        relation = mods[0]
        result = ~_COMPARE[{"neu": "eq"}[relation]](a, b) if relation == "neu" else _COMPARE[relation](a, b)
        self.set(o[0], result.astype(np.uint64), on)

    def op_prmt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        both = (self.read(o[1]) & _mask(32)) | (self.read(o[2]) & _mask(32)) << np.uint64(32)
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
        self.set(o[0], self.read(o[1]) & self.read(o[2]) & _mask(_BITS[mods[0]]), on)

    def op_or(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], (self.read(o[1]) | self.read(o[2])) & _mask(_BITS[mods[0]]), on)

    def op_xor(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], (self.read(o[1]) ^ self.read(o[2])) & _mask(_BITS[mods[0]]), on)

    def op_not(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.set(o[0], ~self.read(o[1]) & _mask(_BITS[mods[0]]), on)

    def op_lop3(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        a, b, c = (self.read(x) for x in o[1:4])
        table, total = int(o[4], 0), np.zeros(self.count, np.uint64)
        for i in range(8):
            if table >> i & 1:
                total |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self.set(o[0], total & _mask(32), on)

    def op_shl(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        n = _BITS[mods[0]]
        shift = self.read(o[2]) & _mask(32)
        x = np.where(shift < n, self.read(o[1]) << np.minimum(shift, np.uint64(63)), np.uint64(0))
        self.set(o[0], x & _mask(n), on)

    def op_shr(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[0]
        shift = np.minimum(self.read(o[2]) & _mask(32), np.uint64(_BITS[kind] - (kind[0] == "s")))
        x = self.get(o[1], kind).astype(np.int64 if kind[0] == "s" else np.uint64)
        self.put(
            o[0],
            x >> shift.astype(x.dtype) if kind[0] == "s" else np.where(shift < _BITS[kind], x >> shift, 0),
            kind,
            on,
        )

    def op_bfe(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        at, n = self.read(o[2]).astype(np.int64), self.read(o[3]).astype(np.int64)
        x = (self.read(o[1]) & _mask(32)).astype(np.int64) >> at & (1 << n) - 1
        if mods[0] == "s32":
            x = x - ((x >> n - 1 & 1) << n)
        self.set(o[0], x.astype(np.uint64) & _mask(32), on)

    def op_neg(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.put(o[0], -self.get(o[1], mods[-1]), mods[-1], on)

    def op_abs(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.put(o[0], np.abs(self.get(o[1], mods[-1])), mods[-1], on)

    def op_mul(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        kind = mods[-1]
        if "wide" in mods:
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
        a, b, c = (self.get(x, mods[-1]).astype(np.float64) for x in o[1:4])
        self.put(o[0], a * b + c, mods[-1], on)

    def _unary(self, mods: list[str], o: list[str], on: np.ndarray, f: Callable[[Any], Any]) -> None:
        self.put(o[0], f(self.get(o[1], mods[-1]).astype(np.float64)), mods[-1], on)

    def op_rcp(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, lambda x: 1 / x)

    def op_sqrt(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.sqrt)

    def op_ex2(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.exp2)

    def op_lg2(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._unary(mods, o, on, np.log2)

    def op_div(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self._binary(mods, o, on, lambda a, b: a / b)

    # Memory

    def op_bar(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        pass

    op_prefetch = op_bar

    def _address(self, text: str) -> np.ndarray:
        m = re.match(r"\[\s*([%\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        assert m, text
        return self.read(m[1]).astype(np.int64) + int(m[2] or "0", 0)

    def _check(self, address: np.ndarray, size: int, space: np.ndarray) -> None:
        assert not ((address < 0) | (address + size > space.size)).any(), "out of bounds"

    def op_ld(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        if "param" in mods:
            m = re.search(r"_param_(\d+)", o[1])
            assert m
            self.set(o[0], np.full(self.count, self.arguments[int(m[1])] & 0xFFFFFFFFFFFFFFFF, np.uint64), on)
            return
        space = self.shared if "shared" in mods else self.memory.bytes
        size, names = _BITS[mods[-1]] // 8, _split(o[0].strip("{} "))
        address = np.where(on, self._address(o[1]), 0)
        self._check(address, size * len(names), space)
        for i, name in enumerate(names):
            x = np.zeros(self.count, np.uint64)
            for byte in range(size):
                x |= space[address + i * size + byte].astype(np.uint64) << np.uint64(8 * byte)
            self.set(name, x, on)

    def op_st(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        space = self.shared if "shared" in mods else self.memory.bytes
        size, names = _BITS[mods[-1]] // 8, _split(o[1].strip("{} "))
        address = self._address(o[0])[on]
        self._check(address, size * len(names), space)
        for i, name in enumerate(names):
            x = self.read(name)[on]
            for byte in range(size):
                space[address + i * size + byte] = (x >> np.uint64(8 * byte)).astype(np.uint8)

    def _matrices(self, mods: list[str], text: str) -> np.ndarray:
        """Byte addresses `[warps, matrices, 8 rows]` of the 8 x 8 matrices of halves that a warp's threads point to."""
        count = int(next(m for m in mods if m in ("x1", "x2", "x4"))[1])
        return self._address(text).reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)

    def op_ldmatrix(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        rows = self._matrices(mods, o[1])
        o16 = rows[..., None] + 2 * np.arange(8)
        x = self.shared[o16].astype(np.uint64) | self.shared[o16 + 1].astype(np.uint64) << np.uint64(8)
        x = x.swapaxes(-1, -2) if "trans" in mods else x
        pairs = x[..., 0::2] | x[..., 1::2] << np.uint64(16)  # [warp, matrix, row, 4]: thread 4 row + pair
        for i, name in enumerate(_split(o[0].strip("{} "))):
            self.set(name, pairs[:, i].reshape(-1), on)

    def op_stmatrix(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        rows = self._matrices(mods, o[0])
        for i, name in enumerate(_split(o[1].strip("{} "))):
            word = self.read(name).reshape(-1, 8, 4)
            x = np.stack([word & np.uint64(0xFFFF), word >> np.uint64(16) & np.uint64(0xFFFF)], -1).reshape(-1, 8, 8)
            x = x.swapaxes(-1, -2) if "trans" in mods else x
            o16 = rows[:, i, :, None] + 2 * np.arange(8)
            self.shared[o16], self.shared[o16 + 1] = x.astype(np.uint8), (x >> np.uint64(8)).astype(np.uint8)

    def op_mma(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        """m16n8k16 of halves or m16n8k32 of signed bytes, row by column; fragments as the PTX manual draws them."""
        assert on.all()
        whole = "s8" in mods
        assert ("m16n8k32" if whole else "m16n8k16") in mods, mods
        names = [_split(x.strip("{} ")) for x in o]
        per, kind, wide = (4, "s8", np.int64) if whole else (2, "f16", np.float64)

        def parts(name: str) -> np.ndarray:  # [warp, row or column, thread in group, element]
            x = self.read(name).reshape(-1, 8, 4)
            return np.stack([view(x >> np.uint64(32 // per * i), kind) for i in range(per)], -1).astype(wide)

        a0, a1, a2, a3 = (parts(n).reshape(-1, 8, 4 * per) for n in names[1])
        b0, b1 = (parts(n).reshape(-1, 8, 4 * per) for n in names[2])
        a = np.concatenate([np.concatenate([a0, a2], -1), np.concatenate([a1, a3], -1)], 1)
        d = np.einsum("wmk,wnk->wmn", a, np.concatenate([b0, b1], -1))
        out = "s32" if whole else "f32"
        for i in range(4):
            own = d[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2].reshape(-1)
            self.put(names[0][i], own + self.get(names[3][i], out).astype(wide), out, on)
