"""Folds on a stream of their own, while the layers that follow go on; inside a CUDA graph as well.

Per layer: read (main stream), fold (this stream, after the read). The pages that a fold writes are read again in the
next step, so one wait at the end of a step is enough (`join`), before anything else touches pages or buffers. What a
read hands to its fold, k_now and u_now, takes turns between `PAIRS` pairs: a read waits for the fold that had its pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PAIRS = 2  # of k_now and u_now; layer i uses pair i mod PAIRS


class WritebackStream:
    """The stream of one pool, on the current CUDA device or the one given."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.stream = torch.cuda.Stream(device)
        self._done: dict[int, torch.cuda.Event] = {}

    def before_read(self, layer: int) -> None:
        """The pair of k_now and u_now of a layer is free again."""
        event = self._done.pop(layer - PAIRS, None)
        if event is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event)

    @contextmanager
    def fold(self, layer: int) -> Iterator[None]:
        """Launch a layer's fold in this block, after everything that the current stream was given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
            event = torch.cuda.Event()
            event.record(self.stream)
        self._done[layer] = event

    def join(self) -> None:
        """The current stream goes on when all folds are done."""
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._done.clear()
