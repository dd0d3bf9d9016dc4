"""What a case must not do: take long, take memory, write elsewhere, start or import or run anything, open a socket."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 10.0  # of one case
PEAK_BYTES = 160 << 20  # that one case may raise the process's peak by
WRITES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "os.chmod",
          "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile")  # fmt: skip
NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn",
         "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request",
         "pickle.find_class", "os.kill", "os.putenv")  # fmt: skip


class Slow(BaseException):
    """A case took too long; no `except Exception` on the way stops it."""


class Guard:
    """Watches one case at a time through the interpreter's audit events, a timer and the peak of resident memory.

    Args:
        allowed: directories below which a case may write.
    """

    def __init__(self, allowed: list[Path]) -> None:
        self.allowed = [os.path.realpath(path) for path in allowed]
        self.active, self.events = False, list[str]()
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, self._late)

    def _late(self, number: int, frame: Any) -> None:
        if self.active:
            self.events.append(
                f"took more than {SECONDS} s"
            )  # here, as something on the way may swallow what is raised
            raise Slow

    @contextmanager
    def case(self) -> Iterator[list[str]]:
        """Yield the list that what is found goes into."""
        self.events = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
        self.active = True
        try:
            yield self.events
        except Slow:
            pass
        finally:
            self.active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if grown > PEAK_BYTES:
            self.events.append(f"took {grown >> 20} MiB")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and isinstance(path, str | bytes | os.PathLike) and not self._inside(os.path.realpath(path)):
                self.events.append(f"opened {os.fsdecode(path)} for writing")
        elif event in WRITES:
            for path in args[:2]:
                if not isinstance(path, str | bytes | os.PathLike):
                    continue
                if (
                    isinstance(args[-1], int) and args[-1] > 2 and not os.path.isabs(path)
                ):  # relative to a directory's fd
                    path = os.path.join(os.readlink(f"/proc/self/fd/{args[-1]}"), os.fsdecode(path))
                if not self._inside(path):
                    self.events.append(f"{event} {os.fsdecode(path)}")
        elif event in NEVER:
            self.events.append(event)
        elif event == "exec":
            name = getattr(args[0], "co_filename", "")
            if self._inside(name):
                self.events.append(f"ran code of {name}")
        elif event == "import" and len(args) > 1 and args[1] and self._inside(args[1]):
            self.events.append(f"imported {args[1]}")

    def _inside(self, path: Any) -> bool:
        head, name = os.path.split(os.fsdecode(path).rstrip(os.sep))
        real = os.path.join(os.path.realpath(head), name)  # a link is removed or renamed itself
        return any(real == place or real.startswith(place + os.sep) for place in self.allowed)


def limit_address_space(extra: int) -> None:
    """Let the process map `extra` bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
