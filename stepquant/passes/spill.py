"""Large results of a run of the model, a file a layer: written in place while the model runs, read a layer at a time.

Each file is an ordinary safetensors file whose size is reserved before the run starts, so that a full disk stops a
compile at its beginning and not after an hour. Rows are written at their own offset: a batch that runs again after an
interruption writes the same bytes to the same place. Without a directory (cache.enabled=false) all stays in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import file_digest
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepquant.errors import ArtifactError
from stepquant.passes.protocol import Product
from stepquant.reading import check_file

GIB = 1 << 30
SPARE = 256 << 20  # bytes left free on the disk for the small files of a compile
Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}


@dataclass
class SpilledProduct(Product):
    """A product whose tensors ``<field>.<layer>`` lie in one file a layer of `directory`, read when asked for."""

    directory: Path = field(default_factory=Path)
    layers: int = 0

    def __getitem__(self, name: str) -> Tensor:
        what, _, layer = name.rpartition(".")
        path = self.directory / file_name(int(layer))
        try:
            with safe_open(str(path), framework="pt") as file:
                tensor: Tensor = file.get_tensor(what)
                return tensor
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"{path}: {name} cannot be read ({error}); delete {self.directory}, run again"
            ) from None

    @property
    def files(self) -> list[Path]:
        """The files, in order of layers."""
        return [self.directory / file_name(layer) for layer in range(self.layers)]


def file_name(layer: int) -> str:
    """Name of a layer's file."""
    return f"{layer}.safetensors"


def spilled_bytes(layers: int, fields: Fields) -> int:
    """Bytes of `layers` layers of `fields`, headers left out."""
    return layers * sum(dtype.itemsize * prod(shape) for dtype, shape in fields.values())


def check_space(directory: Path, need: int, what: str) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        ArtifactError: naming the directory, what is free and what is needed.
    """
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < need + SPARE:
        raise ArtifactError(
            f"{place} has {free / GIB:.2f} GiB free, {what} take {need / GIB:.2f} GiB and {SPARE >> 20} MiB must stay; "
            "choose another disk with cache.dir=DIR, free some space, or lower samples.per_layer"
        )


def disk_error(path: Path, error: OSError) -> ArtifactError:
    """What a failed write says: the file, the reason, and what to do."""
    return ArtifactError(
        f"{path} could not be written: {error.strerror or error}; free the disk or choose another with cache.dir=DIR, "
        "then start again: it resumes where it stopped"
    )


class LayerStore:
    """Where an observer puts rows of its layers' tensors.

    Args:
        directory: of the run; None keeps everything in memory.
        layers: how many.
        fields: dtype and shape of every tensor of a layer; the first dimension are the rows.
        what: what is stored, for messages.

    Attributes:
        fresh: nothing of an earlier, interrupted run was found.

    Raises:
        ArtifactError: the disk cannot hold it.
    """

    def __init__(self, directory: Path | None, layers: int, fields: Fields, what: str) -> None:
        self.directory, self.layers, self.fields = directory, layers, dict(fields)
        self.memory: dict[str, Tensor] = {}
        self.fresh = True
        if directory is None:
            self.memory = {
                f"{name}.{layer}": torch.zeros(shape, dtype=dtype)
                for layer in range(layers) for name, (dtype, shape) in self.fields.items()
            }  # fmt: skip
            return
        self.header, self.offsets, self.size = _layout(self.fields)
        missing = [path for path in self._paths() if not self._whole(path)]
        self.fresh = bool(missing)
        if missing:
            check_space(directory, len(missing) * self.size, what)
            directory.mkdir(parents=True, exist_ok=True)
        for path in missing:
            self._reserve(path)

    def write(self, layer: int, name: str, row: int, values: Tensor) -> None:
        """Put `values` `[n, ...]` into rows `row` .. `row + n - 1`.

        Raises:
            ArtifactError: the disk is full or gone.
        """
        dtype, shape = self.fields[name]
        values = values.detach().to(dtype).cpu().contiguous()
        if values.shape[1:] != shape[1:] or row + values.shape[0] > shape[0]:
            raise ValueError(f"{name}: rows {row} + {list(values.shape)} do not fit {list(shape)}")
        if self.directory is None:
            self.memory[f"{name}.{layer}"][row : row + values.shape[0]] = values
            return
        path = self.directory / file_name(layer)
        offset = self.offsets[name] + row * dtype.itemsize * prod(shape[1:])
        data = values.view(torch.uint8).numpy().reshape(-1).data if values.numel() else memoryview(b"")
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                while data:
                    written = os.pwrite(descriptor, data, offset)
                    data, offset = data[written:], offset + written
            finally:
                os.close(descriptor)
        except OSError as error:
            raise disk_error(path, error) from None

    def finish(self, facts: dict[str, Any]) -> Product:
        """The product of what was written."""
        if self.directory is None:
            return Product(self.memory, facts)
        return SpilledProduct({}, facts, self.directory, self.layers)

    def _paths(self) -> list[Path]:
        assert self.directory is not None
        return [self.directory / file_name(layer) for layer in range(self.layers)]

    def _whole(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                return path.stat().st_size == self.size and file.read(len(self.header)) == self.header
        except OSError:
            return False

    def _reserve(self, path: Path) -> None:
        try:
            with path.open("wb") as file:
                file.write(self.header)
                file.flush()
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self.size)
                else:
                    file.truncate(self.size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise disk_error(path, error) from None


def _layout(fields: Fields) -> tuple[bytes, dict[str, int], int]:
    """Header of a safetensors file of `fields`, absolute offsets of its tensors, and its size."""
    at, entries, offsets = 0, {}, {}
    for name, (dtype, shape) in sorted(fields.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        end = at + dtype.itemsize * prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        offsets[name], at = at, end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + at


def hash_files(files: list[Path]) -> dict[str, str]:
    """SHA-256 of every file by name, several at a time.

    Raises:
        ArtifactError: a file cannot be read.
    """

    def one(path: Path) -> str:
        check_file(path, "a layer's file")
        try:
            with path.open("rb") as file:
                return file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip((path.name for path in files), pool.map(one, files), strict=True))
