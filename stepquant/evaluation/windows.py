"""Write windows over known tokens, whole windows at a time: the fast form of `stepquant.codec.window`.

Where the inputs of a layer are known (teacher forcing), everything of a window that does not depend on the state is
prepared for all windows at once; what is left per window are one product with the state for all reads, a tiny
triangular solve for the residuals, one rank-W update, and the codec. W = 1 is the plain path of equations 1 and 4,
token by token, through the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stepquant.codec.recurrence import expand_gate
from stepquant.codec.registry import StateCodec
from stepquant.codec.window import last_dtype, store

GRAPH_WINDOWS = 16  # windows from which recording one pays


class WindowFactors(NamedTuple):
    """State-independent parts of N windows of W tokens, `[N, b * H, ...]`.

    Attributes:
        reads: `[.., 2 W, K]`: k_n D Gamma_n, then q_n D Gamma_n: what the base is read with.
        solve: `[.., W, W]`: (I + diag(beta) A)^-1 with A_ni = k_n . D_n kbar_i below the diagonal.
        system: `[.., W, W]`: diag(beta) A, for residuals that are rounded one by one.
        mix: `[.., W, W]`: q_n . D_n kbar_i below the diagonal, q_n . k_n on it.
        fold: `[.., K, W]`: the keys a fold takes.
        decay: `[.., 1 or K, 1]`: Gamma_W.
        v: `[.., W, V]`; beta: `[.., W, 1]`.
    """

    reads: Tensor
    solve: Tensor
    system: Tensor
    mix: Tensor
    fold: Tensor
    decay: Tensor
    v: Tensor
    beta: Tensor


def prepare_windows(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, length: int, dtype: str = "fp32"
) -> WindowFactors:
    """Factors of consecutive windows.

    Args:
        q, k: `[b, T, H, K]`; v: `[b, T, H, V]`; log_gate: `[b, T, H]` or `[b, T, H, K]`; beta: `[b, T, H]`; T a
            multiple of `length`.
        length: W.
        dtype: of the buffers (`stepquant.codec.window.store`).
    """

    def split(x: Tensor) -> Tensor:  # [b, T, H, ...] -> [N, b * H, W, ...]
        x = x.unflatten(1, (-1, length)).movedim(1, 0).transpose(2, 3)
        return x.flatten(1, 2).contiguous()

    gate = split(expand_gate(log_gate, q)).exp()  # [N, bH, W, 1 or K]
    q, k, v, beta = split(q), split(k), split(v), split(beta).unsqueeze(-1)
    decay = gate.cumprod(-2)
    keys = store(k, dtype) if length > 1 else k
    both = torch.stack([k, q], -2)  # [N, bH, W, 2, K]
    overlap = k.new_zeros(*k.shape[:-2], 2, length, length)
    if gate.shape[-1] == 1:
        ratio = k.new_zeros(*k.shape[:-1], length)  # ratio[n, i]: product of the gates after i up to n
        for n in range(length):
            if n:
                ratio[..., n, :n] = ratio[..., n - 1, :n] * gate[..., n, :]
            ratio[..., n, n] = 1
        overlap = (both.transpose(-2, -3) @ keys.transpose(-1, -2).unsqueeze(-3)) * ratio.unsqueeze(-3)
        committed = keys * ratio[..., -1, :].unsqueeze(-1)
    else:
        committed = keys.clone()
        for n in range(1, length):
            now = committed[..., :n, :] * gate[..., n : n + 1, :]
            overlap[..., n, :n] = both[..., n, :, :] @ now.transpose(-1, -2)
            committed[..., :n, :] = store(now, dtype)
    if length > 1:
        committed[..., -1, :] = store(k[..., -1, :], last_dtype(dtype))
    system, mix = overlap[..., 0, :, :].tril(-1) * beta, overlap[..., 1, :, :].tril(-1)
    mix.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    eye = torch.eye(length, dtype=k.dtype, device=k.device)
    solve = torch.linalg.solve_triangular(system + eye, eye.expand_as(system), upper=False, unitriangular=True)
    reads = torch.cat([k * decay, q * decay], -2)
    last = decay[..., -1, :].unsqueeze(-1)
    return WindowFactors(reads, solve, system, mix, committed.transpose(-1, -2).contiguous(), last, v, beta)


def run_windows(
    factors: WindowFactors, state: Tensor, codec: StateCodec | None, dtype: str = "fp32"
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run windows one after the other.

    Args:
        factors: of N windows.
        state: `[b, H, K, V]` base before the first; overwritten.
        codec: applied to the state after every window; None leaves it as it is.
        dtype: of the buffers.

    Yields:
        For every window y `[b * H, W, V]`, the folded state before quantisation and the base after it, both
        `[b, H, K, V]`. The states are only valid until the next window.
    """
    count = factors.v.shape[0]
    if state.device.type == "cuda" and count >= GRAPH_WINDOWS:
        yield from _replay(factors, state, codec, dtype)
        return
    for index in range(count):
        y, folded, state = _window(WindowFactors(*(part[index] for part in factors)), state, codec, dtype)
        yield y, folded, state


def _window(
    factors: WindowFactors, state: Tensor, codec: StateCodec | None, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """One window, its factors `[b * H, ...]`; `state` is overwritten by the folded one."""
    reads, solve, system, mix, fold, decay, v, beta = factors
    length, shape = v.shape[-2], state.shape
    flat = state.view(-1, *shape[-2:])
    total = torch.bmm(reads, flat)
    target = (v - total[:, :length]).mul_(beta)
    y = total[:, length:]
    if length == 1:
        u = target
        y.addcmul_(mix, u)
    elif dtype == "fp32":
        u = torch.bmm(solve, target)
        y.baddbmm_(mix, u)
    else:
        u = _rounded_residuals(system, target, dtype)
        own = target - torch.bmm(system, u)  # each token's own residual, not yet rounded
        y.baddbmm_(mix.tril(-1), u).addcmul_(mix.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), own)
    flat.mul_(decay)
    if length == 1:
        flat.addcmul_(fold, u)
    else:
        flat.baddbmm_(fold, u)
    folded = flat.view(shape)
    return y, folded, folded if codec is None else codec.roundtrip(folded)


def _replay(
    factors: WindowFactors, state: Tensor, codec: StateCodec | None, dtype: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same on a GPU: one window recorded as a CUDA graph and replayed, since launching its several dozen small
    kernels one by one takes many times longer than running them."""
    now = WindowFactors(*(part[0].clone() for part in factors))
    base = state.clone()
    stream = torch.cuda.Stream(base.device)
    stream.wait_stream(torch.cuda.current_stream(base.device))
    with torch.cuda.stream(stream):  # a graph records allocations and library handles that must exist already
        _window(now, base.clone(), codec, dtype)
    torch.cuda.current_stream(base.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, folded, after = _window(now, base.clone(), codec, dtype)
        base.copy_(after)
    for parts in zip(*(part.unbind() for part in factors), strict=True):
        torch._foreach_copy_(list(now), list(parts))
        graph.replay()
        yield y, folded, after


def _rounded_residuals(system: Tensor, target: Tensor, dtype: str) -> Tensor:
    """Residuals `[b * H, W, V]` as they are held, each from the rounded ones before it."""
    u = target.clone()
    length = u.shape[-2]
    for n in range(length):
        if n:
            u[:, n] -= torch.bmm(system[:, n : n + 1, :n], u[:, :n]).squeeze(-2)
        u[:, n] = store(u[:, n], dtype if n < length - 1 else last_dtype(dtype))
    return u
