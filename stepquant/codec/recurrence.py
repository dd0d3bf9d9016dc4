"""The gated delta rule in plain torch: one step and a readable replay (`chunks` has the fast form).

Notation of the paper, one head: state S [K, V], query q, key k [K], value v [V], gate D = alpha I (GDN) or
diag(d_1 .. d_K) (KDA), write strength beta:

    u = beta (v - k^T D S);  X = D S + k u^T;  y = X^T q          (equations 1 and 4: read before requantising)

Leading dimensions (batch, heads) broadcast. The dtype is the caller's: float64 in tests, float32 elsewhere.
"""

from __future__ import annotations

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
