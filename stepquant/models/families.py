"""What can be said of a delta-rule checkpoint from its config.json alone: family, layers, geometry.

Neither torch nor transformers is imported, so that dry runs and synthetic compiles work at full size anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepquant.errors import ModelError
from stepquant.geometry import Geometry
from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
from stepquant.models.family_table import (
    FAMILY_TABLE,
    LARA_PATTERN,
    ModelFamily,
    check_transformers,
    find_family,
    known_model_types,
)

__all__ = [
    "FAMILY_TABLE",
    "ModelFamily",
    "check_transformers",
    "find_family",
    "gate_lower_bound",
    "geometry_from_config",
    "known_model_types",
    "layer_kinds",
    "read_config",
    "resolve_checkpoint",
    "text_config",
    "weight_format",
]


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration with the family's defaults filled in (a multimodal config nests it)."""
    family = find_family(config)
    nested = config.get("text_config")
    own = dict(nested) if isinstance(nested, Mapping) and nested else dict(config)
    own = {key: value for key, value in own.items() if value is not None}
    linear = own.get("linear_attn_config")
    if family.family == "kda" and isinstance(linear, Mapping):
        renamed = {
            "head_dim": "linear_head_dim",
            "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim",
            "gate_lower_bound": "linear_lower_bound",
        }
        own.update({new: linear[old] for old, new in renamed.items() if linear.get(old) is not None})
    return {**family.defaults, **own}


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """Kind of every decoder layer: ``linear_attention`` for delta-rule layers, otherwise as the config calls it.

    Raises:
        ModelError: layer lists that do not cover the layers exactly once.
    """
    family, text = find_family(config), text_config(config)
    count = int(text["num_hidden_layers"])
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = _kinds_by_rule(family, text, count)
    if len(kinds) != count:
        raise ModelError(f"layer_types has {len(kinds)} entries but num_hidden_layers is {count} ({family.model_type})")
    return [str(kind) for kind in kinds]


def _kinds_by_rule(family: ModelFamily, text: Mapping[str, Any], count: int) -> list[str]:
    if family.layer_rule == "pattern":
        return [LARA_PATTERN[i % len(LARA_PATTERN)] for i in range(count)]
    if family.layer_rule == "kimi":
        linear = text.get("linear_attn_config") or {}
        kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
        if kda is None or full is None:
            return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
        if sorted([*kda, *full]) != list(range(1, count + 1)):
            raise ModelError(
                f"linear_attn_config lists kda_layers {list(kda)} and full_attn_layers {list(full)}; "
                f"expected each of the layers 1 to {count} exactly once (counted from 1)"
            )
        return ["linear_attention" if i + 1 in set(kda) else "full_attention" for i in range(count)]
    period = int(text.get(family.period, 4)) if isinstance(family.period, str) else family.period
    kinds = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    if family.model_type == "olmo_hybrid" and "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    return kinds


def _dims(family: ModelFamily, text: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """(value heads, key heads, K, V, convolution width) of a delta-rule layer."""
    try:
        if family.family == "kda":
            head = int(text["linear_head_dim"] if "linear_head_dim" in text else text["head_dim"])
            heads = int(text["linear_num_heads"] if "linear_num_heads" in text else text["num_attention_heads"])
            width = int(text.get("short_conv_kernel_size", text.get("linear_conv_kernel_dim", 4)))
            return heads, heads, head, head, width
        if family.model_type == "olmo_hybrid":
            keys = text.setdefault("linear_num_key_heads", text["num_attention_heads"])
            text.setdefault("linear_num_value_heads", text["num_attention_heads"])
            key_dim = text.setdefault("linear_key_head_dim", int(0.75 * text["hidden_size"] / keys))
            text.setdefault("linear_value_head_dim", 2 * key_dim)
        names = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
                 "linear_conv_kernel_dim")  # fmt: skip
        heads, keys, key_dim, value_dim, width = (int(text[name]) for name in names)
        return heads, keys, key_dim, value_dim, width
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of a {family.model_type} model lacks or garbles {error}") from None


def geometry_from_config(config: Mapping[str, Any] | str | Path) -> Geometry:
    """Geometry of a checkpoint from its configuration alone; loads no weights and imports no model.

    Args:
        config: a config dictionary, a checkpoint directory, a config.json, or an alias that `resolve_checkpoint` takes.

    Returns:
        The geometry. ``conv_bytes`` counts ``width - 1`` BF16 columns of every convolved q, k and v channel (what
        SGLang keeps); ``kv_bytes_per_token`` counts the BF16 cache of attention layers that grow with the context: keys
        and values, or the MLA latent. Sliding-window layers, sparse-attention indexers and n-gram caches are left out.

    Raises:
        ModelError: unreadable or incomplete configuration, unknown model type, or no delta-rule layer.
    """
    config = config if isinstance(config, Mapping) else read_config(config)
    family, text, kinds = find_family(config), text_config(config), layer_kinds(config)
    heads, key_heads, key_dim, value_dim, width = _dims(family, text)
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        raise ModelError(f"the {family.model_type} config promises no linear_attention layer; its layers are {kinds}")
    full = sum(kind not in ("linear_attention", "sliding_attention") for kind in kinds)
    if family.attention == "mla":
        per_layer = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    else:
        query_heads = int(text.get("num_attention_heads", 16))
        head_dim = int(text.get("head_dim", int(text.get("hidden_size", 0)) // query_heads))
        per_layer = 2 * int(text.get("num_key_value_heads", query_heads)) * head_dim
    return Geometry(
        family=family.family,
        model_type=family.text_type,
        layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_bytes=len(layers) * (2 * key_heads * key_dim + heads * value_dim) * (width - 1) * 2,
        kv_bytes_per_token=full * per_layer * 2,
        num_layers=len(kinds),
        beta_max=2.0 if family.beta_key and text.get(family.beta_key) else 1.0,
    )


def gate_lower_bound(config: Mapping[str, Any]) -> float | None:
    """Lower bound of the gate in log space per token where the family bounds it (KDA's safe gate), else None."""
    family, text = find_family(config), text_config(config)
    if text.get("kda_safe_gate") is False:
        return None
    return next((float(text[key]) for key in family.lower_bound_keys if text.get(key) is not None), None)
