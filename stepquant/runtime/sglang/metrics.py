"""Figures of the packed pool: in SGLang's log, in its server info, and as Prometheus gauges where it has them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from stepquant.runtime.sglang.pool import store_of
from stepquant.runtime.sglang.state import current

logger = logging.getLogger(__name__)
EVERY = 10.0  # seconds between two readings of the device's counter

GAUGES = {
    "slots": "Slots of the packed state pool",
    "slot_bytes": "Bytes of a packed slot on this rank",
    "pool_bytes": "Bytes of the packed state pool on this rank",
    "compression": "Bytes of FP32 states over packed bytes",
    "requests": "Most running requests",
    "nonfinite_states": "States that were not finite and were reset",
    "failed_requests": "Requests that were ended because their logits were not finite",
}
_gauges: dict[str, Any] = {}


def figures(pool: Any) -> dict[str, Any]:
    """The pool's figures; reads a counter from the device."""
    store = store_of(pool)
    if store is None:
        return {}
    found = {**current().report, "nonfinite_states": store.nonfinite, "plan": current().directory.name}
    if found["nonfinite_states"] > current().report.get("nonfinite_logged", 0):
        current().report["nonfinite_logged"] = found["nonfinite_states"]
        logger.warning(f"stepquant: {found['nonfinite_states']} states were not finite so far; each was reset to zero")
    return {**found, "failed_requests": found.get("failed_requests", 0)}


def internal_state(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """`Scheduler.get_internal_state`: what /server_info shows, with the packed pool beside it."""
    answer = original(self, recv_req)
    found = figures(getattr(self.req_to_token_pool, "mamba_pool", None))
    if found:
        answer.internal_state["stepquant"] = found
    return answer


def decode_stats(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`report_decode_stats`, once a decode step: the pool's own figures every `EVERY` seconds."""
    result = original(self, *args, **kwargs)
    now = time.monotonic()
    if now - current().published >= EVERY:
        current().published = now
        scheduler = getattr(self, "scheduler", self)
        found = figures(getattr(scheduler.req_to_token_pool, "mamba_pool", None))
        if found:
            set_gauges(found)
    return result


def set_gauges(found: dict[str, Any]) -> None:
    """Publish the figures to Prometheus if SGLang does (--enable-metrics sets the directory of its processes)."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return
    from prometheus_client import Gauge

    for name, text in GAUGES.items():
        if name not in _gauges:
            _gauges[name] = Gauge(f"stepquant:{name}", text, multiprocess_mode="mostrecent")
        _gauges[name].set(found.get(name, 0))
