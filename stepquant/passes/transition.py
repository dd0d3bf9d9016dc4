"""Transition-aware row weights: the diagonal of the readout-error Gram matrix (equation 15, design 2.5 b).

    W_t = A_{t+1}^T (q_{t+1} q_{t+1}^T + W_{t+1}) A_{t+1},   W = 0 at a segment's end,

and G_ii = mean over t of (W_t)_ii is the expected squared output error, summed over all later reads, of a unit error
put into key row i. The recursion runs backwards a chunk of C tokens at a time: over a chunk the product of transitions
is Phi = diag(exp G_C) - writes^T Z and the reads are R, both of rank C, so that

    W_0 = Phi^T W_C Phi + R^T R

costs a few thin matrix products instead of C passes over a K x K matrix. Its diagonal is taken at chunk boundaries, an
even sample of every C-th update.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from stepquant.codec.chunks import prepare_chunk, split_chunks
from stepquant.models.capture import DeltaTrace
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product

CHUNK = 16


def transition_diagonals(q: Tensor, k: Tensor, log_gate: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Diagonals of W_t at every `chunk`-th update, the segment's end left out (it is zero).

    Args:
        q, k: `[B, T, H, K]`; log_gate: `[B, T, H]` or `[B, T, H, K]`; beta: `[B, T, H]`. A leading piece shorter than
            `chunk` is not run: boundaries are counted from the segment's end.

    Returns:
        `[N, B, H, K]`, the latest boundary first, N = T // chunk.
    """
    count = q.shape[1] // chunk
    gram = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], q.shape[3])
    diagonals = []
    inputs = (x[:, q.shape[1] - count * chunk :] for x in (q, k, log_gate, beta))
    queries, keys, gate, strength = (split_chunks(x, chunk) for x in inputs)  # [N, B, H, C, ...]
    ready = prepare_chunk(keys, gate, strength, queries)
    z = ready.solve(strength.unsqueeze(-1) * keys * ready.gamma)  # u = -z S for a disturbance S
    assert ready.mix is not None
    seen = queries * ready.gamma - ready.mix @ z  # r_s = Phi_s^T q_s
    reads = seen.transpose(-1, -2) @ seen
    for n in reversed(range(count)):
        decay, writes = ready.decay[n], ready.writes[n]
        spread = gram @ writes.transpose(-1, -2)  # W writes^T, [B, H, K, C]
        half = z[n].transpose(-1, -2) @ (0.5 * (writes @ spread)) - spread * decay
        outer = half @ z[n]
        gram = gram * decay * decay.transpose(-1, -2) + outer + outer.transpose(-1, -2) + reads[n]
        diagonals.append(gram.diagonal(dim1=-2, dim2=-1))
    return torch.stack(diagonals) if diagonals else q.new_zeros(0, q.shape[0], q.shape[2], q.shape[3])


class Transition:
    """Mean diagonal `gram` `[L, H, K]` of the readout-error Gram matrix over updates and segments."""

    name, version = "transition", 1
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return "transition" in (context.recipe.temporal.weight, context.recipe.spatial.impact)

    def start(self, context: Context, place: Path | None = None) -> TransitionObservation:
        return TransitionObservation(context)


class TransitionObservation:
    """Accumulators of `Transition`."""

    def __init__(self, context: Context) -> None:
        g = context.geometry
        self.total = torch.zeros(g.num_delta_layers, g.num_heads, g.key_dim, dtype=torch.float64)
        self.count = torch.zeros(g.num_delta_layers, dtype=torch.float64)

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        for one in range(trace.q.shape[0]):  # a segment at a time keeps the K x K matrices of a layer in the cache
            q, k, gate, beta = (
                x[one : one + 1].detach().float() for x in (trace.q, trace.k, trace.log_gate, trace.beta)
            )
            diagonals = transition_diagonals(q, k, gate, beta)
            self.total[layer] += diagonals.sum((0, 1), dtype=torch.float64).cpu()
            self.count[layer] += diagonals.shape[0] * diagonals.shape[1]

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.total, self.count = state["total"], state["count"]

    def finish(self) -> Product:
        return Product({"gram": self.total / self.count.clamp_min(1).view(-1, 1, 1)})
