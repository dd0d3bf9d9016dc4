"""The recurrence against float64 identities of the paper (equations 1, 5, 15, 19, proposition 1)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepquant.codec.chunks import GDN_CHUNK, KDA_CHUNK, delta_rule, states_at, states_every
from stepquant.codec.recurrence import expand_gate, replay, step, transition_rows


def draw(seed, kda, batch=2, tokens=12, heads=2, rows=8, columns=6, strongest=6.0):
    """Random inputs in float64 under proposition 1's conditions: |k| <= 1, beta in [0, 1], gates in [0, 1]."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    q, k = randn(batch, tokens, heads, rows), randn(batch, tokens, heads, rows)
    k = k / k.norm(dim=-1, keepdim=True)
    q = q / q.norm(dim=-1, keepdim=True) * rows**-0.5
    gate = -rand(batch, tokens, heads, *([rows] if kda else [])) * strongest
    return q, k, randn(batch, tokens, heads, columns), gate, rand(batch, tokens, heads)


def transition(k, log_gate, beta):
    """A = (I - beta k k^T) D of equation 2, written out as a matrix."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    gate = expand_gate(log_gate, k).exp().expand_as(k)
    return (eye - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)) @ torch.diag_embed(gate)


@pytest.mark.parametrize("kda", [False, True])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_step_is_equation_2(kda, seed):
    q, k, v, gate, beta = (x[:, 0] for x in draw(seed, kda))
    state = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    updated, y = step(state, q, k, v, gate, beta)
    expected = transition(k, gate, beta) @ state + beta[..., None, None] * k.unsqueeze(-1) * v.unsqueeze(-2)
    torch.testing.assert_close(updated, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, (expected.transpose(-1, -2) @ q.unsqueeze(-1)).squeeze(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kda", [False, True])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_errors_propagate_as_equation_5_and_contract(kda, seed):
    q, k, v, gate, beta = draw(seed, kda)
    error = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    reference, disturbed = torch.zeros_like(error), error.clone()
    for t in range(q.shape[1]):
        inputs = [x[:, t] for x in (q, k, v, gate, beta)]
        before = disturbed - reference
        reference, y = step(reference, *inputs)
        disturbed, noisy = step(disturbed, *inputs)
        a = transition(k[:, t], gate[:, t], beta[:, t])
        torch.testing.assert_close(disturbed - reference, a @ before, rtol=1e-9, atol=1e-12)
        rows = transition_rows(k[:, t], q[:, t], gate[:, t], beta[:, t])
        torch.testing.assert_close(noisy - y, torch.einsum("bhk,bhkv->bhv", rows, before), rtol=1e-9, atol=1e-12)
        assert bool((torch.linalg.matrix_norm(a, 2) <= 1 + 1e-12).all())
        assert bool((torch.linalg.matrix_norm(a, 2) <= expand_gate(gate[:, t], k[:, t]).exp().amax(-1) + 1e-12).all())


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_directional_contraction_is_equation_19(seed):
    _, k, _, gate, beta = (x[:, 0] for x in draw(seed, kda=False))
    error = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    left = (transition(k, gate, beta) @ error).square().sum((-1, -2))
    along = torch.einsum("bhk,bhkv->bhv", k, error).square().sum(-1)
    norm = k.square().sum(-1)
    right = gate.exp().square() * (error.square().sum((-1, -2)) - beta * (2 - beta * norm) * along)
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("every", [1, 4, 8])
@pytest.mark.parametrize("strongest", [0.01, 6.0, 300.0])
def test_chunked_states_match_the_replay(kda, every, strongest):
    q, k, v, gate, beta = draw(3, kda, tokens=19, strongest=strongest)
    initial = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    seen = 0
    for done, state in states_every(k, v, gate, beta, every, initial):
        _, expected = replay(*(x[:, :done] for x in (q, k, v, gate, beta)), state=initial)
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)
        seen = done
    assert seen == 19 // every * every


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("strongest", [0.01, 6.0, 300.0])
@pytest.mark.parametrize("size", [None, 16, 64])
def test_states_at_any_update_match_the_replay(kda, strongest, size):
    q, k, v, gate, beta = draw(7, kda, batch=3, tokens=150, strongest=strongest)
    rows, done = [2, 0, 2, 2, 0, 2], [150, 64, 8, 129, 7, 0]  # chunk boundaries, middles, the end, nothing
    found = states_at(k, v, gate, beta, rows, done, size)
    for state, row, count in zip(found, rows, done, strict=True):
        _, expected = replay(*(x[row : row + 1, :count] for x in (q, k, v, gate, beta)))
        torch.testing.assert_close(state, expected[0], rtol=1e-9, atol=1e-12)
    assert states_at(k, v, gate, beta, [], []).shape == (0, 2, 8, 6)


class Count(TorchDispatchMode):
    """Operations that launch a kernel on a GPU, and the bytes that they read and write: views do neither."""

    def __init__(self):
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        if any(x.untyped_storage().data_ptr() not in storages for x in outputs):
            self.launches += 1
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


@pytest.mark.parametrize("kda", [False, True])
def test_a_few_samples_cost_few_launches(kda):
    _, k, v, gate, beta = draw(1, kda, batch=4, tokens=2048, heads=1, rows=128, columns=128)
    rows, done = [0, 1, 1, 3, 2, 0, 3, 1], [2040, 8, 1000, 504, 720, 88, 1304, 1640]
    with Count() as at:
        states_at(k, v, gate, beta, rows, done, KDA_CHUNK if kda else GDN_CHUNK)
    with Count() as every:
        for _ in states_every(k, v, gate, beta, 8):
            pass
    assert at.launches < (0.8 if kda else 0.25) * every.launches
    assert at.bytes < every.bytes


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 37, 130])
@pytest.mark.parametrize("strongest", [0.01, 6.0, 300.0])
def test_chunked_outputs_match_the_replay(kda, tokens, strongest):
    q, k, v, gate, beta = draw(4, kda, batch=1, tokens=tokens, strongest=strongest)
    initial = torch.randn(1, 2, 8, 6, dtype=torch.float64)
    y, state = delta_rule(q, k, v, gate, beta, initial)
    expected, final = replay(q, k, v, gate, beta, initial)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kda", [False, True])
def test_chunked_gradients_match_the_replay(kda):
    inputs = [x.requires_grad_() for x in draw(4, kda, batch=1, tokens=37)]
    weight = torch.randn(1, 37, 2, 6, dtype=torch.float64)
    found = torch.autograd.grad((delta_rule(*inputs)[0] * weight).sum(), inputs)
    expected = torch.autograd.grad((replay(*inputs)[0] * weight).sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
