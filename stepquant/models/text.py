"""Documents of the text sources: WikiText-2 through `datasets`, and local text, JSONL and parquet files."""

from __future__ import annotations

import importlib.util
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from stepquant.errors import DataError

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
TEXT_KEYS = ("text", "content")
ALTERNATIVES = "data.source=builtin (no download) or data.source=file data.path=FILE (text, .jsonl or .parquet)"

_LARGEST = 1 << 28  # characters of one plain file that are ever looked at


def stdlib_documents(split: str, seed: int = 0) -> Iterator[str]:
    """Modules of the running interpreter's standard library, in a seeded order; the splits share no file.

    Raises:
        DataError: this Python has no library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    files = [file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts)]
    names = sorted(file.relative_to(root).as_posix() for file in files)
    held_out = [name for name in names if zlib.crc32(name.encode()) % 4 == 0]
    chosen = held_out if split != "train" else [name for name in names if name not in set(held_out)]
    if not chosen:
        raise DataError(f"this Python has no standard library sources in {root}; use data.source=file data.path=FILE")
    random.Random(seed).shuffle(chosen)
    for name in chosen:
        yield (root / name).read_text(encoding="utf-8", errors="replace")


def wikitext_documents(split: str) -> list[str]:
    """WikiText-2 (raw) of one split as a single document, its lines joined as GPTQ and the paper do.

    Raises:
        DataError: `datasets` is not installed, or the data set is neither cached nor downloadable.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data.source=wikitext2 needs the package datasets: pip install 'stepquant[data]'; or use {ALTERNATIVES}"
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(*WIKITEXT, split=split)
    except Exception as error:  # datasets raises a dozen kinds for "no network" and "no such split"
        raise DataError(
            f"WikiText-2 ({split}) is neither in the datasets cache nor downloadable ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); use {ALTERNATIVES}"
        ) from error
    return ["\n\n".join(rows["text"])]


def check_file(path: Path, key: str = "data.path") -> Path:
    """The path with ``~`` expanded, having checked that a file with something in it is there.

    Raises:
        DataError: missing or empty.
    """
    path = path.expanduser()
    if not path.is_file():
        raise DataError(f"{key} {str(path)!r} is not a file; expected a text file, .jsonl or .parquet")
    if path.stat().st_size == 0:
        raise DataError(f"{key} {str(path)!r} is empty; expected text")
    return path


def file_documents(path: Path, key: str = "data.path") -> Iterator[str]:
    """Documents of a local file: ``.jsonl`` and ``.parquet`` by row (key ``text`` or ``content``), otherwise one text.

    Raises:
        DataError: missing, empty, not UTF-8, a row without text, or parquet with no reader installed.
    """
    path = check_file(path, key)
    if path.suffix in (".jsonl", ".ndjson"):
        return _jsonl(path)
    if path.suffix in (".parquet", ".pq"):
        return _parquet(path)
    return _plain(path)


def _plain(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as handle:
            yield handle.read(_LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {str(path)!r} as UTF-8 text: {error}") from None


def _jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                keys = list(row) if isinstance(row, dict) else []
                text = next((row[key] for key in TEXT_KEYS if key in keys and isinstance(row[key], str)), None)
                if text is None:
                    raise DataError(
                        f"{path.name} line {number} has keys {keys}; expected a string under {' or '.join(TEXT_KEYS)}"
                    )
                yield text
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name} is not UTF-8 JSON lines: {error}") from None


def _parquet(path: Path) -> Iterator[str]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{path.name} needs the package pyarrow: pip install 'stepquant[data]'; or give the text as .jsonl or .txt"
        )
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        key = next((key for key in TEXT_KEYS if key in names), None)
        if key is None:
            raise DataError(f"{path.name} has columns {names}; expected {' or '.join(TEXT_KEYS)}")
        for batch in table.iter_batches(columns=[key]):
            yield from (text for text in batch.column(0).to_pylist() if text)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path.name} is not a readable parquet file: {error}") from None
