"""The pipeline's cache: one directory a product, named by a hash of everything it was made from.

    <cache.dir>/<pass>/<key>/tensors.safetensors, facts.json          or, for what was spilled, one file a layer

facts.json is written last, so that its presence marks a whole entry; a damaged entry is made again, never trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from stepquant.errors import ArtifactError
from stepquant.files import (
    hash_json,
    hash_tensors,
    read_hashed,
    read_json,
    read_tensors,
    write_hashed_tensors,
    write_json,
    write_tensors,
)
from stepquant.passes.protocol import Product
from stepquant.passes.spill import SpilledProduct, hash_files
from stepquant.reading import MAX_TABLE_BYTES, check_file

FACTS, TENSORS = "facts.json", "tensors.safetensors"


class Cache:
    """Products on disk under `directory`; with `enabled=False` nothing is read or written but partial results."""

    def __init__(self, directory: Path, enabled: bool = True) -> None:
        self.directory, self.enabled = directory, enabled

    def path(self, name: str, key: str) -> Path:
        """Directory of one entry."""
        return self.directory / name / key[:32]

    def has(self, name: str, key: str) -> bool:
        """Whether a whole entry exists whose facts are sound (its tensors are checked when they are read)."""
        return self._facts(name, key) is not None

    def _facts(self, name: str, key: str) -> dict[str, Any] | None:
        """The entry's facts, or None if there is none or they are damaged or of an older kind (which deletes it)."""
        path = self.path(name, key)
        if not self.enabled or not (path / FACTS).is_file():
            return None
        try:
            facts = read_json(path / FACTS, f"cache entry {name}")
            if _identity(facts) != facts.get("identity") or facts.get("key") != key:
                raise ArtifactError(f"{path / FACTS}: it does not match its key or hash")
        except ArtifactError:
            shutil.rmtree(path, ignore_errors=True)
            return None
        return facts

    def load(self, name: str, key: str) -> Product | None:
        """The stored product, or None if there is none or it is damaged (which deletes it)."""
        facts = self._facts(name, key)
        if facts is None:
            return None
        path = self.path(name, key)
        try:
            if "files" in facts:
                return _load_spilled(path, facts)
            tensors = read_tensors(path / TENSORS, f"cache entry {name}", facts["bytes"])
            if facts["sha256"] != hash_tensors(tensors):
                raise ArtifactError(f"{path}: cache entry {name} does not match its hash")
            return Product(tensors, facts["facts"])
        except (ArtifactError, KeyError):
            shutil.rmtree(path, ignore_errors=True)
            return None

    def store(self, name: str, key: str, product: Product) -> None:
        """Write a product; a whole entry appears or none."""
        if not self.enabled:
            return
        path = self.path(name, key)
        if isinstance(product, SpilledProduct):
            _adopt(path, key, product)
            return
        write_tensors(path / TENSORS, product.tensors)
        size = (path / TENSORS).stat().st_size
        _write_facts(path, {"key": key, "sha256": hash_tensors(product.tensors), "bytes": size, "facts": product.facts})

    def working(self, key: str) -> Path | None:
        """Directory of a run in progress, for what is too large to be kept in memory; None where nothing is written."""
        return self.path("partial", key) if self.enabled else None

    @contextmanager
    def locked(self, key: str, what: str, say: Callable[[str], None]) -> Iterator[None]:
        """Let one process at a time make what `key` names: runs in progress and spilled products are shared files.

        Args:
            what: is made, for the message.
            say: told once when another process has to be waited for.

        Raises:
            ArtifactError: the cache cannot be written to.
        """
        if not self.enabled:
            yield
            return
        try:
            (self.directory / "locks").mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.directory / "locks" / f"{key[:32]}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                say(f"waiting for another compile that makes the same {what} in {self.directory}")
                lock.acquire()
        except OSError as error:
            raise ArtifactError(
                f"{self.directory} cannot be locked: {error.strerror or error}; choose another with cache.dir=DIR, or "
                "cache.enabled=false"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def load_partial(self, key: str) -> dict[str, Tensor] | None:
        """Accumulators of an interrupted run of the model, or None."""
        path = self.path("partial", key) / TENSORS
        if not self.enabled or not path.is_file():
            return None
        try:
            return read_hashed(path, "partial calibration", MAX_TABLE_BYTES)[0]
        except ArtifactError:
            path.unlink(missing_ok=True)
            return None

    def store_partial(self, key: str, state: dict[str, Tensor]) -> None:
        """Keep accumulators of a run in progress."""
        if self.enabled:
            write_hashed_tensors(self.path("partial", key) / TENSORS, state)

    def drop_stale(self, days: float = 7.0) -> list[str]:
        """Delete what interrupted runs left that nobody has taken up for `days`: state samples of a large model are
        10 GiB and more. Returns the names of the deleted directories."""
        if not self.enabled or not (self.directory / "partial").is_dir():
            return []
        oldest = time.time() - 86400 * days
        stale = []
        for path in (self.directory / "partial").iterdir():
            with suppress(OSError):
                newest = max(p.stat().st_mtime for p in (path, *path.rglob("*")))
                if newest < oldest:
                    shutil.rmtree(path, ignore_errors=True)
                    stale.append(path.name)
        return stale

    def drop_partial(self, key: str) -> None:
        """Forget the accumulators of a run that is done."""
        shutil.rmtree(self.path("partial", key), ignore_errors=True)


def _adopt(path: Path, key: str, product: SpilledProduct) -> None:
    """Move a product's files into its entry; the product is read from there from now on."""
    hashes = hash_files(product.files)
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(parents=True)
        for file in product.files:
            os.replace(file, path / file.name)
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be written to: {error.strerror}; check cache.dir, or free the disk"
        ) from None
    product.directory = path
    size = max(file.stat().st_size for file in product.files)
    _write_facts(path, {"key": key, "files": hashes, "bytes": size, "facts": product.facts})


def _write_facts(path: Path, facts: dict[str, Any]) -> None:
    write_json(path / FACTS, {**facts, "identity": _identity(facts)})


def _identity(facts: dict[str, Any]) -> str:
    """Hash of everything else in facts.json, as it is read back (keys are strings, tuples lists)."""
    return hash_json(json.loads(json.dumps({k: v for k, v in facts.items() if k != "identity"})))


def _load_spilled(path: Path, facts: dict[str, Any]) -> SpilledProduct:
    """A spilled product whose files are what they were.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    found = SpilledProduct({}, facts["facts"], path, len(facts["files"]))
    for file in found.files:  # sizes first: a file that was swapped may take hours to hash
        check_file(file, "a layer's file", facts["bytes"])
    if hash_files(found.files) != facts["files"]:
        raise ArtifactError(f"{path}: the cache entry does not match its hashes")
    return found
