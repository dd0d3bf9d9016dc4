"""The serving check itself, without SGLang: its traffic against a stand-in, its arithmetic, its jobs and its plugin."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str) -> Any:
    """A module of the check; they import each other by their bare names."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("fake_server.py")), str(port)]
    found = module("serving_http").Server(command, port, os.environ, tmp_path / "log")
    assert found.wait(20)
    yield found
    assert found.stop() == -15


def test_everything_is_asked_once(server: Any) -> None:
    found = module("serving_traffic").requests(server)
    assert (found["status"], found["same_twice"], found["tokens"]) == (200, True, 8 * 48)
    assert (found["streamed_events"], found["abort_ended_as"], found["oversize"][0]) == (48, "abort", 400)
    assert found["gauges"] == ["stepquant:slots"]
    assert found["figures"]["slots"] == 4


def test_hard_traffic(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = module("serving_traffic")
    monkeypatch.setenv("SERVING_HARD", "3")
    monkeypatch.setattr(traffic, "WORKERS", 4)
    found = traffic.hard(server, 1950)
    assert (found["errors"], found["first_errors"]) == (0, [])
    assert set(found["probes"]) == {"same"}
    assert found["probe_same_after"] is True
    assert found["memory_mib"]["end"]["resident"] > 5
    counts = found["counts"]
    assert {"long whole", "thrash whole", "leave left", "oversize 400"} <= set(counts)
    assert {name for name in counts if name.startswith("abort")} <= {"abort ended as abort", "abort ended as length"}


def test_throughput_is_that_of_the_longest_stretch_on_the_slowest_rank() -> None:
    steps = module("serving_steps")
    assert steps.longest([4, 0, 4, 4, 4, 0, 4, 4], 4) == slice(2, 5)
    assert steps.longest([4, 4], 4) == slice(0, 2)
    assert steps.longest([2], 4) == slice(0, 0)

    def segment(batch: list[int], interval: list[float]) -> dict[str, list[float]]:
        more = {f"{name}_ms": interval for name in ("forward", "host_forward", "host_interval")}
        return {"batch": [float(b) for b in batch], "interval_ms": interval, **more}

    warm = segment([2, 2, 2], [1.0, 1.0, 1.0])
    run = steps.run_figures([warm, segment([2, 4, 4, 4, 2], [9.0, 1.0, 2.0, 3.0, 9.0])], 4)
    assert (run["steps"], run["ms"], run["step_ms"], run["slowest_step_ms"]) == (3, 6.0, 2.0, 3.0)
    assert run["tokens_per_s"] == 2000
    slow = {**run, "ms": 12.0, "tokens_per_s": 1000}
    fast = {**run, "ms": 3.0, "tokens_per_s": 4000}
    found = steps.figures([[run, slow], [fast, run], [run, fast]])
    assert found["runs_tokens_per_s"] == [1000, 2000, 2000]
    assert found["tokens_per_s"] == 2000


def test_jobs_measure_one_by_one_on_each_gpu(tmp_path: Path) -> None:
    turns, running = module("serving").take_turns, {"a": 0, "b": 1, "c": 0}
    (tmp_path / "a.ready").touch()
    (tmp_path / "b.ready").touch()
    turns(running, tmp_path)
    assert not list(tmp_path.glob("*.turn"))  # c is still starting
    (tmp_path / "c.ready").touch()
    turns(running, tmp_path)
    assert {path.name for path in tmp_path.glob("*.turn")} == {"a.turn", "b.turn"}
    (tmp_path / "a.measured").touch()
    turns(running, tmp_path)
    assert (tmp_path / "c.turn").exists()
    for name in ("b", "c"):
        assert not (tmp_path / "over").exists()
        (tmp_path / f"{name}.measured").touch()
        turns(running, tmp_path)
    assert (tmp_path / "over").exists()


def test_a_server_that_does_not_end_is_killed_with_its_processes(tmp_path: Path, monkeypatch: Any) -> None:
    http = module("serving_http")
    monkeypatch.setattr(http, "STOPPING", 0.5)
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('Gracefully exiting', flush=True))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    server = http.Server([sys.executable, "-c", program], 0, os.environ, tmp_path / "log")
    while not (tmp_path / "log").read_text().strip():
        time.sleep(0.05)
    child = Path(f"/proc/{(tmp_path / 'log').read_text().strip()}")
    assert server.stop() == "did not end within 0.5 s, waiting for requests that it refused"
    end = time.time() + 10
    while child.exists() and child.joinpath("stat").read_text().split()[2] != "Z":
        assert time.time() < end
        time.sleep(0.05)


