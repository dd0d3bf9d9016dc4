"""The two built-in tiny models, and text for them that neither was trained on: the standard library's sources.

``tiny_gdn`` is a Qwen3.5 hybrid (gated delta net), ``tiny_kda`` a Kimi-Linear hybrid (KDA); both have 8 layers, 6 of
them delta-rule layers of 8 heads with 128 x 128 states, and a byte-level vocabulary: id i < 256 is the byte i.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from stepquant.errors import DataError, ModelError, closest
from stepquant.models.data import cut_segments
from stepquant.models.text import stdlib_documents

TINY_MODELS = ("tiny_gdn", "tiny_kda")
SEPARATOR = 256
"""Token between documents in training (``<|endoftext|>``, also the end-of-text token)."""

Split = Literal["calibration", "evaluation"]
# The names under which stepquant.models.text splits the library's files: one rule, so that no file is in both.
_SPLITS = {"calibration": "train", "evaluation": "test"}


def tiny_model_path(name: str) -> Path:
    """Checkpoint directory of a built-in model: config, safetensors, tokenizer, and how it was trained.

    Raises:
        ModelError: no such built-in model, or an installation without its files.
    """
    if name not in TINY_MODELS:
        raise ModelError(f"no built-in model {name!r}{closest(name, TINY_MODELS)}; known: {', '.join(TINY_MODELS)}")
    path = Path(str(resources.files("stepquant.models") / "assets" / name))
    if not (path / "model.safetensors").is_file():
        raise ModelError(
            f"built-in model {name!r} has no model.safetensors in {path}; expected it in the package: reinstall "
            "stepquant, or make it with tools/train_tiny.py"
        )
    return path


def byte_ids(text: str) -> list[int]:
    """Token ids of a text under the built-in models' vocabulary, without specials; what their tokenizer gives."""
    return list(text.encode("utf-8"))


def _documents(split: Split, seed: int) -> Iterator[str]:
    if split not in _SPLITS:
        raise DataError(f"split is {split!r}{closest(split, _SPLITS)}; expected {' or '.join(_SPLITS)}")
    for text in stdlib_documents(_SPLITS[split], seed):
        if text and "\ufffd" not in text:  # a replacement character: the file is not UTF-8
            yield text


def stdlib_text(split: Split, seed: int = 0, min_bytes: int | None = None) -> list[str]:
    """Documents (whole modules) of the running interpreter's standard library, in a seeded order.

    A hash of the relative file name decides the split, so no file is in both; tests and files that are not UTF-8
    are left out.

    Args:
        split: ``calibration`` or ``evaluation``.
        seed: order of the files.
        min_bytes: stop once this many UTF-8 bytes were read; None reads all (about 7 and 2 million).

    Raises:
        DataError: unknown split, no library sources, or fewer than ``min_bytes`` in them.
    """
    documents, total = [], 0
    for text in _documents(split, seed):
        documents.append(text)
        total += len(text.encode("utf-8"))
        if min_bytes is not None and total >= min_bytes:
            return documents
    if min_bytes is not None:
        raise DataError(
            f"the standard library's {split} text holds {total:,} bytes; expected at least {min_bytes:,}: "
            "ask for less, or use data.source=file data.path=FILE"
        )
    return documents


def stdlib_segments(
    split: Split, n_segments: int, length: int, seed: int = 0, tokenizer: Any | None = None
) -> torch.Tensor:
    """Distinct, non-overlapping segments of standard library text, documents joined by the separator token.

    Args:
        split: ``calibration`` or ``evaluation``; the two share no file.
        n_segments: how many.
        length: tokens of each.
        seed: which files and which places in them.
        tokenizer: a transformers tokenizer; None takes the built-in models' bytes.

    Returns:
        Token ids int64 ``[n_segments, length]`` on the CPU, the same for the same arguments and interpreter.

    Raises:
        DataError: unknown split, a count below one, or too little text; the message has the arithmetic.
    """
    if n_segments < 1 or length < 1:
        raise DataError(f"n_segments is {n_segments} and length {length}; expected both to be at least 1")
    end = SEPARATOR if tokenizer is None else getattr(tokenizer, "eos_token_id", None)
    # Four times what is needed, so that segments come from many files even when few are asked for.
    enough, ids = max(4 * n_segments * length, 1 << 18), list[int]()
    for text in _documents(split, seed):
        ids += byte_ids(text) if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [end] if isinstance(end, int) else []
        if len(ids) >= enough:
            break
    return cut_segments(torch.tensor(ids), n_segments, length, seed, f"standard library ({split})")
