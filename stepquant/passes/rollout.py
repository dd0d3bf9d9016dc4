"""Rollout: what each precision really does to the readout, measured by running it (past the paper, docs/method.md).

The paper and `passes.transition` add up independent rounding errors over a unit's lifetime. Real rounding is not
independent: a state that changes by less than half a step is rounded back to the same code, so that the error of a
long-lived unit stays near one step instead of growing with its lifetime. So the quantised recurrence is run beside
the exact one, every head by itself, on pieces of a few captured segments:

    E_t = Shat_t - S_t;   cost_i(b) = mean_t F_t g_{t,i}^2 |E_{t-1,i}|^2      (rows: equation 9, no cross terms)
                          cost_h(b) = mean_t F_t |E_{t-1}^T g_t|^2             (heads: exactly its output error)

with g_t = A_t^T q_t and F_t the output sensitivity of the head at that very token, so that tokens whose readout is
small, and is blown up by the head's norm, count as they should. The write window is the recipe's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepquant.codec.chunks import states_every
from stepquant.codec.recurrence import expand_gate, transition_rows
from stepquant.codec.registry import make_codec
from stepquant.codec.spec import CodecSpec
from stepquant.passes.context import Context
from stepquant.passes.distortion import table_candidates
from stepquant.passes.protocol import Product, Products
from stepquant.passes.rollout_traces import FIELDS, PREFILL
from stepquant.small_operations import small_operations

SETTLE = 0.5  # share of the decoded tokens that is run but not counted: errors of long-lived rows build up first


class Rollout:
    """Mean cost a token of every precision: `rows` `[L, H, K, C]`, `heads` `[L, H, C]`; FP16 is the last one."""

    name, version = "rollout", 2
    reads: tuple[str, ...] = ("spatial.codec", "spatial.refits", "spatial.sample", "allocation.unit", "window.length")
    needs: tuple[str, ...] = ("rollout_traces", "row_weights")

    def wanted(self, context: Context) -> bool:
        return context.recipe.temporal.weight == "rollout"

    def run(self, context: Context, products: Products) -> Product:
        candidates, w = table_candidates(context), products["row_weights"]["w"]
        traces, window = products["rollout_traces"], context.recipe.window.tokens
        count = traces["beta.0"].shape[0]
        together = 1 if context.device.type == "cpu" else count  # on a CPU a piece's states stay in its cache
        rows, heads = [], []
        with small_operations(context.device), context.progress.bar("rollout", w.shape[0] * count) as bar:
            for layer in range(w.shape[0]):
                sums = []
                for piece in range(0, count, together):
                    inputs = (_pieces(traces[f"{name}.{layer}"][piece : piece + together]) for name in FIELDS)
                    q, k, v, log_gate, beta, sensitivity = (x.float().to(context.device) for x in inputs)
                    repeated = w[layer].repeat(together, 1)
                    by_row, by_head, tokens = rollout(
                        q, k, v, log_gate, beta, sensitivity, repeated, context.codec, candidates, window
                    )
                    sums.append((
                        by_row.unflatten(0, (together, -1)).sum(0), by_head.unflatten(0, (together, -1)).sum(0),
                        tokens * together,
                    ))  # fmt: skip
                    bar.advance(together)
                tokens = sum(part[2] for part in sums)
                rows.append(torch.stack([part[0] for part in sums]).sum(0) / max(tokens, 1))
                heads.append(torch.stack([part[1] for part in sums]).sum(0) / max(tokens, 1))
        return Product({"rows": torch.stack(rows), "heads": torch.stack(heads)}, {"candidates": list(candidates)})


def _pieces(x: Tensor) -> Tensor:
    """`[S, T, H, ...]` as `[T, S H, ...]`: pieces of one length run beside each other like so many heads."""
    return x.movedim(0, 1).flatten(1, 2)


def rollout(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor, sensitivity: Tensor, w: Tensor,
    spec: CodecSpec, candidates: tuple[int, ...], window: int = 1,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Costs of one layer on one piece of text.

    Args:
        q, k: `[T, H, K]`; v: `[T, H, V]`; log_gate: `[T, H]` or `[T, H, K]`; beta: `[T, H]`.
        sensitivity: F_t `[T, H]`.
        w: row weights `[H, K]`.
        spec: spatial codec; candidates: precisions, each tried on whole heads.
        window: tokens between requantisations; between them states evolve exactly.

    Returns:
        Sums over the second half of the decoded tokens: rows `[H, K, C]` and heads `[H, C]`, float64, and how many
        tokens that are.
    """
    heads, rows, columns, count = q.shape[1], q.shape[2], v.shape[2], len(candidates)
    start = min(PREFILL, q.shape[0] // 3) // 8 * 8
    exact = v.new_zeros(heads, rows, columns)
    before = [x[None, :start] for x in (k, v, log_gate, beta)]
    for _, state in states_every(before[0], before[1], before[2], before[3], every=8):
        exact = state[0]
    w, precision = w.to(q.device), torch.tensor(candidates, dtype=torch.uint8, device=q.device)
    codecs = [make_codec(b.expand(heads, rows).contiguous(), w, spec, columns) for b in precision]
    read = transition_rows(k, q, log_gate, beta)  # [T, H, K]
    gate = expand_gate(log_gate, q).exp().unsqueeze(-1)
    states = torch.stack([exact, *[codec.roundtrip(exact) for codec in codecs]])  # [1 + C, H, K, V]
    by_row = torch.zeros(count, heads, rows, dtype=torch.float64, device=q.device)
    by_head = torch.zeros(count, heads, dtype=torch.float64, device=q.device)
    counted = start + int(SETTLE * (q.shape[0] - start))
    for t in range(start, q.shape[0]):
        if t >= counted:
            error = states[1:] - states[:1]
            output = (read[t].unsqueeze(-2) @ error).squeeze(-2)  # [C, H, V]
            by_head += (sensitivity[t] * output.square().sum(-1)).double()
            by_row += ((sensitivity[t].unsqueeze(-1) * read[t].square()) * error.square_().sum(-1)).double()
        states *= gate[t]
        states += k[t].unsqueeze(-1) * (beta[t].view(-1, 1, 1) * (v[t].unsqueeze(-2) - k[t].unsqueeze(-2) @ states))
        if (t + 1) % window == 0:
            for index, codec in enumerate(codecs):
                states[index + 1] = codec.roundtrip(states[index + 1])
    return by_row.permute(1, 2, 0).cpu(), by_head.T.cpu(), q.shape[0] - counted


def rollout_table(products: Products, by_head: bool, source: str) -> Tensor:
    """Cost of every row at every candidate, `[L, H, K, C]`.

    Where units are heads, rows share out the head's exact cost. With pivots out of the column fit (``source`` is
    ``pivot_distortion``), costs change as the reconstruction errors did.
    """
    rows = products["rollout"]["rows"]
    if by_head:
        total = rows.sum(2, keepdim=True)
        return rows * (products["rollout"]["heads"].unsqueeze(2) / total.clamp_min(torch.finfo(total.dtype).tiny))
    if source != "distortion":
        before, after = products["distortion"]["row_error"], products[source]["row_error"]
        ratio = torch.where(before > 0, after / before.clamp_min(torch.finfo(before.dtype).tiny), 1.0)
        rows = rows * torch.cat([ratio[..., :-1], torch.ones_like(ratio[..., -1:])], -1)
    return rows
