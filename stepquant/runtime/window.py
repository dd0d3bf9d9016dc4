"""Buffers of write windows: what a running request owns beside its packed slot (design 2.5 c)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepquant.codec.window import last_dtype
from stepquant.codegen.spec import KernelSpec
from stepquant.runtime.writeback import PAIRS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}


@dataclass
class WindowBuffers:
    """Pending tokens of one layer, `[N, ...]` with an entry for each running request.

    Attributes:
        keys: `[N, HK, W-1, K]` raw (GDN) or `[N, H, W-1, K]` with later gates folded in, in tile order (KDA).
        us: `[N, H, W-1, V]` residuals. key_scale, u_scale: FP16, one a vector, used by int8 buffers only.
        ratios: FP32 `[N, H, 2, W-1]`, gates since each entry (GDN; unused by KDA). With n entries pending those of
            n mod 2 count, and a token writes the others: programs of a head need not wait for each other.
        gammas: FP32 `[N, H, 2]` (the same) or `[N, H, K]`, all gates since the fold; not read while nothing is pending.
        k_now, u_now: FP16 (FP32 beside FP32 buffers) `[N, HK or H, K]` and `[N, H, V]`, key and residual of a token
            that completes a window, from `read` to `fold` of the same step.
    """

    keys: Tensor
    us: Tensor
    key_scale: Tensor
    u_scale: Tensor
    ratios: Tensor
    gammas: Tensor
    k_now: Tensor
    u_now: Tensor

    @classmethod
    def allocate(
        cls, spec: KernelSpec, count: int, device: torch.device | str, now: tuple[Tensor, Tensor] | None = None
    ) -> WindowBuffers:
        """Buffers for `count` requests; `now` has k_now and u_now where layers share them (`allocate_now`)."""
        entries, dtype = spec.window - 1, DTYPES[spec.buffer]
        kda = spec.family == "kda"
        key_heads = spec.num_heads if kda else spec.num_key_heads

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, *shape, dtype=dtype, device=device)

        half = torch.float16
        k_now, u_now = allocate_now(spec, count, device) if now is None else now
        return cls(
            keys=empty(key_heads, entries, spec.key_dim, dtype=dtype),
            us=empty(spec.num_heads, entries, spec.value_dim, dtype=dtype),
            key_scale=empty(key_heads, entries, dtype=half),
            u_scale=empty(spec.num_heads, entries, dtype=half),
            ratios=empty(spec.num_heads, 2, entries),
            gammas=empty(spec.num_heads, spec.key_dim if kda else 2),
            k_now=k_now,
            u_now=u_now,
        )

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """In the order the kernels take them, without k_now and u_now."""
        return self.keys, self.key_scale, self.us, self.u_scale, self.ratios, self.gammas


def allocate_now(spec: KernelSpec, count: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """k_now and u_now for batches of up to `count` requests."""
    dtype = DTYPES[last_dtype(spec.buffer)]
    key_heads = spec.num_heads if spec.family == "kda" else spec.num_key_heads
    k = torch.zeros(count, key_heads, spec.key_dim, dtype=dtype, device=device)
    return k, torch.zeros(count, spec.num_heads, spec.value_dim, dtype=dtype, device=device)


def now_bytes(spec: KernelSpec) -> int:
    """Bytes of k_now and u_now for one request, all pairs that layers take turns with."""
    key_heads = spec.num_heads if spec.family == "kda" else spec.num_key_heads
    size = DTYPES[last_dtype(spec.buffer)].itemsize
    return PAIRS * size * (key_heads * spec.key_dim + spec.num_heads * spec.value_dim)


def bytes_per_request(spec: KernelSpec) -> int:
    """Bytes of one layer's buffers that a running request owns, what layers share left out."""
    if spec.window == 1:
        return 0
    entries, int8 = spec.window - 1, spec.buffer == "int8"
    size = DTYPES[spec.buffer].itemsize
    kda = spec.family == "kda"
    key_heads = spec.num_heads if kda else spec.num_key_heads
    vectors = key_heads * (spec.key_dim * size + 2 * int8) + spec.num_heads * (spec.value_dim * size + 2 * int8)
    gates = 4 * spec.num_heads * (spec.key_dim if kda else 2 + 2 * entries)
    return entries * vectors + gates


class WindowSteps:
    """What kernels of every kind make of a read and a fold."""

    spec: KernelSpec
    read: Callable[..., Tensor]
    fold: Callable[..., None]

    def window_step(
        self, layer: int, pages: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor, buffers: WindowBuffers, rows: Tensor,
        phases: Tensor, pending: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """One decode step with a write window: reads every token, folds the windows that it completes.

        Args:
            buffers: of this layer; rows: int32 `[B]`, the entry of each request in them.
            phases: int32 `[B]`, each request's length mod W before this token.
            pending: int32 `[B]`, its entries before this token, at most its phase. The caller counts: pending becomes 0
                after a fold (phase W - 1) and grows by one otherwise. The other arguments are `step`'s.
        """
        token = (q, k, v, a, b, A_log, dt_bias, scale, out)
        self.read(layer, pages, slots, *token, buffers, rows, phases, pending, l2norm)
        self.fold(layer, pages, slots, buffers, rows, phases, pending, self.list_folds(phases))
        return out

    def list_folds(self, phases: Tensor) -> Tensor:
        """What `fold` takes as `folds`: how many requests complete a window, and their places in the batch."""
        full = (phases == self.spec.window - 1).nonzero().flatten().int()
        return torch.cat([full.new_tensor([len(full)]), full, full.new_zeros(len(phases) - len(full))])
