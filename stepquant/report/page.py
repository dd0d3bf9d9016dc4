"""The page: sections, figures, the plotting library and a few lines of script in one file that asks for nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from stepquant.artifact import REPORT
from stepquant.files import write_text
from stepquant.report import results, sections, serving
from stepquant.report.evidence import Evidence, read_evidence
from stepquant.report.html import embed_json, esc, join
from stepquant.report.sections import Figures

# Nothing may be fetched, whatever a plan holds: only what is written in the page itself runs and shows.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(directory: str | Path) -> Path:
    """Write `directory`'s report.html from what the artifact holds; the same artifact gives the same bytes.

    Returns:
        The path of the report.

    Raises:
        ArtifactError: when the plan is missing or unsound.
    """
    path = Path(directory) / REPORT
    write_text(path, render(read_evidence(Path(directory))))
    return path


def render(evidence: Evidence) -> str:
    """The whole page."""
    drawn: Figures = {}
    parts = [
        sections.header(evidence),
        sections.compiled(evidence),
        sections.precisions(evidence, drawn),
        sections.lives(evidence, drawn),
        sections.by_layer(evidence, drawn),
        sections.budget_curve(evidence, drawn),
        serving.storage(evidence, drawn),
        serving.capacity(evidence, drawn),
        results.kernels(evidence),
        results.measured(evidence, drawn),
    ]
    data = {"figures": drawn, "serving": serving.equation_terms(evidence)}
    mark = "SYNTHETIC " if evidence.plan.synthetic else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{esc(mark + evidence.plan.name)}: stepquant report</title>\n"
        f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>\n<main>\n{join(parts)}\n"
        f"<noscript>{sections.note('Figures and the calculator need JavaScript; every table is here without it.')}"
        f"</noscript>\n</main>\n<footer>stepquant, plan {esc(evidence.plan.hash[:16])}</footer>\n"
        f"{embed_json('report-data', data)}\n"
        f'<script id="plotly">{plotly_script()}</script>\n'
        f"<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"
    )


def plotly_script() -> str:
    """The source of plotly.js as plotly's own package ships it."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (files("stepquant.report") / "assets" / name).read_text(encoding="utf-8")
