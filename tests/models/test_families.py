"""Every family: a small random checkpoint saved by transformers, loaded and traced like any other."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
import torch

from stepquant.errors import ModelError
from stepquant.models.adapter import load_model
from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.models.families import (
    FAMILY_TABLE,
    check_transformers,
    find_family,
    gate_lower_bound,
    geometry_from_config,
    layer_kinds,
    read_config,
)
from tests.models.checkpoints import CONFIGS, needs, save_checkpoint

torch.set_num_threads(1)
TOKENS = 70  # more than one chunk of 64


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: save_checkpoint(name, root))


def naive(trace: DeltaTrace) -> tuple[torch.Tensor, torch.Tensor]:
    """Independent float64 recurrence, one token at a time, written from the paper's equations."""
    q, k, v, gate, beta = (x.double() for x in (trace.q, trace.k, trace.v, trace.log_gate, trace.beta))
    batch, tokens, heads, rows = k.shape
    state = torch.zeros(batch, heads, rows, v.shape[-1], dtype=torch.float64)
    if trace.initial_state is not None:
        state = trace.initial_state.double()
    outputs = []
    for t in range(tokens):
        decay = gate[:, t].exp()
        decay = decay[..., None] if decay.ndim == 2 else decay
        state = decay[..., None] * state
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + beta[:, t, :, None, None] * torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t] - predicted)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_trace_reproduces_native_output(name, checkpoints, monkeypatch):
    path = checkpoints(name)
    family = FAMILY_TABLE[name]
    module = importlib.import_module(family.module)
    native: list[torch.Tensor] = []

    def record(function):
        @functools.wraps(function)
        def recorded(*args, **kwargs):
            result = function(*args, **kwargs)
            native.append(result[0])
            return result

        return recorded

    for function in family.functions:  # before loading: older modelling files bind them in __init__
        monkeypatch.setattr(module, function, record(getattr(module, function)))
    before = [getattr(module, function) for function in family.functions]
    loaded = load_model(path)
    geometry = loaded.geometry
    seen: list[int] = []
    outputs: list[torch.Tensor] = []

    def observe(layer: int, trace: DeltaTrace) -> None:
        shape = (2, TOKENS, geometry.num_heads)
        assert trace.q.shape == trace.k.shape == (*shape, geometry.key_dim)
        assert trace.v.shape == (*shape, geometry.value_dim)
        assert trace.log_gate.shape == (shape if geometry.family == "gdn" else (*shape, geometry.key_dim))
        assert trace.beta.shape == shape
        assert (trace.log_gate <= 0).all()
        assert (trace.beta <= geometry.beta_max).all()
        bound = gate_lower_bound(loaded.config)
        assert bound is None or (trace.log_gate >= bound).all()
        seen.append(layer)
        outputs.append(naive(trace)[0])

    ids = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), capture_delta_rule(loaded, observe):
        logits = loaded.model(input_ids=ids, use_cache=False).logits
    assert seen == list(range(geometry.num_delta_layers))
    for ours, theirs in zip(outputs, native, strict=True):
        assert relative(ours, theirs) < 1e-4
    assert [getattr(module, function) for function in family.functions] == before

    with torch.no_grad(), capture_delta_rule(loaded, replace=lambda _, trace: naive(trace)[0]):
        replaced = loaded.model(input_ids=ids, use_cache=False).logits
    assert relative(replaced, logits) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("kimi_linear", marks=needs("kimi_linear"))])
def test_incremental_decode_is_intercepted(name, checkpoints):
    loaded = load_model(checkpoints(name))
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(2))
    calls: list[tuple[int, bool, bool]] = []

    def replace(layer: int, trace: DeltaTrace):
        calls.append((layer, trace.recurrent, trace.initial_state is not None))
        y, state = naive(trace)
        return y, state.float()

    with torch.no_grad():
        whole = loaded.model(input_ids=ids, use_cache=False).logits
        with capture_delta_rule(loaded, replace=replace):
            generated = loaded.model.generate(ids[:, :8], max_new_tokens=3, do_sample=False)
        plain = loaded.model.generate(ids[:, :8], max_new_tokens=3, do_sample=False)
        with pytest.raises(ModelError, match="final state"), capture_delta_rule(loaded, replace=lambda _, t: t.v):
            loaded.model(input_ids=ids, use_cache=True)
    assert whole.isfinite().all()
    assert torch.equal(generated, plain)
    layers = loaded.geometry.num_delta_layers
    assert calls == [(i, False, False) for i in range(layers)] + [(i, True, True) for i in range(layers)] * 2


