"""Checks of what plan.json says, value by value: the parts of a plan that are no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from stepquant.codec.spec import CodecKind, CodecSpec
from stepquant.errors import ArtifactError, shown
from stepquant.geometry import Geometry

CODEBOOKS = ("head", "shared")
MOST_LAYERS = 4096
WEIGHT_TOLERANCE = 1e-3
_FIGURES = ("cost", "bound", "gap", "predicted_cost_per_token", "seconds")


def geometry_from_json(data: Mapping[str, Any]) -> Geometry:
    """A geometry from plan.json, every value of its own type.

    Raises:
        ArtifactError, RecipeError: naming the key, the value found and what was expected.
    """
    for name, value in data.items():
        if name not in Geometry.__dataclass_fields__:
            raise ArtifactError(
                f"geometry has the unknown key {shown(name)}; expected {', '.join(Geometry.__dataclass_fields__)}"
            )
        if name == "layers":
            whole = isinstance(value, list) and all(type(i) is int for i in value)
            if not whole or not len(value) <= MOST_LAYERS:
                raise ArtifactError(f"geometry.layers is {shown(value)}; expected a list of layer indices")
        elif name in ("family", "model_type"):
            if not isinstance(value, str):
                raise ArtifactError(f"geometry.{name} is {shown(value)}; expected a string")
        elif name == "beta_max":
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                raise ArtifactError(f"geometry.beta_max is {shown(value)}; expected a positive number")
        elif type(value) is not int or not 0 <= value < 2**53:
            raise ArtifactError(f"geometry.{name} is {shown(value)}; expected a whole number that is not negative")
    return Geometry.from_json(dict(data))


def check_codec(where: str, codec: CodecSpec, value_dim: int) -> None:
    """Refuse codec settings that no codec has.

    Raises:
        ArtifactError: naming the setting.
    """
    if codec.kind not in get_args(CodecKind):
        raise ArtifactError(f"{where}: codec.kind is {shown(codec.kind)}; expected one of {get_args(CodecKind)}")
    if codec.codebook not in CODEBOOKS:
        raise ArtifactError(f"{where}: codec.codebook is {shown(codec.codebook)}; expected one of {CODEBOOKS}")
    if codec.group < 1:
        raise ArtifactError(f"{where}: codec.group is {codec.group}; expected at least one of {value_dim} columns")
    if codec.sample % 16:
        raise ArtifactError(f"{where}: codec.sample is {codec.sample}; expected a multiple of 16 columns, or 0")


def check_storage(where: str, bits: Tensor, permutation: Tensor) -> None:
    """Refuse a permutation that does not put equal precisions of a head together.

    Raises:
        ArtifactError: naming a head.
    """
    stored = bits.gather(-1, permutation.long())
    runs = 1 + (stored[..., 1:] != stored[..., :-1]).sum(-1)
    order = bits.sort(-1).values
    kinds = 1 + (order[..., 1:] != order[..., :-1]).sum(-1)
    if bool((runs != kinds).any()):
        layer, head = (runs != kinds).nonzero()[0].tolist()
        raise ArtifactError(f"{where}: permutation of layer {layer}, head {head} scatters equal precisions of bits")


def check_weights(where: str, w: Tensor) -> None:
    """Refuse row weights whose geometric mean is not 1 in every head.

    Raises:
        ArtifactError: naming a head.
    """
    mean = w.double().log().mean(-1).exp()
    if bool(((mean - 1).abs() > WEIGHT_TOLERANCE).any()):
        layer, head = ((mean - 1).abs() > WEIGHT_TOLERANCE).nonzero()[0].tolist()
        raise ArtifactError(
            f"{where}: w of layer {layer}, head {head} has geometric mean {float(mean[layer, head]):.4g}; expected 1"
        )


def check_facts(where: str, plan: Any) -> None:
    """Check what is recorded about a plan: finite numbers, and the figures that are shown of their own type.

    Raises:
        ArtifactError: naming the fact.
    """
    if not plan.name or len(plan.name) > 200 or not plan.name.isprintable():
        raise ArtifactError(f"{where}: name is {shown(plan.name)}; expected 1 to 200 printable characters")
    for name in ("budget", "predicted", "settings", "provenance"):
        _check_finite(f"{where}: {name}", getattr(plan, name))
    for name in _FIGURES:
        value = plan.predicted.get(name, 0.0)
        if not _is_number(value):
            raise ArtifactError(f"{where}: predicted.{name} is {shown(value)}; expected a number")
    bits = plan.budget.get("bits")
    if bits is not None and not _is_number(bits):
        raise ArtifactError(f"{where}: budget.bits is {shown(bits)}; expected a number or null")
    layers, count = plan.predicted.get("by_layer"), plan.geometry.num_delta_layers
    if layers is not None and not (
        isinstance(layers, list) and len(layers) == count and all(_is_number(x) for x in layers)
    ):
        raise ArtifactError(f"{where}: predicted.by_layer is {shown(layers)}; expected {count} numbers, one a layer")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_finite(where: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ArtifactError(f"{where} is {value}; expected a finite number")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_finite(f"{where}.{str(name)[:40]}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_finite(f"{where}[{index}]", item)
