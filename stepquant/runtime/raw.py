"""Raw gate inputs that make the kernels compute given gates: they take a and b as a model's projections give them."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_gates(log_gate: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs a and b for A_log = dt_bias = 0, where the kernels form log_gate = -softplus(a) and beta = sigmoid(b).

    Args:
        log_gate: at most 0, any shape; beta: in [0, 1], any shape.
    """
    rate = -log_gate
    return torch.where(rate > 20, rate, torch.log(torch.expm1(rate))), torch.logit(beta)
