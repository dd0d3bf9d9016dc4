"""``python -m stepquant.report DIR [--open]``: write an artifact's report.html again."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence

from stepquant.commands import Parser, exit_code, user_path
from stepquant.report.evidence import read_evidence
from stepquant.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, write the report and print its path; return the exit code."""
    parser = Parser(prog="python -m stepquant.report", description="Write report.html of an artifact again.")
    parser.add_argument("plan", type=user_path, help="artifact directory of stepquant.compile")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    args = parser.parse_args(argv)

    def run() -> None:
        path = write_report(args.plan)
        for about, text in read_evidence(args.plan).notes.items():
            print(f"note: {about}: {text}", file=sys.stderr)
        print(path)
        if args.open:
            webbrowser.open(path.resolve().as_uri())

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
