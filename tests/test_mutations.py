"""The guards that ``python -m benchmarks.mutations`` breaks are where it looks for them, and its table is of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations import ROOT, Mutation, Outcome, mutations, table

ALL = list(mutations())


@pytest.mark.parametrize("mutation", ALL, ids=lambda m: f"{Path(m.file).stem}: {m.guard}")
def test_the_guard_is_there_once_and_its_tests_exist(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    broken = mutation.broken(source)
    assert broken != source
    compile(broken, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).is_file()


def test_a_guard_that_is_gone_or_there_twice_is_an_error() -> None:
    one = Mutation("x", "f.py", "a", "b", ("t",))
    assert one.broken("cac") == "cbc"
    for text in ("c", "aa"):
        with pytest.raises(ValueError, match=r"f\.py: x: 'a' stands there \d times, not once"):
            one.broken(text)


def test_the_table_has_every_guard() -> None:
    """docs/mutations.md is of these guards, and of a run in which every one was noticed."""
    found = (ROOT / "docs" / "mutations.md").read_text()
    rows = [line.split(" | ") for line in found.splitlines() if line.startswith("| ")][1:]
    assert [(row[0][2:], f"stepquant/{row[1].strip('`')}") for row in rows] == [(m.guard, m.file) for m in ALL]
    assert f"broke {len(ALL)} guards" in found
    assert f"{len(ALL)} were noticed" in found
    assert "**none**" not in found
    assert "**none**" in table([Outcome(ALL[0], None, 1.0)])
