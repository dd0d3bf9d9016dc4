"""Calibration text as token segments ``[n, length]``: built-in, WikiText-2, or a local file.

The token stream of a source is cut into blocks of ``length`` tokens and a seeded choice of ``n`` of them is taken, in
stream order. Documents are tokenised without special tokens and joined by the end-of-text token where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepquant.errors import DataError, closest
from stepquant.models.text import ALTERNATIVES, file_documents, stdlib_documents, wikitext_documents

SOURCES = ("builtin", "wikitext2", "file")
_PIECE = 1 << 16  # characters given to the tokenizer at once
_CHARACTERS_PER_TOKEN = 16  # no more text is read than this times the tokens asked for
_MIN_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class Segments:
    """Calibration segments.

    Attributes:
        ids: token ids ``[n, length]``, int64, on the CPU.
        source: where they come from, for plans and messages; holds no local path.
        fingerprint: ``sha256:`` of the ids and their shape.
        tokens_available: tokens of the stream that the segments were drawn from.
    """

    ids: Tensor
    source: str
    fingerprint: str
    tokens_available: int


def load_segments(
    tokenizer: Any,
    *,
    source: str = "builtin",
    path: str | Path | None = None,
    segments: int = 16,
    length: int = 1024,
    seed: int = 0,
    split: str = "train",
    vocab_size: int | None = None,
    keys: str = "data.segments or data.length",
    path_key: str = "data.path",
) -> Segments:
    """Draw calibration segments.

    Args:
        tokenizer: the checkpoint's tokenizer; None only where `vocab_size` allows random token ids (random weights).
        source: ``builtin``, ``wikitext2`` or ``file``.
        path: the file of ``source=file``.
        segments: how many.
        length: tokens of each.
        seed: which ones.
        split: ``train`` or ``validation`` / ``test``: never the same text (a file has no splits).
        keys, path_key: settings that a message about too little text, or about the file, names.
        vocab_size: with no tokenizer, draw uniform random ids below it instead of text.

    Raises:
        DataError: unknown source, missing package, file or network, or too little text.
    """
    if source not in SOURCES:
        raise DataError(f"data.source is {source!r}{closest(source, SOURCES)}; expected {ALTERNATIVES}, or wikitext2")
    if tokenizer is None:
        return _random_segments(segments, length, seed, vocab_size)
    enough = max(_MIN_CHARACTERS, segments * length * _CHARACTERS_PER_TOKEN)
    documents: Iterable[str]
    if source == "builtin":
        documents, label = stdlib_documents(split, seed), f"builtin/{split}"
    elif source == "wikitext2":
        documents, label = wikitext_documents(split), f"wikitext-2/{split}"
    else:
        if path is None:
            raise DataError("data.source=file needs data.path: a text file, .jsonl or .parquet")
        documents, label = file_documents(Path(path), path_key), "file"
    stream = _tokenise(tokenizer, documents, enough)
    ids = cut_segments(stream, segments, length, seed, label, keys)
    return Segments(ids, label, data_fingerprint(ids), stream.numel())


def data_fingerprint(ids: Tensor) -> str:
    """``sha256:`` and the digest of token ids ``[n, length]`` and their shape."""
    ids = ids.to(torch.int64).contiguous().cpu()
    digest = hashlib.sha256(repr(tuple(ids.shape)).encode())
    digest.update(ids.numpy().astype("<i8").tobytes())
    return f"sha256:{digest.hexdigest()}"


def cut_segments(
    stream: Tensor, segments: int, length: int, seed: int, label: str, keys: str = "data.segments or data.length"
) -> Tensor:
    """A seeded choice of ``segments`` non-overlapping blocks of a token stream ``[N]``, in stream order.

    Raises:
        DataError: the stream is shorter than ``segments * length``; the message has the arithmetic.
    """
    blocks = stream.numel() // length
    if blocks < segments:
        raise DataError(
            f"data source {label} holds {stream.numel():,} tokens, {blocks} segments of {length:,}; "
            f"{segments} segments need {segments * length:,}. Lower {keys}, or give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(blocks, generator=generator)[:segments].sort().values
    return stream[: blocks * length].view(blocks, length)[chosen].clone()


def _random_segments(segments: int, length: int, seed: int, vocab_size: int | None) -> Segments:
    if vocab_size is None:
        raise DataError(
            "the checkpoint has no tokenizer files, so text cannot be tokenised; add its tokenizer.json, or use "
            "model.weights=random:SEED, which takes random tokens"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (segments, length), generator=generator)
    return Segments(ids, "random tokens", data_fingerprint(ids), ids.numel())


def _pieces(documents: Iterable[str], enough: int) -> Iterator[tuple[str, bool]]:
    """Cut documents at line ends into pieces of 64 Ki characters: (piece, it ends the document); stop at `enough`."""
    total = 0
    for document in documents:
        start = 0
        while start < len(document) and total < enough:
            end = start + _PIECE
            if end < len(document):
                newline = document.rfind("\n", start, end)
                end = newline + 1 if newline > start else end
            piece = document[start:end]
            total += len(piece)
            start += len(piece)
            yield piece, start >= len(document)
        if total >= enough:
            return


def _tokenise(tokenizer: Any, documents: Iterable[str], enough: int) -> Tensor:
    end = getattr(tokenizer, "eos_token_id", None)
    ids: list[int] = []
    for piece, last in _pieces(documents, enough):
        ids.extend(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        if last and isinstance(end, int):
            ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)
