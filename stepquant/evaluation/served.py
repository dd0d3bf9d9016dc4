"""Decode through the very code that serves: pages, window buffers and kernels of `stepquant.runtime`.

On a GPU these are the generated Triton kernels of the artifact, on a CPU their twin in plain torch. The prefill is
exact and its state is packed once at the boundary, as a server does; then every token is one kernel step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepquant.evaluation.decode import DecodeSettings, decode_steps
from stepquant.models.capture import DeltaTrace
from stepquant.runtime.load import RankPlan, load_rank_plan
from stepquant.runtime.raw import raw_gates
from stepquant.runtime.window import WindowBuffers


@dataclass
class ServedDecoder:
    """An artifact's kernels on one device.

    Attributes:
        plan: the plan of the artifact.
        kernels: `PackedKernels` or, on a CPU, `ReferenceKernels`.
    """

    plan: RankPlan
    kernels: Any

    @classmethod
    def load(cls, directory: str | Path, device: torch.device) -> ServedDecoder:
        """Load an artifact for serving.

        Raises:
            BackendError: the kernels cannot take the plan. ArtifactError: it is damaged.
        """
        plan = load_rank_plan(Path(directory))
        return cls(plan, plan.kernels(device))

    @torch.no_grad()
    def decode_layer(self, layer: int, trace: DeltaTrace, prefill: int) -> Tensor:
        """Outputs y `[B, T, H, V]`: exact for the first `prefill` tokens, then token by token from packed pages."""
        y = torch.empty_like(trace.v)
        state = self._prefill(trace, prefill, y)
        batch, device = trace.v.shape[0], trace.v.device
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        pages = torch.zeros(batch, int(self.plan.layout.layer_bytes[layer]), dtype=torch.uint8, device=device)
        self.kernels.pack(layer, pages, slots, state.contiguous())
        spec = self.kernels.spec
        buffers = WindowBuffers.allocate(spec, batch, device) if spec.window > 1 else None
        pending = torch.zeros(batch, dtype=torch.int32, device=device)
        for t, token in _tokens(trace, prefill, spec.num_heads // spec.num_key_heads):
            out = torch.empty_like(trace.v[:, t])
            if buffers is None:
                self.kernels.step(layer, pages, slots, *token, 1.0, out, l2norm=False)
            else:
                phases = torch.full_like(pending, t % spec.window)
                self.kernels.window_step(
                    layer, pages, slots, *token, 1.0, out, buffers, slots, phases, pending, l2norm=False
                )
                pending = torch.zeros_like(pending) if t % spec.window == spec.window - 1 else pending + 1
            y[:, t] = out
        return y

    def _prefill(self, trace: DeltaTrace, prefill: int, y: Tensor) -> Tensor:
        """Fill in the exact outputs of the prefill and return its state `[B, H, K, V]`."""
        for start, piece, fold in decode_steps(trace, None, DecodeSettings(prefill)):
            if fold is not None:
                return fold.state.clone()
            y[:, start : start + piece.shape[1]] = piece
        raise AssertionError("decode_steps ends a prefill with a fold")


def _tokens(trace: DeltaTrace, prefill: int, repeat: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """q, k, v, a, b, A_log and dt_bias of each token, with the gates as raw inputs; keys once a group of heads."""
    a, b = raw_gates(trace.log_gate.flatten(2), trace.beta)
    zeros = a.new_zeros(a.shape[-1])
    q, k = trace.q[:, :, ::repeat], trace.k[:, :, ::repeat]
    for t in range(prefill, trace.v.shape[1]):
        token = (x[:, t].contiguous() for x in (q, k, trace.v, a, b))
        yield t, (*token, zeros[: trace.v.shape[2]], zeros)
