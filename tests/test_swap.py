"""Directories replaced as a whole: kills at every file operation, readers and writers at once, what is kept."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepquant import swap
from stepquant.artifact import EVALUATION, RECIPE, new_artifact, read_tables, write_artifact
from stepquant.codec.spec import CodecSpec
from stepquant.config import compose_recipe
from stepquant.errors import ArtifactError
from stepquant.files import write_json, write_text
from stepquant.passes.codegen import write_kernels
from stepquant.plan import load_plan
from stepquant.report import write_report
from stepquant.swap import read_whole, replacing_directory
from tests.plans import small_plan

OWN = ("a", "b", "kernels")
EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "open", "ctypes.dlopen", "fcntl.flock"}


def write(directory: Path, word: str) -> None:
    """Replace a directory by one whose three files say `word`."""
    with replacing_directory(directory, OWN) as place:
        for name in ("a", "b", "kernels/c"):
            write_text(place / name, word)


def words(directory: Path) -> set[str]:
    """What the files say; they must all be there."""
    return {(directory / name).read_text() for name in ("a", "b", "kernels/c")}


def forked(work: Callable[[], None]) -> int:
    """Start a process that does the work; its id."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killing_itself(number: int, work: Callable[[], None]) -> int:
    """Exit status of a process that kills itself before its `number`-th file operation."""

    def run() -> None:
        seen = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal seen
            if event in EVENTS:
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    return status(forked(run))


@pytest.fixture(params=["exchange", "renames"])
def atomic(request, monkeypatch) -> bool:
    """With the kernel's exchange, and as on a file system that has none."""

    def none(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    if request.param == "renames":
        monkeypatch.setattr(swap, "_exchange", none)
    return request.param == "exchange"


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_one(tmp_path, atomic):
    place = tmp_path / "out"
    write(place, "old")
    (place / "notes.txt").write_text("mine")
    found, number = [], 0
    while (number := number + 1) and killing_itself(number, lambda: write(place, "new")) == -signal.SIGKILL:
        if atomic:
            assert words(place) in ({"old"}, {"new"})
        swap.sweep(place, OWN)  # what the next compile begins with
        (said,) = words(place)
        found.append(said)
        assert (place / "notes.txt").read_text() == "mine"
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        write(place, "old")
    assert number > 15
    assert (found[0], found[-1]) == ("old", "new")
    assert words(place) == {"new"}


def test_an_error_leaves_the_old_one(tmp_path):
    write(tmp_path / "out", "old")
    with pytest.raises(ZeroDivisionError), replacing_directory(tmp_path / "out", OWN) as place:
        _ = (place / "a").write_text("new") / 0
    assert words(tmp_path / "out") == {"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_is_not_its_own_stays(tmp_path, atomic):
    place = tmp_path / "out"
    write(place, "old")
    write(place / "budget.bits=4", "job")
    (place / ".a.x1.tmp").touch()  # of a killed process
    write(place, "new")
    assert words(place) == {"new"}
    assert words(place / "budget.bits=4") == {"job"}
    assert sorted(p.name for p in place.iterdir()) == ["a", "b", "budget.bits=4", "kernels"]


def test_a_link_keeps_pointing_at_what_is_replaced(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert words(tmp_path / "real") == {"new"}


def test_work_of_a_process_that_lives_is_not_swept(tmp_path):
    with replacing_directory(tmp_path / "out", OWN) as place:
        assert status(forked(lambda: write(tmp_path / "out", "other"))) == 0
        assert place.is_dir()
        for name in ("a", "b", "kernels/c"):
            write_text(place / name, "new")
    assert words(tmp_path / "out") == {"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_writers_and_readers_at_once(tmp_path):
    place = tmp_path / "out"
    write(place, "0")

    def writing(word: str) -> None:
        for _ in range(25):
            write(place, word)

    writers = [forked(lambda word=word: writing(word)) for word in "12"]
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError):  # read_whole is for errors of ours
            assert len(read_whole(place, lambda: words(place))) == 1
    assert [status(child) for child in writers] == [0, 0]
    assert len(words(place)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_reader_reads_again_when_the_directory_was_replaced(tmp_path):
    place, seen = tmp_path / "out", []
    write(place, "old")

    def reading() -> str:
        seen.append((place / "a").read_text())
        if len(seen) == 1:
            write(place, "new")
            raise ArtifactError("half of each")
        return seen[-1]

    assert read_whole(place, reading) == "new"
    with pytest.raises(ArtifactError):
        read_whole(place, lambda: (_ for _ in ()).throw(ArtifactError("damaged")))


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file/out cannot be replaced: .*check output=DIR"):
        write(tmp_path / "file" / "out", "new")


def whole(directory: Path) -> tuple[str, float]:
    """The plan's name and the first row weight, after checking that everything in the artifact is of one compile."""
    plan = load_plan(directory)
    read_tables(directory)
    assert f"plan {plan.hash[:16]}" in (directory / "report.html").read_text()
    assert plan.hash in (directory / "kernels" / "kernel_plan.json").read_text()
    assert f"name: {plan.name}\n" in (directory / RECIPE).read_text()
    return plan.name, float(plan.w.flatten()[0])


def test_a_writer_killed_at_random_points_leaves_a_whole_artifact(tmp_path):
    place, recipe = tmp_path / "out", compose_recipe("tiny_gdn_6bit")
    codec = CodecSpec(group=16)  # two-bit heads of 32 columns have kernels in such groups
    other = small_plan().w.clone()
    other[..., 0], other[..., 1] = 2.0, 0.5  # a head's weights have geometric mean 1
    plans = [small_plan(name=name, w=w, codec=codec) for name, w in (("one", small_plan().w), ("two", other))]

    def compile_one(plan):
        with new_artifact(place, plan.hash) as new:
            write_artifact(new, plan, recipe.replace({"name": plan.name}), {}, {})
            write_kernels(new, plan, [])
            write_report(new)

    def compiling():
        while True:
            for plan in plans:
                compile_one(plan)

    compile_one(plans[1])
    chance = random.Random(0)
    for _ in range(6):
        child = forked(compiling)
        time.sleep(chance.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        assert status(child) == -signal.SIGKILL
        assert whole(place) in (("one", 1.0), ("two", 2.0))
    compile_one(plans[0])
    assert whole(place) == ("one", 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_evaluation_stays_with_its_own_plan(tmp_path):
    plan, other, place = small_plan(), small_plan(granularity=8), tmp_path / "out"
    for made, evaluated, kept in ((plan, plan, True), (other, plan, False), (plan, None, False)):
        place.mkdir(exist_ok=True)
        if evaluated is not None:
            write_json(place / EVALUATION, [{"variant": "int8", "plan_sha256": evaluated.hash}])
        with new_artifact(place, made.hash) as new:
            made.save(new)
        assert (place / EVALUATION).is_file() == kept
    (place / EVALUATION).write_text("{")
    with new_artifact(place, plan.hash) as new:
        plan.save(new)
    assert not (place / EVALUATION).exists()
