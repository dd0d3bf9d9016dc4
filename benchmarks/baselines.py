"""Others' decode kernels for one layer: SGLang's with FP32 and BF16 states, FLA's recurrent kernel with FP32 states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kernel_times import Call, graph_time, set_count, slot_sets

K = V = 128
HEADS = {"gdn": (16, 48), "kda": (32, 32)}  # key heads, value heads


def baseline_times(family: str, batch: int) -> list[dict[str, Any]]:
    """Rows with microseconds and the bytes of states that are read and written; what cannot be imported is left out."""
    rows: list[dict[str, Any]] = []
    for name, dtype, make in (
        ("sglang fp32", torch.float32, sglang_calls), ("sglang bf16", torch.bfloat16, sglang_calls),
        ("fla fp32", torch.float32, fla_calls),
    ):  # fmt: skip
        moved = 2 * batch * HEADS[family][1] * K * V * dtype.itemsize
        try:
            us = graph_time(make(family, batch, dtype, set_count(moved)))
        except (ImportError, TypeError, RuntimeError) as error:
            print(f"no {name}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        rows.append({"family": family, "state": name, "batch": batch, "us": us, "bytes": moved})
        torch.cuda.empty_cache()
    return rows


def sglang_calls(family: str, batch: int, dtype: torch.dtype, sets: int) -> Sequence[Call]:
    """SGLang's decode kernel as its backend calls it."""
    from sglang.srt.layers.attention.fla import fused_recurrent, fused_sigmoid_gating_recurrent

    H, HV = HEADS[family]
    sets = max(2, min(sets, (2**31 - 1) // (batch * HV * V * K)))  # the KDA kernel counts elements in 32 bits
    pool = torch.empty(sets * batch, HV, V, K, dtype=dtype, device="cuda").normal_(std=0.02)
    slots = slot_sets(sets, batch)
    a_log = torch.empty(HV, device="cuda").uniform_(1, 16).log()
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    b = torch.randn(batch, HV, **half)
    if family == "gdn":
        qkv, a = torch.randn(batch, 2 * H * K + HV * V, **half), torch.randn(batch, HV, **half)
        dt_bias = torch.empty(HV, **half).uniform_(-6, -2)
        out = torch.empty(batch, 1, HV, V, **half)
        decode = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
        return [
            lambda s=s: decode(mixed_qkv=qkv, a=a, b=b, A_log=a_log, dt_bias=dt_bias, scale=K**-0.5,
                               initial_state=pool, out=out, ssm_state_indices=s, use_qk_l2norm_in_kernel=True)
            for s in slots
        ]  # fmt: skip
    q, k, v = (torch.randn(1, batch, H, K, **half) for _ in range(3))
    a, dt_bias = torch.randn(batch, H * K, **half), torch.empty(H * K, device="cuda").uniform_(-6, -2)
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    decode = fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update
    return [
        lambda s=s: decode(A_log=a_log.view(1, 1, H, 1), dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b[None],
                           initial_state_source=pool, initial_state_indices=s, cu_seqlens=cu,
                           use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=True)
        for s in slots
    ]  # fmt: skip


def fla_calls(family: str, batch: int, dtype: torch.dtype, sets: int) -> Sequence[Call]:
    """FLA's recurrent kernel of one token, states in and out (it knows no pool: states lie in the batch's order)."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    H, HV = HEADS[family]
    states = [torch.empty(batch, HV, K, V, device="cuda", dtype=dtype).normal_(std=0.02) for _ in range(min(sets, 16))]
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = torch.randn(batch, 1, H, K, **half), torch.randn(batch, 1, H, K, **half)
    v = torch.randn(batch, 1, HV, V, **half)
    beta = torch.rand(batch, 1, HV, **half)
    g = -torch.rand(batch, 1, HV, *((K,) if family == "kda" else ()), device="cuda")
    decode = fused_recurrent_gated_delta_rule if family == "gdn" else fused_recurrent_kda
    with torch.no_grad():
        return [
            lambda s=s: decode(q, k, v, g=g, beta=beta, initial_state=s, output_final_state=True,
                               use_qk_l2norm_in_kernel=True)
            for s in states
        ]  # fmt: skip
