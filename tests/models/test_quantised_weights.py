"""Already-quantised weights: the format is read from the config, enters the fingerprint, and loads where it can."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepquant.errors import ModelError
from stepquant.models.adapter import load_model
from stepquant.models.capture import capture_delta_rule
from stepquant.models.checkpoint import weight_format
from stepquant.models.fingerprint import fingerprint
from stepquant.models.layerwise import load_layerwise
from tests.models.checkpoints import save_checkpoint

GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*lm_head", "re:.*linear_attn.*", "re:.*self_attn.*", "re:.*visual.*"],
    "config_groups": {"group_0": GROUP},
}


def quantise(path):
    """FP8 weights of the MLPs with one scale a row, as compressed-tensors stores them."""
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if ".mlp." in name and name.endswith("proj.weight") and "visual" not in name:
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))


def test_format_is_read_from_the_config():
    base = {"model_type": "qwen3_next"}
    assert weight_format(base) == "unquantised"
    assert weight_format({**base, "quantization_config": {"quant_method": "awq", "bits": 4}}) == "awq-4bit"
    assert weight_format({**base, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}) == "fp8-e4m3"
    assert weight_format({**base, "quantization_config": FP8}) == "compressed-tensors-8bit-float-quantized"
    nested = {"model_type": "qwen3_5", "text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}
    assert weight_format(nested) == "gptq-4bit"


def test_fingerprint_and_refusals(tmp_path):
    path = save_checkpoint("qwen3_5", tmp_path)
    before = fingerprint(path)
    quantise(path)
    assert fingerprint(path) != before
    with pytest.raises(ModelError, match=r"compressed-tensors-8bit.*model\.loading=whole"):
        load_layerwise(path, device="cpu")


def test_compressed_tensors_load_and_trace(tmp_path):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    path = save_checkpoint("qwen3_5", tmp_path)
    ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = load_model(path, device="cpu").model(input_ids=ids, use_cache=False).logits
        quantise(path)
        loaded = load_model(path, device="cpu", dtype="float32")
        layers: list[int] = []
        with capture_delta_rule(loaded, lambda layer, _: layers.append(layer)):
            logits = loaded.model(input_ids=ids, use_cache=False).logits
    assert loaded.weight_format == "compressed-tensors-8bit-float-quantized"
    assert layers == [0, 1, 2]
    assert 1e-3 < ((logits - plain).norm() / plain.norm()).item() < 0.3
