"""The gated delta rule a chunk of C tokens at a time: matrix products instead of C passes over the state.

With Gamma_i the product of the gates of a chunk up to token i, the residuals u_i = beta_i (v_i - k_i^T D_i S_{i-1})
solve a unit lower triangular system, and outputs and state follow:

    u_i + beta_i sum_{j<i} (k_i . Gamma_i/Gamma_j k_j) u_j = beta_i (v_i - (k_i Gamma_i)^T S_0)
    y_i = (q_i Gamma_i)^T S_0 + sum_{j<=i} (q_i . Gamma_i/Gamma_j k_j) u_j
    S_C = Gamma_C S_0 + sum_i (Gamma_C/Gamma_i k_i) u_i^T

Ratios of gates are never divisions: KDA carries every key forward by multiplying the gates after it, GDN exponentiates
differences of cumulative log gates, all <= 0. Nothing overflows however small a gate is. No operation is in place, so
that gradients flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepquant.codec.recurrence import expand_gate

GDN_CHUNK, KDA_CHUNK = 64, 16  # tokens; KDA's pairwise products grow with the chunk
CPU_CHUNK = 8  # of states_at, where operations cost more than launches


@dataclass(frozen=True)
class Chunk:
    """What of chunks does not depend on the state; leading dimensions are the caller's.

    Attributes:
        system: `[..., C, C]` unit lower triangular, I + diag(beta) (k_i . Gamma_i/Gamma_j k_j).
        mix: `[..., C, C]` lower triangular, q_i . Gamma_i/Gamma_j k_j; None without queries.
        gamma: `[..., C, 1 or K]`, Gamma_i.
        writes: `[..., C, K]`, Gamma_C/Gamma_i k_i.
    """

    system: Tensor
    mix: Tensor | None
    gamma: Tensor
    writes: Tensor

    @property
    def decay(self) -> Tensor:
        """Gamma_C over the rows of a state, `[..., 1 or K, 1]`."""
        return self.gamma[..., -1, :].unsqueeze(-1)

    def solve(self, target: Tensor) -> Tensor:
        """system^-1 target, `[..., C, N]`."""
        return torch.linalg.solve_triangular(self.system, target, upper=False, unitriangular=True)


def prepare_chunk(k: Tensor, log_gate: Tensor, beta: Tensor, q: Tensor | None = None) -> Chunk:
    """Prepare chunks.

    Args:
        k, q: `[..., C, K]`; log_gate: `[..., C]` or `[..., C, K]`; beta: `[..., C]`.
    """
    gates = expand_gate(log_gate, k)
    overlap, mix, writes = _shared_gate(k, gates, q) if gates.shape[-1] == 1 else _gate_a_row(k, gates.exp(), q)
    system = overlap * beta.unsqueeze(-1) + torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    return Chunk(system, mix, gates.cumsum(-2).exp(), writes)


def _shared_gate(k: Tensor, log_gate: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    total = log_gate.cumsum(-2)
    keep = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
    ratio = torch.where(keep, total - total.transpose(-1, -2), -torch.inf).exp()
    keys = k.transpose(-1, -2)
    mix = None if q is None else (q @ keys) * ratio
    return ((k @ keys) * ratio).tril(-1), mix, k * (total[..., -1:, :] - total).exp()


def _gate_a_row(k: Tensor, gate: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """`carried` holds, for every token i >= d, the key of token i - d decayed to token i."""
    size = k.shape[-2]
    carried, written = k, [k[..., -1, :]]
    overlap = torch.zeros_like(k[..., :size]) if k.shape[-1] >= size else k.new_zeros(*k.shape[:-1], size)
    mix = None if q is None else torch.diag_embed((q * k).sum(-1))
    for d in range(1, size):
        carried = carried[..., :-1, :] * gate[..., d:, :]
        written.append(carried[..., -1, :])
        overlap = overlap + torch.diag_embed((carried * k[..., d:, :]).sum(-1), offset=-d)
        if q is not None and mix is not None:
            mix = mix + torch.diag_embed((carried * q[..., d:, :]).sum(-1), offset=-d)
    return overlap, mix, torch.stack(written[::-1], -2)


def split_chunks(x: Tensor, size: int) -> Tensor:
    """`[B, T, H, ...]` to `[N, B, H, C, ...]`, T a multiple of C."""
    return x.unflatten(1, (-1, size)).movedim(1, 0).transpose(2, 3)


def states_every(
    k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, every: int, state: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield `(updates done, state [B, H, K, V])` after every `every` updates of a segment.

    A trailing piece shorter than `every` is not run.

    Args:
        k: `[B, T, H, K]`; v: `[B, T, H, V]`; log_gate: `[B, T, H]` or `[B, T, H, K]`; beta: `[B, T, H]`.
        every: updates between two states, at least 1.
        state: initial state, zero if left out.
    """
    count = k.shape[1] // every
    if state is None:
        state = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if not count:
        return
    keys, values, gates, strength = (split_chunks(x[:, : count * every], every) for x in (k, v, log_gate, beta))
    chunk = prepare_chunk(keys, gates, strength)
    solved = chunk.solve(strength.unsqueeze(-1) * torch.cat([values, keys * chunk.gamma], -1))
    plain, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    writes, decay = chunk.writes.transpose(-1, -2), chunk.decay
    for n in range(count):
        residual = plain[n] - read[n] @ state
        state = state * decay[n] + writes[n] @ residual
        yield (n + 1) * every, state


