"""Exit codes of the commands: 2 and one line on stderr for a user's mistake, 130 for Ctrl-C, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from stepquant.errors import StepQuantError

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command and turn what users cause into an exit code."""
    try:
        return command() or 0
    except StepQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
