"""Replace a whole directory at once: build it beside the old one, then exchange the two names.

A reader, and whoever looks after a kill at any moment, finds the old directory or the new one, whole. The exchange is
Linux's renameat2(RENAME_EXCHANGE); where a file system has none (NFS, some FUSE ones) two renames take its place, and a
kill between them leaves the old directory under a name from which `sweep` brings it back.

While a directory is built its inode is locked (flock), which ends with the process: `sweep` removes what is not locked.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import TypeVar

from stepquant.errors import ArtifactError, StepQuantError

T = TypeVar("T")
BUILDING, REPLACED = ".building", ".replaced"
ATTEMPTS = 5  # reads of a directory that is replaced again and again
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def replacing_directory(directory: Path, own: Collection[str]) -> Iterator[Path]:
    """Yield an empty sibling directory that takes `directory`'s place when the block ends without an error.

    Args:
        own: names that belong to what is replaced, and go with it. Whatever else lies in the old directory (other
            artifacts of a sweep, a user's notes) is moved into the new one.

    Raises:
        ArtifactError: the place cannot be written to.
    """
    directory = Path(os.path.realpath(directory))  # a link keeps pointing where it did
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        sweep(directory, own)
        place, lock = _create(directory)
    except OSError as error:
        raise _cannot(directory, error) from None
    try:
        try:
            yield place
            os.chmod(place, S_IMODE(directory.stat().st_mode) if directory.is_dir() else 0o755)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        try:
            _swap(place, directory)
        except OSError as error:
            shutil.rmtree(place, ignore_errors=True)
            sweep(directory, own)  # brings back what may have been moved away
            raise _cannot(directory, error) from None
        _retire(place, directory, own)
    finally:
        os.close(lock)


def read_whole(directory: Path, read: Callable[[], T]) -> T:
    """What `read` finds in several files of a directory; read again if the directory was replaced meanwhile."""
    for _ in range(ATTEMPTS):
        before = _identity(directory)
        try:
            found = read()
        except StepQuantError:
            if _identity(directory) == before:
                raise
        else:
            if _identity(directory) == before:
                return found
    return read()


def _identity(directory: Path) -> tuple[int, ...] | None:
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns  # a number of a deleted directory may come again


def sweep(directory: Path, own: Collection[str]) -> None:
    """Remove what killed processes left beside `directory`, and finish what they had begun."""
    left = [p for p in directory.parent.glob(f"{_literal(f'.{directory.name}.')}*") if is_working_name(p.name)]
    for place in left:
        if place.name.endswith(REPLACED) and not directory.exists():
            with suppress(OSError):  # another process was faster
                place.rename(directory)
    for place in left:
        _retire_unlocked(place, directory, own)


def _retire_unlocked(place: Path, directory: Path, own: Collection[str]) -> None:
    with suppress(OSError):  # it is gone, or its process lives
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _retire(place, directory, own)
        finally:
            os.close(descriptor)


def _create(directory: Path) -> tuple[Path, int]:
    """A new locked directory beside `directory`, and the descriptor that holds its lock."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=BUILDING, dir=directory.parent))
        descriptor = -1
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.stat().st_ino == os.fstat(descriptor).st_ino:
                return place, descriptor
        except (FileNotFoundError, BlockingIOError):
            pass  # a sweep of another process came between creating and locking
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EBADF, *_NO_EXCHANGE):
                raise
            return place, descriptor  # no locks here: a sweep cannot tell either, and leaves it alone
        if descriptor >= 0:
            os.close(descriptor)


def _swap(place: Path, directory: Path) -> None:
    """Give `place` the name `directory`; what had it is at `place` afterwards."""
    while True:
        try:
            os.rename(place, directory)  # no directory there yet, or an empty one
            return
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        try:
            _exchange(place, directory)
            return
        except FileNotFoundError:
            continue  # another process has just moved it away
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
        with suppress(FileNotFoundError):
            os.rename(directory, place.with_suffix(REPLACED))


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names in one step."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def _retire(place: Path, directory: Path, own: Collection[str]) -> None:
    """Delete what was replaced, after moving what is not its own into the new directory."""
    replaced = [place.with_suffix(REPLACED)] if directory.is_dir() else []  # else it is all there is
    for old in (place, *replaced):
        for entry in sorted(old.iterdir()) if old.is_dir() else ():
            if entry.name in own or _is_temporary(entry.name, own):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
            elif directory.is_dir() and not os.path.lexists(directory / entry.name):
                with suppress(OSError):
                    entry.rename(directory / entry.name)
        with suppress(OSError):  # what has the same name in both stays where it is
            old.rmdir()


def is_working_name(name: str) -> bool:
    """Whether a name is that of a directory that is being built, or that a killed process left."""
    return name.startswith(".") and name.endswith((BUILDING, REPLACED))


def _is_temporary(name: str, own: Collection[str]) -> bool:
    """Whether a name is one of `stepquant.files.replacing`'s, left by a killed process."""
    return name.endswith(".tmp") and any(name.startswith(f".{one}.") for one in own)


def _cannot(directory: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{directory} cannot be replaced: {error.strerror or error}; check output=DIR, or free the disk"
    )


def _literal(text: str) -> str:
    """A file name in glob's grammar."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
