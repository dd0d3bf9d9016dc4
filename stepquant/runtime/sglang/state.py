"""What the plugin knows in one process: the plan that was named, the SGLang version, what the server was asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stepquant.errors import BackendError
from stepquant.runtime.load import RankPlan, load_rank_plan
from stepquant.runtime.sglang.versions import Version

PLAN_VARIABLE = "STEPQUANT_PLAN"
ACCEPT_VARIABLE = "STEPQUANT_ACCEPT"
TUNE_VARIABLE = "STEPQUANT_TUNE"
"""1: kernels are launched as measured on this GPU, not as the generator prefers."""
WORKSPACE_STATES = 64
"""Dense FP32 states of one layer that a prefill holds at a time; a larger batch goes in parts."""


@dataclass(frozen=True)
class Accept:
    """What `stepquant.serve` was told to let pass, by its own words; processes get it in one variable.

    Attributes:
        force: a synthetic plan. any_checkpoint, any_weight_format: as in `stepquant.plan_match.check_checkpoint`.
    """

    force: bool = False
    any_checkpoint: bool = False
    any_weight_format: bool = False

    @classmethod
    def from_text(cls, text: str) -> Accept:
        """Of the variable: words with commas between them.

        Raises:
            BackendError: naming a word that is none of the attributes.
        """
        words, known = {word.strip() for word in text.split(",")} - {""}, [f.name for f in fields(cls)]
        if words - set(known):
            raise BackendError(
                f"{ACCEPT_VARIABLE} is {text!r}; expected some of {', '.join(known)} with commas between them"
            )
        return cls(**dict.fromkeys(words, True))

    @property
    def text(self) -> str:
        """For the variable."""
        return ",".join(f.name for f in fields(self) if getattr(self, f.name))


@dataclass
class PluginState:
    """Attributes: directory: of the plan. accept: what is let pass. version: entry of the table.
    slots_per_request: SGLang's ratio of slots to running requests. plans: by (rank, size). report: figures of the
    pool for logs and metrics. published: when they last went to Prometheus."""

    directory: Path
    accept: Accept
    version: Version
    slots_per_request: int = 1
    plans: dict[tuple[int, int], RankPlan] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    published: float = 0.0

    def rank_plan(self, rank: int, size: int) -> RankPlan:
        """The plan of one tensor-parallel rank, loaded once."""
        if (rank, size) not in self.plans:
            self.plans[rank, size] = load_rank_plan(self.directory, rank, size)
        return self.plans[rank, size]


_current: list[PluginState] = []


def plan_directory() -> Path | None:
    """The plan that the environment names, or None where the plugin is to do nothing."""
    name = os.environ.get(PLAN_VARIABLE, "").strip()
    return Path(name) if name else None


def activate(state: PluginState) -> None:
    """Make a plan the process's."""
    _current[:] = [state]


def current() -> PluginState:
    """The active plan.

    Raises:
        BackendError: none is active.
    """
    if not _current:
        raise BackendError(f"the stepquant plugin is not active; set {PLAN_VARIABLE} (python -m stepquant.serve does)")
    return _current[0]


def local_plan() -> RankPlan:
    """The plan as this process's tensor-parallel rank holds it; SGLang's groups must exist."""
    from sglang.srt.distributed.parallel_state import (
        get_attn_tensor_model_parallel_rank,
        get_attn_tensor_model_parallel_world_size,
    )

    return current().rank_plan(get_attn_tensor_model_parallel_rank(), get_attn_tensor_model_parallel_world_size())
