"""Order of reads and folds on two streams, on a model of CUDA's streams: what has happened before what."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from stepquant.runtime import writeback
from stepquant.runtime.writeback import PAIRS, WritebackStream

LAYERS = 7


class Stream:
    """What is known to be done when this stream reaches its next operation."""

    device = "fake"

    def __init__(self, device: object = None) -> None:
        self.done: set[str] = set()

    def run(self, name: str, needs: set[str]) -> None:
        missing = needs - self.done
        assert not missing, f"{name} starts without waiting for {sorted(missing)}"
        self.done = self.done | {name}

    def wait_event(self, event: Event) -> None:
        self.done = self.done | event.done

    def wait_stream(self, other: Stream) -> None:
        self.done = self.done | other.done


class Event:
    def __init__(self) -> None:
        self.done: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.done = set(stream.done)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    current = [Stream()]

    @contextmanager
    def on(stream: Stream):
        current.append(stream)
        yield
        current.pop()

    cuda = SimpleNamespace(Stream=Stream, Event=Event, current_stream=lambda device=None: current[-1], stream=on)
    monkeypatch.setattr(writeback, "torch", SimpleNamespace(cuda=cuda, device=str))
    return current[0]


def step(main: Stream, aside: WritebackStream, last: set[str], number: int) -> set[str]:
    """One decode step; returns its folds. `last`: those of the step before, whose pages it reads."""
    for layer in range(LAYERS):
        aside.before_read(layer)
        pair = {f"fold {number}.{layer - PAIRS}"} if layer >= PAIRS else set()  # had this pair of k_now and u_now
        main.run(f"read {number}.{layer}", last | pair)
        with aside.fold(layer):
            aside.stream.run(f"fold {number}.{layer}", {f"read {number}.{layer}"})
    aside.join()
    return {f"fold {number}.{layer}" for layer in range(LAYERS)}


def test_every_reader_waits_for_what_it_reads(main: Stream) -> None:
    aside, folds = WritebackStream(), set()
    for number in range(3):
        folds = step(main, aside, folds, number)
        main.run(f"copy {number}", folds)  # prefix cache and counters come after the last layer


def test_reads_do_not_wait_for_the_fold_in_front(main: Stream) -> None:
    """Otherwise nothing runs beside anything."""
    aside = WritebackStream()
    step(main, aside, set(), 0)
    aside.before_read(0)
    main.run("read 1.0", set())
    with aside.fold(0):
        aside.stream.run("fold 1.0", {"read 1.0"})
    aside.before_read(1)
    assert "fold 1.0" not in main.done


def test_the_model_finds_a_missing_wait(main: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WritebackStream, "before_read", lambda self, layer: None)
    with pytest.raises(AssertionError, match=f"read 0.{PAIRS} starts without waiting for"):
        step(main, WritebackStream(), set(), 0)
