"""Exit codes of the commands: 2 and one line on stderr for a user's mistake, 130 for Ctrl-C, never a traceback."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from stepquant.errors import StepQuantError, closest

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


class Parser(argparse.ArgumentParser):
    """Options whose mistakes give one line, the closest option for an unknown one, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            hint = closest(message.split()[2], [o for a in self._actions for o in a.option_strings])
        self.exit(EXIT_ERROR, f"error: {message}{hint}; see {self.prog} --help\n")


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command and turn what users cause into an exit code."""
    with _noting_ctrl_c():
        return _exit_code(command)


def _exit_code(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except BrokenPipeError:  # `inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, Exception) as error:
        if interrupted(error):
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            error = StepQuantError(
                f"{name[:60]}... has {len(name)} characters, too many for a path; give a shorter one"
            )
        if isinstance(error, RuntimeError) and "home directory" in str(error):  # of pathlib, for ~NAME
            error = StepQuantError("a path begins with ~ and a user that this machine does not have; write it out")
        if not isinstance(error, StepQuantError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


_ctrl_c = threading.Event()


@contextmanager
def _noting_ctrl_c() -> Iterator[None]:
    """Ctrl-C leaves a note and raises KeyboardInterrupt as ever; a handler of somebody else's is left alone.

    C code that calls back into Python may put an error of its own in the place of what that call raised, without a
    trace of it: torch asks a storage for an item, and says ValueError where the answer was KeyboardInterrupt.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def note(*_: object) -> NoReturn:
        _ctrl_c.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _ctrl_c.clear()


def interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library that tidies up after it, or hides it, ends in one of its own."""
    if _ctrl_c.is_set():
        return True
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def user_path(text: str) -> Path:
    """A path of the command line; "~" is the user's directory, also where the shell left it."""
    return Path(text).expanduser()
