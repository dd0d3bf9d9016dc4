"""The gated delta rule in plain torch: one step, a readable replay, and a chunked form that skips to every n-th state.

Notation of the paper, one head: state S [K, V], query q, key k [K], value v [V], gate D = alpha I (GDN) or
diag(d_1 .. d_K) (KDA), write strength beta:

    u = beta (v - k^T D S);  X = D S + k u^T;  y = X^T q          (equations 1 and 4: read before requantising)

Leading dimensions (batch, heads) broadcast. The dtype is the caller's: float64 in tests, float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def expand_gate(log_gate: Tensor, q: Tensor) -> Tensor:
    """Give a gate a key-row axis: `[...]` (GDN) becomes `[..., 1]`, `[..., K]` (KDA) stays; `q` is `[..., K]`."""
    return log_gate.unsqueeze(-1) if log_gate.dim() == q.dim() - 1 else log_gate


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One update and readout (equations 1 and 4).

    Args:
        state: `[..., K, V]`.
        q, k: `[..., K]`; v: `[..., V]`; log_gate: `[...]` or `[..., K]`; beta: `[...]`.

    Returns:
        The updated state X `[..., K, V]` and the output y `[..., V]`.
    """
    decayed = state * expand_gate(log_gate, q).exp().unsqueeze(-1)
    residual = beta.unsqueeze(-1) * (v - torch.einsum("...k,...kv->...v", k, decayed))
    updated = decayed + k.unsqueeze(-1) * residual.unsqueeze(-2)
    return updated, torch.einsum("...k,...kv->...v", q, updated)


def replay(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run a whole segment token by token: the reference that everything else is checked against.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, H, V]`; log_gate: `[B, T, H]` or `[B, T, H, K]`; beta: `[B, T, H]`.
        state: initial state `[B, H, K, V]`, zero if left out.

    Returns:
        Outputs y `[B, T, H, V]` and the final state `[B, H, K, V]`.
    """
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        state, y = step(state, q[:, t], k[:, t], v[:, t], log_gate[:, t], beta[:, t])
        outputs.append(y)
    return (torch.stack(outputs, 1) if outputs else torch.empty_like(v)), state


def transition_rows(k: Tensor, q: Tensor, log_gate: Tensor, beta: Tensor) -> Tensor:
    """g_t = A_t^T q_t = D (q - beta k (k^T q)) (equations 10 and 20), `[..., K]`."""
    return expand_gate(log_gate, q).exp() * (q - (beta * (k * q).sum(-1)).unsqueeze(-1) * k)


def decayed_overlap(x: Tensor, k: Tensor, gates: Tensor, diagonal: int) -> Tensor:
    """`[..., C, C]` with entries x_i . exp(G_i - G_j) k_j for j - i <= diagonal, zero above.

    Only differences G_i - G_j with j <= i are exponentiated, so that nothing overflows however small a gate is.

    Args:
        x, k: `[..., C, K]`; gates: cumulative log gates `[..., C, 1]` or `[..., C, K]`.
        diagonal: 0 keeps j <= i, -1 keeps j < i.
    """
    size = k.shape[-2]
    if gates.shape[-1] == 1:
        keep = torch.ones(size, size, dtype=torch.bool, device=k.device).tril(diagonal)
        return (x @ k.transpose(-1, -2)) * torch.where(keep, gates - gates.transpose(-1, -2), -torch.inf).exp()
    rows = []
    for i in range(size):  # a row at a time: [C, K] instead of [C, C, K]
        decayed = k[..., : i + 1, :] * (gates[..., i : i + 1, :] - gates[..., : i + 1, :]).exp()
        row = (decayed @ x[..., i, :].unsqueeze(-1)).squeeze(-1)[..., : i + 1 + diagonal]
        rows.append(torch.nn.functional.pad(row, (0, size - row.shape[-1])))
    return torch.stack(rows, -2)


def chunk_factors(k: Tensor, log_gate: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What of a chunk of C tokens does not depend on the state.

    With cumulative log gates G_i inside the chunk (all <= 0), the residuals solve the unit lower triangular system

        u_i + beta_i sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j = beta_i (v_i - (k_i exp(G_i))^T S_0).

    Args:
        k: `[..., C, K]`; log_gate: `[..., C]` or `[..., C, K]`; beta: `[..., C]`.

    Returns:
        system `[..., C, C]` (unit lower triangular), reads `[..., C, K]` = k_i exp(G_i), and
        writes `[..., C, K]` = k_i exp(G_C - G_i), so that S_C = exp(G_C) S_0 + sum_i writes_i u_i^T.
    """
    gates = expand_gate(log_gate, k).cumsum(-2)
    system = decayed_overlap(k, k, gates, -1) * beta.unsqueeze(-1)
    system = system + torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    return system, k * gates.exp(), k * (gates[..., -1:, :] - gates).exp()


def states_every(
    k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, every: int, state: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield `(updates done, state [B, H, K, V])` after every `every` updates of a segment, by the chunked form.

    A trailing piece shorter than `every` is not run. The yielded tensor is overwritten by the next step: copy what
    is kept. Two matrix products a chunk replace `every` passes over the state.

    Args:
        k: `[B, T, H, K]`; v: `[B, T, H, V]`; log_gate: `[B, T, H]` or `[B, T, H, K]`; beta: `[B, T, H]`.
        every: updates between two states, at least 1.
        state: initial state, zero if left out.
    """
    chunks = k.shape[1] // every

    def split(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B, H, C, ...]
        x = x[:, : chunks * every].unflatten(1, (chunks, every))
        return x.movedim(1, 0).transpose(2, 3)

    current = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]) if state is None else state.clone()
    keys, values, gates, betas = split(k), split(v), split(log_gate), split(beta)
    for n in range(chunks):
        system, reads, writes = chunk_factors(keys[n], gates[n], betas[n])
        target = betas[n].unsqueeze(-1) * (values[n] - reads @ current)
        residual = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        decay = expand_gate(gates[n], keys[n]).sum(-2).exp().unsqueeze(-1)
        current = current * decay + writes.transpose(-1, -2) @ residual
        yield (n + 1) * every, current
