"""One forward of the whole model over known tokens, its delta rule replaced by a variant's decode loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepquant.codec.registry import StateCodec
from stepquant.evaluation.decode import DecodeSettings, decode_layer
from stepquant.evaluation.layer_errors import LayerErrors
from stepquant.evaluation.metrics import TokenFigures, compare_logits, join
from stepquant.models.capture import DeltaTrace, capture_delta_rule

if TYPE_CHECKING:
    from stepquant.evaluation.served import ServedDecoder
    from stepquant.evaluation.variants import Variant
    from stepquant.models.adapter import LoadedModel

LOGIT_ELEMENTS = 2**23  # logits compared at a time: bounds the float64 temporaries at large vocabularies


class Readout:
    """A model's features (the last hidden states) and how they become logits.

    Keeping features instead of logits of a whole stream is what makes large vocabularies cheap. Where the logits are
    not simply the output embedding of the last hidden states, the features are the logits themselves.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        self.deferred = self.head is not None and self._is_last(loaded.device)

    def _is_last(self, device: torch.device) -> bool:
        """Check on a few tokens that the head is all there is between features and logits."""
        tokens = torch.arange(8, device=device).unsqueeze(0)
        with torch.no_grad():
            logits = self.model(input_ids=tokens, use_cache=False).logits
            with self.bare():
                features = self.model(input_ids=tokens, use_cache=False).logits
            return features.shape[:-1] == logits.shape[:-1] and torch.equal(self.head(features).float(), logits.float())

    @contextmanager
    def bare(self) -> Iterator[None]:
        """Let the head return its input while the context is open."""
        own = self.head.__dict__.get("forward")
        self.head.forward = lambda x: x
        try:
            yield
        finally:
            del self.head.forward
            if own is not None:
                self.head.forward = own

    def features(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Features `[B, D, F]` at `positions` `[D]` of `tokens` `[B, T]`."""
        with self.bare() if self.deferred else nullcontext():
            return self.model(input_ids=tokens, use_cache=False, logits_to_keep=positions).logits

    def logits(self, features: Tensor) -> Tensor:
        """Logits of features."""
        return self.head(features) if self.deferred else features

    def compare(self, reference: Tensor, variant: Tensor, targets: Tensor) -> TokenFigures:
        """Token figures of two sets of features, a bounded number of tokens at a time."""
        width = self.logits(reference[:1, :1]).shape[-1]
        step = max(1, LOGIT_ELEMENTS // (reference.shape[0] * width))
        parts = []
        for start in range(0, reference.shape[1], step):
            now = slice(start, start + step)
            pair = (self.logits(reference[:, now]), self.logits(variant[:, now]))
            parts.append(compare_logits(*pair, targets[:, now].to(reference.device)))
        return join(parts, 1)


def served_decoders(variants: Sequence[Variant], device: torch.device) -> dict[Path | None, ServedDecoder]:
    """What runs the variants whose path is ``served``, by their directory, each loaded once."""
    found: dict[Path | None, ServedDecoder] = {}
    for directory in {variant.directory for variant in variants if variant.path == "served"}:
        from stepquant.evaluation.served import ServedDecoder  # brings Triton along

        assert directory is not None
        found[directory] = ServedDecoder.load(directory, device)
    return found


@torch.no_grad()
def run_variant(
    loaded: LoadedModel,
    readout: Readout,
    tokens: Tensor,
    prefill: int,
    variant: Variant | None,
    errors: LayerErrors | None = None,
    advance: Callable[[], None] | None = None,
    served: ServedDecoder | None = None,
) -> Tensor:
    """Features of the decode tokens of a batch of streams.

    Args:
        loaded: model.
        readout: its readout.
        tokens: `[B, prefill + decode]`.
        prefill: tokens of exact prefill.
        variant: None is the reference: FP32 states through the same loop.
        errors: collects state and readout errors of every layer, if given.
        advance: called after every layer.
        served: what runs a variant whose path is ``served``.

    Returns:
        `[B, decode, F]`.
    """
    tokens = tokens.to(loaded.device)
    positions = torch.arange(prefill, tokens.shape[1], device=loaded.device)
    settings = DecodeSettings(prefill)
    if variant is not None:
        settings = DecodeSettings(prefill, variant.window.length, variant.window.dtype)

    def codec(layer: int, device: torch.device) -> StateCodec | None:
        return None if variant is None else variant.codec(layer, device)

    def replaced(layer: int, trace: DeltaTrace) -> Tensor:
        found = codec(layer, trace.q.device)
        if served is not None:
            y = served.decode_layer(layer, trace, prefill)
        else:
            y = decode_layer(trace, found, settings) if errors is None else errors.decode(trace, found, settings)
        if advance is not None:
            advance()
        return y

    if variant is not None and variant.native:
        return readout.features(tokens, positions)
    with capture_delta_rule(loaded, replace=replaced):
        return readout.features(tokens, positions)
