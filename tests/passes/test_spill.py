"""Spilled products: what comes back is what was written, and a disk that cannot hold it is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stepquant.errors import ArtifactError
from stepquant.files import write_json
from stepquant.models.layerwise import Reached, load_progress, save_progress
from stepquant.passes import spill
from stepquant.passes.cache import Cache
from stepquant.passes.protocol import Product
from stepquant.passes.spill import LayerStore, SpilledProduct, check_space, spilled_bytes

FIELDS = {"a": (torch.float16, (5, 3)), "b": (torch.float32, (5,)), "c": (torch.int64, (2, 2))}
VALUES = {"a": torch.randn(5, 3), "b": torch.randn(5), "c": torch.tensor([[1, 2], [3, 1 << 40]])}


def fill(store: LayerStore, layers: int) -> None:
    for layer in range(layers):
        for row in (3, 0):  # out of order, in two pieces
            for name in ("a", "b"):
                store.write(layer, name, row, VALUES[name][row : row + (2 if row else 3)] + layer)
        store.write(layer, "c", 0, VALUES["c"] + layer)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_was_written_comes_back(on_disk, tmp_path):
    store = LayerStore(tmp_path / "spill" if on_disk else None, 2, FIELDS, "rows")
    fill(store, 2)
    product = store.finish({"x": 1})
    for layer in range(2):
        assert torch.equal(product[f"a.{layer}"], (VALUES["a"] + layer).half())
        assert torch.equal(product[f"b.{layer}"], VALUES["b"] + layer)
        assert torch.equal(product[f"c.{layer}"], VALUES["c"] + layer)
    if on_disk:  # any other reader of safetensors agrees
        plain = load_file(tmp_path / "spill" / "1.safetensors")
        assert torch.equal(plain["c"], VALUES["c"] + 1)
        assert spilled_bytes(1, FIELDS) <= (tmp_path / "spill" / "1.safetensors").stat().st_size


def test_rows_outside_are_a_mistake(tmp_path):
    store = LayerStore(tmp_path, 1, FIELDS, "rows")
    with pytest.raises(ValueError, match="do not fit"):
        store.write(0, "b", 4, torch.zeros(2))


def test_an_interrupted_run_finds_its_files(tmp_path):
    first = LayerStore(tmp_path, 2, FIELDS, "rows")
    assert first.fresh
    fill(first, 2)
    again = LayerStore(tmp_path, 2, FIELDS, "rows")
    assert not again.fresh
    assert torch.equal(again.finish({})["b.1"], VALUES["b"] + 1)
    with (tmp_path / "1.safetensors").open("r+b") as file:  # cut short
        file.truncate(40)
    assert LayerStore(tmp_path, 2, FIELDS, "rows").fresh
    with (tmp_path / "1.safetensors").open("r+b") as file:  # its header is whole
        file.truncate((tmp_path / "0.safetensors").stat().st_size - 1)
    assert LayerStore(tmp_path, 2, FIELDS, "rows").fresh
    assert LayerStore(tmp_path, 2, {**FIELDS, "b": (torch.float32, (6,))}, "rows").fresh


def test_the_cache_takes_the_files_over_and_refuses_damaged_ones(tmp_path):
    cache = Cache(tmp_path)
    store = LayerStore(cache.working("k" * 32) / "p", 2, FIELDS, "rows")
    fill(store, 2)
    product = store.finish({"x": 1})
    cache.store("p", "key", product)
    cache.drop_partial("k" * 32)
    assert torch.equal(product["b.1"], VALUES["b"] + 1)  # still readable where it was made
    found = cache.load("p", "key")
    assert isinstance(found, SpilledProduct)
    assert found.facts == {"x": 1}
    assert torch.equal(found["a.0"], VALUES["a"].half())
    file = cache.path("p", "key") / "1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert cache.load("p", "key") is None
    assert not cache.has("p", "key")


def test_only_what_was_left_for_a_week_is_deleted(tmp_path):
    cache = Cache(tmp_path)
    for name in ("old", "new", "touched"):
        fill(LayerStore(cache.working(name) / "p", 1, FIELDS, "rows"), 1)
    for name in ("old", "touched"):
        for path in (cache.working(name), *cache.working(name).rglob("*")):
            os.utime(path, (0, time.time() - 8 * 86400))
    os.utime(cache.working("touched") / "p" / "0.safetensors")
    assert cache.drop_stale() == ["old"]
    assert sorted(path.name for path in (tmp_path / "partial").iterdir()) == ["new", "touched"]
    assert Cache(tmp_path / "none").drop_stale() == []


def test_low_space_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 300 << 20))
    check_space(tmp_path, 40 << 20, "state samples")
    with pytest.raises(ArtifactError, match=r"has 0\.29 GiB free, state samples take 0\.98 GiB.*cache\.dir=DIR"):
        check_space(tmp_path / "not" / "there", 1000 << 20, "state samples")
    big = {"states": (torch.float32, (1 << 20, 100))}
    with pytest.raises(ArtifactError, match="state samples take"):
        LayerStore(tmp_path / "spill", 3, big, "state samples")
    assert not (tmp_path / "spill").exists()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_named(call, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "pwrite":
        store = LayerStore(tmp_path, 1, FIELDS, "rows")
    monkeypatch.setattr(spill.os, call, full)
    with pytest.raises(ArtifactError, match=r"0\.safetensors could not be written: No space left.*cache\.dir=DIR"):
        (LayerStore(tmp_path, 1, FIELDS, "rows") if call != "pwrite" else store).write(0, "b", 0, VALUES["b"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_small_files_name_a_full_disk_too(tmp_path, monkeypatch):
    """A device on which every write fails, behind the temporary name."""
    from stepquant import files

    def full(prefix, suffix, dir):
        name = f"{dir}/{prefix}{suffix}"
        os.symlink("/dev/full", name)
        return os.open(name, os.O_WRONLY), name

    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    monkeypatch.setattr(files.os, "chmod", lambda *_: pytest.fail("went on after a failed write"))
    with pytest.raises(ArtifactError, match=r"x\.json could not be written: No space left on device"):
        write_json(tmp_path / "x.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_progress_of_a_layerwise_run_names_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("stepquant.models.layerwise.save_file", full)
    with pytest.raises(ArtifactError, match=r"layerwise\.safetensors could not be written .*cache\.dir=DIR"):
        save_progress(tmp_path, "key", Reached(1, torch.zeros(2), {}))
    assert load_progress(tmp_path, "key") is None
    assert list(tmp_path.iterdir()) == []


def test_an_entry_of_an_older_kind_is_not_there(tmp_path):
    """Facts without a hash of their own, as earlier versions wrote them: such a pass must run, not be called reused."""
    cache = Cache(tmp_path)
    cache.store("distortion", "k", Product({"x": torch.ones(2)}, {"n": 1}))
    assert cache.has("distortion", "k")
    facts = next(tmp_path.rglob("facts.json"))
    facts.write_text(json.dumps({k: v for k, v in json.loads(facts.read_text()).items() if k != "identity"}))
    assert not cache.has("distortion", "k")
    assert not facts.exists()
    assert cache.load("distortion", "k") is None
