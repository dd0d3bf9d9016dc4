"""Rollout costs against a float64 recurrence with the same codec, step by step."""

from __future__ import annotations

import pytest
import torch

from stepquant.codec.recurrence import replay, step
from stepquant.codec.registry import make_codec
from stepquant.codec.spec import CodecSpec
from stepquant.passes import rollout as rollout_module
from stepquant.passes.protocol import Product
from stepquant.passes.rollout import rollout, rollout_table
from tests.codec.test_recurrence import draw

TOKENS, START = 72, 24


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("window", [1, 4])
def test_costs_are_those_of_the_recurrence(kda, window):
    q, k, v, gate, beta = (
        x[0].float() for x in draw(9, kda, batch=1, tokens=TOKENS, rows=16, columns=32, strongest=0.5)
    )
    sensitivity = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(0))
    w, spec = torch.ones(2, 16), CodecSpec(codebook="shared" if kda else "head")
    rows, heads, tokens = rollout(q, k, v, gate, beta, sensitivity, w, spec, (4, 8), window)
    counted = START + (TOKENS - START) // 2  # errors have to build up first
    assert tokens == TOKENS - counted
    inputs = [x.double().unsqueeze(0) for x in (q, k, v, gate, beta)]
    _, exact = replay(*(x[:, :START] for x in inputs))
    for index, bits in enumerate((4, 8)):
        codec = make_codec(torch.full((2, 16), bits, dtype=torch.uint8), w, spec, 32)
        reference = exact.clone()
        quantised = codec.roundtrip(exact.float()).double()
        expected = torch.zeros(2, dtype=torch.float64)
        for t in range(START, TOKENS):
            now = [x[:, t] for x in inputs]
            reference, y = step(reference, *now)
            quantised, noisy = step(quantised, *now)
            if t >= counted:
                expected += sensitivity[t].double() * (noisy - y).square().sum(-1)[0]
            if (t + 1) % window == 0:
                quantised = codec.roundtrip(quantised.float()).double()
        torch.testing.assert_close(
            heads[:, index], expected, rtol=5e-2, atol=1e-9
        )  # float32 rounds a code now and then
    assert bool((heads[:, 0] > heads[:, 1]).all())
    assert bool((rows > 0).all())


def test_heads_share_out_their_exact_cost_and_pivots_scale_rows():
    rows = torch.rand(1, 2, 4, 3, dtype=torch.float64)
    heads = torch.rand(1, 2, 3, dtype=torch.float64)
    before, after = torch.rand(1, 2, 4, 3, dtype=torch.float64), torch.rand(1, 2, 4, 3, dtype=torch.float64)
    products = {"rollout": Product({"rows": rows, "heads": heads}), "distortion": Product({"row_error": before}),
                "pivot_distortion": Product({"row_error": after})}  # fmt: skip
    torch.testing.assert_close(rollout_table(products, True, "distortion").sum(2), heads)
    torch.testing.assert_close(rollout_table(products, False, "distortion"), rows)
    scaled = rollout_table(products, False, "pivot_distortion")
    torch.testing.assert_close(scaled[..., :2], (rows * after / before)[..., :2])
    torch.testing.assert_close(scaled[..., 2], rows[..., 2])


def test_the_prefill_is_whole_chunks():
    assert rollout_module.PREFILL % 8 == 0


def test_pieces_run_together_cost_what_they_cost_one_by_one():
    """As many pieces at once as on a GPU, against the loop of a CPU."""
    pieces = [draw(seed, True, batch=1, tokens=48, rows=16, columns=32, strongest=0.5) for seed in (1, 2, 3)]
    inputs = [torch.cat(parts).float() for parts in zip(*pieces, strict=True)]
    inputs.append(torch.rand(3, 48, 2))
    w, spec = torch.rand(2, 16) + 0.5, CodecSpec(codebook="shared")
    together = rollout(*(rollout_module._pieces(x) for x in inputs), w.repeat(3, 1), spec, (4, 16), 4)
    apart = [rollout(*(x[i] for x in inputs), w, spec, (4, 16), 4) for i in range(3)]
    for index in range(2):
        expected = torch.stack([part[index] for part in apart]).sum(0)
        torch.testing.assert_close(together[index].unflatten(0, (3, 2)).sum(0), expected, rtol=1e-5, atol=1e-12)
    assert together[2] == apart[0][2]
