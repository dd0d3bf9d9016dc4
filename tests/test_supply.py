"""Nothing from outside: no network, no code of a checkpoint unless asked for, nothing local in what is given away."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepquant.config import compose_recipe
from stepquant.models.checkpoint import resolve_checkpoint

ROOT = Path(__file__).parents[1]
NO_NETWORK = """
import sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        print("NETWORK", event, args[1:] if event == "socket.connect" else args, flush=True)
        raise OSError("no network in this test")
sys.addaudithook(hook)
"""
COMPILE = """
from stepquant.compile import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = ["data.segments=2", "data.length=64", "samples.per_layer=2", "recipe=tiny_gdn_6bit"]


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_NETWORK + code, *arguments], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_hook_sees_a_connection() -> None:
    assert "NETWORK socket" in run("import socket\nsocket.socket().connect(('127.0.0.1', 9))").stdout


def test_no_network_and_nothing_local(tmp_path: Path) -> None:
    """Every module imports and a model is compiled without a socket; the artifact holds no path, user or host."""
    user, model = "zqxuser", tmp_path / "models" / "zqxmodel"
    shutil.copytree(resolve_checkpoint("builtin:tiny_gdn"), model)
    (tmp_path / "zqxtext.txt").write_text("words of a text about zqx, line by line\n" * 400)
    done = run(
        "import pkgutil, importlib, stepquant\n"
        "for m in pkgutil.walk_packages(stepquant.__path__, 'stepquant.'):\n"
        "    if '__main__' not in m.name and 'sglang' not in m.name: importlib.import_module(m.name)\n" + COMPILE,
        *SMALL, f"output={tmp_path / 'out'}", f"cache.dir={tmp_path / 'cache'}", f"model.path={model}",
        "data.source=file", f"data.path={tmp_path / 'zqxtext.txt'}", f"json={tmp_path / 'summary.json'}",
        USER=user, LOGNAME=user, USERNAME=user, HOME=str(tmp_path / user), A_SECRET=f"{user}-secret",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "NETWORK" not in done.stdout
    host = socket.gethostname()
    local = ["zqx", str(tmp_path), str(ROOT), sys.prefix, sys.base_prefix, str(Path.home()) + "/"] + [host] * (
        len(host) > 6
    )
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(files) > 8
    for path in files:
        data = path.read_bytes()
        for text in local:
            assert text.encode() not in data, (path.name, text)
        if path.suffix in (".json", ".yaml", ".py"):
            assert not re.search(rb"[\"' =](/[a-z]+/|[A-Z]:\\\\)", data), path.name


@pytest.mark.parametrize("kind", ["config", "analyse", "evaluate", "harness"])
def test_remote_code_is_off_unless_asked_for(kind: str) -> None:
    text = (ROOT / "conf" / f"{kind}.yaml").read_text()
    assert re.findall(r"trust_remote_code: (\w+)", text) == ["false"]
    if kind == "config":
        found = [compose_recipe(p.stem) for p in sorted((ROOT / "recipes").glob("tiny*.yaml"))]
        assert found
        assert not any(r.model.trust_remote_code for r in found)


def test_code_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(resolve_checkpoint("builtin:tiny_gdn"), place)
    config = json.loads((place / "config.json").read_text())
    config["auto_map"] = {n: f"evil.{n}" for n in ("AutoConfig", "AutoModelForCausalLM")}
    (place / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (place / "evil.py").write_text(f"open({str(marker)!r}, 'w').write('x')\n")
    run(COMPILE, *SMALL, f"model.path={place}", f"output={tmp_path / 'out'}", f"cache.dir={tmp_path / 'cache'}")
    assert not marker.exists()


def test_the_lock_has_a_hash_for_everything_that_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "ci.txt").read_text(), re.M))
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
                         (ROOT / "requirements" / "ci.lock").read_text(), re.M)  # fmt: skip

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    assert {(plain(n), v) for n, v in pinned} == {(plain(n), v) for n, v, _ in entries}


INSTALL = ROOT / "requirements" / "install.sh"
HASHED = "install --require-hashes --no-deps"


def install(
    place: Path, mode: str, *, fits: bool, has_torch_file: bool = True, fail: str = ""
) -> tuple[int, list[str]]:
    """Exit code of install.sh and the arguments that pip was given, with an interpreter that only writes them down."""
    python, log = place / "python", place / "log"
    torch_lock = "exit 0" if has_torch_file else "exit 1"
    python.write_text(
        f"""#!/bin/sh
        case "$*" in
            *"import torch"*) exit 1;;
            *sys.version_info*) echo {fits};;
            *"import platform"*) echo "Python 3.99.0 vax VMS";;
            *) echo "$*" >> {log}
               case "$*" in *"{fail or "nothing at all"}"*) exit 1;; *torch.lock*) {torch_lock};; esac;;
        esac
        """
    )
    python.chmod(0o755)
    done = subprocess.run([str(INSTALL), str(python), mode], capture_output=True, text=True, cwd=ROOT)
    calls = [line.replace("-m pip --disable-pip-version-check --quiet ", "") for line in log.read_text().splitlines()]
    return done.returncode, [done.stdout, *(call.replace(str(INSTALL.parent) + "/", "") for call in calls)]


def test_a_new_environment_is_installed_by_hash(tmp_path: Path) -> None:
    code, (said, *calls) = install(tmp_path, "locked", fits=True)
    assert code == 0
    assert calls == [
        f"{HASHED} --requirement build.lock", f"{HASHED} --no-build-isolation --requirement ci.lock",
        f"{HASHED} --requirement torch.lock", "install --no-deps --no-build-isolation --editable .", "check",
    ]  # fmt: skip
    assert "checked by hash" in said


@pytest.mark.parametrize("fail", ["build.lock", "ci.lock", "quiet check"])
def test_a_package_that_does_not_match_its_hash_is_the_end(fail: str, tmp_path: Path) -> None:
    code, (_, *calls) = install(tmp_path, "locked", fits=True, fail=fail)
    assert code != 0
    assert fail.split()[-1] in calls[-1]


def test_where_the_lock_does_not_fit_it_says_so(tmp_path: Path) -> None:
    code, (said, *calls) = install(tmp_path, "locked", fits=False)
    assert code == 0
    assert re.search(r"is for Python 3\.11 on x86-64 Linux, this is Python 3\.99\.0 vax VMS: .*nothing pinned", said)
    assert calls == ["install torch==2.13.0", "install --editable .[dev]"]


def test_where_pip_has_no_cpu_torch_it_says_so(tmp_path: Path) -> None:
    code, (said, *calls) = install(tmp_path, "locked", fits=True, has_torch_file=False)
    assert code == 0
    assert "installing torch==2.13.0 as pip finds it, not checked by hash" in said
    assert calls[3] == "install torch==2.13.0"


def test_ci_takes_torch_by_hash_or_fails() -> None:
    ci, makefile = (ROOT / ".ci" / "run").read_text(), (ROOT / "Makefile").read_text()
    assert 'TORCH="--require-hashes --no-deps --requirement requirements/torch.lock" || exit 1' in ci
    assert "requirements/install.sh" in makefile
    assert "pip install" not in ci + makefile
