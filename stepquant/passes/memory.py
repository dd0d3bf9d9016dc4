"""Memory of passes: peaks measured on host and GPUs, and what to do when there is not enough."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stepquant.errors import BackendError
from stepquant.geometry import Geometry
from stepquant.recipe import Recipe

GIB = 1 << 30
_HOST_MARKS = ("can't allocate memory", "cannot allocate memory", "not enough memory")


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


@contextlib.contextmanager
def explain_memory(recipe: Recipe, geometry: Geometry, doing: str) -> Iterator[None]:
    """Turn an out-of-memory error into one that says what takes how much and which setting to change.

    Raises:
        BackendError: in place of torch's own error.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and not isinstance(error, MemoryError) and not any(m in str(error).lower() for m in _HOST_MARKS):
            raise
        place = _gpu_state() if on_gpu else f"host memory (peak {host_peak() / GIB:.1f} GiB)"
        raise BackendError(f"out of memory while {doing} on {place}: {arithmetic(recipe, geometry)}") from error


def arithmetic(recipe: Recipe, geometry: Geometry) -> str:
    """What a run needs, in GiB, and the settings that change it."""
    tokens = recipe.data.batch * recipe.data.length
    traced = 4 * tokens * geometry.num_heads * (2 * geometry.key_dim + geometry.value_dim) / GIB
    size = weights_bytes(recipe)
    parts = [f"weights {size / GIB:.1f} GiB" if size else "the weights"]
    parts.append(
        f"one layer's q, k, v at data.batch={recipe.data.batch} x data.length={recipe.data.length} tokens "
        f"{traced:.2f} GiB, its delta rule about {6 * traced:.2f} GiB"
    )
    options = [f"data.batch={recipe.data.batch // 2}"] if recipe.data.batch > 1 else ["a smaller data.length"]
    if recipe.model.loading == "whole":
        options.append("model.loading=layerwise (one layer on the device at a time)")
        if recipe.model.device_map is None and torch.cuda.is_available() and torch.cuda.device_count() > 1:
            options.append("model.device_map=auto")
    return f"{', '.join(parts)}; set {' or '.join(options)}"


def weights_bytes(recipe: Recipe) -> int:
    """Bytes of the checkpoint's weights; 0 where they are random or cannot be counted."""
    if recipe.model.path is None or recipe.model.weights_seed is not None:
        return 0
    from stepquant.errors import ModelError
    from stepquant.models.checkpoint import resolve_checkpoint
    from stepquant.models.fingerprint import checkpoint_tensors

    try:
        return sum(entry.size for entry in checkpoint_tensors(resolve_checkpoint(recipe.model.path)).values())
    except ModelError:
        return 0


def _gpu_state() -> str:
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    held = torch.cuda.memory_allocated(index)
    return f"GPU {index} ({held / GIB:.1f} of {properties.total_memory / GIB:.1f} GiB held)"
