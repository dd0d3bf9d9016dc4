"""Widen the MLA latent of a Kimi-Linear checkpoint with zeros, so that SGLang 0.5.12's Triton attention takes it.

    python tools/pad_latent.py SOURCE OUT [RANK]      (RANK 512)

SGLang's Triton kernels know latents of 512 + 64 and 256 + 32; the built-in tiny_kda has 128 + 64. Zero rows of
kv_a_proj_with_mqa and zero columns of kv_b_proj add nothing. The RMS of the latent is taken over RANK instead of the
old rank, so its weight is multiplied by sqrt(old / RANK), which must be a power of two to be exact.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def pad(source: Path, out: Path, rank: int) -> None:
    """Write the widened checkpoint."""
    config = json.loads((source / "config.json").read_text())
    old, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    factor = math.sqrt(old / rank)
    if rank < old or math.log2(factor) != round(math.log2(factor)):
        raise SystemExit(f"error: a latent of {old} cannot be widened to {rank}; expected {old} times a power of 4")
    tensors = load_file(source / "model.safetensors")
    for name, x in tensors.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            latent, rotary = x.split([old, rope])
            x = torch.cat([latent, latent.new_zeros(rank - old, x.shape[1]), rotary])
        elif name.endswith("kv_a_layernorm.weight"):
            x = torch.cat([x * factor, x.new_ones(rank - old)])
        elif name.endswith("kv_b_proj.weight"):
            x = torch.cat([x, x.new_zeros(x.shape[0], rank - old)], 1)
        tensors[name] = x.contiguous()
    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copy(file, out / file.name)
    (out / "config.json").write_text(json.dumps({**config, "kv_lora_rank": rank}, indent=2))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    pad(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 512)
