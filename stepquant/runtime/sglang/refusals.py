"""What is refused by name before any weight is loaded: arguments, checkpoints and plans that would be served wrong."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepquant import plan_match
from stepquant.errors import BackendError, ModelError, StepQuantError
from stepquant.plan import LayoutPlan
from stepquant.runtime.sglang.state import Accept

CHECK_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": ((None,), "speculative decoding keeps unpacked states for its drafts"),
    "disaggregation_mode": (("null",), "prefill-decode disaggregation sends the FP32 state pool"),
    "pp_size": ((1,), "pipeline parallelism splits the layers of a plan"),
    "enable_dp_attention": ((False,), "data-parallel attention is not tested"),
    "attn_cp_size": ((1,), "context parallelism is not tested"),
    "enable_hierarchical_cache": ((False,), "the host cache of prefixes copies FP32 states by their layout"),
    "enable_memory_saver": ((False,), "the packed pool does not take part in memory saving"),
    "enable_two_batch_overlap": ((False,), "two batches interleave their layers"),
    "enable_streaming_session": ((False,), "sessions that keep their states between turns are not tested"),
    "enable_pdmux": ((False,), "prefill and decode run at the same time on one pool"),
    "linear_attn_backend": (("triton",), "the packed kernels take the place of the Triton ones"),
    "linear_attn_decode_backend": ((None, "triton"), "the packed kernels take the place of the Triton ones"),
    "linear_attn_prefill_backend": ((None, "triton"), "the workspace of a prefill is laid out for the Triton kernel"),
    "mamba_ssm_dtype": ((None, "float32"), "the state is packed; its dense form in a prefill is float32"),
    "enable_linear_replayssm": ((False,), "the plan has write windows of its own"),
    "enable_linear_replayssm_spec": ((False,), "speculative decoding is not served"),
    "enable_unified_memory": ((False,), "the unified memory pool lays out FP32 states"),
    "enable_page_major_kv_layout": ((False,), "the page-major layout is for FP32 states"),
    "enable_int8_mamba_checkpoint": ((False,), "cached states are packed already"),
}  # arguments of any checked version: allowed values, and why others are not


def check_arguments(arguments: Any, plan: LayoutPlan) -> None:
    """Refuse server arguments that do not go with packed states.

    Args:
        arguments: SGLang's resolved ServerArgs; attributes that its version lacks are not asked for.

    Raises:
        BackendError: naming the argument, its value and what would do.
    """
    for name, (allowed, reason) in CHECK_VALUES.items():
        value = getattr(arguments, name, allowed[0])
        if value not in allowed:
            flag = f"--{name.replace('_', '-')}"
            wanted = " or ".join("left out" if x in (None, False) else str(x) for x in allowed)
            raise BackendError(f"{flag} is {value!r}; with a packed state it must be {wanted}: {reason}")
    tp, g = int(getattr(arguments, "tp_size", 1)), plan.geometry
    if g.num_heads % tp or g.num_key_heads % tp:
        raise BackendError(
            f"--tp {tp} does not divide the plan's {g.num_heads} value heads and {g.num_key_heads} key heads; choose "
            "one that divides both"
        )
    interval = int(getattr(arguments, "mamba_track_interval", 256))
    if interval % plan.window.length:
        raise BackendError(
            f"--mamba-track-interval is {interval}; cached prefixes must end on whole write windows: expected a "
            f"multiple of {plan.window.length}"
        )


def check_checkpoint(model_path: str, plan: LayoutPlan, where: Path, accept: Accept) -> None:
    """Refuse a plan that was made for another checkpoint, or from invented statistics.

    Args:
        model_path: as the server is given it; a directory, or a name in the local Hugging Face cache.
        where: the plan's directory. accept: what is let pass; a synthetic plan has no weights to compare.

    Raises:
        BackendError: a synthetic plan, or a checkpoint that is not there yet.
        ArtifactError: naming what differs, in the words of `stepquant.plan_match`.
    """
    if plan.synthetic and not accept.force:
        raise BackendError(
            f"plan {plan.name!r} is synthetic (made from invented statistics or random weights) and would answer with "
            "noise; compile it from the checkpoint, or say force=true to measure speed and memory"
        )
    plan_match.check_checkpoint(
        plan, where, local_checkpoint(model_path), any_checkpoint=accept.any_checkpoint or plan.synthetic,
        any_weight_format=accept.any_weight_format,
    )  # fmt: skip


def check_plugin_allowed(allowed: str | None) -> None:
    """Raises BackendError if SGLANG_PLUGINS would keep this plugin out, which SGLang does without a word."""
    names = {name.strip() for name in (allowed or "").split(",") if name.strip()}
    if names and "stepquant" not in names:
        raise BackendError(f"SGLANG_PLUGINS is {allowed!r} and leaves out stepquant; add it, or unset the variable")


def check_environment(refused: Mapping[str, str]) -> None:
    """Raises BackendError for a variable that is switched on and whose path the plugin does not hook."""
    for name, reason in refused.items():
        if os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on"):
            raise BackendError(f"{name} is {os.environ[name]!r}; with a packed state it must be unset: {reason}")


def resolved(server_args: Any) -> Any:
    """ServerArgs as they will be used: 0.5.23 keeps what was resolved beside what was typed."""
    try:
        view = importlib.import_module("sglang.srt.arg_groups.model_override_base").resolving_view
    except (ModuleNotFoundError, AttributeError):
        return server_args
    return view(server_args)


def local_checkpoint(model_path: str) -> Path:
    """Where a checkpoint lies on this machine.

    Raises:
        BackendError: not there yet; its fingerprint cannot be compared before it is.
    """
    from stepquant.models.checkpoint import resolve_checkpoint

    try:
        return resolve_checkpoint(model_path)
    except (ModelError, StepQuantError) as error:
        raise BackendError(f"--model-path: {error}") from None
