"""Calibration segments, cached, so that a run whose products are cached neither tokenises nor imports transformers."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stepquant.errors import DataError
from stepquant.files import hash_json
from stepquant.models.checkpoint import read_config, resolve_checkpoint
from stepquant.passes.cache import Cache
from stepquant.passes.protocol import Product
from stepquant.recipe import DataSettings, ModelSettings

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tiktoken.model")


@dataclass(frozen=True)
class CalibrationText:
    """Token ids `segments` `[n, length]`, their fingerprint, and a label of the source without local paths."""

    segments: Tensor
    fingerprint: str
    source: str


def calibration_text(data: DataSettings, model: ModelSettings, cache: Cache) -> CalibrationText:
    """Draw the segments of a recipe, or take them from the cache.

    Raises:
        DataError: when the source is missing, unreachable or too short.
    """
    checkpoint = resolve_checkpoint(str(model.path))
    key = hash_json({
        "source": data.source, "segments": data.segments, "length": data.length, "seed": data.seed,
        "split": data.split, "weights": model.weights, "python": sys.version, "text": _file_hash(data.path),
        "tokenizer": [_file_hash(checkpoint / name) for name in _TOKENIZER_FILES],
    })  # fmt: skip
    product = cache.load("segments", key)
    if product is None:
        from stepquant.models.adapter import load_tokenizer
        from stepquant.models.data import load_segments
        from stepquant.models.families import text_config

        tokenizer = load_tokenizer(checkpoint, trust_remote_code=model.trust_remote_code)
        vocab = text_config(read_config(checkpoint)).get("vocab_size") if model.weights != "checkpoint" else None
        found = load_segments(
            tokenizer, source=data.source, path=data.path, segments=data.segments, length=data.length,
            seed=data.seed, split=data.split, vocab_size=vocab,
        )  # fmt: skip
        product = Product({"ids": found.ids}, {"fingerprint": found.fingerprint, "source": found.source})
        cache.store("segments", key, product)
    return CalibrationText(product["ids"], product.facts["fingerprint"], product.facts["source"])


def _file_hash(path: str | Path | None) -> str | None:
    """SHA-256 of a file's content, None where there is none to hash (its absence is reported by who reads it)."""
    if path is None or not Path(path).is_file():
        return None
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check data.path") from None
