"""Real SGLang on a GPU with the plugin: does it answer as FP32 states do, does it leak, what fits, how fast is it.

    python benchmarks/serving.py OUT SELECTION... (jobs by name; each an engine in its own process, side by side)

Plans and checkpoints lie under $SERVING_DIR: plans/gdn_6, models/tiny_gdn, ... Results go to OUT/<job>.json.
"""

from __future__ import annotations

import fcntl
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

ROOT = Path(os.environ.get("SERVING_DIR", "."))
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True, "enable_multimodal": False, "attention_backend": "triton",
    "sampling_backend": "pytorch", "grammar_backend": "none", "disable_piecewise_cuda_graph": True,
    "cuda_graph_max_bs": 32, "max_running_requests": 48, "max_total_tokens": 65536, "mem_fraction_static": 0.3,
    "random_seed": 0, "log_level": "info", "chunked_prefill_size": 256, "max_mamba_cache_size": 300,
}  # fmt: skip
OFF = {"disable_radix_cache": True, "max_mamba_cache_size": None}
EXTRA = {"mamba_scheduler_strategy": "extra_buffer"}
SMALL = {"max_mamba_cache_size": 60, "max_running_requests": 12, "max_total_tokens": 4096}
SIZED = {
    "max_mamba_cache_size": None,
    "max_running_requests": None,
    "max_total_tokens": None,
    "cuda_graph_max_bs": 8,
    "mem_fraction_static": 0.1,
}
FAST = {
    **OFF, "max_running_requests": 512, "cuda_graph_max_bs": 512, "cuda_graph_bs": [32, 128, 512],
    "max_total_tokens": 300000, "chunked_prefill_size": 8192, "load_format": "dummy",
}  # fmt: skip

# name: model, plan, engine arguments, tasks
JOBS: dict[str, tuple[str, str | None, dict[str, Any], tuple[str, ...]]] = {
    "gdn_fp32": ("tiny_gdn", None, OFF, ("decode", "score:gdn_fp32,gdn_8,gdn_6,gdn_4")),
    "gdn_8": ("tiny_gdn", "gdn_8", OFF, ("decode",)),
    "gdn_6": ("tiny_gdn", "gdn_6", OFF, ("decode", "prefixes_off")),
    "gdn_4": ("tiny_gdn", "gdn_4", OFF, ("decode",)),
    "gdn_6_tp2": ("tiny_gdn", "gdn_6", {**OFF, "tp_size": 2}, ("decode",)),
    "gdn_6_no_buffer": ("tiny_gdn", "gdn_6", {}, ("prefixes_on",)),
    "gdn_6_extra_buffer": ("tiny_gdn", "gdn_6", EXTRA, ("prefixes_on",)),
    "gdn_6_no_buffer_stress": ("tiny_gdn", "gdn_6", SMALL, ("stress",)),
    "gdn_6_extra_buffer_stress": ("tiny_gdn", "gdn_6", {**SMALL, **EXTRA}, ("stress",)),
    "gdn_6_off_stress": ("tiny_gdn", "gdn_6", {**SMALL, **OFF}, ("stress",)),
    "kda_fp32": ("tiny_kda512", None, OFF, ("decode", "score:kda_fp32,kda_8,kda_6,kda_4")),
    "kda_8": ("tiny_kda512", "kda_8", OFF, ("decode",)),
    "kda_6": ("tiny_kda512", "kda_6", OFF, ("decode",)),
    "kda_4": ("tiny_kda512", "kda_4", OFF, ("decode",)),
    "kda_6_stress": ("tiny_kda512", "kda_6", {**SMALL, **OFF}, ("stress",)),
    "size_fp32": ("tiny_gdn", None, SIZED, ()),
    "size_6": ("tiny_gdn", "gdn_6", SIZED, ()),
    "size_4": ("tiny_gdn", "gdn_4", SIZED, ()),
    "fast_fp32": ("qwen4l", None, FAST, ("throughput",)),
    "fast_bf16": ("qwen4l", None, {**FAST, "mamba_ssm_dtype": "bfloat16"}, ("throughput",)),
    "fast_6": ("qwen4l", "qwen_6", FAST, ("throughput",)),
    "fast_4": ("qwen4l", "qwen_4", FAST, ("throughput",)),
}


