r"""Write windows: quantise once in W tokens, keep the tokens in between exactly (design 2.5 c).

Let S_0 be the state read back at the last fold and (k_i, u_i, D_i), i = 1 .. n, the tokens since then, with resolved
residuals u_i = beta_i (v_i - k_i^T D_i S_{i-1}) (so that S_i = D_i S_{i-1} + k_i u_i^T is equation 1). Unrolled,

    S_n = Gamma_n S_0 + sum_i kbar_i u_i^T,   Gamma_n = D_n .. D_1,   kbar_i = D_n .. D_{i+1} k_i,

so one more token (q, k, v, D, beta) needs one pass over S_0 and n small corrections:

    k^T D S_n = (k D Gamma_n)^T S_0 + sum_i (k . D kbar_i) u_i     -> u = beta (v - k^T D S_n)
    y         = (q D Gamma_n)^T S_0 + sum_i (q . D kbar_i) u_i + (q . k) u

and a fold is S_0 <- Q(Gamma_n S_0 + sum_i kbar_i u_i^T). With W = 1 nothing is ever pending: the plain path.

**Tiny gates.** The ratio Gamma_n / Gamma_i must not be computed by division, nor as exp of a difference of cumulative
log gates: after one gate of exp(-10^6) the sums hold nothing of the gates that follow, and after a gate of 0 they are
infinite. Here ratios are products of the gates after i, or exp of the sum of just those log gates. All factors are in
[0, 1]: nothing overflows, nothing cancels, and an underflow is a contribution that truly is gone.

**What is stored** for a pending token, in the buffer's dtype (fp32, fp16, bf16, int8 with one FP16 scale a vector):

- u `[V]`, and the key `[K]`. GDN keeps the raw key, which the value heads of a group share, and one FP32 ratio a head
  and token. KDA folds each step's gate into the stored keys (kbar_i <- D kbar_i, rounded again), so that no per-token
  gates `[K]` are kept; S_0 has one FP32 vector Gamma (GDN: a scalar) a head.
- The token being read is exact in its own readout. A fold that it completes takes its u and key in FP16 (FP32 beside
  FP32 buffers) whatever the buffer's dtype: W tokens need W - 1 stored entries, and one for the moment.

**Speculative drafts.** A fold cannot be undone, and neither can a gate folded into a KDA key. A draft token is a
pending entry with its raw key, u and its own log gate; its reads take the gates of the drafts before it as suffix sums.
`accept(n)` commits the first n drafts (gates folded in then) and forgets the others. Each u depends on earlier tokens
only, so accepted entries need no recomputation. If the accepted length passes a multiple of W, everything accepted is
folded at once, so folding never looks past what was accepted. Drafts form a chain; buffers need W - 1 plus the longest
draft entries and belong to the running request.

A request's phase is its own length mod W, whatever batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stepquant.codec.dual_axis import to_fp16, to_scale
from stepquant.codec.recurrence import expand_gate, step

BUFFER_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8}


def last_dtype(dtype: str) -> str:
    """What the token that completes a window is kept in until the fold, beside buffers of `dtype`."""
    return "fp32" if dtype == "fp32" else "fp16"


def store(x: Tensor, dtype: str) -> Tensor:
    """What a vector `[..., N]` reads back as after a trip through a buffer of `dtype`, in the dtype of `x`."""
    if dtype == "fp32":
        return x
    if dtype == "fp16":
        return to_fp16(x).to(x.dtype)
    if dtype == "bf16":
        return x.bfloat16().to(x.dtype)
    scale = to_scale(x.abs().amax(-1, keepdim=True) / 127)
    return (x / scale).round_().clamp_(-127, 127).mul_(scale)


@dataclass
class _Draft:
    """One draft token: stored key `[..., K]`, log gate `[..., 1 or K]`, stored u `[..., V]`."""

    key: Tensor
    log_gate: Tensor
    u: Tensor


class WriteWindow:
    """Pending tokens of a set of requests at the same phase: the reference that kernels and fast paths are checked by.

    Leading dimensions `[...]` (requests, heads) are the caller's; so is the state that was read back at the last fold,
    `base [..., K, V]`, which every method takes and which is only ever replaced by `fold`'s result.

    Args:
        length: W.
        dtype: of the buffers: fp32, fp16, bf16 or int8.
        phase: tokens already past the last multiple of W when the base was packed (its length mod W): the first window
            is shorter by so many.
    """

    def __init__(self, length: int, dtype: str = "fp32", phase: int = 0) -> None:
        self.length, self.dtype, self.phase = length, dtype, phase % length
        self.decay: Tensor | None = None  # Gamma, [..., 1 or K]; None for no pending token
        self.keys: Tensor | None = None  # [..., n, K]: raw (GDN) or with all later gates folded in (KDA)
        self.ratios: Tensor | None = None  # [..., n, 1]: product of later gates (GDN), ones (KDA)
        self.us: Tensor | None = None  # [..., n, V]
        self.drafts: list[_Draft] = []

    def step(
        self, base: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        """Read one token and commit it.

        Args:
            base: `[..., K, V]`; q, k: `[..., K]`; v: `[..., V]`; log_gate: `[...]` or `[..., K]`; beta: `[...]`.

        Returns:
            The state that is the base from now on, y `[..., V]`, and whether the base is new: a folded, unquantised
            state that the caller quantises before the next step.
        """
        if self.length == 1:
            state, y = step(base, q, k, v, log_gate, beta)
            return state, y, True
        gate = expand_gate(log_gate, q)
        y, u = self._resolve(base, q, k, v, gate, beta)
        self._decay_committed(gate.exp())
        self.phase = (self.phase + 1) % self.length
        if self.phase == 0:
            last = last_dtype(self.dtype)
            return self.fold(base, store(k, last), store(u, last)), y, True
        self._append(store(k, self.dtype), torch.ones_like(gate[..., :1]), store(u, self.dtype))
        return base, y, False

    def draft(self, base: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor) -> Tensor:
        """Read one draft token after the pending ones and the drafts so far; nothing is committed. Returns y."""
        gate = expand_gate(log_gate, q)
        y, u = self._resolve(base, q, k, v, gate, beta)
        self.drafts.append(_Draft(store(k, self.dtype), gate, store(u, self.dtype)))
        return y

    def accept(self, base: Tensor, count: int) -> tuple[Tensor, bool]:
        """Commit the first `count` drafts and forget the others; returns the base and whether it is new, as `step`."""
        accepted, self.drafts = self.drafts[:count], []
        if not accepted:
            return base, False
        tails = _suffix_sums([draft.log_gate for draft in accepted])
        self._decay_committed(tails[0].exp())
        for draft, tail in zip(accepted, tails[1:], strict=True):
            ratio = tail.exp()
            if ratio.shape[-1] == 1:
                self._append(draft.key, ratio, draft.u)
            else:
                key = store(draft.key * ratio, self.dtype) if draft is not accepted[-1] else draft.key
                self._append(key, torch.ones_like(ratio[..., :1]), draft.u)
        passed = self.phase + len(accepted) >= self.length
        self.phase = (self.phase + len(accepted)) % self.length
        return (self.fold(base), True) if passed else (base, False)

    def fold(self, base: Tensor, key: Tensor | None = None, u: Tensor | None = None) -> Tensor:
        """The state with everything committed in it; empties the buffers. This is also the flush before a slot is
        copied, forked, retracted or sent to the host.

        Args:
            base: `[..., K, V]`.
            key, u: entry of a token just read that is not in the buffers, if any.
        """
        state = base if self.decay is None else base * self.decay.unsqueeze(-1)
        if self.keys is not None and self.ratios is not None and self.us is not None:
            state = state + (self.keys * self.ratios).transpose(-1, -2) @ self.us
        if key is not None and u is not None:
            state = state + key.unsqueeze(-1) * u.unsqueeze(-2)
        self.decay = self.keys = self.ratios = self.us = None
        return state

    def _resolve(
        self, base: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """y and u of one token, from the base, the committed entries and the drafts; `gate` is `[..., 1 or K]`."""
        tails = _suffix_sums([*(draft.log_gate for draft in self.drafts), gate])
        factor = tails[0].exp()  # what the committed past is decayed by, this token's gate included
        decay = factor if self.decay is None else self.decay * factor
        reads = torch.stack([k, q], -2)  # [..., 2, K]
        total = (reads * decay.unsqueeze(-2)) @ base
        if self.keys is not None and self.ratios is not None and self.us is not None:
            keys = self.keys * self.ratios * factor.unsqueeze(-2)
            total = total + (reads @ keys.transpose(-1, -2)) @ self.us
        for draft, tail in zip(self.drafts, tails[1:], strict=False):
            overlap = (reads * (draft.key * tail.exp()).unsqueeze(-2)).sum(-1, keepdim=True)
            total = total + overlap * draft.u.unsqueeze(-2)
        u = beta.unsqueeze(-1) * (v - total[..., 0, :])
        return total[..., 1, :] + (q * k).sum(-1, keepdim=True) * u, u

    def _decay_committed(self, factor: Tensor) -> None:
        """Fold gates `[..., 1 or K]` into everything committed."""
        self.decay = factor if self.decay is None else self.decay * factor
        if self.keys is None or self.ratios is None:
            return
        if factor.shape[-1] == 1:
            self.ratios = self.ratios * factor.unsqueeze(-2)
        else:
            self.keys = store(self.keys * factor.unsqueeze(-2), self.dtype)

    def _append(self, key: Tensor, ratio: Tensor, u: Tensor) -> None:
        def grown(old: Tensor | None, new: Tensor) -> Tensor:
            return new.unsqueeze(-2) if old is None else torch.cat([old, new.unsqueeze(-2)], -2)

        self.keys, self.ratios, self.us = grown(self.keys, key), grown(self.ratios, ratio), grown(self.us, u)


def _suffix_sums(log_gates: list[Tensor]) -> list[Tensor]:
    """[g_1 + .. + g_n, g_2 + .. + g_n, .., g_n, 0]: entry i is what token i (0: the past) has been decayed by."""
    sums = [torch.zeros_like(log_gates[-1])]
    for gate in reversed(log_gates):
        sums.append(sums[-1] + gate)
    return sums[::-1]
