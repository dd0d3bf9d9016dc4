"""SGLang's HTTP server on loopback, started as a user would, asked and hit; standard library only.

python benchmarks/serving_http.py --server PORT JSON      (SGLang's own launch_server with these arguments)
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds that an answer may take
STOPPING = 7  # seconds that the end may take


class Server:
    """A running server: `ask` and `stream` it, then `stop`.

    Args:
        command: that serves on 127.0.0.1 at `port`. log: file for its output.
    """

    def __init__(self, command: list[str], port: int, environment: Mapping[str, str], log: Path) -> None:
        self.port, self.log = port, log
        self._file = log.open("w")
        self.process = subprocess.Popen(command, env=dict(environment), stdout=self._file, stderr=subprocess.STDOUT)

    def wait(self, seconds: float) -> bool:
        """Whether it answered /health within `seconds`."""
        end = time.time() + seconds
        while time.time() < end and self.process.poll() is None:
            try:
                if self.ask("GET", "/health", limit=5)[0] == 200:
                    return True
            except OSError:
                pass
            time.sleep(0.5)
        return False

    def ask(self, method: str, path: str, body: Any = None, limit: float = LIMIT) -> tuple[int, Any]:
        """Status and answer, parsed where it is JSON."""
        connection = self.send(method, path, body, limit)
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def send(self, method: str, path: str, body: Any, limit: float = LIMIT) -> http.client.HTTPConnection:
        """A connection on which a request was sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection

    def stream(self, body: dict[str, Any], leave_after: int | None = None) -> Iterator[dict[str, Any]]:
        """Events of a streamed generation; hangs up after `leave_after` of them."""
        connection = self.send("POST", "/generate", {**body, "stream": True})
        try:
            answer = connection.getresponse()
            seen = 0
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                yield json.loads(line[6:])
                seen += 1
                if seen == leave_after:
                    return
        finally:
            connection.close()

    def generate(self, ids: list[int], new: int, **sampling: Any) -> list[int]:
        """Greedy tokens.

        Raises:
            AssertionError: with the server's words, on any status but 200.
        """
        given = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new, **sampling}
        status, answer = self.ask("POST", "/generate", {"input_ids": ids, "sampling_params": given})
        assert status == 200, f"{status}: {str(answer)[:300]}"
        return list(answer["output_ids"])

    def memory(self) -> dict[str, int]:
        """MiB that the server's processes hold: resident, and on the GPU."""
        pids = descendants(self.process.pid)
        resident = sum(resident_bytes(pid) for pid in pids) >> 20
        command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired):
            lines = []
        used = [line.split(",") for line in lines if line.split(",")[0].strip().isdigit()]
        return {"resident": resident, "gpu": sum(int(m) for pid, m in used if int(pid) in pids and m.strip().isdigit())}

    def stop(self) -> int | str:
        """End it as a service manager would; its exit code. SGLang looks every 5 s whether it may end; 0.5.12 keeps
        requests that it refused for their length in its books and then never does: what is left of it is killed."""
        processes = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            waits = self.log.read_text(errors="replace").count("Gracefully exiting")
            return f"did not end within {STOPPING} s" + (", waiting for requests that it refused" if waits else "")
        finally:
            self._file.close()


def descendants(pid: int) -> set[int]:
    """A process and all below it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def resident_bytes(pid: int) -> int:
    """Of one process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """SGLang's arguments as its command line takes them; what it has no flag for is left out."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found += [str(x) for x in value] if isinstance(value, list | tuple) else [str(value)]
    return found


def start(
    how: str, model: Path, plan: Path, arguments: Mapping[str, Any], port: int, log: Path, tune: bool = False
) -> Server:
    """Start a server with a plan: ``serve`` by `python -m stepquant.serve`, ``python`` by SGLang's own function."""
    given = {**arguments, "host": "127.0.0.1", "port": port, "skip_server_warmup": True}
    environment = dict(os.environ)
    if how == "serve":
        environment.pop("STEPQUANT_PLAN", None)
        command = [sys.executable, "-m", "stepquant.serve", f"plan={plan}", f"tune={str(tune).lower()}"]
        return Server([*command, "--", "--model-path", str(model), *flags(given)], port, environment, log)
    text = json.dumps({**given, "model_path": str(model)})
    return Server([sys.executable, __file__, "--server", str(port), text], port, environment, log)


def serve_here(arguments: dict[str, Any]) -> None:
    """SGLang's HTTP server in this process; its command line cannot say enable_multimodal=False."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    serve_here(json.loads(sys.argv[3]))
