"""A pool of packed slots with its own free list: what the transformers backend uses, and the semantics SGLang's has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepquant.errors import BackendError
from stepquant.layout import PageLayout
from stepquant.runtime.slots import SlotStore


class PackedPool(SlotStore):
    """`SlotStore` with allocation; slots 1 to `slots` are handed out first in, first out.

    Arguments as `SlotStore`.
    """

    def __init__(self, layout: PageLayout, kernels: Any, slots: int, requests: int, device: torch.device | str) -> None:
        super().__init__(layout, kernels, slots, requests, device)
        self._free = list(range(1, slots + 1))
        self._owned: set[int] = set()

    @property
    def available(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def owned(self) -> frozenset[int]:
        """Slots that somebody owns."""
        return frozenset(self._owned)

    def alloc(self, count: int) -> Tensor | None:
        """`count` clean slots as int64 `[count]` on the pool's device, or None where so many are not free."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self._owned.update(taken)
        slots = torch.tensor(taken, dtype=torch.int64, device=self.device)
        self.clear(slots)
        return slots

    def free(self, slots: Tensor) -> None:
        """Give slots back.

        Raises:
            BackendError: naming a slot that is not owned, or named twice; none is given back then.
        """
        given = [int(slot) for slot in slots.tolist()]
        left = set(self._owned)
        for slot in given:
            if slot not in left:
                raise BackendError(f"slot {slot} is freed but nobody owns it; expected one of {sorted(left)}")
            left.discard(slot)
        self._owned = left
        self._free += given

    def fork(self, source: Tensor) -> Tensor | None:
        """A new slot `[1]` with the state of `source [1]`, or None where none is free."""
        target = self.alloc(1)
        if target is not None:
            self.copy(source, target)
        return target

    def reset(self) -> None:
        """Free everything."""
        self._free, self._owned = list(range(1, self.slots + 1)), set()
        self.table[0, 1:] = -1
        self.table[2] = 0
