"""What differs between the SGLang versions that the plugin was checked with, in one table."""

from __future__ import annotations

from dataclasses import dataclass

from stepquant.errors import BackendError

MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
GDN = "sglang.srt.layers.attention.linear.gdn_backend"
KDA = "sglang.srt.layers.attention.linear.kda_backend"
HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"


@dataclass(frozen=True)
class Target:
    """A function of SGLang that the plugin hooks: dotted path and the parameters that it must have, in order."""

    path: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Version:
    """One version of SGLang.

    Attributes:
        name: as `sglang.__version__` says.
        served: ran on a GPU with the plugin; otherwise its classes and signatures were checked on a CPU.
        targets: hooks by the name of the plugin's function.
        state_params: class whose property `mamba_cache_per_req` says what a slot costs.
        request: where a request keeps its slot: the attributes on the way from `Req`.
        environment: variables that switch off paths which read the state pool past the dispatcher.
        refused: variables that switch on what the plugin does not hook, with why.
    """

    name: str
    served: bool
    targets: dict[str, Target]
    state_params: str
    request: tuple[str, ...]
    environment: dict[str, str]
    refused: dict[str, str]


_POOL = f"{MEMORY_POOL}.MambaPool"
_BASE = f"{HYBRID}.MambaAttnBackendBase"
_COMMON = {
    "layer_cache": Target(f"{_POOL}.mamba2_layer_cache", ("self", "layer_id")),
    "save": Target(f"{_POOL}.get_cpu_copy", ("self", "indices")),
    "load": Target(f"{_POOL}.load_cpu_copy", ("self", "mamba_cache_cpu", "indices")),
    "forward_metadata": Target(f"{_BASE}._forward_metadata", ("self", "forward_batch")),
}
_SAMPLE = ("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs",
           "positions")  # fmt: skip
_RESULT = ("self", "batch", "result")
_SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"
_OUTPUT_12 = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
_OUTPUT_23 = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_POOL_ARGUMENTS = ("self", "size", "spec_state_size", "cache_params", "mamba_layer_ids", "device",
                   "enable_memory_saver", "speculative_num_draft_tokens")  # fmt: skip
_TRACK = ("self", "forward_batch", "conv_states", "ssm_states", "cache_indices")
_TRACK_EXTEND = ("self", "forward_batch", "h", "ssm_states", "forward_metadata")

VERSIONS = {
    version.name: version
    for version in (
        Version(
            "0.5.12", True,
            {
                **_COMMON,
                "pool": Target(f"{_POOL}.__init__", _POOL_ARGUMENTS),
                "clear": Target(f"{_POOL}.alloc", ("self", "need_size")),
                "copy": Target(f"{_POOL}.copy_from", ("self", "src_index", "dst_index")),
                "track_decode": Target(f"{_BASE}._track_mamba_state_decode", _TRACK),
                "track_extend": Target(f"{_BASE}._track_mamba_state_extend", _TRACK_EXTEND),
                "gdn": Target(f"{GDN}.GDNKernelDispatcher.__init__", ("self", "decode_backend", "prefill_backend")),
                "kda": Target(f"{KDA}.KDAKernelDispatcher.__init__", ("self", "decode_backend", "prefill_backend")),
                "sizing": Target(
                    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
                    ".handle_max_mamba_cache", ("self", "total_rest_memory"),
                ),
                "finished": Target(
                    "sglang.srt.mem_cache.mamba_radix_cache.MambaRadixCache.cache_finished_req",
                    ("self", "req", "is_insert"),
                ),
                "arguments": Target("sglang.srt.server_args.ServerArgs.check_server_args", ("self",)),
                "internal_state": Target(
                    "sglang.srt.managers.scheduler.Scheduler.get_internal_state", ("self", "recv_req")
                ),
                "decode_stats": Target(
                    "sglang.srt.observability.scheduler_metrics_mixin.SchedulerMetricsMixin.report_decode_stats",
                    ("self", "can_run_cuda_graph", "running_batch", "num_correct_drafts"),
                ),
                "sample": Target(_SAMPLER, _SAMPLE),
                "decoded": Target(f"{_OUTPUT_12}.process_batch_result_decode", _RESULT),
                "prefilled": Target(f"{_OUTPUT_12}.process_batch_result_prefill", _RESULT),
            },
            "sglang.srt.configs.mamba_utils.BaseLinearStateParams", ("mamba_pool_idx",), {},
            {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "the unified prefix cache of this version is not hooked"},
        ),
        Version(
            "0.5.23", False,
            {
                **_COMMON,
                "pool": Target(
                    f"{_POOL}.__init__",
                    (*_POOL_ARGUMENTS, "speculative_eagle_topk", "enable_linear_replayssm",
                     "linear_replayssm_cache_len", "envelope_layout", "enable_linear_replayssm_spec"),
                ),
                "clear": Target(f"{_POOL}.clear_slots", ("self", "indices")),
                "copy": Target(f"{_POOL}.copy_from", ("self", "src_indices", "dst_indices")),
                "track_decode": Target(f"{_BASE}._track_mamba_state_decode", (*_TRACK, "layer_id")),
                "track_extend": Target(
                    f"{_BASE}._track_mamba_state_extend", (*_TRACK_EXTEND, "track_states", "h_track_buf")
                ),
                "gdn": Target(
                    f"{GDN}.GDNKernelDispatcher.__init__",
                    ("self", "decode_backend", "prefill_backend", "verify_backend"),
                ),
                "kda": Target(
                    f"{KDA}.KDAKernelDispatcher.__init__",
                    ("self", "decode_backend", "prefill_backend", "verify_backend"),
                ),
                "sizing": Target(
                    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
                    ("self", "total_rest_memory"),
                ),
                "finished": Target(
                    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
                    ("self", "req", "up_to", "kwargs"),
                ),
                "arguments": Target("sglang.srt.server_args.ServerArgs.check_server_args", ("self",)),
                "internal_state": Target(
                    "sglang.srt.managers.scheduler.Scheduler.get_internal_state", ("self", "recv_req")
                ),
                "decode_stats": Target(
                    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
                    ".report_decode_stats",
                    ("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens"),
                ),
                "sample": Target(_SAMPLER, (*_SAMPLE, "logprob_logits")),
                "decoded": Target(f"{_OUTPUT_23}.process_batch_result_decode", _RESULT),
                "prefilled": Target(f"{_OUTPUT_23}.process_batch_result_prefill", _RESULT),
            },
            "sglang.srt.configs.mamba_utils.BaseLinearStateParams", ("kv", "mamba_pool_idx"),
            {"SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND": "1"}, {},
        ),
    )
}  # fmt: skip


def checked_version(found: str) -> Version:
    """The table's entry for an installed version.

    Raises:
        BackendError: for a version that nobody checked.
    """
    if found not in VERSIONS:
        raise BackendError(
            f"SGLang {found} was not checked with this stepquant; expected one of {', '.join(VERSIONS)}: install one "
            "of them, or a stepquant that knows this version"
        )
    return VERSIONS[found]