def test_gradients_flow_through_a_replacement(checkpoints):
    loaded = load_model(checkpoints("qwen3_5"))
    leaves: dict[int, torch.Tensor] = {}

    def replace(layer: int, trace: DeltaTrace) -> torch.Tensor:
        y = naive(trace)[0].float().detach().requires_grad_() if layer == 0 else naive(trace)[0].float()
        leaves.setdefault(layer, y)
        return y

    ids = torch.randint(3, 64, (1, 9))
    with torch.enable_grad(), capture_delta_rule(loaded, replace=replace):
        loaded.model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[0].grad.abs().sum() > 0


def test_bypassed_function_is_told(checkpoints, monkeypatch):
    loaded = load_model(checkpoints("qwen3_5"))
    monkeypatch.setattr(type(loaded.delta_layers[0]), "forward", lambda self, hidden_states, **_: hidden_states)
    with pytest.raises(ModelError, match="without calling"), capture_delta_rule(loaded):
        loaded.model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_random_weights_are_seeded(name, checkpoints):
    path = checkpoints(name)
    ids = torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(1))
    models = [load_model(path, weights=f"random:{seed}") for seed in (1, 1, 2)]
    with torch.no_grad():
        one, again, other = (m.model(input_ids=ids, use_cache=False).logits for m in models)
    assert one.isfinite().all()
    assert one.std() > 1e-3
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
    assert models[0].synthetic
    assert models[0].fingerprint == models[1].fingerprint != models[2].fingerprint
    assert not any(t.is_meta for t in [*models[0].model.parameters(), *models[0].model.buffers()])


def test_geometry_of_real_models():
    qwen = {"model_type": "qwen3_5", "text_config": {
        "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_value_heads": 48, "full_attention_interval": 4,
    }}  # fmt: skip
    geometry = geometry_from_config(qwen)
    assert (geometry.num_delta_layers, geometry.num_heads, geometry.num_key_heads) == (48, 48, 16)
    assert (geometry.fp32_bytes, geometry.conv_bytes, geometry.kv_bytes_per_token) == (150_994_944, 2_949_120, 65_536)
    linear = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [i for i in range(1, 27) if i % 4],
              "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}  # fmt: skip
    kimi = {"model_type": "kimi_linear", "num_hidden_layers": 27, "linear_attn_config": linear}
    geometry = geometry_from_config(kimi)
    assert geometry.layers[:4] == (0, 1, 2, 4)
    assert (geometry.num_delta_layers, geometry.fp32_bytes) == (20, 41_943_040)
    assert (geometry.conv_bytes, geometry.kv_bytes_per_token) == (20 * 3 * 4096 * 3 * 2, 7 * (512 + 64) * 2)
    olmo = geometry_from_config({"model_type": "olmo_hybrid"})
    assert (olmo.key_dim, olmo.value_dim, olmo.num_heads, olmo.beta_max) == (96, 192, 30, 2.0)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_defaults_agree_with_transformers(name, checkpoints):
    import transformers

    config = transformers.AutoConfig.for_model(name).to_dict()
    bare = geometry_from_config({"model_type": name})
    assert geometry_from_config(config) == bare
    text = transformers.AutoConfig.for_model(name).get_text_config()
    assert [kind == "linear_attention" for kind in layer_kinds({"model_type": name})] == [
        kind == "linear_attention" for kind in text.layer_types
    ]
    saved = read_config(checkpoints(name))
    assert geometry_from_config(saved) == geometry_from_config({"model_type": name, **CONFIGS[name]})
    assert find_family(saved) is FAMILY_TABLE[name]


def test_refusals_name_what_is_known(tmp_path: Path, checkpoints, monkeypatch):
    with pytest.raises(ModelError, match=r"'qwen3_6'.*did you mean 'qwen3_5'.*kimi_linear"):
        geometry_from_config({"model_type": "qwen3_6"})
    with pytest.raises(ModelError, match="builtin:tiny_gdn"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="exactly once"):
        geometry_from_config({"model_type": "kimi_linear", "num_hidden_layers": 3,
                              "linear_attn_config": {"kda_layers": [0, 1], "full_attn_layers": [2]}})  # fmt: skip
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.6.0")
    monkeypatch.setattr("stepquant.models.family_table.version", lambda _: "5.6.0")
    missing = FAMILY_TABLE["lara_mini"].__class__("lara_maxi", "gdn", "LaraMaxi")
    with pytest.raises(ModelError, match=r"transformers 5.6.0 has no lara_maxi.*qwen3_5"):
        check_transformers(missing)


def test_config_that_promises_other_layers_is_refused(tmp_path: Path, checkpoints):
    import json
    import shutil

    path = tmp_path / "broken"
    shutil.copytree(checkpoints("qwen3_next"), path)
    config = json.loads((path / "config.json").read_text())
    config["layer_types"] = config["layer_types"][::-1]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="missing keys"):
        load_model(path)
