"""Geometry of a model's recurrent state: what the plan, the layout and the memory formula need to know of a model."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

from stepquant.errors import RecipeError, shown

Family = Literal["gdn", "kda"]
FAMILIES: tuple[Family, ...] = ("gdn", "kda")


@dataclass(frozen=True)
class Geometry:
    """Shapes and per-request bytes of a model's delta-rule layers.

    Attributes:
        family: ``gdn`` (one gate a value head) or ``kda`` (one gate a key row).
        model_type: transformers' ``model_type`` of the text model, for messages and checks.
        layers: indices, in the whole model, of the delta-rule layers, ascending and 0-based.
        num_heads: value heads of a layer (H); each owns one state of ``key_dim x value_dim``.
        num_key_heads: key heads of a layer; value head h uses key head ``h // (num_heads // num_key_heads)``.
        key_dim: key rows of a state (K).
        value_dim: value columns of a state (V).
        conv_bytes: bytes of convolution state of one slot over all layers, as the server keeps it.
        kv_bytes_per_token: bytes of attention KV cache of one token over all full-attention layers.
        num_layers: layers of the whole model, delta-rule and others.
        beta_max: upper bound of the write strength (2 where negative eigenvalues are allowed).
    """

    family: Family
    model_type: str
    layers: tuple[int, ...]
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_bytes: int = 0
    kv_bytes_per_token: int = 0
    num_layers: int = 0
    beta_max: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(i) for i in self.layers))
        if self.family not in FAMILIES:
            raise RecipeError(f"geometry.family is {shown(self.family)}; expected one of {', '.join(FAMILIES)}")
        for name in ("num_heads", "num_key_heads", "key_dim", "value_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise RecipeError(f"geometry.{name} is {value!r}; expected a positive integer")
        if not self.layers:
            raise RecipeError("geometry.layers is empty; expected the indices of the delta-rule layers")
        if len(set(self.layers)) != len(self.layers) or list(self.layers) != sorted(self.layers) or self.layers[0] < 0:
            raise RecipeError(
                f"geometry.layers is {shown(list(self.layers))}; expected ascending distinct 0-based indices"
            )
        if self.num_layers and self.layers[-1] >= self.num_layers:
            raise RecipeError(f"geometry.layers ends with {self.layers[-1]}; num_layers is {self.num_layers}")
        if self.num_heads % self.num_key_heads:
            raise RecipeError(
                f"geometry.num_heads is {self.num_heads}, not a multiple of num_key_heads {self.num_key_heads}; "
                "grouped heads share q and k in equal groups"
            )

    @property
    def num_delta_layers(self) -> int:
        """Delta-rule layers (L)."""
        return len(self.layers)

    @property
    def head_elements(self) -> int:
        """State elements of one head (K * V)."""
        return self.key_dim * self.value_dim

    @property
    def elements(self) -> int:
        """State elements of one slot over all layers (N of appendix D)."""
        return self.num_delta_layers * self.num_heads * self.head_elements

    @property
    def fp32_bytes(self) -> int:
        """Bytes of one slot's FP32 state."""
        return 4 * self.elements

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for plan.json; `from_json` is its inverse."""
        data = asdict(self)
        data["layers"] = list(self.layers)
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        """Rebuild from `to_json`'s dictionary.

        Raises:
            RecipeError: on unknown or missing keys or bad values.
        """
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(data) - known)
        if unknown:
            raise RecipeError(f"geometry has unknown keys {shown(unknown)}; expected {sorted(known)}")
        missing = [item.name for item in fields(cls) if item.default is MISSING and item.name not in data]
        if missing:
            raise RecipeError(f"geometry lacks {', '.join(missing)}; expected a value for each of them")
        layers = data["layers"]
        if not isinstance(layers, list | tuple) or not all(type(index) is int for index in layers):
            raise RecipeError(f"geometry.layers is {shown(layers)}; expected a list of whole numbers")
        return cls(**{**data, "layers": tuple(layers)})
