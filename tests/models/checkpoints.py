"""Smallest checkpoints of every family, built by transformers itself and saved the way a user's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepquant.errors import ModelError
from stepquant.models.families import FAMILY_TABLE, check_transformers

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GDN = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MOE = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_MLA = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

_ALL: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_BASE, **_GDN, **_MOE, "num_hidden_layers": 4},
    "qwen3_5": {"text_config": {**_BASE, **_GDN, "num_hidden_layers": 4}, "vision_config": _VISION},
    "qwen3_5_moe": {"text_config": {**_BASE, **_GDN, **_MOE, "num_hidden_layers": 4}, "vision_config": _VISION},
    "qwen4_exp": {
        "text_config": {
            **_BASE, **_GDN, **_MOE, "num_hidden_layers": 4, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2,
            "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
            "ple_layer_ids": [2], "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "split_ngram_parts": 2,
            "make_ngram_vocab_size_divisible_by": 8,
        },
        "vision_config": _VISION,
    },
    "olmo_hybrid": {**_BASE, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                    "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "lara_mini": {**_BASE, **_GDN, **_MOE, "num_hidden_layers": 5, "num_key_value_heads": 1, "sliding_window": 8,
                  "tie_word_embeddings": True},
    "kimi_linear": {
        **_BASE, **_MLA, "num_hidden_layers": 4, "num_experts": 4, "num_expert_group": 1,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 2,
                               "short_conv_kernel_size": 4},
    },
    "bailing_hybrid": {**_BASE, **_MLA, "num_hidden_layers": 3, "layer_group_size": 3, "head_dim": 16,
                       "num_experts": 4, "num_mtp_layers": 0, "first_k_dense_replace": 1},
    "glm5_next": {
        "text_config": {**_BASE, **_MLA, "num_hidden_layers": 4, "n_routed_experts": 4, "q_lora_rank": 16,
                        "qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 2, "index_topk": 16,
                        "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2,
                        "hc_sinkhorn_iters": 2},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
                          "intermediate_size": 16, "projection_intermediate_size": 16, "image_size": 8},
    },
}  # fmt: skip


def _available(name: str) -> bool:
    try:
        check_transformers(FAMILY_TABLE[name])
    except ModelError:
        return False
    return True


CONFIGS = {name: config for name, config in _ALL.items() if _available(name)}
"""Configurations of the families that the installed transformers has."""


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where the installed transformers lacks the family."""
    return pytest.mark.skipif(name not in CONFIGS, reason=f"this transformers has no {name}")


def save_checkpoint(model_type: str, directory: Path, seed: int = 0) -> Path:
    """Build the family's smallest model with its own initialisation, larger weights, and save it with transformers."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    auto = transformers.AutoModelForImageTextToText if "text_config" in CONFIGS[model_type] else None
    auto = auto or getattr(transformers, FAMILY_TABLE[model_type].auto_class)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory / model_type)
    return directory / model_type
