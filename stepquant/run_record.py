"""run.json of an artifact: what the compile that wrote it took, pass by pass. It shapes nothing and is not hashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from stepquant.errors import ArtifactError
from stepquant.files import read_json, write_json

RUN_JSON = "run.json"
_GIB = 1 << 30


def write_run(directory: Path, plan_hash: str, passes: list[dict[str, Any]], reused: list[str]) -> dict[str, Any]:
    """Write run.json.

    Args:
        plan_hash: of the plan that the passes made.
        passes: `stepquant.passes.progress.PassCost.to_json` of each, in order.
        reused: products that came from the cache or another artifact.

    Returns:
        What was written.
    """
    found = {"plan_sha256": plan_hash, "passes": passes, "reused": reused,
             "seconds": round(sum(p["seconds"] for p in passes), 3), "machine": machine()}  # fmt: skip
    write_json(directory / RUN_JSON, found)
    return found


def read_run(directory: Path, plan_hash: str) -> dict[str, Any] | None:
    """What run.json says, None where there is none, or it is damaged or another plan's: it is only information."""
    try:
        found = read_json(directory / RUN_JSON, "the run's record")
    except ArtifactError:
        return None
    passes, reused = found.get("passes"), found.get("reused")
    sound = (
        found.get("plan_sha256") == plan_hash and _is_number(found.get("seconds"))
        and isinstance(passes, list) and all(map(_is_pass, passes))
        and isinstance(reused, list) and all(isinstance(name, str) for name in reused)
    )  # fmt: skip
    return found if sound else None


def _is_pass(found: Any) -> bool:
    """Whether a value is `PassCost.to_json`'s."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not _is_number(found.get("seconds")):
        return False
    peaks = found.get("gpu_peak_bytes")
    sizes = [found.get("host_peak_bytes"), *peaks] if isinstance(peaks, list) else [None]
    return all(type(size) is int for size in sizes) and _is_number(found.get("tokens_per_second", 0))


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def machine() -> dict[str, Any]:
    """Versions and accelerators; no host or user name."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {"torch": torch.__version__, "gpus": gpus}


def run_table(run: dict[str, Any]) -> Table:
    """Seconds and peak memory of every pass."""
    table = Table(title=f"passes, {run['seconds']:.1f} s in all")
    for name in ("pass", "seconds", "tokens/s", "peak host GiB", "peak GPU GiB"):
        table.add_column(name, justify="left" if name == "pass" else "right")
    for one in run["passes"]:
        gpus = " + ".join(f"{size / _GIB:.2f}" for size in one["gpu_peak_bytes"]) or "-"
        pace = f"{one['tokens_per_second']:,.0f}" if "tokens_per_second" in one else "-"
        table.add_row(escape(one["name"]), f"{one['seconds']:.1f}", pace, f"{one['host_peak_bytes'] / _GIB:.2f}", gpus)
    for name in run.get("reused", []):
        table.add_row(escape(name), "reused", "-", "-", "-")
    return table
