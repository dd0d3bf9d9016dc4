"""The built-in tiny models are what they say: size, trained on such text, gates, a byte tokenizer, clean splits."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import pytest
import torch

from stepquant.errors import DataError, ModelError
from stepquant.models.tiny import (
    SEPARATOR,
    TINY_MODELS,
    byte_ids,
    stdlib_segments,
    stdlib_text,
    tiny_model_path,
)

transformers = pytest.importorskip("transformers", minversion="5.17")

# Text length per model: transformers' reference KDA on a CPU is some ten times slower than its GDN.
_CASES = {
    "tiny_gdn": ("qwen3_5", "torch_chunk_gated_delta_rule", (2, 512)),
    "tiny_kda": ("kimi_linear", "chunk_kimi_delta_attention", (1, 320)),
}
# Means over long text are 1.35 and 1.25; single modules of the library differ by a factor of two.
_MAX_BITS_PER_BYTE = 2.5


@pytest.fixture(scope="module", params=TINY_MODELS)
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One forward over held-out text: logits [B, T, vocabulary], its ids, and every delta-rule layer's log gates."""
    name: str = request.param
    family, function, (rows, length) = _CASES[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    original, gates = getattr(module, function), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        gates.append(kwargs["g"])
        return original(*args, **kwargs)

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model_path(name), dtype=torch.float32, output_loading_info=True
    )
    ids = stdlib_segments("evaluation", rows, length, seed=1)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, function, spy)
        logits = model(input_ids=ids, use_cache=False).logits
    return {"name": name, "info": info, "ids": ids, "logits": logits, "gates": gates, "model": model}


def test_loads_completely_and_predicts(run: dict[str, Any]) -> None:
    """No tensor is missing or left over, logits are finite, and held-out text costs far less than 8 bits a byte."""
    assert not run["info"]["missing_keys"]
    assert not run["info"]["mismatched_keys"]
    assert not run["info"]["unexpected_keys"]
    assert torch.isfinite(run["logits"]).all()
    loss = torch.nn.functional.cross_entropy(run["logits"][:, :-1].flatten(0, 1), run["ids"][:, 1:].flatten())
    assert loss.item() / math.log(2) < _MAX_BITS_PER_BYTE


def test_gates_span_short_and_long_half_lives(run: dict[str, Any]) -> None:
    """Six delta-rule layers of 8 heads; half-lives from a few tokens to over a thousand."""
    assert len(run["gates"]) == 6
    assert all(g.shape[2] == 8 and (g <= 0).all() for g in run["gates"])
    means = torch.cat([g.float().flatten(0, 1).mean(0).flatten() for g in run["gates"]])
    half_lives = math.log(2) / -means
    assert half_lives.min() < 4
    assert half_lives.max() > 1000
    assert ((half_lives > 10) & (half_lives < 500)).float().mean() > 0.2


@pytest.mark.parametrize("name", TINY_MODELS)
def test_checkpoint_files(name: str) -> None:
    """At most 8 MB, bf16 but for the gates, under the tensor names that SGLang reads too; its training on record."""
    from safetensors import safe_open

    path = tiny_model_path(name)
    assert (path / "model.safetensors").stat().st_size <= 8_000_000
    with safe_open(path / "model.safetensors", "pt") as tensors:
        kinds = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    wide = {key for key, kind in kinds.items() if kind != "BF16"}
    assert wide == {key for key in kinds if key.endswith(("A_log", "dt_bias"))}
    expected = {
        "tiny_gdn": ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "model.visual.pos_embed.weight"),
        "tiny_kda": ("model.layers.0.self_attn.q_conv1d.weight", "model.layers.0.self_attn.f_b_proj.weight"),
    }
    assert set(expected[name]) <= set(kinds)
    record = json.loads((path / "training.json").read_text())
    assert record["half_life_by_mean_log_gate"]["max"] > 1000
    assert not set(record["text"]["held_out_packages"]) & {"stdlib", "lib"}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokenizer_is_bytes(name: str) -> None:
    """Ids are byte values and text comes back unchanged, whatever it holds."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_path(name))
    text = "def f(x):\n\treturn  'é€𝄞\x00\r\n  end '  # ­​\n\n don't 123\x7f" + "".join(map(chr, range(1, 0x250)))
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == byte_ids(text)
    assert tokenizer(text)["input_ids"] == byte_ids(text)
    assert tokenizer.decode(byte_ids(text)) == text
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (320, SEPARATOR, 257)
    assert tokenizer("a<|endoftext|>b")["input_ids"] == [97, SEPARATOR, 98]


def test_generates_with_its_cache(run: dict[str, Any]) -> None:
    """Greedy continuation with the recurrent cache stays within the bytes and is repeatable."""
    prompt = torch.tensor([byte_ids("import os\nimport sys\n\n\ndef main(")])
    out = [run["model"].generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :] for _ in range(2)]
    assert torch.equal(*out)
    assert (out[0] <= SEPARATOR).all()


def test_splits_are_disjoint() -> None:
    """No document of one split is in the other, and both are large enough for their use."""
    calibration, evaluation = (stdlib_text(split) for split in ("calibration", "evaluation"))
    assert not set(calibration) & set(evaluation)
    assert sum(map(len, calibration)) > 3_000_000
    assert sum(map(len, evaluation)) > 800_000


def test_segments_are_seeded_and_distinct() -> None:
    """Same arguments, same ids; another seed, other ids; no block twice; a tokenizer gives what bytes give."""
    ids = stdlib_segments("calibration", 16, 256, seed=3)
    assert ids.shape == (16, 256)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, stdlib_segments("calibration", 16, 256, seed=3))
    assert not torch.equal(ids, stdlib_segments("calibration", 16, 256, seed=4))
    assert len({tuple(row.tolist()) for row in ids}) == 16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_path("tiny_kda"))
    assert torch.equal(ids, stdlib_segments("calibration", 16, 256, seed=3, tokenizer=tokenizer))


def test_errors_say_what_to_do() -> None:
    """Unknown names, splits and requests for more text than there is are refused by name."""
    with pytest.raises(ModelError, match=r"tiny_gnd.*did you mean 'tiny_gdn'"):
        tiny_model_path("tiny_gnd")
    with pytest.raises(DataError, match=r"'train'.*expected calibration or evaluation"):
        stdlib_text("train")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"holds [\d,]+ bytes; expected at least 10,000,000,000"):
        stdlib_text("evaluation", min_bytes=10**10)
    with pytest.raises(DataError, match=r"segments need 10,000,000,000"):
        stdlib_segments("evaluation", 10_000, 1_000_000)
    with pytest.raises(DataError, match=r"n_segments is 0"):
        stdlib_segments("evaluation", 0, 16)
