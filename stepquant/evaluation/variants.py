"""What can be evaluated: a plan as compiled, and the codecs it is compared with, by name.

    plan directory           the plan's own codec and window
    fp32, bf16, fp16         states kept in that dtype (fp32: the reference itself)
    native                   the model's own delta rule, untouched: how far the reference path is from it
    int8, int6, .. int2      rowwise absmax, one FP16 scale a key row
    qmamba6, qmamba4, ..     Q-Mamba's decoupled scales
    nvfp4                    NVFP4 blocks of 16
    spatial6, spatial4, ..   the dual-axis codec at uniform bits, with the plan's row weights
    damp                     DAMP-like: INT8 with Hadamard, FP16 channels chosen from the plan's tables

Any of them may be followed by ``@W`` or ``@W:DTYPE``: the same with a write window of W tokens (``int4@8``,
``build/qwen_4bit@8:int8``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stepquant.accounting import byte_count, packable, page_layout
from stepquant.codec.baselines import FloatCodec, damp_channels
from stepquant.codec.registry import FLOAT_DTYPES, FP32, StateCodec, check_bits, make_codec, storage_bits
from stepquant.codec.spec import MENU, CodecSpec
from stepquant.codec.window import BUFFER_BITS
from stepquant.errors import RecipeError, closest
from stepquant.files import hash_tensors
from stepquant.geometry import Geometry
from stepquant.passes.protocol import Product
from stepquant.plan import WINDOW_LENGTHS, LayoutPlan, WindowSpec, load_plan

StoragePath = Literal["simulated", "packed", "served"]
_INTEGER = re.compile(r"(int|qmamba|spatial)([1-9]\d*)")
_FIXED = ("native", "fp32", "bf16", "fp16", "nvfp4", "damp")


@dataclass(frozen=True)
class Variant:
    """One way of storing the states of a model.

    Attributes:
        name: label of its row.
        geometry: shapes of the model.
        spec: codec settings.
        bits: precision map uint8 `[L, H, K]`.
        w: row weights float32 `[L, H, K]`.
        window: write window.
        dtype: for kind ``float``: fp32, fp16 or bf16.
        path: ``simulated`` runs the codec, ``packed`` goes through the bytes of pages, ``served`` through the runtime.
        directory: artifact directory whose kernels run it, for ``served``.
        native: do not replace the model's delta rule at all.
    """

    name: str
    geometry: Geometry
    spec: CodecSpec
    bits: Tensor
    w: Tensor
    window: WindowSpec = field(default_factory=WindowSpec)
    dtype: str = "fp32"
    path: StoragePath = "simulated"
    native: bool = False
    directory: Path | None = None

    @property
    def exact(self) -> bool:
        """States are stored in FP32 after every token: the reference."""
        return self.spec.kind == "float" and self.dtype == "fp32" and self.window.length == 1 and not self.native

    def path_on(self, device: torch.device) -> str:
        """What a row says of the way the states went: for ``served`` also what ran on this device."""
        if self.native:
            return "native"
        if self.path != "served":
            return self.path
        return f"served by {'generated kernels' if device.type == 'cuda' else 'torch operations'}"

    @property
    def bits_per_value(self) -> float:
        """Bits that a slot stores by state value, scales and pivots included (window buffers are not a slot's)."""
        plan = self.as_plan()
        total = (
            byte_count(plan).total * 8
            if packable(plan)
            else storage_bits(self.bits, self.spec, self.geometry.value_dim)
        )
        return total / self.geometry.elements

    @cached_property
    def key(self) -> str:
        """Hash of everything that shapes its results (not its name)."""
        settings = [asdict(self.spec), self.window.length, self.dtype, self.path == "packed", self.native]
        settings += [self.window.dtype] if self.window.length > 1 else []
        settings += [self.path, _serving_code()] if self.path == "served" else []
        return hash_tensors({"bits": self.bits, "w": self.w, repr(settings): torch.zeros(0)})

    def as_plan(self) -> LayoutPlan:
        """The precision map as a plan of its own, for byte counts and pages."""
        order = torch.arange(self.geometry.key_dim, dtype=torch.int16).expand_as(self.bits)
        return LayoutPlan(self.name, self.geometry, self.spec, self.bits, self.w, order, window=self.window)

    def codec(self, layer: int, device: torch.device) -> StateCodec | None:
        """The codec of one delta-rule layer; None where FP32 states are kept as they are."""
        if self.spec.kind == "float":
            return None if self.dtype == "fp32" else FloatCodec(FLOAT_DTYPES[self.dtype])
        w = self.w[layer].to(device)
        if self.path == "packed":
            return PackedPath(self.as_plan(), layer, w)
        return make_codec(self.bits[layer].to(device), w, self.spec, self.geometry.value_dim)


class PackedPath:
    """The round trip through the bytes of a page, as a `StateCodec`."""

    def __init__(self, plan: LayoutPlan, layer: int, w: Tensor) -> None:
        from stepquant.codec.packed import PackedCodec

        self.codec = PackedCodec(page_layout(plan), layer, w, plan.codec)

    def roundtrip(self, x: Tensor) -> Tensor:
        """Pack states `[b, H, K, V]` and unpack them again."""
        return self.codec.unpack(self.codec.pack(x))


@cache
def _serving_code() -> str:
    """Hash of the code that serves: its results are those of exactly this code."""
    package = Path(__file__).resolve().parents[1]
    files = sorted([*(package / "codegen").glob("*.py"), *(package / "runtime").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def from_plan(
    plan: LayoutPlan, name: str | None = None, path: StoragePath = "simulated", directory: str | Path | None = None
) -> Variant:
    """The plan as it would be served.

    Args:
        path: see `Variant`.
        directory: the plan's artifact directory, for ``served``.

    Raises:
        RecipeError: ``packed`` or ``served`` where the packers do not take the plan.
    """
    variant = Variant(name or plan.name, plan.geometry, plan.codec, plan.bits, plan.w, plan.window)
    if plan.codec.kind == "float":
        return replace(variant, dtype="fp32" if int(plan.bits.flatten()[0]) == FP32 else "fp16")
    if path != "simulated" and not packable(plan):
        raise RecipeError(
            f"plan {plan.name} cannot be packed (codec {plan.codec.kind}, bits {sorted(plan.bits.unique().tolist())}); "
            "evaluate it with path=simulated"
        )
    if path == "served":
        assert directory is not None, "served kernels are those of an artifact"
        return replace(variant, path=path, directory=Path(directory))
    return replace(variant, path=path)


def named_variant(
    text: str, plan: LayoutPlan, tables: Mapping[str, Product] | None = None, path: StoragePath = "simulated"
) -> Variant:
    """The variant that a name of ``against`` stands for.

    Args:
        text: a name of the list above, or an artifact directory, with an optional ``@W`` or ``@W:DTYPE``.
        plan: what it is compared with: gives the geometry and, for ``spatialN``, the row weights.
        tables: calibration products of the plan's artifact, for ``damp``.
        path: of other plans; see `Variant`.

    Raises:
        RecipeError: unknown name, window or precision, or a plan for another model.
    """
    if "@" not in text or _is_plan(text):
        return _named(text, plan, tables, path)
    name, _, window = text.rpartition("@")
    base = _named(name, plan, tables, path)
    length, _, dtype = window.partition(":")
    if length not in map(str, WINDOW_LENGTHS) or (dtype and dtype not in BUFFER_BITS):
        raise RecipeError(
            f"{text}: window {window!r} is not W or W:DTYPE; W is in {WINDOW_LENGTHS}, DTYPE in {list(BUFFER_BITS)}"
        )
    spec = WindowSpec(int(length), dtype or base.window.dtype)  # type: ignore[arg-type]
    if base.path == "served" and spec != base.window:
        raise RecipeError(
            f"{text}: its kernels were generated for a window of {base.window.length} ({base.window.dtype}); leave "
            f"@{window} out, or say path=packed"
        )
    return replace(base, name=f"{base.name}@{window}", window=spec)


def _is_plan(text: str) -> bool:
    return (Path(text) / "plan.json").is_file()


def _named(name: str, plan: LayoutPlan, tables: Mapping[str, Product] | None, path: StoragePath) -> Variant:
    if _is_plan(name):
        return _other_plan(name, plan, path)
    ones = torch.ones_like(plan.w)

    def uniform(bits: int, spec: CodecSpec, w: Tensor = ones, **more: object) -> Variant:
        check_bits(torch.tensor([[bits]], dtype=torch.uint8), spec, plan.geometry.value_dim)
        table = torch.full_like(plan.bits, bits)
        return Variant(name, plan.geometry, spec, table, w, **more)  # type: ignore[arg-type]

    if name in ("fp32", "bf16", "fp16", "native"):
        width = FP32 if name in ("fp32", "native") else 16
        dtype = "fp32" if name == "native" else name
        return uniform(width, CodecSpec(kind="float"), dtype=dtype, native=name == "native")
    if name == "nvfp4":
        return uniform(4, CodecSpec(kind="nvfp4"))
    if name == "damp":
        return Variant(name, plan.geometry, CodecSpec(kind="damp"), _damp_bits(plan, tables), ones)
    match = _INTEGER.fullmatch(name)
    if match and int(match[2]) in MENU:
        codebook = plan.codec.codebook
        spec, w = {
            "int": (CodecSpec(kind="rowwise"), ones),
            "qmamba": (CodecSpec(kind="dsq"), ones),
            "spatial": (
                CodecSpec(
                    codebook=codebook, refits=plan.codec.refits, group=plan.codec.group, sample=plan.codec.sample
                ),
                plan.w,
            ),
        }[match[1]]
        return uniform(int(match[2]), spec, w)
    raise RecipeError(_unknown(name))


def _other_plan(name: str, plan: LayoutPlan, path: StoragePath) -> Variant:
    other = load_plan(name)
    if other.geometry != plan.geometry or other.fingerprint != plan.fingerprint:
        raise RecipeError(
            f"{name} was compiled for another checkpoint (fingerprint {other.fingerprint[:16]}, {plan.name}: "
            f"{plan.fingerprint[:16]}); compare plans of one model"
        )
    return from_plan(other, path=path if packable(other) else "simulated", directory=name)


def _damp_bits(plan: LayoutPlan, tables: Mapping[str, Product] | None) -> Tensor:
    """FP16 channels by 8-bit reconstruction error times lifetime, both from the plan's calibration."""
    from stepquant.passes.gate_statistics import lifetime

    try:
        assert tables is not None
        gates, distortion = tables["gate_statistics"]["mean_log_gate"], tables["distortion"]
        error = distortion["row_error"][..., list(distortion.facts["candidates"]).index(8)]
    except (AssertionError, KeyError, ValueError):
        raise RecipeError(
            "damp needs the plan's calibration tables with an 8-bit column; the artifact has none: compile "
            "recipe=baseline_damp for this model and give its directory instead"
        ) from None
    persistence = lifetime(gates, 2048)
    return damp_channels(error, persistence if persistence.dim() == 3 else persistence.unsqueeze(-1))


def _unknown(name: str) -> str:
    known = [*_FIXED, *(f"{kind}{bits}" for kind in ("int", "qmamba", "spatial") for bits in MENU)]
    if name.startswith("temporal"):
        return (
            f"{name} is a solved map of its own; compile recipe=ablation_temporal_6 (or _4, _no_pivots_6, ..) for this "
            "model and give the artifact's directory instead"
        )
    return (
        f"against has {name!r}{closest(name, known)}; expected a compiled artifact's directory or one of native, fp32, "
        f"bf16, fp16, nvfp4, damp, intN, qmambaN, spatialN with N of {MENU}, each with an optional @WINDOW"
    )


def unique_names(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with repeated names told apart by a number, and exact repetitions left out."""
    result: list[Variant] = []
    for variant in variants:
        if any(v.key == variant.key and v.name == variant.name for v in result):
            continue
        taken = sum(v.name == variant.name or v.name.startswith(f"{variant.name}#") for v in result)
        result.append(replace(variant, name=f"{variant.name}#{taken + 1}") if taken else variant)
    return result
