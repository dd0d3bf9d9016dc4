"""``python -m stepquant.doctor [--plan DIR] [--json]``: what of stepquant works in this environment, and why not.

Exit code 0 if serving works here, 1 if something that serving needs is missing, 2 on a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from stepquant.commands import exit_code, user_path
from stepquant.errors import StepQuantError

Status = Literal["ok", "warn", "fail"]
CAPABILITY = (8, 0)  # that the kernels need: Ampere


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, how it stands, what was found, what to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(plan: Path | None = None) -> list[Finding]:
    """Run every check; none raises.

    Args:
        plan: an artifact to check for serving as well.
    """
    checks: list[Callable[[], Finding]] = [
        _python, _torch, _triton, _gpu, _transformers, _commands, _solvers, _sglang, _plugin, _allowed, _hooks,
    ]  # fmt: skip
    findings = [_guarded(check) for check in checks]
    if plan is not None:
        findings.append(_guarded(lambda: _plan(plan)))
    return findings


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken package must not hide what the other checks say
        name = getattr(check, "__name__", "plan").strip("_")
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "repair or reinstall the package")


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _python() -> Finding:
    found = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "fail", found, "" if good else "stepquant needs Python 3.11 or newer")


def _torch() -> Finding:
    import torch

    return Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")


def _triton() -> Finding:
    found = installed("triton")
    if found is None:
        return Finding("triton", "fail", "not installed", "install triton: the kernels are written in it")
    return Finding("triton", "ok", found)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "fail", "none", "serving needs a CUDA GPU; compiling and evaluating run on the CPU too")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    capability = torch.cuda.get_device_capability()
    found = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, sm_{capability[0]}{capability[1]}"
    if capability < CAPABILITY:
        return Finding("gpu", "fail", found, "the kernels need compute capability 8.0 or newer")
    return Finding("gpu", "ok", found)


def _transformers() -> Finding:
    found = installed("transformers")
    if found is None:
        return Finding("transformers", "fail", "not installed", "install transformers: compiling reads models with it")
    return Finding("transformers", "ok", found)


def _commands() -> Finding:
    found = installed("hydra-core")
    if found is None:
        return Finding(
            "commands", "fail", "without hydra-core", "install it: compile, evaluate and serve are set up by it"
        )
    return Finding("commands", "ok", f"hydra-core {found}")


def _solvers() -> Finding:
    missing = [name for name in ("pulp", "ortools") if installed(name) is None]
    if missing:
        return Finding("solvers", "warn", f"without {', '.join(missing)}", "solver=ilp needs them; serving does not")
    return Finding("solvers", "ok", "PuLP and OR-Tools")


def _sglang() -> Finding:
    from stepquant.runtime.sglang.versions import VERSIONS

    found, known = installed("sglang"), ", ".join(VERSIONS)
    if found is None:
        return Finding("sglang", "fail", "not installed", f"install one of {known} to serve")
    if found not in VERSIONS:
        return Finding("sglang", "fail", found, f"not checked with this stepquant; install one of {known}")
    if not VERSIONS[found].served:
        return Finding("sglang", "warn", found, "its classes and signatures were checked on a CPU; it was not served")
    return Finding("sglang", "ok", found)


def _plugin() -> Finding:
    from stepquant.runtime.launch import GROUP, plugin_target

    found = plugin_target()
    if found is None:
        advice = "pip install stepquant into SGLang's environment, so that SGLang finds the plugin"
        return Finding("plugin", "fail", f"no entry point in {GROUP}", advice)
    return Finding("plugin", "ok", found)


def _allowed() -> Finding:
    from stepquant.runtime.sglang.refusals import check_plugin_allowed

    allowed = os.environ.get("SGLANG_PLUGINS")
    try:
        check_plugin_allowed(allowed)
    except StepQuantError as error:
        return Finding("SGLANG_PLUGINS", "fail", str(allowed), str(error))
    return Finding("SGLANG_PLUGINS", "ok", allowed or "not set")


def _hooks() -> Finding:
    """Every function that the plugin hooks, in the installed SGLang."""
    from stepquant.runtime.sglang.hooks import check_signature
    from stepquant.runtime.sglang.versions import VERSIONS

    found = installed("sglang")
    if found not in VERSIONS:
        return Finding("hooks", "fail", "not looked at", "needs a checked SGLang")
    wrong = []
    for target in VERSIONS[str(found)].targets.values():
        try:
            check_signature(target)
        except StepQuantError as error:
            wrong.append(str(error))
    if wrong:
        return Finding("hooks", "fail", "; ".join(wrong), "SGLang or one of its dependencies is not what was checked")
    return Finding("hooks", "ok", f"{len(VERSIONS[str(found)].targets)} functions as checked")


def _plan(directory: Path) -> Finding:
    from stepquant.kernel_files import read_kernels
    from stepquant.runtime.load import load_rank_plan

    try:
        rank = load_rank_plan(directory)
    except StepQuantError as error:
        return Finding("plan", "fail", str(directory), str(error))
    g, window = rank.plan.geometry, rank.plan.window
    found = (
        f"{rank.plan.name}: {g.family}, {g.num_delta_layers} layers of {g.num_heads} heads, {rank.slot_bytes:,} bytes "
        f"a slot, window {window.length}"
    )
    if rank.plan.synthetic:
        return Finding("plan", "warn", found, "synthetic: served with force=true only")
    try:
        read_kernels(directory, rank.plan)
    except StepQuantError as error:  # a server generates its kernels from the plan, and reads no more than their hash
        return Finding("plan", "warn", found, f"{error} (served all the same, with generated kernels)")
    return Finding("plan", "ok", found)


def works(findings: Sequence[Finding]) -> dict[str, bool]:
    """What works: ``compile``, ``transformers`` (decoding in model.generate) and ``serve``."""
    bad = {finding.name for finding in findings if finding.status == "fail"}
    base = not bad & {"python", "torch", "transformers"}
    return {
        "compile": base and "commands" not in bad,
        "transformers": base and "plan" not in bad,
        "serve": not bad,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Check and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stepquant.doctor", description="Check an environment.")
    parser.add_argument("--plan", type=user_path, help="also check an artifact directory of stepquant.compile")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)

    def command() -> int:
        findings = examine(args.plan)
        verdict = works(findings)
        if args.json:
            print(json.dumps({"findings": [asdict(f) for f in findings], "works": verdict}, indent=2))
        else:
            for finding in findings:
                print(f"{finding.status:4}  {finding.name}: {finding.found}")
                if finding.advice:
                    print(f"      {finding.advice}")
            for name, good in verdict.items():
                print(f"{'works' if good else 'does not work'}: {name}")
        return 0 if verdict["serve"] else 1

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
