"""What the GDN and KDA backends call instead of their FP32 kernels: decode on pages, prefill through a workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from stepquant.errors import BackendError
from stepquant.runtime.copies import copy_rows
from stepquant.runtime.sglang.failures import poison
from stepquant.runtime.sglang.pool import PackedStates, store_of
from stepquant.runtime.sglang.state import WORKSPACE_STATES

# Arguments of an extend kernel with one row a request, cut when a batch goes in parts.
PER_REQUEST = ("track_state", "track_chunk_idx", "extend_prefix_lens", "extend_seq_lens_cpu")


class PackedKernel:
    """Decode and prefill kernels of one family on packed states, in the place of SGLang's.

    Args:
        native: SGLang's Triton kernel, whose chunked prefill runs on the workspace.
    """

    supports_packed_decode = True
    supports_packed_decode_safe_gate = False
    supports_track_state_snapshot = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = False
    uses_state_checkpoints = False
    supports_safe_gate = False

    def __init__(self, native: Any) -> None:
        self.native = native

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: PackedStates, cache_indices: Tensor, num_v_heads: int, head_v_dim: int,
        lower_bound: float | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """One token of every request from the packed projection `[B, HK K + HK K + H V]`; returns `[1, B, H, V]`."""
        _refuse_safe_gate(lower_bound)
        layout = packed(ssm_states).store.kernels.spec
        keys, values = layout.num_key_heads * layout.key_dim, num_v_heads * head_v_dim
        q, k, v = mixed_qkv.split([keys, keys, values], -1)
        q, k = (x.unflatten(-1, (layout.num_key_heads, layout.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (num_v_heads, head_v_dim))
        return _decode(q, k, v, a, b, A_log, dt_bias, scale, ssm_states, cache_indices)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: PackedStates, cache_indices: Tensor, query_start_loc: Tensor, lower_bound: float | None = None,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        """One token of every request; q, k `[1, B, HK, K]`, v `[1, B, H, V]`; returns `[1, B, H, V]`."""
        _refuse_safe_gate(lower_bound)
        return _decode(q[0], k[0], v[0], a, b, A_log, dt_bias, q.shape[-1] ** -0.5, packed(ssm_states), cache_indices)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: PackedStates,
        cache_indices: Tensor, query_start_loc: Tensor, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Chunked prefill: states to FP32, SGLang's kernel on them, packed again; as SGLang's kernel returns.

        A batch of more than `WORKSPACE_STATES` requests goes in parts of so many, which bounds the workspace.
        """
        states = packed(ssm_states)
        _refuse_safe_gate(kwargs.get("lower_bound"))
        count = len(cache_indices)
        if count <= WORKSPACE_STATES:
            return self._part(q, k, v, g, beta, states, cache_indices, query_start_loc, 0, kwargs)
        starts, parts = query_start_loc.tolist(), []
        for first in range(0, count, WORKSPACE_STATES):
            last = min(first + WORKSPACE_STATES, count)
            some = slice(starts[first], starts[last])
            own = {n: x[first:last] if n in PER_REQUEST and x is not None else x for n, x in kwargs.items()}
            where = query_start_loc[first : last + 1] - query_start_loc[first]
            parts.append(
                self._part(
                    q[:, some], k[:, some], v[:, some], g[:, some], beta[:, some], states, cache_indices[first:last],
                    where, first, own,
                )
            )  # fmt: skip
        return _joined(parts)

    def _part(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: PackedStates, slots: Tensor,
        query_start_loc: Tensor, first: int, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        store, layer = states.store, states.layer
        workspace = torch.empty(len(slots), *states.shape[1:], dtype=torch.float32, device=store.device)
        store.read_states(layer, slots, workspace)
        places = torch.arange(len(slots), dtype=slots.dtype, device=store.device)
        result = self.native.extend(
            q, k, v, g, beta, ssm_states=workspace, cache_indices=places, query_start_loc=query_start_loc, **kwargs
        )
        store.extend_layer(layer, slots, workspace, first)
        return poison(result, store.failed(first, len(slots)), query_start_loc) if states.last else result

    def target_verify(self, *_: Any, **__: Any) -> NoReturn:
        """Raises BackendError: drafts are not served."""
        raise BackendError("speculative decoding is not served on packed states; start without a draft model")


def packed(states: Any) -> PackedStates:
    """Raises BackendError if a backend hands over anything but packed states."""
    if not isinstance(states, PackedStates):
        raise BackendError(f"the state pool is a {type(states).__name__}, not packed; was a hook undone?")
    return states


def _refuse_safe_gate(lower_bound: float | None) -> None:
    if lower_bound is not None:
        raise BackendError(f"the model bounds its gates below (lower_bound={lower_bound}); the kernels do not know it")


def _decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    states: PackedStates, slots: Tensor,
) -> Tensor:  # fmt: skip
    batch = len(slots)
    out = torch.empty(batch, *v.shape[1:], dtype=v.dtype, device=v.device)
    states.store.decode(
        states.layer, slots, q[:batch], k[:batch], v[:batch], a.reshape(-1, a.shape[-1])[:batch],
        b.reshape(-1, b.shape[-1])[:batch], A_log.flatten(), dt_bias.flatten(), scale, out,
    )  # fmt: skip
    return out.unsqueeze(0)


