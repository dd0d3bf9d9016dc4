"""Table of the delta-rule model families of transformers.

What the modelling files share is the rule: each calls one of two module-level functions (a chunked and a recurrent one)
with post-convolution q, k, v, a natural-log gate g <= 0 and a write strength beta; the functions L2-normalise q and k
themselves (`use_qk_l2norm_in_kernel=True`), scale q by K^-1/2 and repeat grouped key heads. The table holds
what differs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from stepquant.errors import ModelError, closest
from stepquant.geometry import Family

GDN_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
KDA_FUNCTIONS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


@dataclass(frozen=True)
class ModelFamily:
    """What differs between families.

    Attributes:
        model_type: transformers' ``model_type`` and the name of its package under ``transformers.models``.
        family: ``gdn`` (one gate a value head) or ``kda`` (one gate a key row).
        layer_class: class of the delta-rule module.
        text_types: other model types under which the same text model appears (nested or saved on its own).
        auto_class: transformers' auto class that builds it with a language-modelling head.
        attention: ``gqa`` (keys and values per KV head) or ``mla`` (one latent a token).
        layer_rule: how layer kinds follow where the config has no ``layer_types``.
        period: argument of `layer_rule`, or the config key that holds it.
        defaults: values transformers assumes for keys a config.json may leave out.
        beta_key: config key that doubles the write strength (negative eigenvalues), if the family has one.
        lower_bound_keys: config keys of the gate's lower bound in log space, if it can be bounded.
        grouped: key heads reach the delta rule not yet repeated to the value heads.
        gate_dtype: dtype in which the gate reaches the delta rule: ``float32``, or ``model`` for that of the weights.
    """

    model_type: str
    family: Family
    layer_class: str
    text_types: tuple[str, ...] = ()
    auto_class: str = "AutoModelForCausalLM"
    attention: Literal["gqa", "mla"] = "gqa"
    layer_rule: Literal["every", "kimi", "pattern"] = "every"
    period: int | str = 4
    defaults: Mapping[str, Any] = field(default_factory=dict)
    beta_key: str | None = None
    lower_bound_keys: tuple[str, ...] = ()
    grouped: bool = False
    gate_dtype: str = "float32"

    @property
    def module(self) -> str:
        """Dotted name of the modelling file."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    @property
    def text_type(self) -> str:
        """transformers' ``model_type`` of the text model, whether it stands alone or in a multimodal one."""
        return self.text_types[0] if self.text_types else self.model_type

    def load_auto_class(self) -> Any:
        """transformers' auto class that builds the family's language model (imports transformers)."""
        import transformers

        return getattr(transformers, self.auto_class)

    @property
    def functions(self) -> tuple[str, str]:
        """Module-level (chunked, recurrent) delta-rule functions of the modelling file."""
        return GDN_FUNCTIONS if self.family == "gdn" else KDA_FUNCTIONS


_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN = {**_GDN, "num_key_value_heads": 2, "head_dim": 256}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_conv_kernel_dim": 4}
LARA_PATTERN = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")

_TABLE = (
    ModelFamily("qwen3_next", "gdn", "Qwen3NextGatedDeltaNet", period="full_attention_interval", grouped=True,
                defaults={**_QWEN, "num_hidden_layers": 48}),
    ModelFamily("qwen3_5", "gdn", "Qwen3_5GatedDeltaNet", ("qwen3_5_text",), period="full_attention_interval",
                grouped=True, defaults={**_QWEN, "num_key_value_heads": 4, "num_hidden_layers": 32}),
    ModelFamily("qwen3_5_moe", "gdn", "Qwen3_5MoeGatedDeltaNet", ("qwen3_5_moe_text",),
                period="full_attention_interval", grouped=True, defaults={**_QWEN, "num_hidden_layers": 40}),
    ModelFamily("qwen4_exp", "gdn", "Qwen4ExpTextGatedDeltaNet", ("qwen4_exp_text",),
                period="full_attention_interval", grouped=True, defaults={**_QWEN, "num_hidden_layers": 40}),
    ModelFamily("olmo_hybrid", "gdn", "OlmoHybridGatedDeltaNet", beta_key="linear_allow_neg_eigval",
                defaults={"linear_conv_kernel_dim": 4, "num_hidden_layers": 32, "num_attention_heads": 30,
                          "hidden_size": 3840, "linear_allow_neg_eigval": True}),
    ModelFamily("lara_mini", "gdn", "LaraMiniGatedDeltaNet", layer_rule="pattern", grouped=True,
                defaults={**_GDN, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_hidden_layers": 34,
                          "num_key_value_heads": 4, "head_dim": 128}),
    ModelFamily("kimi_linear", "kda", "KimiLinearDeltaAttention", attention="mla", layer_rule="kimi",
                defaults={**_MLA, "linear_head_dim": 128, "linear_num_heads": 32, "num_hidden_layers": 27}),
    ModelFamily("bailing_hybrid", "kda", "BailingHybridDeltaAttention", attention="mla", period="layer_group_size",
                lower_bound_keys=("kda_lower_bound",), gate_dtype="model",
                defaults={**_MLA, "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 42,
                          "layer_group_size": 6, "short_conv_kernel_size": 4, "kda_safe_gate": True,
                          "kda_lower_bound": -5.0}),
    ModelFamily("glm5_next", "kda", "Glm5NextTextLinearAttention", ("glm5_next_text",), "AutoModelForImageTextToText",
                attention="mla", lower_bound_keys=("linear_lower_bound",),
                defaults={**_MLA, "linear_head_dim": 128, "linear_num_heads": 64, "num_hidden_layers": 45,
                          "qk_rope_head_dim": 0, "linear_lower_bound": -5.0}),
)  # fmt: skip

FAMILY_TABLE: dict[str, ModelFamily] = {family.model_type: family for family in _TABLE}
_BY_TYPE = {name: family for family in _TABLE for name in (family.model_type, *family.text_types)}


def known_model_types() -> list[str]:
    """Model types of the families that can be compiled, sorted."""
    return sorted(FAMILY_TABLE)


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a checkpoint's config dictionary (a multimodal one is looked up by its text model too).

    Raises:
        ModelError: no ``model_type``, or one that is not in the table; the message lists those that are.
    """
    name = config.get("model_type")
    nested = config.get("text_config")
    names = [name, nested.get("model_type") if isinstance(nested, Mapping) else None]
    for candidate in names:
        if candidate in _BY_TYPE:
            return _BY_TYPE[candidate]
    known = ", ".join(known_model_types())
    if not isinstance(name, str):
        raise ModelError(f"config.json names no model_type; expected one of {known}")
    raise ModelError(
        f"model_type {name!r} is not a delta-rule family stepquant knows{closest(name, _BY_TYPE)}; known: {known}"
    )


def check_transformers(family: ModelFamily) -> str:
    """Version of the installed transformers, having checked that it has the family (without importing it).

    Raises:
        ModelError: transformers is not installed, or its version lacks the family.
    """
    spec = importlib.util.find_spec("transformers")
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = None
    if spec is None or found is None:
        raise ModelError(
            f"transformers is not installed; loading a {family.model_type} model needs it: pip install transformers"
        )
    root = Path(next(iter(spec.submodule_search_locations or ["."]))) / "models"
    if not (root / family.model_type).is_dir():
        have = [name for name in known_model_types() if (root / name).is_dir()]
        raise ModelError(
            f"transformers {found} has no {family.model_type}; of the families stepquant knows it has "
            f"{', '.join(have) or 'none'}; install a newer transformers (5.24 has all)"
        )
    return found
