"""Mutations of files: bytes, JSON values, safetensors headers and tensors, and what may stand in a file's place."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from random import Random
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 255, 65536, -(2**31), 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-320,
    1e308, "", "0", "x" * 3000, "../../etc/passwd", "/etc/passwd", "a\u0000b", "\ud800", "line\nbreak",
    "${oc.env:HOME}", "[bold]", "[/]", "<script>", [], {}, [[]], [None], [0], {"a": 1}, ["a", "b"],
    "0" * 64, "f" * 64,
)  # fmt: skip
RAW = (b"NaN", b"-Infinity", b"1e999", b"-1e999", b"0x10", b"01", b"1_000", b"'a'", b"9" * 5000, b"[" * 3000,
       b"[" * 900 + b"]" * 900, b'{"a":' * 300 + b"1" + b"}" * 300)  # fmt: skip
TREES = (b"", b"\x00", b"null", b"[]", b"{}", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b'"text"', b"1", b"[" * 100_000)


def mutate_bytes(data: bytes, random: Random) -> tuple[bytes, str]:
    """One to four changes of a file that know nothing of its format."""
    if random.random() < 0.03:
        return random.choice(TREES), "other content"
    names = []
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        size = min(end - at, 64)
        kind = random.choice(("flip", "flip", "byte", "cut", "insert", "delete", "repeat", "zeros", "append", "digits"))
        names.append(kind)
        one = bytearray(data)
        if kind in ("flip", "byte") and one:
            place = min(at, len(one) - 1)
            one[place] = one[place] ^ 1 << random.randrange(8) if kind == "flip" else random.randrange(256)
        elif kind == "cut":
            del one[random.choice((at, end, min(at, 16))) :]
        elif kind == "insert":
            one[at:at] = random.choice((random.randbytes(8), random.choice(RAW), b"{", b"}", b'"', b",", b"\n"))
        elif kind == "delete":
            del one[at : at + size]
        elif kind == "repeat":
            one[at:at] = one[at : at + size]
        elif kind == "zeros":
            one[at : at + size] = bytes(size)
        elif kind == "append":
            one += random.randbytes(random.choice((1, 8, 4096)))
        else:
            digits = [i for i, c in enumerate(one[:4096]) if 48 <= c < 58]
            for i in random.sample(digits, min(len(digits), 3)):
                one[i] = random.choice(b"0123456789-.e")
        data = bytes(one)
    return data, "bytes " + " ".join(names)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value[:12]) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*at, key))
    return found


def mutate_json(value: Any, random: Random) -> tuple[Any, str, tuple[Any, ...]]:
    """A copy with one place changed; what was done, and where (empty: the oracle cannot ask for the place's name)."""
    value = copy.deepcopy(value)
    places = paths(value)
    if not places:
        return random.choice(HOSTILE), "whole", ()
    weights = [1 / len(p) ** 2 for p in places]
    place = random.choices(places, weights)[0]
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    key = place[-1]
    kind = random.choice(("set", "set", "set", "set", "near", "drop", "add", "swap", "grow"))
    if kind == "set":
        parent[key] = copy.deepcopy(random.choice(HOSTILE))
    elif kind == "near" and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = random.choice((parent[key] + 1, parent[key] - 1, -parent[key], parent[key] * 2, parent[key] / 2))
    elif kind == "drop":
        del parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent[random.choice(("extra", "", "__class__", "a\u0000", "x" * 3000))] = random.choice(HOSTILE)
        place = ()
    elif kind == "swap":
        other = value
        for step in random.choice(places):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    elif kind == "grow" and isinstance(parent[key], list) and parent[key]:
        parent[key] = parent[key] * random.choice((2, 3, 1000))
    elif kind == "grow" and isinstance(parent[key], list):
        parent[key] = [0] * 5000
    else:
        parent[key] = deep(random.choice((50, 300, 900)))
    return value, f"json {kind} {'.'.join(map(str, place))[:80]}", place


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def dump(value: Any, random: Random) -> tuple[bytes, str]:
    """JSON text, now and then with something that only text can hold."""
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    kind = random.choice(("", "", "", "", "", "twice", "raw"))
    colons = [i for i in range(len(text) - 1) if text[i : i + 2] == b": "]
    if kind == "twice" and isinstance(value, dict) and value:
        key = random.choice(sorted(value, key=str))
        return b'{"' + str(key).encode("utf-8", "replace")[:80] + b'": 1, ' + text[1:], " twice"
    if kind == "raw" and colons:
        at = random.choice(colons) + 2
        end = next((i for i in range(at, len(text)) if text[i : i + 1] in b",}]"), len(text))
        return text[:at] + random.choice(RAW) + text[end:], " raw"
    return text, ""


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_safetensors(header: bytes, body: bytes, size: int | None = None) -> bytes:
    return (len(header) if size is None else size).to_bytes(8, "little") + header + body


def mutate_header(data: bytes, random: Random) -> tuple[bytes, str]:
    """A safetensors file whose header lies."""
    header, body = split_safetensors(data)
    names = [name for name in header if name != "__metadata__"]
    name = random.choice(names)
    entry = header[name]
    kind = random.choice(("length", "offsets", "shape", "dtype", "json", "json", "overlap", "rename", "extra",
                          "metadata", "twice", "padding", "many"))  # fmt: skip
    size = None
    start, end = entry["data_offsets"]
    if kind == "length":
        size = random.choice((0, 1, 7, len(body), 2**31, 2**62, 2**64 - 1, 100_000_001, random.randrange(2**32)))
    elif kind == "offsets":
        entry["data_offsets"] = random.choice((
            [end, start], [start, start], [0, 2**64 - 1], [2**64 - 8, 2**64 - 1], [-8, end], [start, 2**63], [start],
            [start, end + 1], [start + 1, end], [start + 0.5, end], "0", None, [start, 10**30], [start, len(body) + 8],
        ))  # fmt: skip
    elif kind == "shape":
        entry["shape"] = random.choice((
            [2**32, 2**32], [2**63, 2], [2**64], [-1], [0], [], [1] * 5000, entry["shape"] * 2, [0, 2**62], None, "3",
            entry["shape"][::-1], [1, *entry["shape"]], [2.5], entry["shape"][:-1],
        ))  # fmt: skip
    elif kind == "dtype":
        entry["dtype"] = random.choice(("F32", "F16", "BF16", "F64", "I8", "U8", "I16", "I32", "I64", "BOOL", "U16",
                                        "U64", "F8_E4M3", "F8_E5M2", "F4", "C64", "O", "", None, 5, "f32"))  # fmt: skip
    elif kind == "json":
        header, _, _ = mutate_json(header, random)
    elif kind == "overlap" and len(names) > 1:
        other = random.choice([n for n in names if n != name])
        header[other] = dict(entry)
    elif kind == "rename":
        header[random.choice(("../x", "", "a" * 5000, "\u0000", "w/../w", "bits ", "__metadata__x"))] = header.pop(name)
    elif kind == "extra":
        header["extra"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(body), len(body)]}
    elif kind == "metadata":
        header["__metadata__"] = random.choice(
            (
                {"a": 1},
                {"a": None},
                [],
                "x",
                {"stepquant": "{"},
                {"stepquant": "[]"},
                {"stepquant": "[" * 3000},
                {"facts": "{}"},
                {"facts": "[1]"},
                {},
                None,
            )
        )
    elif kind == "many":
        header |= {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(300)}
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if kind == "twice":
        text = b'{"' + name.encode() + b'": ' + json.dumps(entry).encode() + b", " + text[1:]
    if kind == "padding":
        text = random.choice((b" " * 64 + text, text + b" " * 1000, text + b"\x00" * 8, text + b"}", b"\n" + text))
    return join_safetensors(text, body, size), f"header {kind}"


def stand_in(path: Path, outside: Path, random: Random) -> str:
    """Something else under a file's name. The real content is at `outside`, a file of another directory."""
    kind = random.choice(
        ("gone", "directory", "fifo", "dangling", "loop", "link", "zero", "sparse", "socket", "random")
    )
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to(path.parent / "nothing")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "link":
        path.symlink_to(outside)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "random":
        path.symlink_to("/dev/urandom")
    elif kind == "sparse":
        size = random.choice((2**36, 2**38))
        header = b'{"bits": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (size, size)
        with path.open("wb") as file:
            file.write(join_safetensors(header, b"") if path.suffix == ".safetensors" else b"{")
            file.truncate(file.tell() + size)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    return f"stand-in {kind}"
