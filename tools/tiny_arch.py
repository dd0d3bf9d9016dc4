"""Architectures of the two built-in tiny models: configuration, initial weights, checkpoint names, tokenizer.

Both are written so that transformers and SGLang 0.5.12 read the same files. SGLang takes Qwen3.5 only as
``Qwen3_5ForConditionalGeneration`` (hence a vision tower of one small layer) and Kimi-Linear under the names of
the original checkpoints.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAMES = ("tiny_gdn", "tiny_kda")
VOCAB = 320
"""256 bytes, seven named specials, the rest reserved (a multiple of 64, as servers pad vocabularies)."""
SPECIALS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|startoftext|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
SEPARATOR, PAD, BOS, IMAGE, VIDEO, VISION_START, VISION_END = range(256, 256 + len(SPECIALS))
LAYERS, HEADS, HEAD_DIM, CONV = 8, 8, 128, 4
MAX_POSITIONS = 32768

GDN_HIDDEN, KDA_HIDDEN = 112, 64


def config_dict(name: str) -> dict[str, Any]:
    """The contents of ``config.json`` for one of ``NAMES``."""
    ids = {"bos_token_id": BOS, "eos_token_id": SEPARATOR, "pad_token_id": PAD}
    if name == "tiny_gdn":
        text = {
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": GDN_HIDDEN,
            "intermediate_size": 192,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "full_attention_interval": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": HEADS,
            "linear_key_head_dim": HEAD_DIM,
            "linear_value_head_dim": HEAD_DIM,
            "linear_conv_kernel_dim": CONV,
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
            **ids,
        }
        vision = {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 1,
            "patch_size": 16,
            "out_hidden_size": GDN_HIDDEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "text_config": text,
            "vision_config": vision,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "tie_word_embeddings": False,
            **ids,
        }
    if name == "tiny_kda":
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": KDA_HIDDEN,
            "head_dim": 72,
            "intermediate_size": 192,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            # transformers gives the MLA latent norm its default of 1e-6 and SGLang this value: keep them equal.
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "model_max_length": MAX_POSITIONS,
            "max_position_embeddings": MAX_POSITIONS,
            "kv_lora_rank": 128,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": HEAD_DIM,
            "mla_use_nope": True,
            "num_nextn_predict_layers": 0,
            # No num_experts: SGLang then builds dense MLPs; transformers needs the number of dense layers.
            "first_k_dense_replace": LAYERS,
            "moe_layer_freq": 1,
            "linear_attn_config": {
                "num_heads": HEADS,
                "head_dim": HEAD_DIM,
                "short_conv_kernel_size": CONV,
                "kda_layers": [1, 2, 3, 5, 6, 7],  # counted from one
                "full_attn_layers": [4, 8],
            },
            **ids,
        }
    raise ValueError(f"tiny model {name!r} is not known; expected one of {', '.join(NAMES)}")


def build(name: str) -> nn.Module:
    """The text model of ``name`` with transformers' own initial weights (float32)."""
    config = config_dict(name)
    if name == "tiny_gdn":
        from transformers import Qwen3_5Config
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

        return Qwen3_5ForCausalLM(Qwen3_5Config(**config).text_config).float()
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(KimiLinearConfig(**config)).float()


def _stratified(n: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """``n`` ascending draws, one from each n-th of [low, high): a spread that a small sample can rely on."""
    return low + (torch.arange(n) + torch.rand(n, generator=generator)) / n * (high - low)


def initialise(model: nn.Module, name: str, seed: int) -> None:
    """Set initial weights in place: fan-in scaled, with the gate initialisation of the released models.

    A is uniform in (1, 16) and softplus(dt_bias) log-uniform up to 0.1, as released, but both stratified over
    the few heads there are and reaching further down, so that half-lives span a few tokens to thousands.
    """
    g = torch.Generator().manual_seed(seed)
    gate_floor = 1e-4 if name == "tiny_gdn" else 2e-4
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("A_log"):
                a = _stratified(p.numel(), 1.0, 16.0, g)
                p.copy_(a.log().view_as(p))
            elif key.endswith("dt_bias"):
                per_channel = p.numel() > HEADS
                n = p.numel() // HEADS if per_channel else HEADS
                rows = [_stratified(n, math.log(gate_floor), math.log(0.1), g) for _ in range(p.numel() // n)]
                # Channels in random order; GDN heads ascending like A, so the longest head has the smallest A.
                dt = torch.cat([r[torch.randperm(n, generator=g)] if per_channel else r for r in rows]).exp()
                p.copy_((dt + torch.log(-torch.expm1(-dt))).view_as(p))
            elif "conv1d" in key:
                p.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
            elif "embed_tokens" in key:
                p.copy_(torch.randn(p.shape, generator=g) * 0.5)
            elif p.ndim == 2:
                # Gates start near their biases; branches that write to the residual stream start small.
                quiet = any(s in key for s in ("in_proj_a.", "f_b_proj."))
                residual = any(s in key for s in ("o_proj.", "out_proj.", "down_proj.", "lm_head."))
                scale = 0.02 if quiet else p.shape[-1] ** -0.5 * ((2 * LAYERS) ** -0.5 if residual else 1.0)
                p.copy_(torch.randn(p.shape, generator=g) * scale)


def checkpoint_tensors(model: nn.Module, name: str, seed: int) -> dict[str, torch.Tensor]:
    """The model's weights under checkpoint names, bf16 (A_log and dt_bias float32, of bf16-exact values)."""
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    out: dict[str, torch.Tensor] = {}
    if name == "tiny_gdn":
        from transformers import Qwen3_5Config
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        torch.manual_seed(seed)
        tower = Qwen3_5VisionModel(Qwen3_5Config(**config_dict(name)).vision_config)
        out = {k.replace("model.", "model.language_model.", 1): v for k, v in state.items()}
        out |= {f"model.visual.{k}": v.detach() for k, v in tower.state_dict().items()}
    else:
        for key, value in state.items():
            key = key.replace(".forget_gate.", ".")
            if ".conv1d." in key:
                for part, chunk in zip("qkv", value.chunk(3), strict=True):
                    out[key.replace(".conv1d.", f".{part}_conv1d.")] = chunk
            else:
                out[key] = value
    wide = ("A_log", "dt_bias")
    half = {k: v.bfloat16().contiguous() for k, v in out.items()}
    return {k: v.float() if k.endswith(wide) else v for k, v in half.items()}


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte value in byte-level tokenizers, indexed by the byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def write_static(name: str, out: Path) -> None:
    """Write ``config.json`` and the tokenizer files of ``name`` into ``out``: id i < 256 is the byte i."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config_dict(name), indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": SEPARATOR, "pad_token_id": PAD, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    names = [*SPECIALS, *(f"<|reserved_{i}|>" for i in range(256 + len(SPECIALS), VOCAB))]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in names])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