def model_of(name: str) -> str:
    """The checkpoint of a job."""
    return JOBS[name][0]


def run_job(name: str, out: Path) -> None:
    """One engine: start, tasks, figures, results after every task."""
    import serving_tasks as tasks

    model, plan, extra, wanted = JOBS[name]
    result: dict[str, Any] = {"job": name, "plan": plan, "arguments": {**COMMON, **extra}}

    def keep(**more: Any) -> None:
        result.update(more)
        (out / f"{name}.json").write_text(json.dumps(result, default=str, indent=1))

    import sglang

    t = time.time()
    engine = sglang.Engine(model_path=str(ROOT / "models" / model), **{**COMMON, **extra})
    keep(start_s=round(time.time() - t, 1))
    print(f"STARTED {name} {result['start_s']}", flush=True)
    keep(figures=tasks.server_figures(engine))
    for task in wanted:
        task, _, argument = task.partition(":")
        t = time.time()
        if task == "score":
            scores = {}
            for other in set(argument.split(",")) & set(os.environ["SERVING_JOBS"].split()):
                path = out / f"{other}.npz"
                deadline = time.time() + 150
                while not path.exists() and time.time() < deadline:
                    time.sleep(0.5)
                if path.exists():
                    time.sleep(0.5)
                    scores[other] = tasks.score(engine, path)
                    print(f"SCORE {other} {scores[other]}", flush=True)
            keep(scores=scores)
        elif task == "decode":
            keep(decode=tasks.decode(engine, out / name))
        elif task.startswith("prefixes"):
            keep(prefixes=tasks.prefixes(engine, task == "prefixes_on"))
        elif task == "throughput":
            with quiet(out):
                keep(throughput=tasks.throughput(engine))
        else:
            keep(**{task: getattr(tasks, task)(engine)})
        print(f"DONE {name} {task} {time.time() - t:.1f} s", flush=True)
    keep(figures_after=tasks.server_figures(engine))
    engine.shutdown()


@contextmanager
def quiet(out: Path) -> Iterator[None]:
    """Nothing else runs on the GPU: all jobs that measure no time have ended, and no other one measures now."""
    while not (out / "quiet").exists():
        time.sleep(0.2)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Start the selected jobs side by side and wait for them."""
    if sys.argv[1] == "--job":
        run_job(sys.argv[2], Path(sys.argv[3]))
        return
    out, limit = Path(sys.argv[1]), float(os.environ.get("SERVING_LIMIT", "150"))
    begun, running = time.time(), {}
    gpus = int(os.environ.get("SERVING_GPUS", "1"))
    for number, name in enumerate(sys.argv[2:]):
        environment = dict(os.environ)
        if JOBS[name][2].get("tp_size", 1) == 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        environment.pop("STEPQUANT_PLAN", None)
        environment["SERVING_JOBS"] = " ".join(sys.argv[2:])
        plan = JOBS[name][1]
        if plan is not None:
            environment["STEPQUANT_ACCEPT"] = "force" if model_of(name) == "qwen4l" else ""  # its plan is synthetic
            environment["STEPQUANT_PLAN"] = str((ROOT / "plans" / plan).resolve())
        log = (out / f"{name}.log").open("w")
        command = [sys.executable, __file__, "--job", name, str(out)]
        running[name] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        time.sleep(float(os.environ.get("SERVING_STAGGER", "0.5")))
    while running and time.time() - begun < limit:
        for name in [n for n, p in running.items() if p.poll() is not None]:
            print(f"[{time.time() - begun:.0f} s] {name} ended with {running.pop(name).returncode}", flush=True)
        if all(name.startswith("fast") for name in running):
            (out / "quiet").touch()
        time.sleep(0.5)
    for name, process in running.items():
        print(f"[{time.time() - begun:.0f} s] {name} stopped at the limit", flush=True)
        os.killpg(process.pid, 9)


if __name__ == "__main__":
    main()
