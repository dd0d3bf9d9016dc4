"""Compiles that share one cache directory at the same time: one traces, the others wait and take its products."""

from __future__ import annotations

import threading

import pytest
import torch

from stepquant.config import compose_recipe
from stepquant.errors import ArtifactError
from stepquant.passes import trace
from stepquant.passes.cache import Cache
from stepquant.passes.compile import compile_recipe
from stepquant.passes.progress import Progress

SECONDS = 60


def test_two_compiles_at_once_both_succeed(tmp_path, monkeypatch):
    said, done, started, waited = [], {}, threading.Event(), threading.Event()
    original = trace.watch_batch

    def say(self, message):
        said.append(message)
        if "waiting" in message:
            waited.set()

    def slow(context, tokens, rows, observations):
        started.set()
        assert waited.wait(SECONDS), "the second compile did not wait"
        original(context, tokens, rows, observations)

    def compiling(name, *overrides):
        settings = ["data.segments=2", "data.length=64", "data.batch=1", "samples.per_layer=4", *overrides]
        settings += [f"cache.dir={tmp_path}/cache", f"output={tmp_path}/{name}"]
        done[name] = compile_recipe(compose_recipe("tiny_gdn_6bit", settings), quiet=True)

    monkeypatch.setattr(Progress, "say", say)
    monkeypatch.setattr(trace, "watch_batch", slow)
    # the second one's trace would be another run of the model that writes the same state samples
    first = threading.Thread(target=compiling, args=("first",))
    second = threading.Thread(target=compiling, args=("second", "temporal.weight=gate"))
    first.start()
    assert started.wait(SECONDS)
    second.start()
    for thread in (first, second):
        thread.join(SECONDS)
    assert set(done) == {"first", "second"}
    assert any(
        "waiting for another compile that makes the same trace in" in message and "cache" in message for message in said
    )
    assert not any(name.startswith("trace") and "state_samples" in name for name in done["second"].ran)
    assert torch.equal(done["first"].plan.w, done["second"].plan.w)


def test_a_lock_ends_with_its_owner_and_nothing_is_locked_without_a_cache(tmp_path):
    for cache in (Cache(tmp_path), Cache(tmp_path), Cache(tmp_path / "off", enabled=False)):
        with cache.locked("k" * 64, "trace", pytest.fail):
            pass
    assert not (tmp_path / "off").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file cannot be locked: .*cache\.dir=DIR"), (
        Cache(tmp_path / "file").locked("k", "trace", pytest.fail)
    ):  # fmt: skip
        pass
