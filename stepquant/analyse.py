"""``python -m stepquant.analyse NAME plan=DIR [KEY=VALUE ...]``: the paper's analyses, with numbers and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepquant.commands import EXIT_ERROR, exit_code
from stepquant.config import hydra_config_command

USAGE = "usage: python -m stepquant.analyse NAME plan=DIR [KEY=VALUE ...]\n\nNAME is one of\n"


def run(name: str, config: Any) -> None:
    """Run one analysis, print what it found, and write ``numbers.json`` and ``figure.html``."""
    from stepquant.errors import RecipeError
    from stepquant.evaluation.analyses import AnalysisRun, check_settings, run_analysis
    from stepquant.evaluation.run import open_run
    from stepquant.evaluation.settings import AnalyseSettings, from_config
    from stepquant.files import write_json, write_text
    from stepquant.passes.progress import Progress
    from stepquant.plan import load_plan

    settings = from_config(AnalyseSettings, config)
    if settings.plan is None:
        raise RecipeError("plan is not given; compile one and give plan=DIR, e.g. plan=build/tiny_gdn_6bit")
    check_settings(name, settings)
    plan = load_plan(settings.plan)
    from stepquant.artifact import read_tables

    tables = {key: product for key, (_, product) in read_tables(Path(settings.plan))[0].items()}
    found = run_analysis(name, AnalysisRun(open_run(settings, plan, Progress()), plan, tables, settings))
    output = Path(settings.output or f"build/analysis/{name}")
    write_json(output / "numbers.json", found.numbers)
    for line in found.headline:
        print(line)
    print(f"numbers: {output / 'numbers.json'}")
    if settings.figure and found.figure is not None:
        write_text(output / "figure.html", found.figure.to_html(include_plotlyjs=True, full_html=True))
        print(f"figure:  {output / 'figure.html'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Take the analysis' name from the arguments, compose the settings, and run it; return the exit code."""
    from stepquant.evaluation.analyses import ANALYSES, check_name

    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((a for a in arguments if "=" not in a and not a.startswith("-")), None)
    if name is None:
        listed = "\n".join(f"  {key:<12} {what}" for key, what in ANALYSES.items())
        asked = bool({"-h", "--help"} & set(arguments))
        print(f"{USAGE}{listed}\n", file=sys.stdout if asked else sys.stderr)
        if not asked:
            print("error: no analysis is named; put its NAME first", file=sys.stderr)
        return 0 if asked else EXIT_ERROR
    arguments.remove(name)
    code = exit_code(lambda: check_name(name))
    return code or hydra_config_command(lambda config: run(name, config), "analyse", "analyse", arguments)


if __name__ == "__main__":
    sys.exit(main())
