"""Keep freed memory in the process: on a CPU the decode loops allocate and free half-megabyte tensors at every step."""

from __future__ import annotations

import ctypes
import sys

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