def test_jobs_name_tasks_that_exist() -> None:
    jobs, serving = module("serving_jobs").JOBS, module("serving")
    known = {"score", "decode", "prefixes_on", "prefixes_off", "throughput", "broken", "stress", "fill"}
    for name, job in jobs.items():
        if job.http is None:
            assert {task.split(":")[0] for task in job.tasks} <= known
            for task in job.tasks:
                assert set(task.partition(":")[2].split(",")) - {""} <= set(jobs), f"{name} scores a job that is not"
        else:
            assert all(hasattr(module("serving_traffic"), task) for task in job.tasks)
    out = Path("/nowhere")
    found = serving.environment_of("fast_6", ["fast_6"], out, 0)
    assert (found["STEPQUANT_ACCEPT"], found["SERVING_STEPS"]) == ("force", "/nowhere/fast_6.steps")
    assert "STEPQUANT_PLAN" not in serving.environment_of("gdn_fp32", [], out, 0)


def test_flags_are_what_a_command_line_takes() -> None:
    arguments = {"a_b": 3, "on": True, "off": False, "none": None, "list": [1, 2]}
    assert module("serving_http").flags(arguments) == ["--a-b", "3", "--on", "--list", "1", "2"]


def test_the_plugin_is_found_and_wraps(tmp_path: Path) -> None:
    plugin = module("serving_plugin")
    plugin.install(tmp_path / "plug")
    target = tmp_path / "victim.py"
    target.write_text("class A:\n    def f(self, x):\n        return x + 1\n")
    program = (
        "import importlib.metadata as m, json\n"
        "point = [p for p in m.entry_points(group='sglang.srt.plugins') if p.name == 'serving_check'][0]\n"
        "point.load()()\n"
        "import serving_plugin, victim\n"
        "serving_plugin.wrap('victim.A.f', lambda original, self, x: 10 * original(self, x))\n"
        "print(json.dumps([point.value, victim.A().f(1)]))\n"
    )
    path = os.pathsep.join([str(tmp_path / "plug"), str(tmp_path), str(BENCHMARKS)])
    environment = {n: x for n, x in os.environ.items() if not n.startswith("SERVING_")} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["serving_plugin:register", 20]


def test_steps_are_written_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three decode forwards and a prefill: two intervals, the second between other batches."""
    torch = pytest.importorskip("torch")
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            now[0] += 1.0
            self.at = now[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps = module("serving_plugin").Steps(str(tmp_path / "steps"))

    class Mode:
        def __init__(self, decodes: bool) -> None:
            self.is_decode = lambda: decodes

    class Batch:
        def __init__(self, size: int, decodes: bool = True) -> None:
            self.batch_size, self.forward_mode = size, Mode(decodes)

    runner = type("Runner", (), {"tp_rank": 1})()
    for batch in (Batch(4), Batch(4), Batch(3), Batch(9, False)):
        assert steps.forward(lambda *_: "out", runner, batch) == "out"
    found = module("serving_steps").read_segments(tmp_path / "steps.1")
    assert len(found) == 1
    assert (found[0]["batch"], found[0]["interval_ms"], found[0]["forward_ms"]) == ([4, 0], [2.0, 2.0], [1.0, 1.0])
