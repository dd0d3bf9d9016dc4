"""``python -m stepquant.serve plan=DIR [KEY=VALUE ...] -- ARGUMENTS``: SGLang with the packed state pool of a plan.

What stands after ``--`` is SGLang's; the plan reaches every process of the server through the environment.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from stepquant.config import hydra_config_command
from stepquant.errors import RecipeError


def run(config: Any, arguments: Sequence[str]) -> None:
    """Start the server, or show what it would do."""
    from stepquant.runtime import launch

    if config.plan is None:
        raise RecipeError("plan is missing: python -m stepquant.serve plan=DIR -- --model-path ...")
    settings = launch.ServeSettings.from_config(config, arguments)
    if config.dry_run:
        launch.show(settings)
        return
    launch.check(settings)
    launch.set_environment(settings)
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after ``--``."""
    argv = list(argv)
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the settings from arguments and serve; return the exit code."""
    own, arguments = split(sys.argv[1:] if argv is None else argv)
    return hydra_config_command(lambda config: run(config, arguments), "serve", "serve", own)


if __name__ == "__main__":
    sys.exit(main())
