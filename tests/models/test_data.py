"""Calibration text: sources, seeds, fingerprints and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from stepquant.errors import DataError
from stepquant.models.data import cut_segments, data_fingerprint, load_segments
from stepquant.models.text import stdlib_documents


class Bytes:
    """Byte-level tokenizer with the two things `load_segments` uses."""

    eos_token_id = 256

    def __call__(self, text: str, **_):
        return {"input_ids": list(text.encode())}


def test_builtin_text_is_seeded_and_splits_are_apart():
    options = {"segments": 4, "length": 128}
    one, again = (load_segments(Bytes(), **options, seed=1) for _ in range(2))
    other, held = load_segments(Bytes(), **options, seed=2), load_segments(Bytes(), **options, seed=1, split="test")
    assert one.ids.shape == (4, 128)
    assert one.ids.dtype == torch.int64
    assert torch.equal(one.ids, again.ids)
    assert one.fingerprint == again.fingerprint
    assert len({one.fingerprint, other.fingerprint, held.fingerprint}) == 3
    train, test = set(stdlib_documents("train")), set(stdlib_documents("test"))
    assert train
    assert test
    assert not {text for text in train & test if text.strip()}


def test_local_files_hold_the_same_text(tmp_path: Path):
    text = "".join(f"line {i} of a small file\n" for i in range(400))
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text(text)
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in (text[:100], text[100:])))
    a = load_segments(Bytes(), source="file", path=plain, segments=3, length=64)
    b = load_segments(Bytes(), source="file", path=lines, segments=3, length=64)
    assert a.tokens_available == len(text) + 1
    assert b.tokens_available == len(text) + 2
    assert "a.txt" not in a.source
    assert bytes(a.ids[0].tolist()).decode() in text


def test_long_documents_lose_nothing(tmp_path: Path):
    file = tmp_path / "long.txt"
    file.write_text("x" * 200_000 + "\n" + "y" * 10)
    found = load_segments(Bytes(), source="file", path=file, segments=1, length=200_012)
    assert found.tokens_available == 200_012


def test_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["abc" * 100, "def" * 100]}), tmp_path / "a.parquet")
    assert load_segments(Bytes(), source="file", path=tmp_path / "a.parquet", segments=2, length=64).ids.shape == (
        2,
        64,
    )


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "a.txt", "is empty"),
        ("short", "a.txt", r"holds 6 tokens, 0 segments of 64; 2 segments need 128"),
        ('{"body": "x"}\n', "a.jsonl", r"line 1 has keys \['body'\]; expected a string under text or content"),
        ("not json\n", "a.jsonl", "not UTF-8 JSON lines"),
        (None, "a.txt", "is not a file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content, name, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_segments(Bytes(), source="file", path=tmp_path / name, segments=2, length=64)


def test_missing_package_or_network_names_alternatives(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"stepquant\[data\].*data.source=builtin"):
        load_segments(Bytes(), source="wikitext2")

    class Offline:
        @staticmethod
        def load_dataset(*_, **__):
            raise ConnectionError("no route to host")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(DataError, match=r"no route to host.*data.source=file"):
        load_segments(Bytes(), source="wikitext2")
    with pytest.raises(DataError, match="did you mean 'wikitext2'"):
        load_segments(Bytes(), source="wikitext")


def test_no_tokenizer():
    found = load_segments(None, segments=2, length=8, vocab_size=10)
    assert found.ids.max() < 10
    with pytest.raises(DataError, match="no tokenizer"):
        load_segments(None)


def test_blocks_do_not_overlap_and_fingerprint_covers_shape():
    ids = cut_segments(torch.arange(100), 5, 10, 3, "t")
    assert ids.flatten().unique().numel() == 50
    assert data_fingerprint(ids) != data_fingerprint(ids.view(10, 5))
