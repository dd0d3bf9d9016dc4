"""Fingerprint of a checkpoint: tells a fine-tune from its base model without reading the whole of it.

For every tensor, in order of name whatever the sharding: its name, dtype, shape, and the bytes of a few 4 KiB windows
(the first, the last, and pseudo-random ones whose places follow from the name), read by offset from the safetensors
files. A fine-tune moves nearly every value of the tensors it trains, so a window of 2,048 BF16 values of each sees it;
an edit of a handful of values between the windows does not show (``windows=None`` reads everything). The cost is
16 KiB a tensor: 54 GB in about 1,000 tensors is 16 MiB read, 20,000 expert tensors 320 MiB. The configuration is
covered too, except for keys that say who wrote it, not what it is.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepquant.errors import ModelError
from stepquant.models.checkpoint import read_config, resolve_checkpoint

WINDOW = 4096
RANDOM_WINDOWS = 2
_VOLATILE = {"transformers_version", "_name_or_path", "use_cache", "architectures", "auto_map"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: where its bytes lie. `start` and `end` are absolute offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


def safetensors_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files: those its index names, or all of them in name order.

    Raises:
        ModelError: none there, or the index names a file that is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a shard index: {error!r}; download the checkpoint again") from None
        files = [directory / name for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ModelError(
                f"{directory} lacks {len(missing)} of its {len(files)} shards, first {missing[0]}; download them"
            )
        return files
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no .safetensors file; convert the checkpoint with save_pretrained first")
    return files


def read_header(file: Path) -> list[TensorEntry]:
    """Entries of one safetensors file, in file order; reads the header only.

    Raises:
        ModelError: truncated or garbled file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, 1 << 30):
                raise ValueError(f"header length {length} in a file of {size} bytes")
            header = json.loads(handle.read(length))
        base = 8 + length
        entries = [
            TensorEntry(name, item["dtype"], tuple(item["shape"]), file, *(base + off for off in item["data_offsets"]))
            for name, item in header.items()
            if name != "__metadata__"
        ]
        if any(not base <= entry.start <= entry.end <= size for entry in entries):
            raise ValueError("tensor offsets beyond the end of the file")
        return entries
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a complete safetensors file: {error}; download it again") from None


def checkpoint_tensors(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint by name, sorted; reads headers only."""
    entries = [entry for file in safetensors_files(directory) for entry in read_header(file)]
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def _windows(entry: TensorEntry, count: int | None) -> Iterator[tuple[int, int]]:
    size = entry.end - entry.start
    if count is None or size <= WINDOW * (count + 2):
        for offset in range(0, size, 1 << 24):
            yield entry.start + offset, min(1 << 24, size - offset)
        return
    generator = random.Random(f"{entry.name}:{size}")
    inner = sorted(generator.randrange(WINDOW, size - 2 * WINDOW + 1) for _ in range(count))
    for offset in (0, *inner, size - WINDOW):
        yield entry.start + offset, WINDOW


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items() if key not in _VOLATILE}
    return value


def fingerprint(path: str | Path, *, weights: str = "checkpoint", windows: int | None = RANDOM_WINDOWS) -> str:
    """Fingerprint of a checkpoint's configuration and tensors.

    Args:
        path: checkpoint directory or alias (see `resolve_checkpoint`); config.json alone is enough for random weights.
        weights: ``checkpoint``, or ``random:SEED``, where no file is read but the configuration.
        windows: pseudo-random 4 KiB windows a tensor beside its first and last; None hashes every byte.

    Returns:
        ``sha256:`` and 64 hexadecimal digits; the same for any sharding of the same tensors.

    Raises:
        ModelError: no readable config.json or safetensors files.
    """
    directory = resolve_checkpoint(path)
    digest = hashlib.sha256(json.dumps(_canonical(read_config(directory)), sort_keys=True).encode())
    if weights != "checkpoint":
        digest.update(weights.encode())
        return f"sha256:{digest.hexdigest()}"
    per_tensor: dict[str, bytes] = {}
    for file in safetensors_files(directory):
        with file.open("rb", buffering=0) as handle:
            for entry in read_header(file):
                own = hashlib.sha256(f"{entry.name} {entry.dtype} {entry.shape}".encode())
                for start, length in _windows(entry, windows):
                    handle.seek(start)
                    own.update(handle.read(length))
                per_tensor[entry.name] = own.digest()
    for name in sorted(per_tensor):
        digest.update(per_tensor[name])
    return f"sha256:{digest.hexdigest()}"
