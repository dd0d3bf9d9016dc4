"""``python -m stepquant.serve`` and ``python -m stepquant.doctor``: dry run, refusals, exit codes, environment."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepquant import doctor, serve
from stepquant.passes.codegen import write_kernels
from stepquant.plan import load_plan
from stepquant.runtime import launch
from stepquant.runtime.sglang.state import Accept
from tests.runtime.sglang.test_refusals import MODEL, plan_of


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    plan_of().save(tmp_path / "plan")
    return tmp_path / "plan"


def test_dry_run_says_slots_bytes_and_cap(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = [
        "--model-path",
        str(MODEL),
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--mem-fraction-static",
        "0.5",
    ]
    code = serve.main([f"plan={plan}", "dry_run=true", "memory=2GiB", f"json={out}", "--", *arguments, "--port", "1"])
    assert code == 0
    found = json.loads(out.read_text())
    g = plan_of().geometry
    assert found["fp32_slot_bytes"] == g.fp32_bytes
    assert found["weights_bytes"] == pytest.approx((MODEL / "model.safetensors").stat().st_size, rel=0.01)
    assert found["available_bytes"] == 2**30 - found["weights_bytes"]
    packed, fp32 = found["packed"], found["fp32"]
    assert packed["request_cap"] == packed["slots"] // 5
    assert 4 < packed["slots"] / fp32["slots"] < found["compression"]
    text = capsys.readouterr().out
    assert f"{packed['slots']} slots set by --mamba-full-memory-ratio" in text
    assert f"at most {packed['request_cap']} running requests" in text
    assert f"FP32:   {fp32['slots']} slots" in text


def test_paths_may_begin_with_a_tilde(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").symlink_to(plan)
    assert serve.main(["plan=~/mine", "dry_run=true", "memory=1GiB", "weights=0B", "json=~/out.json", "--"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["packed"]["slots"] > 0


def test_a_dry_run_names_what_it_does_not_read(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--speculative-algorithm", "EAGLE", "--max-running-reqests=64", "--max-running-requests", "8"]
    assert serve.main([f"plan={plan}", "dry_run=true", "memory=1GiB", "weights=0B", "--", *given]) == 0
    assert (
        "not looked at: --max-running-reqests, --speculative-algorithm; a server that starts" in capsys.readouterr().out
    )


def test_a_dry_run_refuses_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = replace(plan_of(), fingerprint="sha256:" + "0" * 64, synthetic=False)
    made.save(tmp_path)
    given = [f"plan={tmp_path}", "dry_run=true", "memory=2GiB", "--", "--model-path", str(MODEL)]
    assert serve.main(given) == 2
    assert "fingerprint" in capsys.readouterr().err
    assert serve.main([given[0], "any_checkpoint=true", *given[1:]]) == 0


def test_a_dry_run_replaces_its_own_figures_and_nothing_else(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [f"plan={plan}", "dry_run=true", "memory=1GiB", "weights=0B", f"json={out}", "--"]
    assert serve.main(command) == 0
    first = out.read_text()
    assert serve.main(command) == 0
    assert out.read_text() == first
    out.write_text('{"model_type": "x"}')
    assert serve.main(command) == 2
    assert out.read_text() == '{"model_type": "x"}'


def test_dry_run_of_two_ranks_splits_states_and_weights(plan: Path) -> None:
    def figures(tp: int) -> dict[str, Any]:
        arguments = ["--tp", str(tp), "--max-running-requests", "8", "--disable-radix-cache"]
        return launch.figures(
            launch.ServeSettings(plan, Accept(), launch.parse_arguments(arguments), 2**30, 2**20, None)
        )  # fmt: skip

    one, two = figures(1), figures(2)
    assert two["fp32_slot_bytes"] * 2 == one["fp32_slot_bytes"]
    assert two["slot_bytes"] * 2 == pytest.approx(one["slot_bytes"], rel=0.02)
    assert one["packed"]["slots"] == two["packed"]["slots"] == 8
    assert two["available_bytes"] - one["available_bytes"] == 2**19


@pytest.mark.parametrize(
    ("own", "arguments", "message"),
    [
        ([], ["--model-path", "x"], "plan is missing"),
        (["dry_run=true"], [], "memory is missing"),
        (["dry_run=true", "memory=1GiB"], [], "weights is missing"),
        (["dry_run=true", "memory=1MiB", "weights=0B"], [], "make a request"),
        (["dry_run=true", "memory=2", "weights=0B"], [], "memory=2 is 2 bytes; expected a GPU's, e.g. memory=80GiB"),
        (["dry_run=maybe", "memory=1GiB"], [], "dry_run is 'maybe'; expected true or false"),
        (["dry_run=true", "memory=1GiB", "weights=0B"], ["--tp", "three"], "SGLang's arguments after --"),
        (["dry_run=true", "memory=1GiB", "weights=0B"], ["--tp", "3"], "do not divide by tp 3"),
        (["plain=1"], [], "plain"),
        (["dry_run=true", "memory=${nope}"], [], "serve cannot be resolved: Interpolation key 'nope' not found"),
        (["dry_run=true", "memory=???"], [], "serve cannot be resolved: Missing mandatory value: memory"),
        (["dry_run=true", f"memory={'9' * 5000}"], [], "a number in it has too many digits"),
        (["dry_run=true", "memory=1GiB", "weights=0B", "json=/dev/null"], [], "json=/dev/null is no ordinary file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    own: list[str], arguments: list[str], message: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [] if message == "plan is missing" else [f"plan={plan}"]
    assert serve.main([*named, *own, "--", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert "Traceback" not in said


def test_a_path_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([f"plan={'p' * 5000}", "dry_run=true", "memory=1GiB", "weights=0B", "--"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said) < 300


def as_if_installed(monkeypatch: pytest.MonkeyPatch, version: str | None = "0.5.12") -> None:
    from importlib import metadata

    def version_of(name: str) -> str:
        if name == "sglang" and version is None:
            raise metadata.PackageNotFoundError(name)
        return str(version) if name == "sglang" else real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(doctor, "version", version_of)
    monkeypatch.setattr(launch, "plugin_target", lambda: "stepquant.runtime.sglang.plugin:register")


def test_serve_starts_sglang_with_the_plan_in_the_environment(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_installed(monkeypatch)
    for name in ("STEPQUANT_PLAN", "STEPQUANT_ACCEPT", "SGLANG_PLUGINS"):
        monkeypatch.setenv(name, "")
    seen: dict[str, Any] = {}

    def run_module(name: str, **more: Any) -> None:
        seen.update(name=name, argv=list(sys.argv), plan=os.environ["STEPQUANT_PLAN"], **more)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["before"])
    assert serve.main([f"plan={plan}", "--", "--model-path", str(MODEL), "--tp", "2"]) == 0
    assert seen == {
        "name": "sglang.launch_server", "argv": ["sglang.launch_server", "--model-path", str(MODEL), "--tp", "2"],
        "plan": str(plan.resolve()), "run_name": "__main__", "alter_sys": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "plugins", "arguments", "message"),
    [
        (None, "", ["--model-path", str(MODEL)], "SGLang is not installed here; install one of 0.5.12, 0.5.23"),
        ("0.4.1", "", ["--model-path", str(MODEL)], "SGLang 0.4.1 was not checked"),
        ("0.5.12", "other", ["--model-path", str(MODEL)], "leaves out stepquant"),
        ("0.5.12", "", [], "--model-path is missing"),
        ("0.5.12", "", ["--model-path", "nowhere"], "nowhere"),
    ],
)
def test_serve_refuses_before_sglang_is_imported(
    version: str | None, plugins: str, arguments: list[str], message: str, plan: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    as_if_installed(monkeypatch, version)
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: pytest.fail("started"))
    assert serve.main([f"plan={plan}", "--", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_serve_refuses_without_the_entry_point(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_if_installed(monkeypatch)
    monkeypatch.setattr(launch, "plugin_target", lambda: None)
    assert serve.main([f"plan={plan}", "--", "--model-path", str(MODEL)]) == 2
    assert "entry point stepquant of sglang.srt.plugins is not installed" in capsys.readouterr().err


def test_the_entry_point_names_the_plugin() -> None:
    import tomllib

    root = Path(__file__).resolve().parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {launch.GROUP: {launch.NAME: "stepquant.runtime.sglang.plugin:register"}}
    from stepquant.runtime.sglang import plugin

    assert callable(plugin.register)


def test_the_printed_command_is_one_that_serve_takes(plan: Path) -> None:
    printed = shlex.split(launch.serving_command(plan_of(), str(plan), "builtin:tiny_gdn"))
    assert printed[:3] == ["python", "-m", "stepquant.serve"]
    own, arguments = serve.split(printed[3:])
    assert own == [f"plan={plan}"]
    assert launch.parse_arguments(arguments).model_path == str(MODEL)
    forced = launch.serving_command(plan_of(synthetic=True, fingerprint="synthetic"), "a b", None)
    assert forced == "python -m stepquant.serve plan='a b' force=true -- --model-path CHECKPOINT"


def test_doctor_says_what_works(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_if_installed(monkeypatch, None)
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    write_kernels(plan, load_plan(plan), ())
    assert doctor.main(["--json", "--plan", str(plan)]) == 1
    found = json.loads(capsys.readouterr().out)
    status = {entry["name"]: entry["status"] for entry in found["findings"]}
    assert status["python"] == status["torch"] == status["commands"] == status["plan"] == "ok"
    assert status["sglang"] == status["hooks"] == status["SGLANG_PLUGINS"] == "fail"
    assert found["works"]["transformers"] is True
    assert found["works"]["serve"] is False
    assert doctor.main(["--plan", str(plan / "gone")]) == 1
    text = capsys.readouterr().out
    assert "fail  plan:" in text
    assert "does not work: serve" in text


def test_doctor_looks_at_the_kernels_too(plan: Path) -> None:
    """They are generated again to serve, so that nothing fails; but the artifact is not what a compile wrote."""

    def finding() -> doctor.Finding:
        return doctor.examine(plan)[-1]

    assert (finding().name, finding().status) == ("plan", "warn")
    assert f"{plan / 'kernels'}: the directory of generated kernels is missing; compile the plan" in finding().advice
    assert doctor.works([finding()])["serve"], "kernels are generated from the plan"
    write_kernels(plan, load_plan(plan), ())
    assert (finding().status, finding().advice) == ("ok", "")
    path = plan / "kernels" / "kernel_plan.json"
    data = json.loads(path.read_text())
    data["variants"][0]["launch"]["warps"] = 3
    path.write_text(json.dumps(data))
    assert finding().status == "warn"
    assert "variants[0].launch.warps is 3; expected " in finding().advice


def test_doctor_knows_a_version_that_was_only_checked_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_installed(monkeypatch, "0.5.23")
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["sglang"].status == "warn"
    as_if_installed(monkeypatch, "0.5.99")
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["sglang"].status == "fail"
    assert "install one of 0.5.12, 0.5.23" in found["sglang"].advice


def test_doctor_survives_a_broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: 1 / 0)
    broken = {finding.name for finding in doctor.examine() if finding.status == "fail"}
    assert {"triton", "transformers", "commands", "sglang"} <= broken
