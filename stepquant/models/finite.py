"""Weights that are not finite: found when they are loaded, and named, before they become statistics that are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from stepquant.errors import ModelError

CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_finite(directory: Path | str, tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
    """Refuse weights that hold NaN or infinities; quantised ones and those without data (meta) are left out.

    Args:
        directory: of the checkpoint, for the message.
        tensors: by their names in the model.

    Raises:
        ModelError: naming how many tensors and the first one.
    """
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    bad = [name for name, x in items if x.dtype in CHECKED and not x.is_meta and x.numel() and not _finite(x)]
    if bad:
        raise ModelError(
            f"{directory}: {len(bad)} tensors hold NaN or infinities, first {bad[0]}; the checkpoint is damaged or its "
            "training diverged: fetch it again, or choose another"
        )


def _finite(x: Tensor) -> bool:
    """A sum takes no memory; only where it is not finite (it may have overflowed) is every value looked at."""
    total = x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return bool(total.isfinite()) or bool(x.isfinite().all())
