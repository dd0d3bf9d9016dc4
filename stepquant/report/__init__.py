"""``report.html``: one self-contained page about an artifact, written without reading anything but the artifact."""

from stepquant.report.page import REPORT, write_report

__all__ = ["REPORT", "write_report"]
