"""Serving memory (equation 24): M(B, L) = W + (r B + 1) S + B L K, plus window buffers of running requests."""

from __future__ import annotations

from dataclasses import dataclass

from stepquant.errors import InfeasibleError
from stepquant.geometry import Geometry

GIB = 2**30
SLOTS_PER_REQUEST = {"off": 1, "no_buffer": 3, "extra_buffer": 5, "extra_buffer_no_overlap": 4}
_BUFFER_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class ServingMemory:
    """Terms of equation 24 for one model replica, bytes.

    Attributes:
        weights: W, weights summed over ranks.
        slot: S, one slot: state plus convolution state.
        kv_per_token: K, attention KV cache of one token.
        slots_per_request: r.
        per_running_request: window buffers, which belong to running requests and not to slots.
    """

    weights: int
    slot: int
    kv_per_token: int
    slots_per_request: int
    per_running_request: int = 0

    def state(self, batch: int) -> int:
        """The pool: (r B + 1) S, one sentinel slot, and the window buffers of B running requests."""
        return (self.slots_per_request * batch + 1) * self.slot + batch * self.per_running_request

    def total(self, batch: int, context: int) -> int:
        """M(B, L)."""
        return self.weights + self.state(batch) + batch * context * self.kv_per_token

    def concurrency(self, memory: int, context: int) -> int:
        """Largest B with M(B, L) <= memory; 0 if the weights and one sentinel slot do not even fit."""
        per_request = self.slots_per_request * self.slot + self.per_running_request + context * self.kv_per_token
        left = memory - self.weights - self.slot
        return max(0, left // per_request)

    def slot_for(self, memory: int, context: int, batch: int) -> int:
        """Largest slot S, bytes, with which `batch` requests fit into `memory`.

        Raises:
            InfeasibleError: with the arithmetic, when not even an empty slot would fit.
        """
        left = memory - self.weights - batch * (context * self.kv_per_token + self.per_running_request)
        slot = left // (self.slots_per_request * batch + 1)
        if slot < 1:
            raise InfeasibleError(
                f"budget.concurrency={batch} does not fit: {memory / GIB:.2f} GiB less {self.weights / GIB:.2f} GiB of "
                f"weights and {batch * context * self.kv_per_token / GIB:.2f} GiB of KV cache at {context} tokens "
                f"leaves {left / GIB:.2f} GiB for {self.slots_per_request * batch + 1} slots; lower "
                "budget.concurrency or budget.context_length, or give more budget.gpu_memory or budget.gpus"
            )
        return slot


def window_bytes(geometry: Geometry, length: int, dtype: str) -> int:
    """Window buffers of one running request, bytes (design 2.5 c): W - 1 pending (k, u), none for W = 1.

    The token that completes a window is folded as it is read, so W tokens need W - 1 entries. A pending token keeps u
    for every value head and k for every key head; KDA folds gates into its keys, which are then the head's own. The
    packed state's own decay is one FP32 vector (KDA) or number (GDN) a head; GDN also keeps one FP32 ratio a token and
    value head, and both twice (`stepquant.runtime.window`). INT8 vectors carry one FP16 scale each.
    """
    if length == 1:
        return 0
    item, scale = _BUFFER_BYTES[dtype], 2 if dtype == "int8" else 0
    heads, entries = geometry.num_heads, length - 1
    values = heads * (geometry.value_dim * item + scale)
    if geometry.family == "kda":
        keys, ratios, decay = heads * (geometry.key_dim * item + scale), 0, heads * geometry.key_dim * 4
    else:
        keys, ratios, decay = geometry.num_key_heads * (geometry.key_dim * item + scale), heads * 8, heads * 8
    return geometry.num_delta_layers * (entries * (values + keys + ratios) + decay)
