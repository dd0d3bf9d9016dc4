"""Runs the PTX of a compiled kernel on a CPU: what Triton's compiler made of a kernel, inline assembly included.

All threads of a program go in step, and all memory remembers which warp touched it last: one warp reading what another
wrote, or writing what another read, with no barrier in between is an error. A register is a uint64 array with an entry
for every thread; memory is one array of bytes. Only what Triton emits for this package's kernels is understood;
anything else is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.codegen.ptx_registers import Registers
from tests.codegen.ptx_text import BITS, Reg, parse, split, view

__all__ = ["Memory", "Program", "parse"]


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


class Program(Registers):
    """One program of a kernel.

    Args:
        module: what `parse` returned.
        warps: its warps; arguments: bits of its parameters in order; program_id: its place in the grid, of
            `grid` programs.
    """

    def __init__(
        self, module: Any, warps: int, memory: Memory, arguments: Sequence[int], program_id: Sequence[int],
        grid: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.params, self.code, self.labels = module
        self.count, self.memory, self.shared = 32 * warps, memory, np.zeros(1 << 17, np.uint8)
        self.arguments = [*arguments, *[0] * (len(self.params) - len(arguments))]
        thread = np.arange(self.count, dtype=np.uint64)
        self.registers: dict[str, Reg] = {"%tid.x": thread, "%laneid": thread % 32, "global_smem": thread * 0}
        for axis, i, n in zip("xyz", [*program_id, 0, 0], [*grid, 1, 1, 1], strict=False):
            self.registers[f"%ctaid.{axis}"] = thread * 0 + np.uint64(i)
            self.registers[f"%nctaid.{axis}"] = thread * 0 + np.uint64(n)
        self.executed, self.epoch, self.warp = 0, 1, np.arange(self.count) // 32
        # Who wrote and who read every two bytes last, as epoch << 8 | warp; untouched zeros take no memory.
        sizes = (memory.bytes.size // 2, self.shared.size // 2)
        self.touched = [[np.zeros(size, np.int32) for _ in range(2)] for size in sizes]

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
                    targets = [self.labels[x] for x in split(operands[1])]
                    places[on] = np.array(targets)[self.read(operands[0])[on].astype(np.int64)]
                elif name == "ret":
                    places[on] = len(self.code)
                else:
                    getattr(self, f"op_{name}")(op.split(".")[1:], operands, on)

    # Memory

    def op_bar(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        self.epoch += "warp" not in mods

    def op_prefetch(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        pass

    def _touch(self, space: np.ndarray, address: np.ndarray, size: int, warp: np.ndarray, write: bool) -> None:
        """Note who touches memory; fails where another warp did since the last barrier, and one of them writes."""
        if self.count == 32:
            return
        wrote, read = self.touched[space is self.shared]
        at = (address[:, None] + np.arange(0, size, 2)) >> 1
        own = (self.epoch << 8 | warp)[:, None]
        for last in (wrote, read) if write else (wrote,):
            found = last[at]
            assert not ((found >> 8 == self.epoch) & (found != own)).any(), "a barrier is missing"
        if write:
            wrote[at] = own
        else:  # what several warps read is nobody's: 255
            found = read[at]
            read[at] = np.where((found >> 8 == self.epoch) & (found != own), self.epoch << 8 | 255, own)
            read[at[read[at] != own]] = self.epoch << 8 | 255

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
        size, names = BITS[mods[-1]] // 8, split(o[0].strip("{} "))
        address = np.where(on, self._address(o[1]), 0)
        self._check(address, size * len(names), space)
        self._touch(space, address[on], size * len(names), self.warp[on], False)
        found = space[address[:, None] + np.arange(size * len(names))].view(f"u{size}")
        for i, name in enumerate(names):
            x = found[:, i]
            if mods[-1] == "s8":  # a register is wider: its sign goes all the way up
                x = x.view(np.int8).astype(np.int32).view(np.uint32)
            self.set(name, x.astype(np.uint64), on)

    def op_st(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        space = self.shared if "shared" in mods else self.memory.bytes
        size, names = BITS[mods[-1]] // 8, split(o[1].strip("{} "))
        address = self._address(o[0])[on]
        self._check(address, size * len(names), space)
        self._touch(space, address, size * len(names), self.warp[on], True)
        values = np.stack([self.read(name)[on] for name in names], -1).astype(f"u{size}")
        space[address[:, None] + np.arange(size * len(names))] = values.view(np.uint8)

    def op_atom(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        """Adding to a word of global memory, by one thread at most."""
        assert "add" in mods, mods
        assert mods[-1] == "u32", mods
        assert on.sum() <= 1
        address = self._address(o[1])[on]
        self._check(address, 4, self.memory.bytes)
        bytes_of = address[:, None] + np.arange(4)
        before = self.memory.bytes[bytes_of].view("u4")
        self.memory.bytes[bytes_of] = (before + self.read(o[2])[on].astype("u4")[:, None]).view(np.uint8)
        if o[0]:
            self.set(o[0], np.resize(before, self.count).astype(np.uint64), on)

    def op_red(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        """The same, with nobody asking what was there."""
        self.op_atom(mods, ["", *o], on)

    def _matrices(self, mods: list[str], text: str) -> np.ndarray:
        """Byte addresses `[warps, matrices, 8 rows]` of the 8 x 8 matrices of halves that a warp's threads point to."""
        count = int(next(m for m in mods if m in ("x1", "x2", "x4"))[1])
        return self._address(text).reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)

    def op_ldmatrix(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        rows = self._matrices(mods, o[1])
        o16 = rows[..., None] + 2 * np.arange(8)
        self._touch(self.shared, rows.reshape(-1), 16, np.repeat(np.arange(len(rows)), rows[0].size), False)
        x = self.shared[o16].astype(np.uint64) | self.shared[o16 + 1].astype(np.uint64) << np.uint64(8)
        x = x.swapaxes(-1, -2) if "trans" in mods else x
        pairs = x[..., 0::2] | x[..., 1::2] << np.uint64(16)  # [warp, matrix, row, 4]: thread 4 row + pair
        for i, name in enumerate(split(o[0].strip("{} "))):
            self.set(name, pairs[:, i].reshape(-1), on)

    def op_stmatrix(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        rows = self._matrices(mods, o[0])
        for i, name in enumerate(split(o[1].strip("{} "))):
            word = self.read(name).reshape(-1, 8, 4)
            x = np.stack([word & np.uint64(0xFFFF), word >> np.uint64(16) & np.uint64(0xFFFF)], -1).reshape(-1, 8, 8)
            x = x.swapaxes(-1, -2) if "trans" in mods else x
            o16 = rows[:, i, :, None] + 2 * np.arange(8)
            self._touch(self.shared, rows[:, i].reshape(-1), 16, np.repeat(np.arange(len(rows)), 8), True)
            self.shared[o16], self.shared[o16 + 1] = x.astype(np.uint8), (x >> np.uint64(8)).astype(np.uint8)

    def op_mma(self, mods: list[str], o: list[str], on: np.ndarray) -> None:
        """m16n8k16 of halves or m16n8k32 of signed bytes, row by column; fragments as the PTX manual draws them."""
        assert on.all()
        whole = "s8" in mods
        assert ("m16n8k32" if whole else "m16n8k16") in mods, mods
        names = [split(x.strip("{} ")) for x in o]
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
