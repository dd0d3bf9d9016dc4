"""Checks before a run: all of them on every family's checkpoint, and what each failure says."""

from __future__ import annotations

import json
import time

import pytest

from stepquant.models.checks import check_all
from tests.models.checkpoints import CONFIGS, needs, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    path = save_checkpoint("qwen3_next", tmp_path_factory.mktemp("checks"))
    (path / "tokenizer.json").write_text("{}")
    return path


def failed(checks) -> dict[str, str]:
    return {check.name: check.detail for check in checks if not check.ok}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_passes(name, tmp_path):
    path = save_checkpoint(name, tmp_path)
    (path / "tokenizer.json").write_text("{}")
    began = time.monotonic()
    checks = check_all(path, cache_dir=tmp_path / "cache", device="cpu")
    assert time.monotonic() - began < 10
    assert failed(checks) == {}
    names = ["config", "transformers", "dimensions", "layers", "weights", "tokenizer", "device", "disk", "data"]
    assert [check.name for check in checks] == names
    detail = checks[0].detail
    assert ("negative eigenvalues" in detail) == (name == "olmo_hybrid")
    assert ("bounded below by -5" in detail) == (name in ("bailing_hybrid", "glm5_next"))


def change(path, tmp_path, **keys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **keys}))
    return copy


def test_layers_and_heads_come_from_the_tensors(checkpoint, tmp_path):
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    found = failed(check_all(change(checkpoint, tmp_path / "a", layer_types=kinds)))
    assert "found in the checkpoint [0, 1, 2], promised by its config [0, 2]" in found["layers"]
    found = failed(check_all(change(checkpoint, tmp_path / "b", linear_num_value_heads=8)))
    assert "gates for 4 heads, its config promises 8" in found["layers"]


def test_dimensions_disk_data_device_and_format(checkpoint, tmp_path):
    path = change(checkpoint, tmp_path, linear_key_head_dim=24, quantization_config={"quant_method": "awq", "bits": 4})
    found = failed(check_all(path, source="file", device="cuda:7", cache_dir=tmp_path, cache_bytes=10**18))
    assert "24 x 16; the packed layout takes multiples of 16" in found["dimensions"]
    assert "a run writes up to 931322574.6 GiB" in found["disk"]
    assert "needs data.path" in found["data"]
    assert "model.device=cpu" in found["device"] or "CUDA device(s)" in found["device"]
    assert "awq-4bit" in found["weights"]
    assert "model.loading=layerwise takes unquantised" in failed(check_all(path, loading="layerwise"))["weights"]


def test_unknown_model_stops_at_the_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    checks = check_all(tmp_path)
    assert [check.name for check in checks] == ["config"]
    assert "kimi_linear" in checks[0].detail
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in check_all(tmp_path)[0].detail


@needs("kimi_linear")
def test_random_weights_need_only_a_config(tmp_path):
    config = {"model_type": "kimi_linear", "num_hidden_layers": 27}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert failed(check_all(tmp_path, weights="random:0", device="cpu")) == {}
    assert "holds no .safetensors" in failed(check_all(tmp_path))["weights"]
