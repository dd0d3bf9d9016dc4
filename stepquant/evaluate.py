"""``python -m stepquant.evaluate plan=DIR [against=[int8,...]] [KEY=VALUE ...]``: what a plan costs in quality."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepquant.config import hydra_config_command


def run(config: Any) -> None:
    """Evaluate a plan and what it is compared with; print the table, and write ``json``."""
    from stepquant.evaluation.report import print_rows
    from stepquant.evaluation.run import evaluate
    from stepquant.evaluation.settings import EvaluateSettings, from_config

    settings = from_config(EvaluateSettings, config)
    rows = evaluate(settings)
    print_rows(rows, settings)
    keep_with_plan(Path(str(settings.plan)), rows)


def keep_with_plan(directory: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Leave the rows beside the plan they belong to, and draw its report again."""
    from stepquant.evaluation.run import write_rows
    from stepquant.plan import load_plan
    from stepquant.report import write_report

    identity = load_plan(directory).hash
    write_rows(directory / "evaluation.json", [{**row, "plan_sha256": identity} for row in rows])
    print(f"report:   {write_report(directory)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the settings from arguments and evaluate; return the exit code."""
    return hydra_config_command(run, "evaluate", "evaluate", argv)


if __name__ == "__main__":
    sys.exit(main())
