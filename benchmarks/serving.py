"""Real SGLang on a GPU with the plugin: does it answer as FP32 states do, does it leak, what fits, how fast is it.

    python benchmarks/serving.py OUT SELECTION... (jobs of serving_jobs.py by name; each a server in its own process;
    +12 among them: wait so many seconds before the next start, for kernels that the first ones compile)

Plans and checkpoints lie under $SERVING_DIR: plans/gdn_6, models/tiny_gdn, ... Jobs run side by side on the GPUs
$SERVING_GPUS (0; 0,1 in turn), $SERVING_LIMIT seconds at most (150); those that measure time wait until all others have
ended and then run one by one on each GPU, at $SERVING_BATCHES (32,64,128,256,512). Results go to OUT/<job>.json, logs
beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import serving_plugin
from serving_jobs import COMMON, JOBS, Job

ROOT = Path(os.environ.get("SERVING_DIR", "."))
FIRST_PORT = 31200


class Results:
    """What a job found so far, in its file after every task."""

    def __init__(self, name: str, out: Path) -> None:
        job = JOBS[name]
        self.path = out / f"{name}.json"
        self.found: dict[str, Any] = {"job": name, "plan": job.plan, "arguments": {**COMMON, **job.arguments}}

    def keep(self, **more: Any) -> None:
        """Add to the file."""
        self.found.update(more)
        self.path.write_text(json.dumps(self.found, default=str, indent=1))


def run_engine(name: str, job: Job, out: Path, results: Results) -> None:
    """One `sglang.Engine`: start, tasks, figures."""
    import serving_tasks as tasks
    import sglang

    t = time.time()
    engine = sglang.Engine(model_path=str(ROOT / "models" / job.model), **{**COMMON, **job.arguments})
    results.keep(start_s=round(time.time() - t, 1))
    print(f"STARTED {name} {results.found['start_s']}", flush=True)
    results.keep(figures=tasks.server_figures(engine))
    for task in job.tasks:
        task, _, argument = task.partition(":")
        t = time.time()
        if task == "score":
            results.keep(scores=scored(tasks, engine, out, argument.split(",")))
        elif task == "decode":
            results.keep(decode=tasks.decode(engine, out / name))
        elif task.startswith("prefixes"):
            results.keep(prefixes=tasks.prefixes(engine, task == "prefixes_on"))
        elif task == "throughput":
            with quiet(name, out):
                results.keep(throughput=tasks.throughput(engine, Path(os.environ[serving_plugin.STEPS])))
        else:
            results.keep(**{task: getattr(tasks, task)(engine)})
        print(f"DONE {name} {task} {time.time() - t:.1f} s", flush=True)
    results.keep(figures_after=tasks.server_figures(engine))
    engine.shutdown()


def scored(tasks: Any, engine: Any, out: Path, names: list[str]) -> dict[str, Any]:
    """Teacher-forced scores of those jobs that were started, as their tokens come."""
    found, wanted = {}, set(names) & set(os.environ["SERVING_JOBS"].split())
    deadline = time.time() + float(os.environ.get("SERVING_LIMIT", "150")) - 30
    while wanted and time.time() < deadline:
        for name in sorted(wanted):
            if (out / f"{name}.npz").exists():
                time.sleep(0.5)
                found[name] = tasks.score(engine, out / f"{name}.npz")
                print(f"SCORE {name} {found[name]}", flush=True)
                wanted.remove(name)
        time.sleep(0.5)
    return found


def run_http(name: str, job: Job, out: Path, results: Results) -> None:
    """One HTTP server: start, tasks, end; the exit code counts as a result."""
    import serving_http
    import serving_traffic

    assert job.http is not None
    assert job.plan is not None
    arguments = {**COMMON, **job.arguments}
    if job.http == "serve":
        del arguments["enable_multimodal"]  # SGLang has no flag to switch it off
    port = FIRST_PORT + list(JOBS).index(name)
    place, t = ROOT / "models" / job.model, time.time()
    plan, log = ROOT / "plans" / job.plan, out / f"{name}.server.log"
    server = serving_http.start(job.http, place, plan, arguments, port, log, job.tune)
    try:
        started = server.wait(150)
        results.keep(started=started, start_s=round(time.time() - t, 1))
        print(f"STARTED {name} {started} {results.found['start_s']}", flush=True)
        for task in job.tasks if started else ():
            t = time.time()
            extra = (int(arguments["max_total_tokens"]),) if task == "hard" else ()
            results.keep(**{task: getattr(serving_traffic, task)(server, *extra)})
            print(f"DONE {name} {task} {time.time() - t:.1f} s", flush=True)
    finally:
        results.keep(exit_code=server.stop())
        print(f"DONE {name} exit code {results.found['exit_code']}", flush=True)


def run_job(name: str, out: Path) -> None:
    """One job in this process."""
    run = run_engine if JOBS[name].http is None else run_http
    run(name, JOBS[name], out, Results(name, out))


@contextmanager
def quiet(name: str, out: Path) -> Iterator[None]:
    """Nothing else runs on the GPU: all jobs that measure no time have ended, all that do have started, those named
    before on the same GPU have measured, and none ends before all have."""
    (out / f"{name}.ready").touch()
    _await(out / f"{name}.turn")
    yield
    (out / f"{name}.measured").touch()
    _await(out / "over")


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.2)


def take_turns(running: dict[str, int], out: Path) -> None:
    """Once all that run wait to measure: the first on every GPU goes. All of them end together.

    Args:
        running: jobs and their GPUs.
    """
    if all((out / f"{name}.ready").exists() for name in running):
        left = [name for name in running if not (out / f"{name}.measured").exists()]
        first = {running[name]: name for name in reversed(left)}
        for name in first.values():
            (out / f"{name}.turn").touch()
        if not left:
            (out / "over").touch()


def environment_of(name: str, names: list[str], out: Path, gpu: int) -> dict[str, str]:
    """A job's environment: its GPU, its plan, the check's own plugin."""
    job, found = JOBS[name], dict(os.environ)
    if job.arguments.get("tp_size", 1) == 1 or serving_plugin.ONE_GPU in job.environment:
        found["CUDA_VISIBLE_DEVICES"] = str(gpu)
    for variable in ("STEPQUANT_PLAN", "STEPQUANT_ACCEPT"):
        found.pop(variable, None)
    found.update(job.environment, SERVING_JOBS=" ".join(names), STEPQUANT_TUNE=str(int(job.tune)))
    if serving_plugin.STEPS in job.environment:
        found[serving_plugin.STEPS] = str(out / f"{name}.steps")
    found["PYTHONPATH"] = os.pathsep.join([str(out / "plug"), str(Path(__file__).parent), found.get("PYTHONPATH", "")])
    if job.plan is not None:
        found["STEPQUANT_ACCEPT"] = job.accept
        found["STEPQUANT_PLAN"] = str((ROOT / "plans" / job.plan).resolve())
    return found


def main() -> None:
    """Start the selected jobs side by side and wait for them."""
    if sys.argv[1] == "--job":
        run_job(sys.argv[2], Path(sys.argv[3]))
        return
    out, limit = Path(sys.argv[1]).resolve(), float(os.environ.get("SERVING_LIMIT", "150"))
    begun, names = time.time(), [name for name in sys.argv[2:] if not name.startswith("+")]
    running: dict[str, subprocess.Popen[bytes]] = {}
    gpus = [int(x) for x in os.environ.get("SERVING_GPUS", "0").split(",")]
    serving_plugin.install(out / "plug")
    places = {name: gpus[number % len(gpus)] for number, name in enumerate(names)}
    for name in sys.argv[2:]:
        if name.startswith("+"):
            time.sleep(float(name))
            continue
        environment = environment_of(name, names, out, places[name])
        running[name] = subprocess.Popen(
            [sys.executable, __file__, "--job", name, str(out)], env=environment,
            stdout=(out / f"{name}.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        time.sleep(float(os.environ.get("SERVING_STAGGER", "0.5")))
    while running and time.time() - begun < limit:
        for name in [n for n, p in running.items() if p.poll() is not None]:
            print(f"[{time.time() - begun:.0f} s] {name} ended with {running.pop(name).returncode}", flush=True)
        take_turns({name: places[name] for name in running}, out)
        time.sleep(0.5)
    for name, process in running.items():
        print(f"[{time.time() - begun:.0f} s] {name} stopped at the limit", flush=True)
        os.killpg(process.pid, 9)


if __name__ == "__main__":
    main()
