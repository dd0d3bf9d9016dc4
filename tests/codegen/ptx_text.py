"""Reading PTX for the emulator `tests.codegen.ptx`: instructions, and register bits as values of a type and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Reg = np.ndarray
BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
         "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1}  # fmt: skip
UINT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def view(x: Reg, kind: str) -> np.ndarray:
    """The values of a register read as a PTX type."""
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if kind == "pred":
        return x != 0
    narrow = x.astype(UINT[BITS[kind]])
    if kind[0] == "f":
        return narrow.view({16: np.float16, 32: np.float32, 64: np.float64}[BITS[kind]])
    return narrow.view(narrow.dtype.name.replace("uint", "int")) if kind[0] == "s" else narrow


def bits(x: np.ndarray, kind: str) -> Reg:
    """Values as the bits of a register."""
    if kind == "bf16":  # round to nearest even
        u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
        return (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    if kind == "pred":
        return x.astype(np.uint64)
    if kind[0] == "f":
        x = np.asarray(x).astype({16: np.float16, 32: np.float32, 64: np.float64}[BITS[kind]])
        return x.view(UINT[BITS[kind]]).astype(np.uint64)
    return np.asarray(x).astype(np.int64 if kind[0] == "s" else np.uint64).astype(np.uint64) & mask(BITS[kind])


def mask(n: int) -> np.uint64:
    return np.uint64((1 << n) - 1)


def split(text: str) -> list[str]:
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
    tables = {m[1]: m[2] for m in re.finditer(r"(\$?\w+):\s*\.branchtargets\s([^;]*);", ptx)}
    ptx = re.sub(r"\$?\w+:\s*\.branchtargets\s[^;]*;", "", ptx)
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
        if re.match(r"\w+:$", text):
            continue
        if text and not text.startswith((".", "}")):
            m = re.match(r"(?:@(!?[%\w]+) )?([a-z][\w.:]*)\s*(.*)$", text)
            assert m, f"cannot read {text!r}"
            operands = split(m[3]) if m[3] else []
            if m[2].startswith("brx"):
                operands = [operands[0], tables[operands[1]]]
            code.append((m[1] or "", m[2], operands))
    return params, code, labels