def states_at(
    k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, rows: list[int], done: list[int], size: int | None = None
) -> Tensor:
    """States `[n, H, K, V]` of segments `rows[i]` after `done[i]` updates each, from zero states.

    The state is carried over whole chunks only, three launches each; what lies between a chunk's beginning and a wanted
    update is one shorter chunk, run for all wanted states together. No gradients flow.

    Args:
        k: `[B, T, H, K]`; v: `[B, T, H, V]`; log_gate: `[B, T, H]` or `[B, T, H, K]`; beta: `[B, T, H]`.
        rows: segments, 0 .. B - 1; done: updates, 0 .. T.
        size: tokens of a chunk; by default long ones, for few launches, and on a CPU short ones, for few operations.
    """
    if size is None:
        size = CPU_CHUNK if k.device.type == "cpu" else GDN_CHUNK if log_gate.dim() == 3 else KDA_CHUNK
    heads, width, columns = k.shape[2], k.shape[3], v.shape[3]
    starts = v.new_zeros(len(rows), heads, width, columns)
    if not rows:
        return starts
    used = sorted(set(rows))
    position = {row: at for at, row in enumerate(used)}
    whole = max(done) // size * size
    pick = torch.tensor(used, device=k.device)
    k, v, log_gate, beta = (x.detach()[pick, : max(done)] for x in (k, v, log_gate, beta))
    wanted: dict[int, list[int]] = {}
    for index, count in enumerate(done):
        wanted.setdefault(count // size, []).append(index)
    state = v.new_zeros(len(used), heads, width, columns)
    if whole:
        keys, values, gates, strength = (split_chunks(x[:, :whole], size) for x in (k, v, log_gate, beta))
        chunk = prepare_chunk(keys, gates, strength)
        solved = chunk.solve(strength.unsqueeze(-1) * torch.cat([values, keys * chunk.gamma], -1))
        plain, read = (x.flatten(1, 2) for x in solved.split([columns, width], -1))
        writes, decay = chunk.writes.transpose(-1, -2).flatten(1, 2), chunk.decay
    for n in range(whole // size + 1):
        if n in wanted:
            starts[wanted[n]] = state[[position[rows[index]] for index in wanted[n]]]
        if n < whole // size:
            residual = torch.baddbmm(plain[n], read[n], state.flatten(0, 1), alpha=-1)
            state = torch.baddbmm((state * decay[n]).flatten(0, 1), writes[n], residual).view_as(state)
    if not any(count % size for count in done):
        return starts
    rest = torch.tensor([[count % size] for count in done], device=k.device)
    first = torch.tensor([[count // size * size] for count in done], device=k.device)
    segment = torch.tensor([[position[row]] for row in rows], device=k.device)
    offset = torch.arange(size, device=k.device)
    token, taken = (first + offset).clamp_max(k.shape[1] - 1), offset < rest  # [n, C]
    ready = []
    for x in (k, v, log_gate, beta):  # tokens past the wanted one write nothing: k = beta = 0, gate 1
        mask = taken.view(*taken.shape, *[1] * (x.dim() - 2))
        ready.append(torch.where(mask, x[segment, token], 0.0).transpose(1, 2))
    keys, values, gates, strength = ready  # [n, H, C, ...]
    chunk = prepare_chunk(keys, gates, strength)
    solved = chunk.solve(strength.unsqueeze(-1) * torch.cat([values, keys * chunk.gamma], -1))
    plain, read = solved.split([columns, width], -1)
    return starts * chunk.decay + chunk.writes.transpose(-1, -2) @ (plain - read @ starts)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs y `[B, T, H, V]` and final state of a whole segment: `recurrence.replay`, chunked and differentiable.

    Args: as `recurrence.replay`.
    """
    size = GDN_CHUNK if log_gate.dim() == 3 else KDA_CHUNK
    length, extra = q.shape[1], -q.shape[1] % size  # padding writes nothing: k = beta = 0, gate 1
    q, k, v = (pad(x, (0, 0, 0, 0, 0, extra)) for x in (q, k, v))
    beta = pad(beta, (0, 0, 0, extra))
    log_gate = pad(log_gate, (0, 0) * (log_gate.dim() - 2) + (0, extra))
    if state is None:
        state = v.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    queries, keys, values, gates, strength = (split_chunks(x, size) for x in (q, k, v, log_gate, beta))
    chunk = prepare_chunk(keys, gates, strength, queries)
    solved = chunk.solve(strength.unsqueeze(-1) * torch.cat([values, keys * chunk.gamma], -1))
    plain, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    reads, writes, decay = queries * chunk.gamma, chunk.writes.transpose(-1, -2), chunk.decay
    assert chunk.mix is not None
    outputs = []
    for n in range(queries.shape[0]):
        residual = plain[n] - read[n] @ state
        outputs.append(reads[n] @ state + chunk.mix[n] @ residual)
        state = state * decay[n] + writes[n] @ residual
    y = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)  # [N, B, H, C, V] -> [B, T, H, V]
    return y[:, :length], state
