"""The jobs of `serving.py`: which server, with which plan, is asked what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    "max_mamba_cache_size": None, "max_running_requests": None, "max_total_tokens": None, "cuda_graph_max_bs": 8,
    "mem_fraction_static": 0.2, "load_format": "dummy", "chunked_prefill_size": 8192, "decode_log_interval": 4,
}  # fmt: skip
FAST = {
    **OFF, "max_running_requests": 512, "cuda_graph_max_bs": 512, "cuda_graph_bs": [32, 64, 128, 256, 512],
    "max_total_tokens": 300000, "chunked_prefill_size": 8192, "load_format": "dummy", "mem_fraction_static": 0.9,
}  # fmt: skip
# FlashInfer's fused all-reduce uses NVLink multicast, which not every host allows.
TP = {
    **OFF, "tp_size": 2, "disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True,
}  # fmt: skip
# SGLang would refuse two ranks on GPUs of which one has less memory free, beside other jobs.
SHARED_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
SMALLEST = {"max_mamba_cache_size": 3, "max_running_requests": 1, "max_total_tokens": 2048}
STORM = {"max_mamba_cache_size": 40, "max_running_requests": 8, "max_total_tokens": 2560}


@dataclass(frozen=True)
class Job:
    """One server.

    Attributes:
        model, plan: below $SERVING_DIR/models and plans. arguments: of SGLang, beside `COMMON`.
        tasks: of `serving_tasks.py`, or of `serving_http.py` where `http` says how the server is started: ``serve``
            by the command line of stepquant, ``python`` by SGLang's own `launch_server` in Python.
        environment: of its processes. accept: what `stepquant.serve` would be told to let pass. tune: launches are
            chosen on the GPU, as by `stepquant.serve tune=true`.
    """

    model: str
    plan: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    http: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    accept: str = ""
    tune: bool = False


def _gdn(plan: str | None, arguments: dict[str, Any], *tasks: str, **more: Any) -> Job:
    return Job("tiny_gdn", plan, arguments, tasks, **more)


def _kda(plan: str | None, arguments: dict[str, Any], *tasks: str, **more: Any) -> Job:
    return Job("tiny_kda512", plan, arguments, tasks, **more)


def _fast(
    plan: str | None, model: str = "qwen8l", tune: bool = False, environment: dict[str, str] | None = None, **more: Any
) -> Job:
    environment = {"SERVING_STEPS": "1", **(environment or {})}
    return Job(model, plan, {**FAST, **more}, ("throughput",), None, environment, "force", tune)


def _sized(plan: str | None) -> Job:
    return Job("qwen8l", plan, SIZED, ("fill",), accept="force")


def _tp(arguments: dict[str, Any], one_gpu: str = "", plan: str | None = "gdn_6") -> Job:
    """Two ranks, of the checkpoint with two heads in its vision tower; on one GPU in one of `serving_plugin`'s ways."""
    environment = {"SERVING_ONE_GPU": one_gpu} if one_gpu else SHARED_GPUS
    return Job("tiny_gdn_tp", plan, arguments, ("decode",), environment=environment, accept="any_checkpoint")


_BREAK = {"SERVING_BREAK": "1111"}  # longer than any other request
JOBS: dict[str, Job] = {
    "gdn_fp32": _gdn(
        None, OFF, "decode", "score:gdn_fp32,gdn_8,gdn_6,gdn_6_w1,gdn_6_tp2,gdn_6_tp2_nccl,gdn_6_tp2_host"
    ),
    "gdn_8": _gdn("gdn_8", OFF, "decode"),
    "gdn_6": _gdn("gdn_6", OFF, "decode", "prefixes_off"),
    "gdn_6_w1": _gdn("gdn_6_w1", OFF, "decode"),
    "gdn_6_tp2": _tp(TP),
    "gdn_fp32_tp2": _tp(TP, plan=None),
    "kda_6_tp2": _kda("kda_6", TP, "decode", environment=SHARED_GPUS),
    "gdn_6_tp2_nccl": _tp(TP, "nccl"),
    "gdn_6_tp2_host": _tp({**TP, "disable_cuda_graph": True}, "host"),
    "gdn_6_no_buffer": _gdn("gdn_6", SMALL, "prefixes_on", "broken", "stress", environment=_BREAK),
    "gdn_6_extra_buffer": _gdn("gdn_6", {**SMALL, **EXTRA}, "prefixes_on", "broken", "stress", environment=_BREAK),
    "gdn_6_w1_extra_buffer_stress": _gdn("gdn_6_w1", {**SMALL, **EXTRA}, "stress"),
    "kda_fp32": _kda(None, OFF, "decode", "score:kda_fp32,kda_8,kda_6,kda_6_tp2"),
    "kda_8": _kda("kda_8", OFF, "decode"),
    "kda_6": _kda("kda_6", OFF, "decode"),
    "kda_6_w1_http": _kda("kda_6_w1", {**OFF, "enable_metrics": True}, "requests", http="serve"),
    "kda_6_tuned_http": _kda("kda_6", {**OFF, "enable_metrics": True}, "requests", http="serve", tune=True),
    "too_large": _kda("kda_6", {**OFF, "max_mamba_cache_size": 400000}, http="serve"),
    "hard_smallest": _gdn("gdn_6", SMALLEST, "hard", http="python"),
    "hard_no_buffer": _gdn("gdn_6", STORM, "hard", http="python"),
    "hard_extra_buffer": _gdn("gdn_6", {**STORM, **EXTRA}, "hard", http="python"),
    "size_fp32": _sized(None),
    "size_6": _sized("qwen_6"),
    "size_4": _sized("qwen_4"),
    "fast_fp32": _fast(None),
    "fast_bf16": _fast(None, mamba_ssm_dtype="bfloat16"),
    "fast_6": _fast("qwen_6"),
    "fast_6_tuned": _fast("qwen_6", tune=True),
    "fast_6_in_place": _fast("qwen_6", environment={"SERVING_IN_PLACE": "1"}),
    "fast_4": _fast("qwen_4"),
    "deep_fp32": _fast(None, "qwen24l"),
    "deep_6": _fast("qwen24_6", "qwen24l"),
}  # fmt: skip
