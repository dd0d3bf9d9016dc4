"""Greedy generation with quantised states: does a variant say the same, and does it come to an end (section 5.5)?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepquant.codec.registry import StateCodec
from stepquant.codec.window import WriteWindow
from stepquant.evaluation.decode import DecodeSettings, decode_steps, stream_groups
from stepquant.models.capture import DeltaTrace, capture_delta_rule

if TYPE_CHECKING:
    from stepquant.evaluation.variants import Variant
    from stepquant.models.adapter import LoadedModel


@dataclass
class DecodeHook:
    """Replacement of the delta rule in incremental decoding: exact prefill, quantised state from its end on.

    Requests of a batch have the same length, hence the same phase. Use it as `replace` of `capture_delta_rule`; a call
    without an initial state starts new requests.
    """

    variant: Variant | None
    _windows: dict[int, WriteWindow] = field(default_factory=dict)
    _codecs: dict[int, StateCodec | None] = field(default_factory=dict)

    def __call__(self, layer: int, trace: DeltaTrace) -> tuple[Tensor, Tensor]:
        """Outputs `[B, T, H, V]` and the base state `[B, H, K, V]` that the model's cache is to keep."""
        if layer not in self._codecs:
            self._codecs[layer] = None if self.variant is None else self.variant.codec(layer, trace.q.device)
        if trace.initial_state is None:
            return self._prefill(layer, trace)
        return self._decode(layer, trace, trace.initial_state)

    def _prefill(self, layer: int, trace: DeltaTrace) -> tuple[Tensor, Tensor]:
        length = trace.q.shape[1]
        window = None if self.variant is None else self.variant.window
        self._windows[layer] = WriteWindow(window.length, window.dtype, length) if window else WriteWindow(1)
        y, states = torch.empty_like(trace.v), []
        for rows, part in stream_groups(trace):
            for start, piece, fold in decode_steps(part, self._codecs[layer], DecodeSettings(length)):
                y[rows, start : start + piece.shape[1]] = piece
                if fold is not None:
                    states.append(fold.state)
        return y, torch.cat(states)

    def _decode(self, layer: int, trace: DeltaTrace, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, codec = [], self._codecs[layer]
        for t in range(trace.q.shape[1]):
            inputs = (trace.q, trace.k, trace.v, trace.log_gate, trace.beta)
            state, y, folded = self._windows[layer].step(state, *(x[:, t] for x in inputs))
            outputs.append(y)
            if folded and codec is not None:
                state = codec.roundtrip(state)
        return torch.stack(outputs, 1), state


@torch.no_grad()
def generate(loaded: LoadedModel, prompts: Tensor, tokens: int, variant: Variant | None, ends: set[int]) -> Tensor:
    """Greedy continuations.

    Args:
        loaded: model.
        prompts: `[B, P]`.
        tokens: most tokens to generate.
        variant: None keeps FP32 states.
        ends: ids that end a text; what follows one is filled with -1.

    Returns:
        `[B, tokens]` int64 on the CPU.
    """
    now, cache = prompts.to(loaded.device), None
    done = torch.zeros(prompts.shape[0], dtype=torch.bool)
    found = torch.full((prompts.shape[0], tokens), -1, dtype=torch.int64)
    with capture_delta_rule(loaded, replace=DecodeHook(variant)):
        for t in range(tokens):
            out = loaded.model(input_ids=now, use_cache=True, logits_to_keep=1, **_cache(cache))
            cache = out.past_key_values
            chosen = out.logits[:, -1].argmax(-1)
            found[:, t] = torch.where(done, -1, chosen.cpu())
            done |= torch.isin(found[:, t], torch.tensor(sorted(ends), dtype=torch.int64))
            if bool(done.all()):
                break
            now = chosen.unsqueeze(1)
    return found


def _cache(cache: Any) -> dict[str, Any]:
    return {} if cache is None else {"past_key_values": cache}


def end_tokens(loaded: LoadedModel) -> set[int]:
    """Ids that end a text, of the generation settings and the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(loaded.model, "generation_config", None), loaded.tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found |= {int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None}
    return found


def greedy_figures(reference: Tensor, variant: Tensor) -> dict[str, float]:
    """Agreement of continuations `[B, N]` (-1 after the end) with the reference's.

    ``greedy_agreement``: share of the reference's tokens that the variant repeats at the same place;
    ``greedy_prefix``: mean tokens before the first difference; ``greedy_length`` and ``greedy_length_fp32``: mean
    tokens until the end of the text or the limit; ``greedy_ended``: share of texts that came to an end.
    """
    written, theirs = reference >= 0, variant >= 0
    same = (reference == variant) & written
    differs = (reference != variant).double()
    prefix = (differs.cumsum(1) == 0).sum(1).minimum(written.sum(1))
    return {
        "greedy_agreement": int(same.sum()) / int(written.sum()),
        "greedy_prefix": float(prefix.double().mean()),
        "greedy_length": float(theirs.sum(1).double().mean()),
        "greedy_length_fp32": float(written.sum(1).double().mean()),
        "greedy_ended": float((theirs.sum(1) < variant.shape[1]).double().mean()),
    }
