"""Progress of passes: bars with time left on a terminal, plain lines when stderr is none; seconds and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from stepquant.passes.memory import PeakMemory

LINE_SECONDS = 10.0  # between two plain lines of a bar


@dataclass(frozen=True)
class PassCost:
    """What one pass took.

    Attributes:
        name: of the pass.
        seconds: wall time.
        memory: peaks while it ran.
        tokens: tokens of text that the model ran over, 0 where it did not run.
    """

    name: str
    seconds: float
    memory: PeakMemory
    tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it is recorded in an artifact."""
        found: dict[str, Any] = {
            "name": self.name, "seconds": round(self.seconds, 3), "host_peak_bytes": self.memory.host,
            "gpu_peak_bytes": self.memory.gpus,
        }  # fmt: skip
        if self.tokens:
            found |= {"tokens": self.tokens, "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1)}
        return found


class Progress:
    """Reports to stderr, so that stdout stays for results.

    Args:
        quiet: say nothing.

    Attributes:
        ran: names of the passes that ran, in order; `costs` what they took.
        reused: names of those whose product came from the cache.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.costs: list[PassCost] = []
        self.reused: list[str] = []
        self.ran: list[str] = []
        self._open: list[PeakMemory] = []

    def say(self, message: str) -> None:
        """Print one line."""
        self.console.print(f"  {message}", style="dim")

    @contextmanager
    def step(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Measure one pass and print its name, seconds and peak memory; steps may be nested.

        Args:
            tokens: of text that the model runs over in it.
        """
        start = time.perf_counter()
        for outer in self._open:
            outer.read()
        memory = PeakMemory()
        memory.start()
        self._open.append(memory)
        try:
            yield
        finally:
            memory.read()
            self._open.remove(memory)
        for outer in self._open:
            outer.read()
        cost = PassCost(name, time.perf_counter() - start, memory, tokens)
        self.costs.append(cost)
        self.ran.append(name)
        self.console.print(f"  [green]ran[/] {name}  [dim]{cost.seconds:.1f} s, {memory.shown()}[/]")

    def reuse(self, name: str) -> None:
        """Say that a product came from the cache."""
        self.reused.append(name)
        self.console.print(f"  [cyan]reused[/] {name}")

    @contextmanager
    def bar(self, name: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A bar with time left for `total` units of work, `done` of them already done."""
        if not self.console.is_terminal:
            yield Lines(self.console, name, total, done)
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        with Bars(*columns, console=self.console, transient=True) as bars:
            yield TerminalBar(bars, bars.add_task(name, total=total, completed=done))


class Bar:
    """Counts finished units of work."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more."""
        raise NotImplementedError

    def skip(self, amount: int) -> None:
        """Count `amount` that an earlier run had done."""
        self.advance(amount)


class TerminalBar(Bar):
    """One running bar."""

    def __init__(self, bars: Bars, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)  # type: ignore[arg-type]


class Lines(Bar):
    """A line every ten seconds: units done, seconds left at the pace so far, peak memory so far."""

    def __init__(self, console: Console, name: str, total: int, done: int) -> None:
        self._console, self._name, self._total, self._done = console, name, total, done
        self._first = (time.monotonic(), done)
        self._said = self._first[0]

    def skip(self, amount: int) -> None:
        self._done += amount
        self._first = (time.monotonic(), self._done)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._said < LINE_SECONDS or self._done >= self._total:
            return
        self._said = now
        pace = (now - self._first[0]) / max(self._done - self._first[1], 1)
        left = pace * (self._total - self._done)
        self._console.print(
            f"  {self._name} {self._done}/{self._total}, {left:.0f} s left, {PeakMemory().read().shown()}", style="dim"
        )
