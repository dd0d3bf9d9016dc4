"""Run cases: ``python -m tests.fuzz.run COUNT [SEED] [FIRST]`` prints what went wrong and ends with a JSON summary.

Case i of a seed is the same wherever and whenever it runs: `COUNT` 1 and `FIRST` i repeat it alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch

from stepquant.errors import StepQuantError
from tests.fuzz.corpus import Corpus
from tests.fuzz.forge import MARK
from tests.fuzz.guard import Guard, limit_address_space
from tests.fuzz.targets import Target, damage, targets

ADDRESS_SPACE = 3 << 30  # that may be mapped beyond what is when the cases begin
LONGEST_MESSAGE = 1500


def restore(target: Target, names: list[str]) -> None:
    """Put the sound files back, whatever took their place; a loader may have deleted all of them."""
    for name in target.files if target.deletes else names:
        path = target.place / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(target.sound[name])


def wrong_message(error: StepQuantError, target: Target, names: list[str], place: tuple[Any, ...]) -> str:
    text = str(error)
    if len(text) > LONGEST_MESSAGE:
        return f"a message of {len(text)} characters"
    if "recipe" in target.name:
        return ""  # composed of several files: the key says where to look
    if not any(Path(name).name in text or Path(name).parts[0] in text for name in names):
        return f"the message names no file: {text}"
    keys = [str(k) for k in place if not isinstance(k, int) and k]
    other = "not valid JSON" in text or "kernel_plan.json: plan is" in text  # a sound plan, but not these kernels' one
    if keys and not other and not any(k in text for k in keys):
        return f"the message does not name {'.'.join(keys)}: {text}"
    return ""


def one_case(target: Target, corpus: Corpus, guard: Guard, random: Random) -> tuple[str, str]:
    """Damage, load, judge, restore. Returns what came of it and what was wrong, "" for nothing."""
    names, label, place = damage(target, corpus, random)
    outcome, wrong, result = "loaded", "", None
    try:
        with guard.case() as events:
            try:
                result = target.load()
                outcome = "not taken" if target.silent and result is None else "loaded"
            except StepQuantError as error:
                outcome = "refused"
                if target.silent:
                    wrong = "" if "report" in target.name else f"raised {error}"
                else:
                    wrong = wrong_message(error, target, names, place)
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                own = [f for f in traceback.extract_tb(error.__traceback__) if "/stepquant/" in f.filename]
                where = own[-1] if own else frame
                outcome = "crashed"
                file = where.filename.rpartition("/stepquant/")[2]
                wrong = f"{type(error).__name__}: {str(error)[:200]} at {file}:{where.lineno}"
        if events:
            wrong = f"{'; '.join(sorted(set(events))[:5])} {wrong}"
        elif outcome == "loaded" and not wrong:
            wrong = target.check(result)
        if MARK in sys.modules:
            del sys.modules[MARK]
            wrong = f"code of the artifact ran {wrong}"
    finally:
        restore(target, names)
    return outcome, f"{target.name}: {label}: {wrong}" if wrong else ""


def run(count: int, seed: int = 1, first: int = 0, only: str = "", note: int | None = None) -> dict[str, Any]:
    """Run `count` cases.

    Args:
        only: run targets whose name contains this.
        note: file descriptor to write the running case's number to.

    Returns:
        Cases and outcomes by target, what was wrong, seconds, and the peak of resident memory.
    """
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="stepquant-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        (root / "inside").mkdir()
        (root / "outside").mkdir()
        corpus = Corpus.make(root / "inside")
        found = [t for t in targets(corpus) if only in t.name]
        guard = Guard([root / "inside"])
        for target in found:  # sound files load, and nothing is imported for the first time inside a case
            wrong = target.check(target.load())
            if wrong:
                raise AssertionError(f"{target.name}, not damaged: {wrong}")
        limit_address_space(ADDRESS_SPACE)
        weights = [t.share for t in found]
        cases: Counter[str] = Counter()
        outcomes: dict[str, Counter[str]] = {t.name: Counter() for t in found}
        failures: list[dict[str, Any]] = []
        start = time.perf_counter()
        slowest = 0.0
        for index in range(first, first + count):
            random = Random(f"{seed}/{index}")
            target = random.choices(found, weights)[0]
            if note is not None:
                os.pwrite(note, f"{index:12d} {target.name:40}".encode(), 0)
            if index % 20 == 0:
                faulthandler.dump_traceback_later(60, exit=True)  # where a signal cannot interrupt
            began = time.perf_counter()
            outcome, wrong = one_case(target, corpus, guard, random)
            slowest = max(slowest, time.perf_counter() - began)
            cases[target.name] += 1
            outcomes[target.name][outcome] += 1
            if wrong:
                failures.append({"case": index, "what": wrong})
        faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - start
    finally:
        shutil.rmtree(root, ignore_errors=True)
    table = {name: {"cases": cases[name], **dict(outcomes[name])} for name in outcomes}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"cases": count, "seed": seed, "first": first, "seconds": round(seconds, 1), "slowest": round(slowest, 3),
            "peak_mib": peak, "targets": table, "failures": failures}  # fmt: skip


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[1:4]]
    found = run(*arguments, only=sys.argv[4] if len(sys.argv) > 4 else "", note=1 if "--note" in sys.argv else None)
    for failure in found["failures"][:200]:
        print(f"case {failure['case']}: {failure['what']}"[:700])
    print(json.dumps({**found, "failures": len(found["failures"])}))
