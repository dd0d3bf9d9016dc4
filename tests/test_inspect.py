"""``python -m stepquant.inspect``: stable names, tables, comparison, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepquant.compare import compare_plans
from stepquant.errors import ArtifactError
from stepquant.inspect import main
from stepquant.memory import GIB
from stepquant.passes.layout import permutation
from stepquant.plan import LayoutPlan
from stepquant.summary import SYNTHETIC_NOTE
from tests.plans import small_plan, synthetic_plan


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    synthetic_plan("qwen_6bit", "method=paper").save(directory)
    return directory


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kimi")
    synthetic_plan("kimi_4bit", "method=paper").save(directory)
    return directory


def save(plan: LayoutPlan, directory: Path) -> Path:
    plan.save(directory)
    return directory


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict:
    code, out, err = run(capsys, *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_stable_names(qwen, capsys):
    found = run_json(capsys, qwen)
    assert set(found) >= {
        "bytes_per_request", "bytes_per_running_request", "bits_per_value", "paper_bits_per_value", "bits_histogram",
        "synthetic", "window", "serving", "geometry", "budget", "predicted", "settings", "provenance", "name",
        "fingerprint", "weight_format", "compression_fp32", "compression_bf16", "plan_sha256", "codec", "packable",
        "granularity",
    }  # fmt: skip
    size = found["bytes_per_request"]
    assert set(size) == {"codes", "scales", "pivots", "padding", "total", "allocated", "fp32"}
    assert all(type(v) is int for v in size.values())
    assert size["total"] == size["codes"] + size["scales"] + size["pivots"] == 29_999_104
    assert type(found["bytes_per_running_request"]) is int
    assert found["synthetic"] is True
    assert found["window"] == {"length": 1, "dtype": "fp16"}
    assert round(found["bits_per_value"], 4) == 6.3576
    assert round(found["paper_bits_per_value"], 4) == 6.3611
    assert round(found["compression_fp32"], 2) == 5.03
    assert found["compression_bf16"] * 2 == found["compression_fp32"]


def test_histogram_counts_every_unit(qwen, kimi, capsys):
    for directory, unit, count in ((qwen, "head", 48 * 48), (kimi, "row", 20 * 32 * 128)):
        found = run_json(capsys, directory)
        histogram = found["bits_histogram"]
        assert histogram["unit"] == unit
        assert sum(histogram["total"].values()) == count
        assert [entry["layer"] for entry in histogram["layers"]] == found["geometry"]["layers"]
        for bits, n in histogram["total"].items():
            assert sum(entry["counts"].get(bits, 0) for entry in histogram["layers"]) == n


def test_equation_24(qwen, capsys):
    found = run_json(capsys, qwen, "--batch", "64")["serving"]
    assert [round(found[0][k] / GIB, 2) for k in ("state_fp32", "state_plan")] == [46.02, 9.85]
    found = run_json(capsys, qwen, "--batch", "1,512", "--context", "1152", "--weights", "17776688128", "--slots", "5")
    row = found["serving"][1]
    assert (row["batch"], row["context"], row["slots_per_request"], row["weights"]) == (512, 1152, 5, 17_776_688_128)
    assert (round(row["total_fp32"] / GIB, 2), round(row["total_plan"] / GIB, 1)) == (419.73, 131.1)
    code, out, _ = run(capsys, qwen, "--batch", "64")
    assert code == 0
    assert "46.02" in out
    assert "9.85" in out


def test_concurrency_in_given_memory(qwen, capsys):
    found = run_json(capsys, qwen, "--memory", "80GiB", "--weights", "16.5GiB", "--slots", "no_buffer")
    slot = found["bytes_per_request"]["allocated"] + 2_949_120
    left = 80 * GIB - int(16.5 * GIB)
    assert found["concurrency"]["plan"] == (left - slot) // (3 * slot + 4096 * 65_536)
    assert found["concurrency"]["fp32"] < found["concurrency"]["plan"]
    assert str(found["concurrency"]["plan"]) in run(capsys, qwen, "--memory", "80GiB", "--weights", "16.5GiB",
                                                    "--slots", "3")[1]  # fmt: skip


def test_a_second_plan_may_follow_an_option(qwen, capsys):
    """As in ``inspect A --json B``."""
    first = json.loads(run(capsys, qwen, qwen, "--json")[1])
    assert json.loads(run(capsys, qwen, "--json", qwen)[1]) == first
    assert json.loads(run(capsys, "--json", qwen, qwen)[1]) == first


def test_tables_say_what_json_says(qwen, capsys):
    code, out, err = run(capsys, qwen, "--layers")
    assert (code, err) == (0, "")
    for text in ("29,999,104", "150,994,944", "6.3576", "5.03x", "27,787,264", "1,163,264", "1,048,576", "32 x FP16"):
        assert text in out
    assert " ".join(SYNTHETIC_NOTE.split()[:4]) in out
    assert "heads by precision" in out


def test_a_plan_that_is_not_synthetic_has_no_warning(tmp_path, capsys):
    save(small_plan(), tmp_path)
    assert "SYNTHETIC" not in run(capsys, tmp_path)[1]
    assert run_json(capsys, tmp_path)["synthetic"] is False


@pytest.mark.parametrize("name", ["[red]x", "[/bold]", ":smile: <b>", "x" * 200])
def test_names_are_shown_as_they_are(tmp_path, capsys, name):
    first, second = save(small_plan(name=name), tmp_path / "a"), save(small_plan(), tmp_path / "b")
    code, out, _ = run(capsys, first, "--layers")
    assert code == 0
    assert name[:9] in out
    assert run(capsys, first, second)[0] == 0


def test_comparison(tmp_path, capsys):
    base = small_plan()
    bits = base.bits.clone()
    bits[0, 0], bits[1, 3] = 8, 4
    settings = {"temporal": {"horizon": 512, "weight": "gate", "sensitivity": "none"}}
    rows = torch.where(bits == 16, 0, bits.short()).sort(dim=-1, descending=True, stable=True).indices.short()
    other = small_plan(bits=bits, permutation=rows, name="other", settings=settings)
    first, second = save(base, tmp_path / "a"), save(other, tmp_path / "b")
    found = run_json(capsys, first, second)
    assert (found["rows"], found["rows_changed"], found["moves"]) == (128, 32, {"4->8": 16, "8->4": 16})
    assert [entry["layer"] for entry in found["layers"]] == [0, 2]
    assert [entry["rows_changed"] for entry in found["layers"]] == [16, 16]
    assert found["layers"][0]["mean_bits"] == [8.5, 9.5]
    assert found["layers"][0]["predicted"] == [1.0, 1.0]
    assert found["settings"] == {"temporal.horizon": [2048, 512]}
    assert found["same_model"] is True
    assert [p["name"] for p in found["plans"]] == ["small", "other"]
    assert found["plans"][0]["plan_sha256"] == base.hash
    code, out, _ = run(capsys, first, second)
    assert code == 0
    assert "32 of 128 rows differ" in out
    assert "4->8 bits" in out
    assert "DIFFERENT checkpoints" not in out


def test_comparison_of_the_same_and_of_other_models(tmp_path, capsys, qwen, kimi):
    first, second = save(small_plan(), tmp_path / "a"), save(small_plan(fingerprint="f" * 64), tmp_path / "b")
    same = compare_plans(first, first)
    assert (same["rows_changed"], same["moves"], same["settings"]) == (0, {}, {})
    assert "DIFFERENT checkpoints" in run(capsys, first, second)[1]
    assert "SYNTHETIC" not in run(capsys, first, second)[1]
    assert "SYNTHETIC" in run(capsys, qwen, qwen)[1]
    with pytest.raises(ArtifactError, match=r"for GDN states .* for KDA ones .*; compare plans of one model"):
        compare_plans(qwen, kimi)
    with pytest.raises(ArtifactError, match=r"\[48, 48, 128\] x 128 columns, .* for \[\d, \d, \d+\] x "):
        compare_plans(qwen, first)
    code, out, err = run(capsys, qwen, kimi)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("args", [["--json"], [], ["--layers"]])
def test_a_bad_artifact_is_one_line_and_exit_code_2(tmp_path, capsys, args):
    code, out, err = run(capsys, tmp_path / "none", *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'none'}: no such artifact directory")
    code, out, err = run(capsys, tmp_path, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "plan.json: the plan is missing" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--weights", "many"], "'many' is no size in bytes"), (["--batch", "0"], "'0' is no whole number"),
        (["--batch", "1,x"], "'x' is no whole number"), (["--slots", "sometimes"], "nor one of off, no_buffer"),
        (["--slots", "0"], "neither a number from 1"), (["--memory", "5XB"], "'5XB' is no size"),
        (["--context", "-3"], "'-3' is no whole number"), (["--nonsense"], "unrecognized arguments"), ([], "plan"),
    ],
)  # fmt: skip
def test_bad_arguments_exit_with_2(qwen, capsys, args, message):
    with pytest.raises(SystemExit) as raised:
        main([str(qwen), *args] if args else [])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_command(tmp_path):
    save(small_plan(), tmp_path)
    command = [sys.executable, "-m", "stepquant.inspect", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option", [["--memory", "1GiB"], ["--layers"], ["--passes"], ["--weights", "1GiB"], ["--batch", "4"]]
)
def test_options_of_one_plan_are_refused_for_two(tmp_path, capsys, option):
    plan = save(small_plan(), tmp_path / "a")
    code, out, err = run(capsys, plan, plan, *option)
    assert (code, out) == (2, "")
    assert err == f"error: {option[0]} is for one plan, and two are compared; inspect each by itself\n"


def test_comparison_names_directories_and_moved_pivots(tmp_path, capsys):
    old = small_plan()
    bits = old.bits.clone()
    bits[0, 3], bits[1, 1] = 4, 16  # the FP16 head moves to the other layer
    new = small_plan(bits=bits, permutation=permutation(bits))
    first, second = save(old, tmp_path / "before"), save(new, tmp_path / "after")
    found = compare_plans(first, second)
    layers = old.geometry.layers
    assert found["pivots"] == [[f"{layers[0]}/3"], [f"{layers[1]}/1"]]
    assert [p["directory"] for p in found["plans"]] == [str(first), str(second)]
    out = run(capsys, first, second)[1]
    assert "pivots only left" in out


def test_unknown_option_has_the_closest_one(qwen, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(qwen), "--jsn"])
    assert stop.value.code == 2
    assert "(did you mean '--json'?)" in capsys.readouterr().err


def test_passes_that_are_not_on_record_are_said_to_be_missing(tmp_path, capsys):
    plan = save(small_plan(), tmp_path / "a")
    (plan / "run.json").write_text("{}")
    assert "damaged or of another plan: compile again" in " ".join(run(capsys, plan, "--passes")[1].split())
