"""Held-out text for evaluation: streams of known tokens, the same for every variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from stepquant.errors import DataError
from stepquant.models.data import load_segments

if TYPE_CHECKING:
    from pathlib import Path

    from stepquant.models.adapter import LoadedModel


@dataclass(frozen=True)
class Streams:
    """Evaluation text.

    Attributes:
        ids: `[n, prefill + decode + 1]` int64; the last token is a target only.
        prefill: tokens of exact prefill.
        decode: tokens decoded with known inputs; predictions are compared at each of them.
        source: label of the text, without local paths.
        fingerprint: of the ids.
    """

    ids: Tensor
    prefill: int
    decode: int
    source: str
    fingerprint: str


def load_streams(
    model: LoadedModel,
    *,
    streams: int,
    prefill: int,
    decode: int,
    source: str = "builtin",
    path: str | Path | None = None,
    split: str = "test",
    seed: int = 0,
    path_key: str = "data.path",
) -> Streams:
    """Cut held-out text into streams.

    Args:
        model: its tokenizer is used; random weights without one get random tokens.
        streams: how many.
        prefill, decode: tokens of each part.
        source, path, split, seed: as of calibration text (`stepquant.models.data`); calibration uses ``train``.
        path_key: the setting that holds `path`, for messages.

    Raises:
        DataError: missing or too short text, or a prefill of nothing.
    """
    if prefill < 1 or decode < 1 or streams < 1:
        raise DataError(f"streams={streams}, prefill={prefill}, decode={decode}; each must be at least 1")
    vocab = None
    if model.tokenizer is None and model.synthetic:
        vocab = int(model.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    length = prefill + decode + 1
    found = load_segments(
        model.tokenizer,
        source=source,
        path=path,
        segments=streams,
        length=length,
        seed=seed,
        split=split,
        vocab_size=vocab,
        keys="streams, prefill or decode",
        path_key=path_key,
    )
    return Streams(found.ids, prefill, decode, found.source, found.fingerprint)
