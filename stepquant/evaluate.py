"""``python -m stepquant.evaluate plan=DIR [against=[int8,...]] [KEY=VALUE ...]``: what a plan costs in quality."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from stepquant.config import hydra_config_command


def run(config: Any) -> None:
    """Evaluate a plan and what it is compared with; print the table, and write ``json``."""
    from stepquant.evaluation.report import print_rows
    from stepquant.evaluation.run import evaluate
    from stepquant.evaluation.settings import EvaluateSettings, from_config

    settings = from_config(EvaluateSettings, config)
    print_rows(evaluate(settings), settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the settings from arguments and evaluate; return the exit code."""
    return hydra_config_command(run, "evaluate", "evaluate", argv)


if __name__ == "__main__":
    sys.exit(main())
