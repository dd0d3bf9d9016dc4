"""report.html as text: its sections, figures and numbers are the plan's, nothing is fetched, nothing is injected."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from stepquant.artifact import TABLES
from stepquant.files import write_json, write_text
from stepquant.memory import GIB, ServingMemory, window_bytes
from stepquant.passes.gate_statistics import half_life
from stepquant.plan import load_plan
from stepquant.report import write_report
from stepquant.report.__main__ import main
from stepquant.report.evidence import read_evidence
from stepquant.report.figures import thinned
from stepquant.report.page import plotly_script, render
from stepquant.report.serving import capacity_rows, equation_terms
from stepquant.report.tradeoff import tradeoff
from stepquant.summary import SYNTHETIC_NOTE, plan_summary
from tests.plans import compiled, small_plan
from tests.report.pages import EVIL, FIGURES, ROWS, SECTIONS, Page, array, embedded


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("artifacts")
    for name in ("tiny_gdn_6bit", "tiny_kda_4bit"):
        compiled(root / name, name, "method=paper")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(params=["tiny_gdn_6bit", "tiny_kda_4bit"])
def directory(request: pytest.FixtureRequest, artifacts: dict[str, Path]) -> Path:
    return artifacts[request.param]


@pytest.fixture
def text(directory: Path) -> str:
    return (directory / "report.html").read_text()


def test_compile_writes_all_sections_and_figures(text):
    page = Page(text)
    assert page.ids("section") == SECTIONS
    assert set(embedded(text)["figures"]) == FIGURES
    plots = [a["id"] for t, a in page.tags if t == "div" and a.get("class") == "plot"]
    assert {f"plot-{name}" for name in FIGURES} == set(plots)
    assert all(a.get("role") == "img" and a.get("aria-label") for t, a in page.tags if a.get("class") == "plot")
    assert text.count(plotly_script()) == 1
    assert len(text) < 6_000_000


def test_one_file_that_asks_for_nothing(text):
    own = text.replace(plotly_script(), "")
    assert "default-src 'none'" in own
    assert not re.search(r"https?://|@import|url\(|//cdn|\bfetch\(|XMLHttpRequest|WebSocket", own)
    for tag, attributes in Page(own).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert not {"src", "href", "action", "srcset"} & set(attributes)


def test_the_same_artifact_gives_the_same_bytes(directory, text):
    assert write_report(directory) == directory / "report.html"
    assert (directory / "report.html").read_text() == text
    assert str(directory) not in text


def test_numbers_are_the_plans(directory, text):
    summary, words = plan_summary(load_plan(directory)), Page(text).text
    size = summary["bytes_per_request"]
    for name in ("codes", "scales", "pivots", "padding", "total", "allocated", "fp32"):
        assert f"{size[name]:,}" in words
    assert f"{summary['bits_per_value']:.4f}" in words
    assert f"{summary['paper_bits_per_value']:.4f} in the paper's count" in words
    assert f"{summary['compression_fp32']:.2f}x" in words
    assert summary["plan_sha256"] in words
    for bits, count in summary["bits_histogram"]["total"].items():
        assert f"{count:,} x {'FP16' if bits == '16' else bits + ' bits'}" in words


def test_heat_map(directory, text):
    plan, trace = load_plan(directory), embedded(text)["figures"]["bits"]["data"][0]
    shown = np.array([array(row) for row in trace["z"]] if isinstance(trace["z"], list) else array(trace["z"]))
    shown = shown.reshape(plan.bits.shape[:2])
    if plan.geometry.family == "gdn":
        names = trace["colorbar"]["ticktext"]
        found = [[16 if names[int(i)] == "FP16" else int(names[int(i)].split()[0]) for i in row] for row in shown]
        assert found == plan.bits[..., 0].tolist()
    else:
        np.testing.assert_allclose(shown, plan.bits.double().mean(-1), atol=6e-4)
        first = plan.bits[0, 0]
        assert f"{int((first == 4).sum())} x 4 bits" in trace["text"][0][0]


def test_half_lives(directory, text):
    plan, figure = load_plan(directory), embedded(text)["figures"]["half_lives"]
    life = half_life(read_evidence(directory).products["gate_statistics"]["mean_log_gate"]).flatten()
    bits = (plan.bits[..., 0] if plan.geometry.family == "gdn" else plan.bits).flatten()
    assert figure["layout"]["xaxis"]["type"] == "log"
    *clouds, medians = figure["data"]
    shown = 0
    for cloud, median, b in zip(clouds, array(medians["x"]), sorted(set(bits.tolist())), strict=True):
        own = np.sort(life[bits == b].numpy())
        x = np.sort(array(cloud["x"]))
        shown += len(x)
        assert median == pytest.approx(np.median(own))
        if len(x) == len(own):
            np.testing.assert_allclose(x, own, rtol=1e-3)
        assert own[0] * 0.999 <= x[0] <= x[-1] <= own[-1] * 1.001
    assert shown == min(len(life), 6000)
    assert ("All 48 heads" in Page(text).text) == (plan.geometry.family == "gdn")


def test_points_are_thinned_the_same_way_every_time():
    assert thinned(10, 20).tolist() == list(range(10))
    picked = thinned(81_920)
    assert len(set(picked.tolist())) == 6000
    assert (picked == thinned(81_920)).all()
    assert picked.max() > 80_000
    assert picked.min() < 2_000


def test_distortion_by_layer(directory, text):
    plan, bar = load_plan(directory), embedded(text)["figures"]["distortion"]["data"][0]
    assert array(bar["y"]) == pytest.approx(plan.predicted["by_layer"])
    assert array(bar["x"]) == [str(i) for i in plan.geometry.layers]


def test_pareto_curve_goes_through_the_plan(directory, text):
    plan = load_plan(directory)
    curve = tradeoff(read_evidence(directory))
    assert curve is not None
    assert (np.diff(curve.bits) > 0).all()
    assert (np.diff(curve.costs) <= 0).all()
    bits, cost = curve.chosen
    assert cost == plan.predicted["predicted_cost_per_token"]
    assert plan.budget["bits"] - 0.2 < bits <= plan.budget["bits"]
    below, above = curve.costs[curve.bits <= bits + 1e-9][-1], curve.costs[curve.bits >= bits - 1e-9][0]
    assert above * (1 - 1e-9) <= cost <= below * (1 + 1e-9)
    assert [b for b, _ in curve.uniform] == list(curve.candidates) == plan.predicted["candidates"]
    assert all(c > np.interp(b, curve.bits, curve.costs) for b, c in curve.uniform if curve.bits[0] <= b)
    star = embedded(text)["figures"]["pareto"]["data"][-1]
    assert (array(star["x"]), array(star["y"])) == ([bits], [cost])


def test_capacity_is_equation_24(directory, text):
    evidence = read_evidence(directory)
    terms, size = equation_terms(evidence), evidence.summary["bytes_per_request"]
    conv, kv = evidence.plan.geometry.conv_bytes, evidence.plan.geometry.kv_bytes_per_token
    assert terms["slots"] == {"FP32": size["fp32"] + conv, "BF16": size["fp32"] // 2 + conv,
                              "this plan": size["allocated"] + conv}  # fmt: skip
    assert embedded(text)["serving"] == json.loads(json.dumps(terms))
    rows, r = capacity_rows(terms), {"off": 1, "extra_buffer": 5}[terms["start"]["strategy"]]
    expected = ServingMemory(0, size["allocated"] + conv, kv, r).concurrency(80 * GIB, 4096)
    assert rows[2][4] == f"{expected:,}"
    words = Page(text).text
    assert all(cell in words for row in rows for cell in row)


def test_a_window_and_the_recipes_own_capacity(tmp_path):
    compiled(tmp_path, "tiny_gdn_6bit", "window.length=8", "budget.gpu_memory=24GiB", "budget.gpus=2",
             "budget.weights_bytes=1GiB", "budget.context_length=1000", "budget.strategy=no_buffer")  # fmt: skip
    terms = embedded((tmp_path / "report.html").read_text())["serving"]
    assert terms["start"] == {"memory": 48.0, "weights": 1.0, "context": 1000, "strategy": "no_buffer", "batch": 64}
    assert terms["running"]["this plan"] == window_bytes(load_plan(tmp_path).geometry, 8, "fp16")
    assert terms["running"]["this plan"] > 0 == terms["running"]["FP32"]
    words = Page((tmp_path / "report.html").read_text()).text
    assert "a running request on top" in words
    assert "8 token(s), pending ones in fp16" in words


def test_synthetic_is_loud_and_only_where_it_is(text, tmp_path):
    assert SYNTHETIC_NOTE in Page(text).text
    assert "<title>SYNTHETIC " in text
    small_plan().save(tmp_path)
    plain = write_report(tmp_path).read_text().replace(plotly_script(), "")
    assert "SYNTHETIC" not in plain


def test_a_plan_alone_gives_a_report_that_says_what_is_missing(tmp_path):
    small_plan().save(tmp_path)
    text = write_report(tmp_path).read_text()
    assert Page(text).ids("section") == SECTIONS
    assert set(embedded(text)["figures"]) == {"bits", "distortion", "bytes", "capacity"}
    words = Page(text).text
    assert words.count(f"The artifact holds no calibration tables ({TABLES}).") == 2
    assert "No kernels were generated" in words
    assert "Not evaluated yet" in words


def test_quality_and_kernels(tmp_path):
    plan = small_plan()
    plan.save(tmp_path)
    write_text(tmp_path / "evaluation.json", json.dumps([{**row, "plan_sha256": plan.hash} for row in ROWS]))
    kernels = {
        "target": "sm_90",
        "variants": [{"name": "decode", "precisions": [4, 8], "registers": 1234, "us": 1.23456}],
    }
    write_json(tmp_path / "kernels" / "kernel_plan.json", kernels)
    text = write_report(tmp_path).read_text()
    words = Page(text).text
    for shown in ("int6", "0.015 [0.012, 0.018]", "97.31%", "plan W=8", "packed", "sm_90", "4, 8", "1,234", "1.235"):
        assert shown in words
    traces = embedded(text)["figures"]["quality"]["data"]
    assert {t["name"]: array(t["x"]) for t in traces} == {
        "requantised after every token": [0.015], "write window 8": [2e-5],
    }  # fmt: skip
    assert array(traces[0]["error_x"]["array"]) == pytest.approx([0.003])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.json", "{", "evaluation.json cannot be read"),
        ("evaluation.json", '{"a": 1}', "evaluation.json is no list of rows"),
        ("evaluation.json", "[1]", "evaluation.json is no list of rows"),
        ("evaluation.json", '[{"variant": "old", "plan_sha256": "00"}]', "holds figures of another plan (1 left out)"),
        ("evaluation.json", '[{"variant": NaN, "kl_all": NaN, "kl_all_ci": ["x", {}], "window": []}]', "Measured"),
        ("kernels/kernel_plan.json", "[]", "is no JSON object"),
        ("kernels/kernel_plan.json", '{"plan": "00"}', "holds figures of another plan"),
        ("kernels/kernel_plan.json", '{"a": [{}], "b": [{"c": {"d": [1]}}], "e": null}', "Kernels"),
        (TABLES, "damaged", "is not a sound safetensors file"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_said(tmp_path, name, content, message):
    small_plan().save(tmp_path)
    write_text(tmp_path / name, content)
    text = write_report(tmp_path).read_text()
    assert message in Page(text).text
    assert str(tmp_path) not in text
    embedded(text)


def test_nothing_from_a_plan_becomes_markup(tmp_path, artifacts):
    plan = small_plan(
        name=EVIL, fingerprint=EVIL, weight_format=EVIL, settings={"method": EVIL, EVIL: {EVIL: EVIL}},
        provenance={"calibration": EVIL, "data": {"source": EVIL, "fingerprint": EVIL}, "torch": EVIL},
        predicted={"solver": EVIL, "status": EVIL, "by_layer": [1.0, 2.0]}, budget={"bits": 6.0, "concurrency": EVIL},
    )  # fmt: skip
    plan.save(tmp_path)
    write_text(tmp_path / "evaluation.json", json.dumps([{**ROWS[0], "variant": EVIL, "path": EVIL}]))
    write_json(tmp_path / "kernels" / "kernel_plan.json", {EVIL: EVIL, "list": [{EVIL: EVIL}]})
    text = write_report(tmp_path).read_text()
    own = text.replace(plotly_script(), "")
    assert "<script>alert" not in own
    assert "<img" not in own
    page = Page(text)
    assert page.ids("script") == ["report-data", "plotly", None]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count("alert(1)") > 10  # shown, as text
    labels = json.dumps(embedded(text)["figures"]["quality"])
    assert "<" not in labels.replace("<extra></extra>", "")


def test_escaped_json_reads_back():
    from stepquant.report.html import embed_json

    value = {"a": "</script><!-- \u2028 & <b>", "b": [1.5, None, True]}
    shown = embed_json("x", value)
    inner = shown.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(inner)
    assert json.loads(inner) == value


@pytest.mark.parametrize(
    "recipe", ["baseline_int6", "baseline_nvfp4", "baseline_damp", "baseline_qmamba4", "ablation_spatial_6"]
)
def test_baselines_have_reports_too(tmp_path, recipe):
    compiled(tmp_path, recipe)
    text = (tmp_path / "report.html").read_text()
    assert Page(text).ids("section") == SECTIONS
    fixed = recipe in ("baseline_nvfp4", "baseline_damp")
    assert ("pareto" in embedded(text)["figures"]) == (not fixed)


def test_full_size_reports_are_quick(tmp_path, artifacts):
    compiled(tmp_path / "kimi", "kimi_6bit")
    for directory, limit in ((tmp_path / "kimi", 6.0), (artifacts["tiny_gdn_6bit"], 2.0)):
        start = time.process_time()
        text = render(read_evidence(directory))
        assert time.process_time() - start < limit
        assert len(text) < 6_000_000
    assert "6,000 of 81,920 rows" in Page((tmp_path / "kimi" / "report.html").read_text()).text


def test_command(artifacts, tmp_path, capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    directory = artifacts["tiny_gdn_6bit"]
    before = (directory / "report.html").read_bytes()
    (directory / "report.html").unlink()
    assert main([str(directory)]) == 0
    assert capsys.readouterr().out.strip() == str(directory / "report.html")
    assert (directory / "report.html").read_bytes() == before
    assert not opened
    assert main([str(directory), "--open"]) == 0
    assert opened == [(directory / "report.html").resolve().as_uri()]
    capsys.readouterr()
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
