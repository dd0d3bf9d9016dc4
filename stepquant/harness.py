"""``python -m stepquant.harness plan=DIR tasks=[...]``: lm-eval-harness tasks with the plan's states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepquant.config import hydra_config_command


def run(config: Any) -> None:
    """Run tasks with the plan and with what it is compared with; print accuracy beside generation length."""
    from rich.console import Console
    from rich.table import Table

    from stepquant.errors import RecipeError
    from stepquant.evaluation.harness import check_tasks, require_lm_eval, run_tasks
    from stepquant.evaluation.run import chosen_variants, load_for_plan, write_rows
    from stepquant.evaluation.settings import HarnessSettings, from_config
    from stepquant.passes.destinations import ROWS, check_json
    from stepquant.passes.progress import Progress
    from stepquant.plan import load_plan
    from stepquant.small_operations import small_operations

    settings = from_config(HarnessSettings, config)
    if settings.plan is None:
        raise RecipeError("plan is not given; compile one and give plan=DIR, e.g. plan=build/tiny_gdn_6bit")
    if not settings.tasks:
        raise RecipeError("tasks is empty; give names of lm-eval tasks, e.g. tasks=[gsm8k]")
    if settings.json:
        check_json(Path(settings.json).expanduser(), kind=ROWS)
    require_lm_eval()
    plan, progress = load_plan(settings.plan), Progress()
    variants = chosen_variants(settings, plan)
    manager = check_tasks(settings)
    loaded = load_for_plan(settings, plan, progress)
    with small_operations(loaded.device):
        rows = run_tasks(settings, manager, loaded, variants, progress)
    table = Table("variant", "bits/value", "W", "task", "metric", "value", "tokens an answer", "cut at the limit")
    for row in rows:
        value = f"{row['value']:.4f}" + (f" ± {row['stderr']:.4f}" if row["stderr"] else "")
        length = "-" if row["mean_tokens"] is None else f"{row['mean_tokens']:.1f}"
        table.add_row(row["variant"], f"{row['bits_per_value']:.3f}", str(row["window"]), row["task"], row["metric"],
                      value, length, str(row["capped"]))  # fmt: skip
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
    if settings.json:
        write_rows(Path(settings.json).expanduser(), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the settings from arguments and run the tasks; return the exit code."""
    return hydra_config_command(run, "harness", "harness", argv)


if __name__ == "__main__":
    sys.exit(main())
