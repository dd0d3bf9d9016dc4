"""The pool's figures in the server's info, its log, and Prometheus."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stepquant.runtime.sglang import metrics
from stepquant.runtime.sglang.state import activate
from stepquant.runtime.slots import SlotStore
from tests.runtime.plans import kernels_of, layout_of
from tests.runtime.sglang.test_hooks import state_of


class Gauge:
    """A Prometheus gauge that remembers."""

    made: dict[str, Gauge]

    def __init__(self, name: str, text: str, multiprocess_mode: str) -> None:
        assert text
        assert multiprocess_mode == "mostrecent"
        assert name not in Gauge.made, "a gauge may be made once in a process"
        Gauge.made[name], self.values = self, []

    def set(self, value: Any) -> None:
        self.values.append(value)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = state_of("0.5.12")
    state.report.update(slots=4, slot_bytes=123, compression=5.0)
    activate(state)
    monkeypatch.setattr(metrics, "_gauges", {})
    Gauge.made = {}
    fake = ModuleType("prometheus_client")
    fake.Gauge = Gauge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", fake)
    store = SlotStore(layout_of("gdn")[0], kernels_of("gdn"), 4, 2, "cpu")
    return SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(stepquant_store=store)))


def test_server_info_has_the_pool(scheduler: SimpleNamespace) -> None:
    answer = metrics.internal_state(lambda *_: SimpleNamespace(internal_state={"a": 1}), scheduler, None)
    assert answer.internal_state["a"] == 1
    assert answer.internal_state["stepquant"] == {
        "slots": 4, "slot_bytes": 123, "compression": 5.0, "nonfinite_states": 0, "failed_requests": 0,
        "plan": "nowhere",
    }  # fmt: skip
    other = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=None))
    answer = metrics.internal_state(lambda *_: SimpleNamespace(internal_state={}), other, None)
    assert answer.internal_state == {}


@pytest.mark.parametrize("inside", [False, True])
def test_gauges_are_set_now_and_then(scheduler: SimpleNamespace, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.12 reports from the scheduler itself, 0.5.23 from an object that has it."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "somewhere")
    reporter = SimpleNamespace(scheduler=scheduler) if inside else scheduler
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    for _ in range(5):
        assert metrics.decode_stats(lambda *_: "reported", reporter, True) == "reported"
    assert Gauge.made["stepquant:slots"].values == [4]
    now[0] += metrics.EVERY
    metrics.decode_stats(lambda *_: None, reporter, True)
    assert Gauge.made["stepquant:slots"].values == [4, 4]
    assert set(Gauge.made) == {f"stepquant:{name}" for name in metrics.GAUGES}


def test_without_enable_metrics_prometheus_is_left_alone(
    scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    metrics.decode_stats(lambda *_: None, scheduler, True)
    assert Gauge.made == {}


def test_states_that_were_not_finite_are_told_once(
    scheduler: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    store = scheduler.req_to_token_pool.mamba_pool.stepquant_store
    store.begin_extend(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]), torch.tensor([3]))
    for layer in range(2):
        store.extend_layer(layer, torch.tensor([1]), torch.full((1, 2, 16, 16), torch.inf))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = metrics.figures(scheduler.req_to_token_pool.mamba_pool)
    assert found["nonfinite_states"] == 1
    assert len([r for r in caplog.records if "1 states were not finite" in r.message]) == 1