def _joined(parts: list[Any]) -> Any:
    """Results of consecutive requests as one: outputs and chunk states lie along dimension 1."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(items)) for items in zip(*parts, strict=True))
    return None if parts[0] is None else torch.cat(parts, 1)


def dispatcher(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`GDNKernelDispatcher.__init__` and `KDAKernelDispatcher.__init__`: their kernels become packed ones."""
    original(self, *args, **kwargs)
    kernel = PackedKernel(self.extend_kernel)
    self.decode_kernel = self.extend_kernel = self.verify_kernel = kernel
    if hasattr(self, "tree_verify_kernel"):
        self.tree_verify_kernel = kernel
    self.supports_packed_decode, self.supports_packed_decode_safe_gate = True, False


def gdn_dispatcher(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`dispatcher` under a name of its own, for the registry."""
    dispatcher(original, self, *args, **kwargs)


def kda_dispatcher(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """`dispatcher` under a name of its own, for the registry."""
    dispatcher(original, self, *args, **kwargs)


def forward_metadata(original: Callable[..., Any], self: Any, forward_batch: Any) -> Any:
    """`MambaAttnBackendBase._forward_metadata`: a prefill's requests take their window rows and fresh slots start at
    zero, on the stream of the forward, after whatever a batch in flight still wrote there."""
    metadata = original(self, forward_batch)
    pool = self.req_to_token_pool.mamba_pool
    store = store_of(pool)
    if store is None:
        return metadata
    if store.device.type == "cuda":
        pool.stepquant_stream = torch.cuda.current_stream()
    if not forward_batch.forward_mode.is_decode_or_idle() and forward_batch.extend_prefix_lens is not None:
        slots = metadata.mamba_cache_indices
        count = len(slots)
        store.begin_extend(
            slots, forward_batch.req_pool_indices[:count], forward_batch.extend_prefix_lens[:count],
            forward_batch.seq_lens[:count],
        )  # fmt: skip
    return metadata


def track_decode(
    original: Callable[..., Any], self: Any, forward_batch: Any, conv_states: Tensor, ssm_states: Any,
    cache_indices: Tensor, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """`_track_mamba_state_decode`: pages and convolution states of all layers at once, after the last one."""
    if not isinstance(ssm_states, PackedStates):
        original(self, forward_batch, conv_states, ssm_states, cache_indices, *args, **kwargs)
        return
    if forward_batch.mamba_track_mask is None or not ssm_states.last:
        return
    target = getattr(self.forward_metadata, "mamba_track_indices", None)
    target = forward_batch.mamba_track_indices if target is None else target
    count = min(forward_batch.batch_size, len(cache_indices))
    source, target, mask = cache_indices[:count], target[:count], forward_batch.mamba_track_mask[:count]
    ssm_states.store.track(source, target, mask)
    for conv in self.req_to_token_pool.mamba_pool.mamba_cache.conv:
        copy_rows(conv, source, target, mask)


def track_extend(
    original: Callable[..., Any], self: Any, forward_batch: Any, h: Tensor | None, ssm_states: Any,
    forward_metadata: Any, *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    """`_track_mamba_state_extend`: chunk states are packed into the tracked slots, final ones copied as pages."""
    if not isinstance(ssm_states, PackedStates):
        original(self, forward_batch, h, ssm_states, forward_metadata, *args, **kwargs)
        return
    if not forward_metadata.has_mamba_track_mask:
        return
    store = ssm_states.store
    if forward_metadata.track_ssm_h_src.numel() > 0:
        if h is None:
            raise BackendError("the prefill kernel returned no chunk states; the prefix cache needs them")
        chosen = h.squeeze(0)[forward_metadata.track_ssm_h_src]
        store.write_snapshots(ssm_states.layer, forward_metadata.track_ssm_h_dst, chosen, ssm_states.last)
    if ssm_states.last and forward_metadata.track_ssm_final_src.numel() > 0:
        store.copy(forward_metadata.track_ssm_final_src, forward_metadata.track_ssm_final_dst)
