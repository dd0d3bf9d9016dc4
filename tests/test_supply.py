"""Nothing from outside: no network, no code of a checkpoint unless asked for, nothing local in what is given away."""

from __future__ import annotations

import json
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


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_NETWORK + code, *arguments], capture_output=True, text=True, cwd=ROOT
    )


def test_the_hook_sees_a_connection() -> None:
    assert "NETWORK socket" in run("import socket\nsocket.socket().connect(('127.0.0.1', 9))").stdout


def test_no_network_and_nothing_local(tmp_path: Path) -> None:
    """Every module imports and a model is compiled without a socket; the artifact holds no path and no host."""
    done = run(
        "import pkgutil, importlib, stepquant\n"
        "for m in pkgutil.walk_packages(stepquant.__path__, 'stepquant.'):\n"
        "    if '__main__' not in m.name and 'sglang' not in m.name: importlib.import_module(m.name)\n" + COMPILE,
        *SMALL, f"output={tmp_path / 'out'}", f"cache.dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "NETWORK" not in done.stdout
    host = socket.gethostname()
    local = [str(tmp_path), str(ROOT), sys.prefix, sys.base_prefix, str(Path.home()) + "/"] + [host] * (len(host) > 6)
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
