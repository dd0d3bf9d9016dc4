"""Fast kernels for training the tiny models, and a record of the gates they were called with.

fla's chunk_kda serves both models: a GDN head is KDA with the same gate on every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tiny_arch as arch
import torch
import torch.nn.functional as F

_sink: list[torch.Tensor] | None = None


@contextmanager
def recorded_gates() -> Iterator[list[torch.Tensor]]:
    """Within, every delta-rule call appends its log gates, [B, T, H] or [B, T, H, K], to the list given."""
    global _sink
    _sink = []
    try:
        yield _sink
    finally:
        _sink = None


def fewer_autotune_configs() -> None:
    """Let Triton's autotuner try four warps and the fewest stages only (call before fla is imported).

    fla's backward kernels otherwise compile for five minutes, most of a short run.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):  # type: ignore[no-untyped-def]
        kept = [c for c in configs or [] if c.num_warps == 4] or list(configs or [])
        stages = min((c.num_stages for c in kept), default=0)
        original(self, fn, arg_names, [c for c in kept if c.num_stages == stages], *args, **kwargs)

    Autotuner.__init__ = init


def fla_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(delta rule, convolution) on fla's kernels, under the signatures of transformers' module functions."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.kda import chunk_kda

    def delta(query, key, value, g, beta, initial_state=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
        if g.ndim == 3:
            g = g[..., None].expand(*g.shape, key.shape[-1])
        return chunk_kda(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            g.float().contiguous(),
            beta.to(value.dtype).contiguous(),
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
        )

    def conv(x, weight, bias=None, activation=None, **_):  # type: ignore[no-untyped-def]
        y = causal_conv1d(x.transpose(1, 2).contiguous(), weight.to(x.dtype), bias, activation=activation)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)

    return delta, conv


def agrees(fast: Callable[..., Any], slow: Callable[..., Any], inputs: list[torch.Tensor], **kwargs: Any) -> bool:
    """Whether output and input gradients of two functions differ by less than 8% (relative norms)."""
    results = []
    for fn in (fast, slow):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = fn(*leaves, **kwargs)
        out = (out[0] if isinstance(out, tuple) else out).float()
        out.square().mean().backward()
        results.append([out.detach(), *(x.grad.float() for x in leaves)])
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
    print("relative error against transformers' own function:", [f"{e:.1e}" for e in errors], flush=True)
    return all(e < 0.08 for e in errors)


def install(name: str, device: str) -> str:
    """Swap the modelling module's functions for fast, recorded ones; returns what runs the recurrence."""
    if device == "cuda":
        fewer_autotune_configs()
    if name == "tiny_gdn":
        from transformers.models.qwen3_5 import modeling_qwen3_5 as module

        attribute, key_heads, gate = "torch_chunk_gated_delta_rule", arch.HEADS, ()
    else:
        from transformers.models.kimi_linear import modeling_kimi_linear as module

        attribute, key_heads, gate = "chunk_kimi_delta_attention", arch.HEADS, (arch.HEAD_DIM,)
    # The undecorated torch function: transformers' wrapper may already stand for an fla kernel.
    chosen = slow = getattr(getattr(module, attribute), "__wrapped__", getattr(module, attribute))
    used = "torch"
    if device == "cuda":
        try:
            delta, conv = fla_functions()
            make = lambda *s: torch.randn(2, 256, *s, device=device)  # noqa: E731
            inputs = [make(key_heads, arch.HEAD_DIM).bfloat16() for _ in range(3)]
            inputs += [-F.softplus(make(arch.HEADS, *gate) - 2), make(arch.HEADS).sigmoid().bfloat16()]
            if agrees(delta, slow, inputs, use_qk_l2norm_in_kernel=True):
                chosen, used = delta, "fla chunk_kda"
            rows = torch.randn(2, 1024, 256, device=device).bfloat16()
            taps = torch.randn(1024, arch.CONV, device=device) * 0.5
            torch_conv = getattr(module.causal_conv1d_fn, "__wrapped__", module.causal_conv1d_fn)
            if agrees(conv, torch_conv, [rows, taps], activation="silu"):
                module.causal_conv1d_fn = conv
                used += ", fla causal_conv1d"
        except Exception as error:
            print(f"fla kernels not used: {type(error).__name__}: {error}", flush=True)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if _sink is not None:
            _sink.append((kwargs["g"] if "g" in kwargs else args[3]).detach().float())
        return chosen(*args, **kwargs)

    setattr(module, attribute, recorded)
    print(f"{name}: delta rule on {used}", flush=True)
    return used
