"""Sensitivities at the heads' outputs against Jacobians by finite differences."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from stepquant.models.adapter import load_model
from stepquant.models.capture import capture_delta_rule
from stepquant.passes.gradients import LocalProbe, blocks_of, fisher_gradients
from tests.models.checkpoints import CONFIGS, needs, save_checkpoint

torch.set_num_threads(1)
TOKENS, SEGMENTS = 24, 3


class Wanted:
    """Takes the gradients of some segments."""

    kind = "local"

    def __init__(self, segments, tokens):
        self.segments, self.tokens = segments, tokens
        self.taken: dict[tuple[int, int], torch.Tensor] = {}

    def wanted_segments(self, segments):
        return [s for s in self.segments if s in segments]

    def take_gradient(self, layer, segment, gradient):
        self.taken[layer, segment] = gradient


def run(loaded, ids, observations, seed=0, first=0):
    probe = LocalProbe(observations, seed, lambda: range(first, first + len(ids)))
    seen = []

    def observer(layer, trace):
        if not probe.busy:
            seen.append(layer)

    with torch.no_grad(), contextlib.ExitStack() as stack:
        modules = stack.enter_context(capture_delta_rule(loaded, observer, None, probe.edit))
        stack.enter_context(probe.attached(modules, blocks_of(loaded.model, modules)))
        logits = loaded.model(input_ids=ids, use_cache=False).logits
    return logits, seen


@pytest.mark.parametrize(
    ("name", "dtype", "eps"),
    [
        pytest.param("qwen3_5", "float64", 1e-7, marks=needs("qwen3_5")),
        pytest.param("kimi_linear", "float32", 1e-3, marks=needs("kimi_linear")),
    ],
)
def test_mean_squared_gradients_are_the_jacobian_s_norm(name, dtype, eps, tmp_path):
    """E |J^T c|^2 over cotangents c is |J|^2; J's columns by moving one element of every token's y."""
    loaded = load_model(save_checkpoint(name, tmp_path), device="cpu", dtype=dtype)
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    rounds = [Wanted([0], TOKENS) for _ in range(64)]
    for seed, wanted in enumerate(rounds):
        run(loaded, ids, [wanted], seed=seed)
    found = torch.stack([w.taken[0, 0].double().square() for w in rounds]).mean((0, 1, 3))  # [H]
    g = loaded.geometry
    outputs: list[torch.Tensor] = []
    streams: list[torch.Tensor] = []
    nudge: list[tuple[int, int] | None] = [None]

    def edit(layer, y):
        if layer == 0 and nudge[0] is not None:
            y = y.clone()
            y[:, :, nudge[0][0], nudge[0][1]] += eps
        return y

    squares = torch.zeros(g.num_heads, dtype=torch.float64)
    with torch.no_grad(), capture_delta_rule(loaded, None, None, edit) as modules:
        (block,) = blocks_of(loaded.model, modules)[:1]
        block.register_forward_pre_hook(
            lambda _m, args, kwargs: streams.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        modules[0].register_forward_hook(lambda _m, _a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for nudge[0] in [None, *((h, v) for h in range(g.num_heads) for v in range(g.value_dim))]:
            loaded.model(input_ids=ids, use_cache=False)
    base = outputs[0]
    for index, moved in enumerate(outputs[1:]):
        column = (moved - base).double() / eps
        squares[index // g.value_dim] += column.square().sum() / (TOKENS * g.value_dim)
    expected = squares / streams[0].double().square().mean()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0)


@needs("qwen3_5")
@pytest.mark.parametrize("layer", [0, 2])
def test_fisher_gradients_are_slopes_of_the_sampled_loss(layer, tmp_path):
    """Against central differences of a loss whose labels are drawn here, from the undisturbed model."""
    loaded = load_model(save_checkpoint("qwen3_5", tmp_path), device="cpu", dtype="float64")
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    wanted, segment = Wanted([5], TOKENS), 5
    context = SimpleNamespace(model=loaded, delta_rule=None, recipe=SimpleNamespace(seed=3))
    fisher_gradients(context, ids, segment, wanted)
    with torch.no_grad():
        probabilities = loaded.model(input_ids=ids, use_cache=False).logits[0].softmax(-1)
    uniform = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(3 * 1_000_003 + segment))
    label = [next(i for i, c in enumerate(row.cumsum(-1).tolist()) if c >= u) for row, u in zip(probabilities, uniform.flatten().tolist(), strict=True)]  # fmt: skip  # noqa: E501
    direction = torch.randn(TOKENS, *wanted.taken[layer, segment].shape[1:], dtype=torch.float64)

    def loss(step):
        def edit(at, y):
            return y + step * direction if at == layer else y

        with torch.no_grad(), capture_delta_rule(loaded, None, None, edit):
            scores = loaded.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        return -float(scores[range(TOKENS), label].sum())

    expected = (loss(1e-6) - loss(-1e-6)) / 2e-6
    found = float((wanted.taken[layer, segment].double() * direction).sum())
    assert found == pytest.approx(expected, rel=2e-3)  # the loss is taken in float32
    assert sorted(wanted.taken) == [(i, segment) for i in range(3)]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_probing_changes_nothing_and_needs_only_its_segments(name, tmp_path):
    loaded = load_model(save_checkpoint(name, tmp_path), device="cpu")
    ids = torch.randint(3, 64, (SEGMENTS, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = loaded.model(input_ids=ids, use_cache=False).logits
    both = Wanted([0, 2], TOKENS), Wanted([2], 9)
    logits, seen = run(loaded, ids, both)
    assert torch.equal(logits, plain)
    count = loaded.geometry.num_delta_layers
    assert seen == list(range(count))  # traces of the probes are not shown
    assert sorted(both[0].taken) == [(layer, s) for layer in range(count) for s in (0, 2)]
    assert sorted(both[1].taken) == [(layer, 2) for layer in range(count)]
    alone = Wanted([2], TOKENS)
    run(loaded, ids[2:], [alone], first=2)
    for layer in range(count):
        shape = (loaded.geometry.num_heads, loaded.geometry.value_dim)
        assert both[1].taken[layer, 2].shape == (9, *shape)
        expected = both[0].taken[layer, 2]
        torch.testing.assert_close(alone.taken[layer, 2], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
