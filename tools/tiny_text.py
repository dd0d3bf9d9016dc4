"""Training text for the built-in tiny models: the sources and documentation of installed packages.

The standard library is never read here: calibration and evaluation take their text from it
(``stepquant.models.tiny``), and a model must not have seen it.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SUFFIXES = (".py", ".md", ".rst", ".txt")
MAX_FILE_BYTES = 400_000
"""Longer files are mostly generated tables."""
MAX_PACKAGE_BYTES = {"train": 24_000_000, "validation": 3_000_000}
"""No single package may dominate either part of the text."""
HELD_OUT_MODULUS = 12
"""One package in this many, chosen by its name, is validation text as a whole."""


def is_held_out(package: str) -> bool:
    """Whether every file of the top-level ``package`` belongs to the validation text."""
    return zlib.crc32(package.lower().encode()) % HELD_OUT_MODULUS == 6


def _files(package: Path) -> Iterator[Path]:
    """Text files of one top-level package or module, in a fixed order."""
    if package.is_file():
        if package.suffix in SUFFIXES:
            yield package
        return
    for path in sorted(package.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            yield path


def _read(path: Path) -> bytes | None:
    """The file's bytes, or None where it is empty, too long or not UTF-8."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data or None


def gather(site: Path, out: Path, separator: int, max_bytes: int, max_seconds: float) -> dict[str, object]:
    """Collect text below ``site`` into ``out/train.npy`` and ``out/validation.npy``.

    Args:
        site: a site-packages folder.
        out: folder to write to, made if missing.
        separator: token id put after every document.
        max_bytes: stop once this many bytes were kept.
        max_seconds: stop after this long, whatever was read.

    Returns:
        A summary: bytes and documents of each part, and the names of the held-out packages.

    Raises:
        RuntimeError: too little text was found to train or to validate on.
    """
    began, seen, total = time.monotonic(), set[bytes](), 0
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    held_out: set[str] = set()
    packages = [p for p in sorted(site.iterdir()) if not p.name.endswith((".dist-info", ".egg-info", "__pycache__"))]
    # Held-out packages first (a time limit must not leave validation empty), then in an order that mixes sizes.
    packages.sort(key=lambda p: (not is_held_out(p.stem), zlib.crc32(p.name.encode())))
    end = np.array([separator], np.int16)
    with ThreadPoolExecutor(16) as pool:
        for package in packages:
            if total >= max_bytes or time.monotonic() - began > max_seconds:
                break
            kept, part = 0, "validation" if is_held_out(package.stem) else "train"
            for data in pool.map(_read, _files(package)):
                if data is None or kept + len(data) > MAX_PACKAGE_BYTES[part]:
                    continue
                digest = hashlib.sha1(data).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                kept += len(data)
                parts[part] += [np.frombuffer(data, np.uint8).astype(np.int16), end]
                if part == "validation":
                    held_out.add(package.stem)
            total += kept
    summary: dict[str, object] = {"held_out_packages": sorted(held_out), "packages": len(packages)}
    out.mkdir(parents=True, exist_ok=True)
    for name, chunks in parts.items():
        if sum(map(len, chunks)) < 100_000:
            raise RuntimeError(
                f"{name} text: found {sum(map(len, chunks))} bytes below {site}, expected at least 100,000; "
                "point --site at a site-packages folder with more packages installed"
            )
        tokens = np.concatenate(chunks)
        np.save(out / f"{name}.npy", tokens)
        summary[name] = {"tokens": int(tokens.size), "documents": len(chunks) // 2}
    summary["seconds"] = round(time.monotonic() - began, 1)
    (out / "text.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary
