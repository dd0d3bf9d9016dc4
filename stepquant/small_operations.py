"""What makes long loops of small tensor operations fast on a CPU: one thread, and freed memory kept in the process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc takes no larger one


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed blocks of up to 32 MiB instead of giving them back to the system.

    Without it every such tensor costs fresh pages: the codec's loops run three to four times slower. Does nothing where
    the C library has no mallopt. Returns whether it took.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, 2**30))


@contextmanager
def small_operations(device: torch.device) -> Iterator[None]:
    """Run loops of operations of some ten microseconds: on a CPU with one thread (a second one costs more than it
    brings, and several times more where another process wants the core), with freed memory kept."""
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    keep_freed_memory()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
