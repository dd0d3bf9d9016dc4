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

MAX_JSON_BYTES = 64 * 2**20  # far above any plan; a larger file is not one of ours


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory and rename it to `path` when the block ends without an error."""
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
        ArtifactError: if the file is missing, too large, not UTF-8 JSON (NaN, infinities and keys that appear twice are
            none), or not an object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ArtifactError(f"{path}: {what} has {size} bytes; expected at most {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes().decode(), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: {what} is missing; compile the plan again or check the directory") from None
    except OSError as error:
        raise ArtifactError(f"{path}: {what} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: {what} is not valid JSON ({error}); compile the plan again") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {what} holds {kind_name(type(value))}; expected a JSON object")
    return value


def kind_name(kind: type) -> str:
    """What JSON calls a Python type, with its article."""
    names: dict[type, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false",
                              dict: "an object", list: "a list", type(None): "null"}  # fmt: skip
    return names.get(kind, kind.__name__)


def _no_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, expected finite numbers")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


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


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file.

    Raises:
        ArtifactError: if the file is missing or is not a sound safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except FileNotFoundError:
        raise ArtifactError(f"{path}: {what} is missing; compile the plan again or check the directory") from None
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        raise ArtifactError(f"{path}: {what} is not a sound safetensors file ({error}); compile again") from None


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, independent of the file they lie in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{plain.dtype}|{tuple(plain.shape)}|".encode())
        digest.update(plain.flatten().view(dtype=_byte_type()).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _byte_type() -> Any:
    import torch

    return torch.uint8
