"""LayoutPlan: what the solver decided, and its file format (plan.json beside plan.safetensors, no pickle).

Loading is strict: an unknown schema version, a missing or extra tensor, a wrong shape or dtype, a precision outside
the menu, a permutation that is not one, or a hash that does not match is refused by name. Nothing in an artifact is
ever executed.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stepquant.codec.spec import MENU, PIVOT, CodecSpec
from stepquant.errors import ArtifactError, StepQuantError, shown
from stepquant.files import (
    dump_json,
    dump_tensors,
    hash_json,
    hash_tensors,
    read_json,
    read_tensors,
    write_together,
)
from stepquant.geometry import Geometry
from stepquant.json_checks import Kinds, check_object
from stepquant.plan_checks import check_codec, check_facts, check_storage, check_weights, geometry_from_json
from stepquant.reading import MAX_PLAN_BYTES
from stepquant.swap import read_whole

SCHEMA_VERSION = 2
PLAN_JSON, PLAN_TENSORS = "plan.json", "plan.safetensors"
WINDOW_LENGTHS = (1, 2, 4, 8, 16)
WindowDtype = Literal["fp16", "bf16", "int8", "fp32"]
GRANULARITIES = (1, 8, 16)


@dataclass(frozen=True)
class WindowSpec:
    """Write window: pending tokens kept exactly between two writebacks (1 = the paper), and their buffer dtype."""

    length: int = 1
    dtype: WindowDtype = "fp16"


@dataclass(frozen=True)
class LayoutPlan:
    """A solved mixed-precision layout of a model's recurrent state.

    Attributes:
        name: recipe name.
        geometry: shapes of the model it was made for.
        codec: spatial codec settings.
        bits: uint8 `[L, H, K]`, precision of every key row; 16 marks an FP16 pivot.
        w: float32 `[L, H, K]`, row weights of the fit, geometric mean 1 in a head.
        permutation: int16 `[L, H, K]`, storage position -> key row, equal precisions contiguous.
        granularity: rows per precision come in multiples of this in every head.
        window: write window.
        fingerprint: of the checkpoint's tensors, or `synthetic`.
        weight_format: of the checkpoint (`bfloat16`, `awq`, ...); a plan belongs to it.
        synthetic: made from seeded synthetic statistics or random weights; never for serving real traffic.
        budget: what was asked and what the solver used: integers and floats by name.
        predicted: predicted distortion and solver figures by name.
        settings: the recipe's keys that shaped the plan, without paths.
        provenance: versions and data fingerprint.
    """

    name: str
    geometry: Geometry
    codec: CodecSpec
    bits: Tensor
    w: Tensor
    permutation: Tensor
    granularity: int = 1
    window: WindowSpec = field(default_factory=WindowSpec)
    fingerprint: str = "synthetic"
    weight_format: str = "unknown"
    synthetic: bool = False
    budget: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of plan.safetensors by name."""
        return {"bits": self.bits, "w": self.w, "permutation": self.permutation}

    @property
    def hash(self) -> str:
        """Identity of the plan's content: geometry, codec, window and tensors (not provenance)."""
        head = {
            "geometry": self.geometry.to_json(),
            "codec": asdict(self.codec),
            "window": asdict(self.window),
            "granularity": self.granularity,
        }
        return hash_tensors({**self.tensors, repr(sorted(head.items())): torch.zeros(0)})

    def verify(self, where: str = "plan") -> None:
        """Check every invariant; called on the way in and on the way out.

        Raises:
            ArtifactError: naming the field, the value found and what was expected.
        """
        shape = (self.geometry.num_delta_layers, self.geometry.num_heads, self.geometry.key_dim)
        _check_tensor(where, "bits", self.bits, torch.uint8, shape)
        _check_tensor(where, "w", self.w, torch.float32, shape)
        _check_tensor(where, "permutation", self.permutation, torch.int16, shape)
        check_codec(where, self.codec, self.geometry.value_dim)
        menu = set(MENU) | {PIVOT} if self.codec.kind != "float" else {PIVOT, 32}
        found = set(self.bits.unique().tolist())
        if found - menu:
            raise ArtifactError(f"{where}: bits holds {sorted(found - menu)}; expected only {sorted(menu)}")
        if not bool((torch.isfinite(self.w) & (self.w > 0)).all()):
            raise ArtifactError(f"{where}: w holds values that are not finite and positive; expected row weights > 0")
        rows = torch.arange(shape[-1], dtype=torch.int16)
        if not bool((self.permutation.sort(-1).values == rows).all()):
            raise ArtifactError(f"{where}: permutation of some head is not a permutation of 0..{shape[-1] - 1}")
        if self.codec.codebook == "head" and not bool((self.bits == self.bits[..., :1]).all()):
            raise ArtifactError(f"{where}: codec.codebook is 'head' but a head mixes precisions; expected one a head")
        if self.codec.codebook == "head" and 2 in found and self.geometry.value_dim % self.codec.group:
            raise ArtifactError(
                f"{where}: codec.group is {self.codec.group}; expected a divisor of value_dim {self.geometry.value_dim}"
            )
        check_storage(where, self.bits, self.permutation)
        check_weights(where, self.w)
        if self.window.length not in WINDOW_LENGTHS:
            raise ArtifactError(f"{where}: window.length is {self.window.length}; expected one of {WINDOW_LENGTHS}")
        if self.window.dtype not in get_args(WindowDtype):
            known = get_args(WindowDtype)
            raise ArtifactError(f"{where}: window.dtype is {shown(self.window.dtype)}; expected one of {known}")
        if self.granularity not in GRANULARITIES:
            raise ArtifactError(f"{where}: granularity is {self.granularity}; expected one of {GRANULARITIES}")
        check_facts(where, self)

    def save(self, directory: Path) -> None:
        """Write plan.safetensors and plan.json together, plan.json last; it carries the hashes of both."""
        write_together({directory / name: data for name, data in self.files().items()})

    def files(self) -> dict[str, bytes]:
        """The plan's files by name, plan.json last.

        Raises:
            ArtifactError: when the plan contradicts itself.
        """
        self.verify()
        return {PLAN_TENSORS: dump_tensors(self.tensors), PLAN_JSON: dump_json(self.to_json()).encode()}

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json; ``json_sha256`` covers all of the rest."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "geometry": self.geometry.to_json(),
            "codec": asdict(self.codec),
            "window": asdict(self.window),
            "granularity": self.granularity,
            "fingerprint": self.fingerprint,
            "weight_format": self.weight_format,
            "synthetic": self.synthetic,
            "budget": self.budget,
            "predicted": self.predicted,
            "settings": self.settings,
            "provenance": self.provenance,
            "tensors_sha256": hash_tensors(self.tensors),
            "plan_sha256": self.hash,
        }
        return {**data, "json_sha256": _json_hash(data)}


