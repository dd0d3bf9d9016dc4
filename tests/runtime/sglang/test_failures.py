"""A request whose state is not finite ends with an error, by the real releases' own request class; others go on."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepquant.runtime.sglang import failures
from stepquant.runtime.sglang.state import activate, current
from stepquant.runtime.sglang.versions import VERSIONS
from tests.runtime.sglang.sources import _cut, _package, _run, definition, fake_sglang, wheel
from tests.runtime.sglang.test_hooks import state_of

BATCH = "sglang.srt.managers.schedule_batch"
CHECK = {"0.5.12": "check_finished", "0.5.23": "update_finish_state"}


@pytest.fixture(params=VERSIONS)
def requests(request: pytest.FixtureRequest) -> Iterator[tuple[types.ModuleType, str]]:
    """SGLang's `schedule_batch` with its abort and `Req` as far as it decides on a request's end."""
    version = request.param
    with fake_sglang(version):
        module = _package(BATCH)
        wanted = [definition(version, f"{BATCH}.{name}") for name in ("BaseFinishReason", "FINISH_ABORT")]
        req = _cut(definition(version, f"{BATCH}.Req"), {"finished", CHECK[version]})
        _run(version, module, [*wanted, req])
        activate(state_of(version))
        yield module, CHECK[version]


def req_of(module: types.ModuleType, rid: str, **more: Any) -> Any:
    req = module.Req()
    fields = {"rid": rid, "finished_reason": None, "to_finish": None, "is_retracted": False, "output_ids": [1]}
    req.__dict__.update(fields, **more)
    return req


class Event:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def step(reqs: list[Any], logits: torch.Tensor, copy_done: Event | None) -> Any:
    """A sampled step with the hook in place, as the scheduler gets it."""
    output = SimpleNamespace(next_token_logits=logits)

    def sampler(_: Any, given: Any, info: str, *, positions: str) -> torch.Tensor:
        assert given is output
        assert (info, positions) == ("info", "positions")
        assert bool(given.next_token_logits.isfinite().all()), "a row of NaN reached the sampler"
        return given.next_token_logits.argmax(-1)

    tokens = failures.sample(sampler, None, output, "info", positions="positions")
    return SimpleNamespace(reqs=reqs), SimpleNamespace(logits_output=output, next_token_ids=tokens, copy_done=copy_done)


@pytest.mark.parametrize("hook", [failures.decoded, failures.prefilled])
@pytest.mark.parametrize("overlap", [True, False])
def test_it_ends_and_others_go_on(requests: tuple[types.ModuleType, str], hook: Any, overlap: bool) -> None:
    module, check = requests
    reqs = [req_of(module, f"r{i}") for i in range(3)]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = logits.argmax(-1)
    logits[1] = torch.nan
    done = Event() if overlap else None
    batch, result = step(reqs, logits, done)

    def original(_: Any, own: Any, results: Any) -> str:
        assert (own, results) == (batch, result)
        for req in own.reqs[1:2]:
            getattr(req, check)()
        return "processed"

    assert hook(original, None, batch, result) == "processed"
    assert done is None or done.waited == 1
    assert reqs[1].finished()
    said = reqs[1].finished_reason.to_json()
    assert (said["type"], said["status_code"]) == ("abort", 500)
    assert "logits of this request were not finite" in said["message"]
    assert reqs[1].skip_radix_cache_insert is True
    for i in (0, 2):
        assert (reqs[i].to_finish, reqs[i].finished()) == (None, False)
        assert not hasattr(reqs[i], "skip_radix_cache_insert")
        assert int(result.next_token_ids[i]) == int(expected[i])
    assert current().report["failed_requests"] == 1


def test_requests_that_ended_or_were_retracted_are_left_alone(requests: tuple[types.ModuleType, str]) -> None:
    module, _ = requests
    reqs = [req_of(module, "a", finished_reason="length"), req_of(module, "b", is_retracted=True)]
    batch, result = step(reqs, torch.full((2, 9), torch.nan), Event())
    failures.end_failed(batch, result)
    assert [req.to_finish for req in reqs] == [None, None]
    assert current().report["failed_requests"] == 0


def test_steps_without_logits_pass(requests: tuple[types.ModuleType, str]) -> None:
    """An idle step, an embedding, a prompt that is only scored."""
    nothing = SimpleNamespace(next_token_logits=None)
    assert failures.sample(lambda *_: "scored", None, nothing) == "scored"
    for result in (SimpleNamespace(logits_output=None), SimpleNamespace(), SimpleNamespace(logits_output=nothing)):
        failures.end_failed(SimpleNamespace(reqs=[]), result)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_release_keeps_such_a_request_out_of_the_prefix_cache(version: str) -> None:
    module = "sglang.srt.mem_cache.common"
    text = wheel(version).read(module.replace(".", "/") + ".py").decode()
    names = {
        node.name for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and "skip_radix_cache_insert" in (ast.get_source_segment(text, node) or "")
    }  # fmt: skip
    assert "release_kv_cache" in names
