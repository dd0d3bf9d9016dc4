"""SGLang's entry point ``sglang.srt.plugins``: called in every process of a server, before anything is built.

It does nothing unless STEPQUANT_PLAN names a plan. If it does, every hook is in place when `register` returns, or the
process ends: SGLang itself would log the error and serve FP32 states.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from stepquant.commands import EXIT_ERROR
from stepquant.errors import StepQuantError
from stepquant.runtime.sglang.state import ACCEPT_VARIABLE, Accept, PluginState, activate, current, plan_directory


def register() -> None:
    """Hook the checked SGLang functions for the plan that the environment names."""
    directory = plan_directory()
    if directory is None:
        return
    try:
        accept = Accept.from_text(os.environ.get(ACCEPT_VARIABLE, ""))
        install(PluginState(directory, accept, _version()))
    except Exception as error:
        named = str(error) if isinstance(error, StepQuantError) else f"{type(error).__name__}: {error}"
        print(f"error: stepquant could not take over the state pool: {named}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_ERROR) from error


def _version() -> Any:
    import sglang

    from stepquant.runtime.sglang.versions import checked_version

    return checked_version(str(sglang.__version__))


def install(state: PluginState) -> None:
    """Load the plan, put every hook in place and verify it.

    Raises:
        StepQuantError: on a plan that cannot be served, a version that was not checked, or a hook that did not apply.
    """
    from stepquant.runtime.sglang.hooks import apply_hooks
    from stepquant.runtime.sglang.sizing import install_slot_bytes

    state.rank_plan(0, 1)
    for name, value in state.version.environment.items():
        os.environ.setdefault(name, value)
    activate(state)
    apply_hooks(state.version, functions(state))
    install_slot_bytes(state.version.state_params)


def functions(state: PluginState) -> dict[str, Callable[..., Any]]:
    """The plugin's functions by the names of the version table."""
    from stepquant.runtime.sglang import backend, failures, metrics, pool, sizing

    targets = state.version.targets
    clearing = pool.clear_allocated if targets["clear"].path.endswith(".alloc") else pool.clear_slots
    finishing = pool.finished if targets["finished"].path.endswith(".cache_finished_req") else pool.checkpoint
    return {
        "pool": pool.build, "layer_cache": pool.layer_cache, "clear": clearing, "copy": pool.copy, "save": pool.save,
        "load": pool.load, "finished": finishing, "forward_metadata": backend.forward_metadata,
        "track_decode": backend.track_decode, "track_extend": backend.track_extend, "gdn": backend.gdn_dispatcher,
        "kda": backend.kda_dispatcher, "sizing": sizing.size_states, "arguments": check_server,
        "internal_state": metrics.internal_state, "decode_stats": metrics.decode_stats, "sample": failures.sample,
        "decoded": failures.decoded, "prefilled": failures.prefilled,
    }  # fmt: skip


def check_server(original: Callable[..., Any], self: Any) -> Any:
    """`ServerArgs.check_server_args`: refusals, in the main process and before any weight is loaded."""
    from stepquant.runtime.sglang import refusals

    result = original(self)
    state = current()
    arguments, plan = refusals.resolved(self), state.rank_plan(0, 1).plan
    refusals.check_environment(state.version.refused)
    refusals.check_arguments(arguments, plan)
    refusals.check_checkpoint(str(self.model_path), plan, state.directory, state.accept)
    return result
