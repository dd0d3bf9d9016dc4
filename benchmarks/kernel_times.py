"""Times of the generated kernels and of SGLang's decode kernels by CUDA-graph replay over disjoint slot sets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.synthetic import Case
from stepquant.codegen.kernel_plan import Launch
from stepquant.runtime.window import WindowBuffers

SETS = 4


def graph_time(calls: Sequence[Callable[[], Any]], replays: int = 40) -> float:
    """Median microseconds of one call, from replays of a graph that makes every call once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(5):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events) * 1e3 / len(calls)


def slot_sets(batch: int, device: str) -> list[torch.Tensor]:
    order = torch.randperm(SETS * batch, device=device).int()
    return [order[i * batch : (i + 1) * batch].contiguous() for i in range(SETS)]


def packed_times(name: str, batch: int, launches: dict[str, Launch]) -> dict[str, float]:
    """Microseconds of one layer: `step` (W = 1), and for W = 8 `window` (phases spread evenly), all or none folding."""
    case = Case.make(name, 1, "cuda")
    base = case.random_pages(min(SETS * batch, 64))
    pages = base.repeat(-(-SETS * batch // len(base)), 1)[: SETS * batch].contiguous()
    sets, t, found = slot_sets(batch, "cuda"), case.token(batch), {}
    one, eight = case.kernels(), case.kernels(8)
    one.launches.update(launches)
    eight.launches.update(launches)
    found["step"] = graph_time([lambda s=s: one.step(0, pages, s, **t) for s in sets])
    buffers = [WindowBuffers.allocate(eight.spec, batch, "cuda") for _ in sets]
    for b in buffers:
        for x in (b.keys, b.us, b.gammas, b.ratios, b.u_now):
            x.normal_(std=0.1)
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    mixed = (rows % 8).int()
    full = torch.full_like(rows, 7)
    none = torch.zeros_like(rows)
    kernels = (("window", mixed), ("all_fold", full), ("no_fold", none))

    def calls(phases: torch.Tensor) -> list[Callable[[], Any]]:
        return [
            lambda s=s, b=b: eight.window_step(0, pages, s, **t, buffers=b, rows=rows, phases=phases, pending=phases)
            for s, b in zip(sets, buffers, strict=True)
        ]

    found |= {key: graph_time(calls(phases)) for key, phases in kernels}
    return found


def sglang_times(family: str, batch: int, dtype: torch.dtype) -> float:
    """SGLang's own decode kernel of a family with its state in `dtype`."""
    from sglang.srt.layers.attention.fla import fused_recurrent, fused_sigmoid_gating_recurrent

    K = V = 128
    H, HV = (16, 48) if family == "gdn" else (32, 32)
    pool = torch.empty(SETS * batch, HV, V, K, dtype=dtype, device="cuda").normal_(std=0.02)
    sets = slot_sets(batch, "cuda")
    a_log = torch.empty(HV, device="cuda").uniform_(1, 16).log()
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    b = torch.randn(batch, HV, **half)
    if family == "gdn":
        qkv, a = torch.randn(batch, 2 * H * K + HV * V, **half), torch.randn(batch, HV, **half)
        dt_bias = torch.empty(HV, **half).uniform_(-6, -2)
        out = torch.empty(batch, 1, HV, V, **half)
        decode = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
        calls = [
            lambda s=s: decode(mixed_qkv=qkv, a=a, b=b, A_log=a_log, dt_bias=dt_bias, scale=K**-0.5,
                               initial_state=pool, out=out, ssm_state_indices=s, use_qk_l2norm_in_kernel=True)
            for s in sets
        ]  # fmt: skip
    else:
        q, k, v = (torch.randn(1, batch, H, K, **half) for _ in range(3))
        a, dt_bias = torch.randn(batch, H * K, **half), torch.empty(H * K, device="cuda").uniform_(-6, -2)
        cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        decode = fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update
        calls = [
            lambda s=s: decode(A_log=a_log.view(1, 1, H, 1), dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b[None],
                               initial_state_source=pool, initial_state_indices=s, cu_seqlens=cu,
                               use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=True)
            for s in sets
        ]  # fmt: skip
    return graph_time(calls)


def times(
    plans: Sequence[str], batches: Sequence[int], launches: dict[str, Launch] | None = None
) -> list[dict[str, Any]]:
    """Rows of microseconds, printed as they come."""
    rows: list[dict[str, Any]] = []
    for family in ("gdn", "kda"):
        for batch in batches:
            try:
                row = {f"sglang_{str(d)[6:]}": sglang_times(family, batch, d) for d in (torch.float32, torch.bfloat16)}
            except ImportError as error:
                print(f"no SGLang to compare with: {error}")
                break
            rows.append({"family": family, "batch": batch, **row})
            print(rows[-1], flush=True)
    for plan in plans:
        for batch in batches:
            rows.append({"plan": plan, "batch": batch, **packed_times(plan, batch, launches or {})})
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows
