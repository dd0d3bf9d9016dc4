"""State and readout error of every layer against the FP32 recurrence on identical inputs (proposition 1).

Each layer runs the variant and the exact recurrence side by side on the q, k, v and gates it really gets in the
variant's run, so that an error is the layer's own and not inherited from the layers below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepquant.codec.registry import StateCodec
from stepquant.evaluation.decode import DecodeSettings, decode_steps, stream_groups
from stepquant.evaluation.metrics import SPANS, span
from stepquant.models.capture import DeltaTrace

EVERY = 64  # tokens between two comparisons of states


@dataclass
class LayerErrors:
    """Squared errors and squared norms of one batch, by layer: readout `[B, D]`, state `[B, N]` every 64 tokens."""

    readout: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    state: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def decode(self, trace: DeltaTrace, codec: StateCodec | None, settings: DecodeSettings) -> Tensor:
        """`decode_layer`, with the layer's errors noted on the way."""
        y, exact = torch.empty_like(trace.v), torch.empty_like(trace.v)
        found: list[Tensor] = []
        for rows, part in stream_groups(trace):
            states: list[Tensor] = []
            pairs = zip(decode_steps(part, codec, settings), decode_steps(part, None, settings), strict=True)
            for (start, piece, fold), (_, truth, true_fold) in pairs:
                y[rows, start : start + piece.shape[1]] = piece
                exact[rows, start : start + piece.shape[1]] = truth
                if fold is not None and true_fold is not None and fold.tokens % EVERY == 0:
                    states.append(_squares(fold.state - true_fold.state, true_fold.state))
            found.append(torch.stack(states, -1) if states else y.new_zeros(2, part.q.shape[0], 0))
        after = slice(settings.prefill, None)
        error, norm = _squares(y[:, after] - exact[:, after], exact[:, after], dim=(2, 3))
        self.readout[trace.layer] = (error, norm)
        both = torch.cat(found, 1)
        self.state[trace.layer] = (both[0], both[1])
        return y

    def tensors(self) -> dict[str, Tensor]:
        """`readout` `[2, L, B, D]` and `state` `[2, L, B, N]`: squared errors, then squared norms."""
        layers = sorted(self.readout)
        stacked = {}
        for name, part in (("readout", self.readout), ("state", self.state)):
            stacked[name] = torch.stack([torch.stack([part[layer][i] for layer in layers]) for i in range(2)]).cpu()
        return stacked


def _squares(error: Tensor, reference: Tensor, dim: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    """Sums of squares of an error and its reference over `dim`, stacked, float64."""
    return torch.stack([x.double().square().sum(dim) for x in (error, reference)])


def relative_errors(tensors: dict[str, Tensor]) -> list[dict[str, float]]:
    """Relative RMS errors by layer: ``readout_first``, ``readout_last``, ``readout_all``, ``state_all`` and
    ``state_last`` (the last quarter of the comparisons), from `LayerErrors.tensors` joined over streams."""
    rows = []
    for layer in range(tensors["readout"].shape[1]):
        error, norm = tensors["readout"][:, layer]
        row = {f"readout_{part}": _ratio(span(error, part), span(norm, part)) for part in SPANS}
        error, norm = tensors["state"][:, layer]
        quarter = -(-error.shape[1] // 4)
        row["state_all"] = _ratio(error, norm)
        row["state_last"] = _ratio(error[:, -quarter:], norm[:, -quarter:])
        rows.append(row)
    return rows


def _ratio(error: Tensor, norm: Tensor) -> float:
    total = float(norm.sum())
    return float((error.sum() / total).sqrt()) if total else 0.0
