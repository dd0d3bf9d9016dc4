"""Transition-aware weights against equation 15 summed by brute force in float64."""

from __future__ import annotations

import pytest
import torch

from stepquant.passes.transition import transition_diagonals
from tests.codec.test_recurrence import draw, transition


def brute_force(q, k, gate, beta, update):
    """Diagonal of W_t = sum_{s>t} Phi_{s,t}^T q_s q_s^T Phi_{s,t} (equation 15), `[B, H, K]`."""
    size = q.shape[-1]
    phi = torch.eye(size, dtype=q.dtype).expand(q.shape[0], q.shape[2], size, size)
    gram = torch.zeros_like(phi)
    for s in range(update, q.shape[1]):
        phi = transition(k[:, s], gate[:, s], beta[:, s]) @ phi
        read = torch.einsum("bhk,bhkj->bhj", q[:, s], phi)
        gram = gram + read.unsqueeze(-1) * read.unsqueeze(-2)
    return gram.diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("strongest", [0.05, 5.0, 300.0])
def test_diagonals_are_equation_15(kda, chunk, strongest):
    q, k, _, gate, beta = draw(5, kda, tokens=20, strongest=strongest)
    found = transition_diagonals(q, k, gate, beta, chunk)
    assert found.shape[0] == 20 // chunk
    for n in range(found.shape[0]):
        expected = brute_force(q, k, gate, beta, 20 - (n + 1) * chunk)
        torch.testing.assert_close(found[n], expected, rtol=1e-9, atol=1e-13)


def test_float32_is_close_to_float64():
    q, k, _, gate, beta = draw(7, True, tokens=256, rows=32, strongest=0.05)
    exact = transition_diagonals(q, k, gate, beta)
    single = transition_diagonals(*(x.float() for x in (q, k, gate, beta)))
    assert float(((single - exact).abs() / exact).max()) < 1e-4
