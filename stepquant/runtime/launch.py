"""Before a server starts: SGLang's arguments as far as they size the pool, the checks, the dry run, the environment."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from stepquant.errors import ArtifactError, BackendError, RecipeError
from stepquant.memory import GIB
from stepquant.plan import LayoutPlan
from stepquant.runtime.load import RankPlan, load_rank_plan
from stepquant.runtime.sglang.state import Accept
from stepquant.runtime.sizing import PoolArguments, PoolSize, SlotCost, size_pool, slots_per_request
from stepquant.units import parse_bytes

GROUP, NAME = "sglang.srt.plugins", "stepquant"


@dataclass(frozen=True)
class ServeSettings:
    """What `stepquant.serve` was given.

    Attributes:
        plan: artifact directory. accept: what is let pass. sglang: what of SGLang's arguments sizes the pool.
        memory, weights: bytes, for the dry run. json: file for its figures. tune: choose launches on this GPU.
    """

    plan: Path
    accept: Accept
    sglang: argparse.Namespace
    memory: int | None
    weights: int | None
    json: Path | None
    tune: bool = False

    @classmethod
    def from_config(cls, config: Any, arguments: Sequence[str]) -> ServeSettings:
        """Check the composed configuration.

        Raises:
            RecipeError: on a value of a wrong type.
        """
        accepted = [f.name for f in fields(Accept)]
        for name in (*accepted, "dry_run", "tune"):
            if not isinstance(config[name], bool):
                raise RecipeError(f"{name} is {config[name]!r}; expected true or false")
        sizes = {n: None if config[n] is None else parse_bytes(config[n]) for n in ("memory", "weights")}
        if sizes["memory"] is not None and sizes["memory"] < GIB // 1024:
            raise RecipeError(f"memory={config.memory} is {sizes['memory']} bytes; expected a GPU's, e.g. memory=80GiB")
        json = None if config.json is None else Path(str(config.json)).expanduser()
        accept = Accept(**{name: config[name] for name in accepted})
        plan = Path(str(config.plan)).expanduser()
        return cls(plan, accept, parse_arguments(arguments), **sizes, json=json, tune=config.tune)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"SGLang's arguments after --: {message}")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """SGLang's arguments that the pool's size follows from; all others are left to SGLang.

    Raises:
        RecipeError: on a value that is no number where one is expected.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1, dest="tp")
    parser.add_argument("--max-mamba-cache-size", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--mamba-full-memory-ratio", type=float, default=0.9)
    parser.add_argument("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy", default="auto", dest="strategy")
    parser.add_argument("--mem-fraction-static", type=float, default=0.85)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    found, rest = parser.parse_known_args(list(arguments))
    found.others = sorted({word.partition("=")[0] for word in rest if word.startswith("--")})
    return found


def check(settings: ServeSettings) -> None:
    """Everything that can be refused before SGLang itself is asked.

    Raises:
        BackendError: naming what is wrong. Arguments are checked once more in the server, as SGLang resolves them.
    """
    from stepquant.runtime.sglang import refusals

    rank = load_rank_plan(settings.plan, 0, settings.sglang.tp)
    plan = rank.plan
    installed_version()
    refusals.check_plugin_allowed(os.environ.get("SGLANG_PLUGINS"))
    if plugin_target() is None:
        raise BackendError(
            f"the entry point {NAME} of {GROUP} is not installed; SGLang finds the plugin through it: pip install "
            "stepquant into SGLang's environment"
        )
    if settings.sglang.model_path is None:
        raise RecipeError("--model-path is missing after --; SGLang needs the checkpoint that the plan was made for")
    refusals.check_checkpoint(settings.sglang.model_path, plan, settings.plan, settings.accept)
    rank.check_kernels()


def installed_version() -> str:
    """SGLang's version.

    Raises:
        BackendError: not installed, or not checked with this stepquant.
    """
    from importlib.metadata import PackageNotFoundError, version

    from stepquant.runtime.sglang.versions import VERSIONS, checked_version

    try:
        return checked_version(version("sglang")).name
    except PackageNotFoundError:
        raise BackendError(f"SGLang is not installed here; install one of {', '.join(VERSIONS)}") from None


def plugin_target() -> str | None:
    """What the installed entry point names, None where there is none."""
    found = [point.value for point in entry_points(group=GROUP) if point.name == NAME]
    return found[0] if found else None


def set_environment(settings: ServeSettings) -> None:
    """Name the plan to every process of the server."""
    from stepquant.runtime.sglang.state import ACCEPT_VARIABLE, PLAN_VARIABLE, TUNE_VARIABLE

    os.environ[PLAN_VARIABLE] = str(settings.plan.resolve())
    os.environ[ACCEPT_VARIABLE] = settings.accept.text
    os.environ[TUNE_VARIABLE] = str(int(settings.tune))


def show(settings: ServeSettings) -> None:
    """Print what the server would make of its memory, and write it to `json`.

    Raises:
        RecipeError: without the memory of a GPU.
        InfeasibleError: where not one request fits.
    """
    from stepquant.files import write_json
    from stepquant.passes.destinations import SIZING, check_json

    if settings.json is not None:
        check_json(settings.json, kind=SIZING)
    found = figures(settings)
    print(describe(found))
    if settings.json is not None:
        write_json(settings.json, found)


def figures(settings: ServeSettings) -> dict[str, Any]:
    """Slots, bytes and caps of one rank, with the plan and with FP32 states in the same memory.

    Raises:
        RecipeError: without the memory of a GPU.
        ArtifactError: the plan is for another checkpoint than the one that is named.
    """
    from stepquant.runtime.sglang import refusals

    if settings.memory is None:
        raise RecipeError("memory is missing: say what one GPU has, e.g. memory=141GiB")
    a = settings.sglang
    rank = load_rank_plan(settings.plan, 0, a.tp)
    g = rank.plan.geometry
    if a.model_path is not None and Path(a.model_path).expanduser().is_dir() and not rank.plan.synthetic:
        refusals.check_checkpoint(a.model_path, rank.plan, settings.plan, settings.accept)
    radix_off = a.disable_radix_cache or g.family == "kda"  # SGLang switches the prefix cache off for Kimi
    each = slots_per_request(radix_off, a.strategy, a.disable_overlap_schedule)
    pool = PoolArguments(
        a.max_mamba_cache_size, a.max_running_requests, a.mamba_full_memory_ratio, each, radix_off
    )  # fmt: skip
    weights = settings.weights if settings.weights is not None else checkpoint_bytes(a.model_path)
    available = int(settings.memory * a.mem_fraction_static) - weights // a.tp
    cost = _cost(rank)
    dense = SlotCost(g.fp32_bytes // a.tp, cost.conv)
    return {
        "plan": rank.plan.name, "plan_sha256": rank.plan.hash, "tp": a.tp, "slots_per_request": each,
        "weights_bytes": weights, "available_bytes": available, "slot_bytes": cost.state, "conv_bytes": cost.conv,
        "fp32_slot_bytes": dense.state, "window_bytes": cost.window, "workspace_bytes": cost.workspace,
        "compression": round(dense.state / cost.state, 3), "packed": _size(available, pool, cost),
        "fp32": _fp32(available, pool, dense), "arguments_not_read": a.others, "kernels": _kernels(rank),
    }  # fmt: skip


def _cost(rank: RankPlan) -> SlotCost:
    from stepquant.runtime.sglang.sizing import slot_cost

    return slot_cost(rank, rank.plan.geometry.conv_bytes // rank.size)


def _kernels(rank: RankPlan) -> str:
    """Why a GPU would refuse the kernels that the artifact shows; empty where it would not."""
    try:
        rank.check_kernels()
    except ArtifactError as error:
        return str(error)
    return ""


def _size(available: int, arguments: PoolArguments, cost: SlotCost) -> dict[str, Any]:
    return asdict(size_pool(available, arguments, cost))


def _fp32(available: int, arguments: PoolArguments, cost: SlotCost) -> dict[str, Any] | None:
    """The same server with FP32 states; None where those do not fit."""
    from stepquant.errors import InfeasibleError

    try:
        found: PoolSize = size_pool(available, arguments, cost)
    except InfeasibleError:
        return None
    return asdict(found)


def checkpoint_bytes(model_path: str | None) -> int:
    """Bytes of a checkpoint's tensors, of their files' headers.

    Raises:
        RecipeError: no checkpoint named.
    """
    from stepquant.models.checkpoint import resolve_checkpoint
    from stepquant.models.fingerprint import checkpoint_tensors

    if model_path is None:
        raise RecipeError("weights is missing: say weights=BYTES, or name --model-path after --")
    return sum(entry.size for entry in checkpoint_tensors(resolve_checkpoint(model_path)).values())


def describe(found: dict[str, Any]) -> str:
    """The dry run's figures for people."""
    packed, fp32 = found["packed"], found["fp32"]
    ranks = "" if found["tp"] == 1 else f" on each of {found['tp']} ranks"
    lines = [
        f"plan {found['plan']}: {found['slot_bytes']:,} bytes a slot{ranks} instead of {found['fp32_slot_bytes']:,} "
        f"({found['compression']:.2f}x), and {found['conv_bytes']:,} of convolution states",
        f"memory for states and KV cache: {found['available_bytes'] / GIB:.2f} GiB; "
        f"{found['workspace_bytes'] / GIB:.3f} GiB of it prefill workspace",
        f"window buffers: {found['window_bytes']:,} bytes a running request, with room for the token that completes a "
        f"window; slots each: {found['slots_per_request']}",
        f"packed: {packed['slots']} slots set by {packed['set_by']}, {packed['state_bytes'] / GIB:.2f} GiB; at most "
        f"{packed['request_cap']} running requests ({packed['cap_set_by']}); {packed['left_bytes'] / GIB:.2f} GiB left",
    ]
    if fp32 is None:
        lines.append("FP32 states would not fit")
    else:
        lines.append(
            f"FP32:   {fp32['slots']} slots, {fp32['state_bytes'] / GIB:.2f} GiB; at most {fp32['request_cap']} "
            f"running requests; {fp32['left_bytes'] / GIB:.2f} GiB left"
        )
    if found["kernels"]:
        lines.append(f"a server on a GPU would refuse this plan: {found['kernels']}")
    if found["arguments_not_read"]:
        names = ", ".join(found["arguments_not_read"])
        lines.append(f"not looked at: {names}; a server that starts checks them, and names what it refuses")
    return "\n".join(lines)


def serving_command(plan: LayoutPlan, directory: str, model_path: str | None) -> str:
    """The command that serves a plan, as `compile` prints it; a synthetic plan needs force."""
    from stepquant.models.checkpoint import resolve_checkpoint

    forced = " force=true" if plan.synthetic else ""
    path = "CHECKPOINT" if model_path is None else shlex.quote(str(resolve_checkpoint(model_path)))
    return f"python -m stepquant.serve plan={shlex.quote(directory)}{forced} -- --model-path {path}"
