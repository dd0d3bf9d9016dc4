"""Atomic writing and bounded, strict reading of the files of an artifact or of the cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from stepquant.errors import ArtifactError
from stepquant.reading import MAX_JSON_BYTES, check_file, parse_json, read_value

UNSOUND = (SafetensorError, OSError, ValueError, RuntimeError, OverflowError, MemoryError, TypeError, AttributeError)
"""What reading a safetensors file that is none, or whose header lies, raises."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory and rename it to `path` when the block ends without an error.

    Raises:
        ArtifactError: if it cannot be written, or `path` is a device or a pipe, which it would replace.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ArtifactError(f"{path} is no ordinary file and is not replaced; give a path for one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise ArtifactError(
            f"{path.parent} cannot be written to: {error.strerror}; check output and cache.dir, or free the disk"
        ) from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ArtifactError(
            f"{path} could not be written: {error.strerror or error}; check output and cache.dir, or free the disk"
        ) from None
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    write_together({path: data})


def write_together(content: Mapping[Path, bytes]) -> None:
    """Write several files: all of them whole under temporary names first, then renamed one after the other.

    An error while writing leaves every old file as it was. The last file of `content` is renamed last, so that one that
    carries the others' hashes belongs there.
    """
    with ExitStack() as stack:
        for path, data in reversed(list(content.items())):  # the stack unwinds from its end
            stack.enter_context(replacing(path)).write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode())


def dump_json(value: Any) -> str:
    """The one JSON form of this project: sorted keys, two spaces, NaN refused, a newline at the end."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically in `dump_json`'s form."""
    write_text(path, dump_json(value))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArtifactError: if the file is missing, too large, not strict JSON (`stepquant.reading`), or not an object.
    """
    value = read_value(path, what, MAX_JSON_BYTES)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {what} holds {kind_name(type(value))}; expected a JSON object")
    return value


def kind_name(kind: type) -> str:
    """What JSON calls a Python type, with its article."""
    names: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false",
                              dict: "an object", list: "a list", type(None): "null"}  # fmt: skip
    return names.get(kind, kind.__name__)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically; see `dump_tensors`."""
    write_bytes(path, dump_tensors(tensors, metadata))


def dump_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file's bytes; tensors are made contiguous, moved to the CPU, and may share memory."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    seen: set[int] = set()
    for name, tensor in plain.items():
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor  # safetensors refuses shared storage
        seen.add(storage)
    return save(plain, metadata=dict(metadata) if metadata else None)


def read_tensors(path: Path, what: str, most: int | None = None) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file.

    Args:
        most: bytes that the file may have.

    Raises:
        ArtifactError: if the file is missing, too large, or not a sound safetensors file.
    """
    check_file(path, what, most)
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except UNSOUND as error:
        found = str(error)[:200]
        raise ArtifactError(f"{path}: {what} is not a sound safetensors file ({found}); compile again") from None


def write_hashed_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
    """Write a safetensors file that carries the hash of its tensors and `facts` (JSON), atomically."""
    text = json.dumps(facts, sort_keys=True)
    write_tensors(path, tensors, {"facts": text, "sha256": hash_json([text, hash_tensors(tensors)])})


def read_hashed(path: Path, what: str, most: int | None = None) -> tuple[dict[str, Tensor], Any]:
    """What `write_hashed_tensors` wrote: tensors and facts.

    Raises:
        ArtifactError: if the file is missing, unsound, or not what its hash says.
    """
    check_file(path, what, most)
    try:
        with safe_open(str(path), framework="pt") as file:
            head = file.metadata() or {}
        if not {"facts", "sha256"} <= set(head):
            raise ArtifactError(f"{path}: {what} carries no hash")
        tensors = read_tensors(path, what)
        if head["sha256"] != hash_json([head["facts"], hash_tensors(tensors)]):
            raise ArtifactError(f"{path}: {what} does not match its hash")
        return tensors, parse_json(head["facts"])
    except (KeyError, RecursionError, *UNSOUND) as error:
        raise ArtifactError(f"{path}: {what} has no sound header ({str(error)[:200]})") from None


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, independent of the file they lie in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{plain.dtype}|{tuple(plain.shape)}|".encode())
        digest.update(plain.flatten().view(dtype=_byte_type()).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _byte_type() -> Any:
    import torch

    return torch.uint8
