"""What a compile says on a GPU that another process has filled: the message must do the arithmetic and name a setting.

    python -m benchmarks.full_gpu OUT.json [GIB ...]

For each GIB (0.3 0.8 1.5) this process takes the GPU's memory but for so much, then compiles the built-in GDN model
there in a process of its own. A compile that fits ends the list; what failed goes on where it stopped, as for a user.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

LEFT = (0.3, 0.8, 1.5)
GIB = 1 << 30


def take_all_but(left: float) -> torch.Tensor:
    """A tensor that leaves `left` GiB of the GPU's memory free."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(int(free - left * GIB), 1), dtype=torch.uint8, device="cuda")


def compile_here(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Exit code and last words of a compile; products are kept in `folder` for the next one."""
    command = [sys.executable, "-m", "stepquant.compile", "recipe=tiny_gdn_6bit", "model.device=cuda",
               f"cache.dir={folder / 'cache'}", f"output={folder / 'plan'}", *overrides]  # fmt: skip
    begun = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {
        "exit_code": done.returncode, "seconds": round(time.time() - begun, 1), "last_line": lines[-1] if lines else "",
        "traceback": "Traceback" in done.stderr, "artifact": (folder / "plan" / "plan.json").exists(),
    }  # fmt: skip


def main() -> None:
    """Fill the GPU more and less, and compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("left", type=float, nargs="*", default=LEFT, help="GiB that are left")
    args = parser.parse_args()
    out = args.out
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for left in args.left:
            ballast = take_all_but(left)
            row = {"left_gib": left, **compile_here(Path(folder), [])}
            del ballast
            torch.cuda.empty_cache()
            found.append(row)
            print(json.dumps(row), flush=True)
            out.write_text(json.dumps(found, indent=1))
            if row["exit_code"] == 0:
                break


if __name__ == "__main__":
    main()
