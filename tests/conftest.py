"""What tests record as ``figures`` (``record_property``) is printed at the end of a run, with xdist too."""

from __future__ import annotations

from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    done = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    lines = [line for r in done for name, line in getattr(r, "user_properties", []) if name == "figures"]
    if lines:
        terminalreporter.section("figures")
        for line in dict.fromkeys(map(str, lines)):
            terminalreporter.write_line(line)
