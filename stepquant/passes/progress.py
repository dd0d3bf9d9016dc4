"""Progress of long work on the terminal: one bar a pass with time left, plain lines when stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Reports to stderr, so that stdout stays for results.

    Args:
        quiet: say nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.seconds: dict[str, float] = {}
        self.reused: list[str] = []
        self.ran: list[str] = []

    def say(self, message: str) -> None:
        """Print one line."""
        self.console.print(f"  {message}", style="dim")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one pass and print its name and seconds."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self.ran.append(name)
        self.console.print(f"  [green]ran[/] {name}  [dim]{self.seconds[name]:.1f} s[/]")

    def reuse(self, name: str) -> None:
        """Say that a product came from the cache."""
        self.reused.append(name)
        self.console.print(f"  [cyan]reused[/] {name}")

    @contextmanager
    def bar(self, name: str, total: int, done: int = 0) -> Iterator[Bar]:
        """A bar with time left for `total` units of work, `done` of them already done."""
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        with Bars(*columns, console=self.console, transient=True) as bars:
            yield Bar(bars, bars.add_task(name, total=total, completed=done))


class Bar:
    """One running bar."""

    def __init__(self, bars: Bars, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1) -> None:
        """Count finished units of work."""
        self._bars.advance(self._task, amount)  # type: ignore[arg-type]
