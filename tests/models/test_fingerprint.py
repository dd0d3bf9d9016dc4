"""The fingerprint: sees a fine-tune, ignores sharding, and reads little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepquant.errors import ModelError
from stepquant.models.fingerprint import WINDOW, checkpoint_tensors, fingerprint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(512, 1024, generator=generator).bfloat16() for i in range(4)}
    tensors["norm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next", "transformers_version": "5.24.0"}))
    return tmp_path


def rewrite(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("name", ["layers.2.weight", "norm.weight"])
def test_a_fine_tune_of_one_tensor_changes_it(checkpoint, name):
    before = fingerprint(checkpoint)
    assert fingerprint(checkpoint) == before
    rewrite(
        checkpoint, lambda tensors: tensors.__setitem__(name, (tensors[name].float() * 1.01).to(tensors[name].dtype))
    )
    assert fingerprint(checkpoint) != before


def test_low_rank_update_and_part_of_a_tensor_are_seen(checkpoint):
    before = fingerprint(checkpoint)
    rewrite(checkpoint, lambda tensors: tensors["layers.0.weight"].__getitem__(slice(500, 512)).mul_(2))
    assert fingerprint(checkpoint) != before


def test_single_value_needs_the_full_reading(checkpoint):
    full = fingerprint(checkpoint, windows=None)
    rewrite(checkpoint, lambda tensors: tensors["layers.3.weight"].view(-1).__setitem__(300_001, 9.0))
    assert fingerprint(checkpoint, windows=None) != full


def test_sharding_and_writer_do_not_matter_but_config_does(checkpoint):
    before = fingerprint(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen3_next", "transformers_version": "5.30.0"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert fingerprint(checkpoint) == before
    (checkpoint / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert fingerprint(checkpoint) != before
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of its 2 shards, first b\.safetensors"):
        fingerprint(checkpoint)


def test_reads_a_small_part(checkpoint, monkeypatch):
    read = []
    original = Path.open

    def counted(self, *args, **kwargs):
        handle = original(self, *args, **kwargs)
        if self.suffix != ".safetensors":
            return handle

        class Counting:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                handle.close()

            def read(self, n=-1):
                data = handle.read(n)
                read.append(len(data))
                return data

            def seek(self, *a):
                return handle.seek(*a)

        return Counting()

    monkeypatch.setattr(Path, "open", counted)
    fingerprint(checkpoint)
    assert sum(read) < 4 * 4 * WINDOW + 8192
    assert (checkpoint / "model.safetensors").stat().st_size > 4_000_000


def test_damaged_files_are_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        checkpoint_tensors(checkpoint)
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        fingerprint(checkpoint)
    file.unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors"):
        fingerprint(checkpoint)


def test_random_weights_read_only_the_config(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert fingerprint(checkpoint, weights="random:0") != fingerprint(checkpoint, weights="random:1")
