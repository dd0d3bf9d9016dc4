"""report.html in headless Chromium: every figure drawn, no message on the console, light and dark, desk and phone.

A copy of the report gets a probe that looks at the finished page and posts what it found to the page around it, an
empty one with the report in a frame of the wanted width (a window of Chromium's is never narrower than 500 pixels).
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepquant.memory import GIB, ServingMemory
from stepquant.report import write_report
from stepquant.report.evidence import read_evidence
from stepquant.report.serving import equation_terms
from tests.plans import compiled
from tests.report.pages import FIGURES, ROWS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")

PROBE = """<script>
(() => {
  const errors = [];
  addEventListener("error", (e) => errors.push(String(e.message)));
  addEventListener("unhandledrejection", (e) => errors.push(String(e.reason)));
  addEventListener("securitypolicyviolation", (e) => errors.push("policy: " + e.violatedDirective));
  const set = (name, value) => { document.getElementById("in-" + name).value = value; };
  const report = () => {
    const figures = {};
    for (const plot of document.querySelectorAll(".plot")) {
      const box = plot.querySelector("svg.main-svg")?.getBoundingClientRect();
      const label = plot.querySelector(".xtick text, .xtitle");
      figures[plot.id] = {
        width: box?.width ?? 0, room: plot.clientWidth, marks: plot.querySelectorAll(
          ".scatterlayer path, .barlayer path, .heatmaplayer image").length,
        ink: label ? getComputedStyle(label).fill : "",
      };
    }
    const rows = [...document.querySelectorAll("#capacity-table tbody tr")].map(
      (row) => [...row.querySelectorAll("th, td")].map((cell) => cell.textContent));
    const root = document.documentElement;
    return { errors, figures, rows, width: innerWidth, wide: root.scrollWidth,
             paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color };
  };
  const wait = () => {
    if (document.documentElement.dataset.drawn !== "yes" && !errors.length) return setTimeout(wait, 50);
    const before = report();
    set("memory", 320); set("weights", 16.5); set("context", 1152); set("batch", 512); set("strategy", "extra_buffer");
    document.getElementById("calculator").dispatchEvent(new Event("input"));
    setTimeout(() => parent.postMessage(JSON.stringify({ ...before, after: report().rows }), "*"), 300);
  };
  addEventListener("load", wait);
})();
</script>"""
FRAME = """<!doctype html><body style="margin:0"><pre id="found"></pre>
<script>addEventListener("message", (e) => {{ document.getElementById("found").textContent = e.data; }});</script>
<iframe src="probed.html" style="border:0;width:{width}px;height:900px"></iframe>"""


def chromium(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Chromium headless on a page of our own, with no network and a profile that is thrown away."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={directory / 'profile'}", "--enable-logging=stderr",
        "--virtual-time-budget=20000", *arguments,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def look(report: Path, directory: Path, width: int, dark: bool) -> dict[str, Any]:
    """What the probe found in a report at some width; console messages under ``console``."""
    probed = report.read_text().replace('<meta charset="utf-8">', '<meta charset="utf-8">' + PROBE, 1)
    (directory / "probed.html").write_text(probed)
    (directory / "frame.html").write_text(FRAME.format(width=width))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = chromium(directory, scheme, "--window-size=1400,1000", "--dump-dom", (directory / "frame.html").as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, "the page around the report is not there"
    assert found[1], f"the report never finished: {done.stderr[-2000:]}"
    return {**json.loads(html.unescape(found[1])), "console": re.findall(r".*CONSOLE.*", done.stderr)}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("browser")
    for name in ("tiny_gdn_6bit", "tiny_kda_4bit"):
        compiled(root / name, name, "method=paper")
        (root / name / "evaluation.json").write_text(json.dumps(ROWS))
        write_report(root / name)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("tiny_gdn_6bit", 1200, False), ("tiny_kda_4bit", 390, False), ("tiny_kda_4bit", 1200, True),
     ("tiny_gdn_6bit", 390, True)],
)  # fmt: skip
def test_every_figure_is_drawn(artifacts, tmp_path, name, width, dark):
    found = look(artifacts[name] / "report.html", tmp_path, width, dark)
    assert found["errors"] == []
    assert found["console"] == []
    assert found["width"] == width
    assert found["wide"] <= width  # nothing sticks out of the page
    assert set(found["figures"]) == {f"plot-{figure}" for figure in FIGURES | {"quality"}}
    for figure in found["figures"].values():
        assert figure["marks"] > 0
        assert 0.95 * figure["room"] <= figure["width"] <= figure["room"] + 1
        assert figure["ink"] == found["ink"]  # labels take the page's colour
    paper, ink = (sum(map(int, re.findall(r"\d+", found[key])[:3])) for key in ("paper", "ink"))
    assert (paper < 150 and ink > 500) if dark else (paper > 700 and ink < 200)


def test_the_calculator_is_equation_24(artifacts, tmp_path):
    directory = artifacts["tiny_gdn_6bit"]
    terms = equation_terms(read_evidence(directory))
    rows = look(directory / "report.html", tmp_path, 800, False)["after"]
    assert [row[0] for row in rows] == ["FP32", "BF16", "this plan"]
    for row in rows:
        term = ServingMemory(round(16.5 * GIB), terms["slots"][row[0]], terms["kv"], 5, terms["running"][row[0]])
        assert row[1] == f"{term.slot / 2**20:,.3f}"
        assert row[2:4] == [f"{term.state(512) / GIB:,.2f}", f"{term.total(512, 1152) / GIB:,.2f}"]
        assert row[4] == f"{term.concurrency(320 * GIB, 1152):,}"


def test_the_page_starts_with_the_numbers_it_was_written_with(artifacts, tmp_path):
    directory = artifacts["tiny_kda_4bit"]
    rows = look(directory / "report.html", tmp_path, 800, False)["rows"]
    text = (directory / "report.html").read_text()
    for row in rows:
        for cell in row:
            assert f">{cell}</t" in text


def test_it_prints(artifacts, tmp_path):
    target = tmp_path / "report.pdf"
    chromium(tmp_path, f"--print-to-pdf={target}", (artifacts["tiny_gdn_6bit"] / "report.html").as_uri())
    data = target.read_bytes()
    assert data.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 12
