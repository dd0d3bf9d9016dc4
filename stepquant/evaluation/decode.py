"""Teacher-forced decode of one layer over known tokens (appendix B.2, equation 4).

The first P tokens are an exact prefill that never touches the codec; the state is packed once at the boundary; then
every token is read from the state as it is before requantising, and the state is requantised whenever the stream's
length reaches a multiple of W. Replacing the delta rule of every layer by this, in one forward of the whole model over
the whole text, gives the numbers of decoding token by token: a token's inputs depend on earlier tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepquant.codec.registry import StateCodec
from stepquant.evaluation.windows import prepare_windows, run_windows
from stepquant.models.capture import DeltaTrace

PREFILL_CHUNK = 16  # tokens that an exact prefill takes at once
SPAN = 2048  # tokens whose factors are prepared together: bounds memory


@dataclass(frozen=True)
class DecodeSettings:
    """How a stream is decoded: P tokens of exact prefill, window length W, dtype of the window's buffers."""

    prefill: int
    window: int = 1
    buffers: str = "fp32"


@dataclass
class Fold:
    """A writeback: tokens done, the streams it belongs to, the state before and after quantisation `[b, H, K, V]`."""

    tokens: int
    streams: slice
    folded: Tensor
    state: Tensor


Watcher = Callable[[Fold], None]


def stream_groups(trace: DeltaTrace) -> Iterator[tuple[slice, DeltaTrace]]:
    """Groups of streams to run together: one by one on a CPU (a stream's state then stays in its cache), else all."""
    batch = trace.q.shape[0]
    size = 1 if trace.q.device.type == "cpu" else batch
    for start in range(0, batch, size):
        rows = slice(start, start + size)
        initial = None if trace.initial_state is None else trace.initial_state[rows]
        parts = {name: getattr(trace, name)[rows] for name in ("q", "k", "v", "log_gate", "beta")}
        yield rows, replace(trace, **parts, initial_state=initial)


def decode_layer(
    trace: DeltaTrace, codec: StateCodec | None, settings: DecodeSettings, watch: Watcher | None = None
) -> Tensor:
    """Outputs y `[B, T, H, V]` of a layer whose state is quantised at the boundary and then every W tokens.

    Args:
        trace: the layer's inputs, `[B, T, ...]`.
        codec: of this layer's heads, on the trace's device; None keeps the state in FP32.
        settings: prefill, window and buffers. A stream's phase is its own length mod W.
        watch: called at the boundary and after every fold.
    """
    y = torch.empty_like(trace.v)
    for rows, part in stream_groups(trace):
        for start, piece, fold in decode_steps(part, codec, settings):
            y[rows, start : start + piece.shape[1]] = piece
            if watch is not None and fold is not None:
                watch(replace(fold, streams=rows))
    return y


def decode_steps(
    trace: DeltaTrace, codec: StateCodec | None, settings: DecodeSettings
) -> Iterator[tuple[int, Tensor, Fold | None]]:
    """The loop behind `decode_layer` for one group of streams.

    Yields:
        First token, outputs `[b, n, H, V]`, and the fold that ends the piece (None inside the prefill and for a last,
        unfinished window). States in a fold are only valid until the next step.
    """
    batch, length, heads, key_dim = trace.q.shape
    prefill, window = min(settings.prefill, length), settings.window
    state = trace.initial_state
    state = (
        trace.v.new_zeros(batch, heads, key_dim, trace.v.shape[-1]) if state is None else state.to(trace.v, copy=True)
    )
    everything = slice(0, batch)
    for start, y, after, _ in _run(trace, 0, prefill, PREFILL_CHUNK, None, "fp32", state):
        state = after
        yield start, y, None
    packed = state if codec is None else codec.roundtrip(state)
    yield prefill, trace.v[:, :0], Fold(prefill, everything, state, packed)
    for start, y, after, before in _run(trace, prefill, length, window, codec, settings.buffers, packed):
        done = start + y.shape[1]
        yield start, y, Fold(done, everything, before, after) if done % window == 0 else None


def _run(
    trace: DeltaTrace, start: int, stop: int, window: int, codec: StateCodec | None, dtype: str, state: Tensor
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Windows that end at multiples of `window`, over tokens [start, stop): (first token, y, state after, before).

    The first and the last window may be cut short: they are filled with tokens that write nothing (beta = k = 0, gate
    1). A codec is not applied to an unfinished last window.
    """
    batch = trace.q.shape[0]
    begin = start - start % window
    for low in range(begin, stop, -(-SPAN // window) * window):
        high = min(low + -(-SPAN // window) * window, stop)
        front, back = max(start - low, 0), -(high - low) % window
        names = ("q", "k", "v", "log_gate", "beta")
        q, k, v, gate, beta = (_filled(getattr(trace, name), low + front, high, front, back) for name in names)
        factors = prepare_windows(q, k, v, gate, beta, window, dtype)
        last = codec if back == 0 else None
        count = factors.v.shape[0]
        for n, (y, before, after) in enumerate(run_windows(factors, state, codec, dtype)):
            first = low + n * window
            skip, keep = max(start - first, 0), min(window, high - first)
            out = y.view(batch, -1, window, y.shape[-1]).transpose(1, 2)[:, skip:keep]
            state = before if n == count - 1 and last is None else after
            yield first + skip, out, state, before


def _filled(x: Tensor, start: int, stop: int, front: int, back: int) -> Tensor:
    """Tokens [start, stop) of `[b, T, ...]` with zeros for `front` tokens before and `back` after them."""
    x = x[:, start:stop]
    if not front and not back:
        return x
    shape = (x.shape[0], front + back, *x.shape[2:])
    zeros = x.new_zeros(shape)
    return torch.cat([zeros[:, :front], x, zeros[:, front:]], 1)
