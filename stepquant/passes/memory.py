"""Memory of passes: peaks measured on host and GPUs."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

GIB = 1 << 30


@dataclass
class PeakMemory:
    """Peaks between `start` and `read`, in bytes.

    Attributes:
        host: largest resident set of the process, pages of mapped files included; where the system cannot reset its
            high-water mark, of the process so far.
        gpus: most that torch had allocated on each GPU; empty where none was used.
    """

    host: int = 0
    gpus: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Reset the marks."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)

    def read(self) -> PeakMemory:
        """Take in the marks since they were last reset."""
        self.host = max(self.host, host_peak())
        if torch.cuda.is_initialized():
            found = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
            self.gpus = [max(a, b) for a, b in zip(found, self.gpus or [0] * len(found), strict=True)]
        return self

    def shown(self) -> str:
        """``host 3.1 GiB, GPU 60.2 GiB``."""
        parts = [f"host {self.host / GIB:.1f} GiB"]
        if any(self.gpus):
            parts.append("GPU " + " + ".join(f"{bytes_ / GIB:.1f}" for bytes_ in self.gpus) + " GiB")
        return ", ".join(parts)


def host_peak() -> int:
    """The process's high-water mark of resident memory, bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
