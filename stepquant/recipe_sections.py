"""The sections of a recipe: every key with its default and the check that a value must pass."""

from __future__ import annotations

from dataclasses import dataclass

from stepquant import recipe_rules as rules
from stepquant.geometry import Family, Geometry
from stepquant.memory import SLOTS_PER_REQUEST
from stepquant.recipe_checks import (
    candidates,
    choice,
    flag,
    geometry,
    integer,
    listed,
    number,
    one_of,
    one_of_or,
    optional,
    pattern,
    per_layer,
    setting,
    size,
    text,
)

MOST, MOST_SEED = 10**7, 2**32 - 1
"""Counts and seeds above these are slips of the keyboard, whose arithmetic would overflow further on."""
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class ModelSettings:
    """Which checkpoint, and how it is loaded."""

    path: str | None = setting(None, optional(text))
    device: str = setting("auto", pattern(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N"))
    device_map: str | None = setting(None, optional(choice("auto")))
    weights: str = setting("checkpoint", pattern(r"checkpoint|random:\d{1,9}", "checkpoint or random:SEED"))
    loading: str = setting("whole", choice("whole", "layerwise"))
    dtype: str = setting("auto", choice("auto", "float32", "bfloat16"))
    trust_remote_code: bool = setting(False, flag)
    geometry: Geometry | None = setting(None, optional(geometry))
    expect_family: Family | None = setting(None, optional(choice("gdn", "kda")))

    @property
    def weights_seed(self) -> int | None:
        """Seed of ``random:SEED`` weights, or None for a checkpoint's own."""
        return int(self.weights.partition(":")[2]) if self.weights.startswith("random:") else None


@dataclass(frozen=True)
class DataSettings:
    """Calibration text: ``segments`` pieces of ``length`` tokens, run ``batch`` at a time."""

    source: str = setting("builtin", choice("builtin", "wikitext2", "file"))
    path: str | None = setting(None, optional(text))
    segments: int = setting(16, integer(1, MOST))
    length: int = setting(1024, integer(2, MOST))
    batch: int = setting(8, integer(1, MOST))
    seed: int = setting(0, integer(0, MOST_SEED))
    split: str = setting("train", choice("train", "validation", "test"))


@dataclass(frozen=True)
class SampleSettings:
    """State samples: one every ``every`` updates, a reservoir of ``per_layer`` a layer."""

    every: int = setting(8, integer(1, MOST))
    per_layer: int = setting(64, integer(1, MOST))


@dataclass(frozen=True)
class TemporalSettings:
    """What a state error costs over time: horizon, weight of a unit, sensitivity of the output."""

    horizon: int = setting(2048, integer(1, MOST))
    weight: str = setting("gate", choice("gate", "transition", "rollout"))
    sensitivity: str = setting("none", choice("none", "gradient", "local"))


@dataclass(frozen=True)
class SpatialSettings:
    """The codec of a state and its row factors (``gamma``: exponent of the row impact).

    ``refits``: of the column scales; the paper does one; none is faster (docs/kernels.md).
    ``sample``: columns of each half (each group of four-level heads) that row factors are means over; 0 for all.
    """

    codec: str = setting("dual_axis", choice("dual_axis", "rowwise", "nvfp4", "dsq", "damp"))
    gamma: float = setting(0.25, number(0.0, 2.0))
    impact: str = setting("one_step", choice("one_step", "transition"))
    refits: int = setting(0, integer(0, 8))
    sample: int = setting(16, one_of(0, 16, 32, 48, 64))


@dataclass(frozen=True)
class BudgetSettings:
    """How large a slot may be: exactly one of bits a value, bytes a request, or a concurrency to reach."""

    bits: float | None = setting(None, optional(number(2, 8)))
    candidates: tuple[int, ...] | None = setting(None, optional(candidates))
    bytes_per_request: int | None = setting(None, optional(size))
    concurrency: int | None = setting(None, optional(integer(1, MOST)))
    gpu_memory: int | None = setting(None, optional(size))
    gpus: int = setting(1, integer(1, MOST))
    weights_bytes: int | None = setting(None, optional(size))
    context_length: int = setting(4096, integer(1, MOST))
    strategy: str = setting("extra_buffer", choice(*SLOTS_PER_REQUEST))

    @property
    def target(self) -> str:
        """Which key decides: ``bits``, ``bytes_per_request`` or ``concurrency``."""
        return next(name for name in rules.TARGETS if getattr(self, name) is not None)

    @property
    def slots_per_request(self) -> int:
        """Slots a running request takes under the named SGLang strategy (r of equation 24)."""
        return SLOTS_PER_REQUEST[self.strategy]


@dataclass(frozen=True)
class PivotSettings:
    """Units kept in FP16: whole heads or rows, by the unit of the allocation."""

    count: int = setting(0, integer(0, MOST))


@dataclass(frozen=True)
class AllocationSettings:
    """What gets its own precision, and in which multiples; caps and floors by layer (``7``) or head (``7/3``)."""

    mode: str = setting("mixed", choice("mixed", "uniform"))
    unit: str = setting("auto", choice("auto", "head", "row"))
    granularity: int = setting(1, one_of(1, 8, 16))
    caps: dict[str, int] | None = setting(None, optional(per_layer))
    floors: dict[str, int] | None = setting(None, optional(per_layer))


@dataclass(frozen=True)
class SolverSettings:
    """Options of the integer program."""

    backend: str = setting("ortools", choice("ortools", "pulp"))
    time_limit: float = setting(120.0, number(0.1, 86_400))


@dataclass(frozen=True)
class WindowSettings:
    """Write window: the state is requantised once in ``length`` tokens, pending ones kept in ``dtype``.

    ``length=auto`` leaves the choice to the solver, together with the bits, under a target in bytes or requests.
    """

    length: int | str = setting(1, one_of_or("auto", 1, 2, 4, 8, 16))
    dtype: str = setting("fp16", choice("fp16", "bf16", "int8", "fp32"))

    @property
    def tokens(self) -> int:
        """W; 1, with nothing pending, while the solver has yet to choose."""
        return 1 if isinstance(self.length, str) else self.length


@dataclass(frozen=True)
class TargetSettings:
    """The server the plan is for."""

    tensor_parallel: int = setting(1, one_of(1, 2, 4, 8))


@dataclass(frozen=True)
class CodegenSettings:
    """GPU architectures to compile kernels for ahead of time."""

    targets: tuple[str, ...] = setting((), listed(choice(*ARCHITECTURES), "a list such as [sm_90]"))


@dataclass(frozen=True)
class CacheSettings:
    """Where the products of passes are kept between runs."""

    dir: str = setting("~/.cache/stepquant", text)
    enabled: bool = setting(True, flag)