_KEYS: Kinds = {
    "schema_version": int, "name": str, "geometry": dict, "codec": dict, "window": dict, "granularity": int,
    "fingerprint": str, "weight_format": str, "synthetic": bool, "budget": dict, "predicted": dict,
    "settings": dict, "provenance": dict, "tensors_sha256": str, "plan_sha256": str, "json_sha256": str,
}  # fmt: skip


def load_plan(directory: str | Path) -> LayoutPlan:
    """Read and verify the plan of an artifact directory.

    Raises:
        ArtifactError: naming the file, the field, the value found and what was expected.
    """
    return read_whole(Path(directory), lambda: _load_plan(Path(directory)))


def _load_plan(directory: Path) -> LayoutPlan:
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such artifact directory; compile one with python -m stepquant.compile")
    path = directory / PLAN_JSON
    data = read_json(path, "the plan")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path}: schema_version is {shown(version)}; this stepquant reads {SCHEMA_VERSION}; compile the plan again"
        )
    check_object(f"{path}: ", data, _KEYS)
    tensors = read_tensors(directory / PLAN_TENSORS, "the file of the plan's tensors", MAX_PLAN_BYTES)
    expected = {"bits", "w", "permutation"}
    if set(tensors) != expected:
        raise ArtifactError(
            f"{directory / PLAN_TENSORS}: tensors {shown(sorted(tensors))}; expected {sorted(expected)}"
        )
    if hash_tensors(tensors) != data["tensors_sha256"]:
        raise ArtifactError(f"{directory / PLAN_TENSORS}: tensors do not match tensors_sha256 of {PLAN_JSON}")
    try:
        plan = LayoutPlan(
            name=data["name"],
            geometry=geometry_from_json(data["geometry"]),
            codec=_dataclass(CodecSpec, data["codec"], "codec"),
            window=_dataclass(WindowSpec, data["window"], "window"),
            granularity=data["granularity"],
            fingerprint=data["fingerprint"],
            weight_format=data["weight_format"],
            synthetic=data["synthetic"],
            budget=data["budget"],
            predicted=data["predicted"],
            settings=data["settings"],
            provenance=data["provenance"],
            bits=tensors["bits"],
            w=tensors["w"],
            permutation=tensors["permutation"],
        )
    except StepQuantError as error:
        raise ArtifactError(f"{path}: {error}") from None
    plan.verify(str(path))
    if data["json_sha256"] != _json_hash({name: value for name, value in data.items() if name != "json_sha256"}):
        raise ArtifactError(f"{path}: json_sha256 does not match the rest; it was edited: compile it again")
    if plan.hash != data["plan_sha256"]:
        raise ArtifactError(f"{path}: plan_sha256 does not match the plan's content; it was edited: compile it again")
    return plan


def _json_hash(data: dict[str, Any]) -> str:
    """Hash of JSON as it will be read back (keys as strings, tuples as lists)."""
    return hash_json(json.loads(json.dumps(data)))


def _dataclass(kind: Any, data: dict[str, Any], where: str) -> Any:
    fields = kind.__dataclass_fields__
    if set(data) != set(fields):
        raise ArtifactError(f"{where} has keys {shown(sorted(data))}; expected {sorted(fields)}")
    for name, value in data.items():
        default = fields[name].default
        if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value < 1024):
            raise ArtifactError(f"{where}.{name} is {shown(value)}; expected something like {default!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ArtifactError(f"{where}.{name} is {value!r}; expected a finite number")
    return kind(**data)


def _check_tensor(where: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ArtifactError(
            f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)} from the geometry"
        )
