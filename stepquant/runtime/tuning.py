"""Which launch of a kernel is fastest on this GPU, by batch: measured at first load, kept beside the artifact.

A launch is a number of warps and a cap on registers (`stepquant.codegen.kernel_plan`). The file ``DIR.tuning.json`` has
one entry for each GPU, Triton version and generated source; anything in it that does not fit is measured again.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepquant.codegen.generate import source_hash
from stepquant.codegen.kernel_plan import Launch, launches_of
from stepquant.errors import ArtifactError
from stepquant.files import write_json
from stepquant.runtime.step import PackedKernels, Tuned
from stepquant.runtime.window import WindowBuffers

BATCHES = (8, 32, 128, 512)
"""A batch takes the launch of the first of these that is no smaller; larger ones that of the last."""
SETS, REPLAYS, MAX_BYTES = 4, 7, 1 << 20
Call = Callable[[], Any]
log = logging.getLogger(__name__)


def tuned_launches(kernels: PackedKernels, directory: Path) -> Tuned:
    """Launches of the kernels of every decode step, from the file beside the artifact or measured now.

    Args:
        kernels: on a CUDA device; nothing may be recording a graph.
        directory: of the artifact. Where its parent cannot be written, the result is only used.
    """
    path = directory.with_name(f"{directory.name}.tuning.json")
    key = machine_key(kernels)
    entries = _read(path)
    found = _parse(entries.get(key))
    if found is None:
        log.info("stepquant: choosing launches for %s (once; kept in %s)", kernels.spec.family, path)
        found = measure(kernels)
        entries[key] = {name: [[batch, x.warps, x.registers] for batch, x in rows] for name, rows in found.items()}
        try:
            write_json(path, entries)
        except (OSError, ArtifactError) as error:
            log.warning("stepquant: %s cannot be written (%s); launches are chosen again next time", path, error)
    return found


def machine_key(kernels: PackedKernels) -> str:
    """What a choice holds for."""
    import triton

    return f"{torch.cuda.get_device_name(kernels.device)}, triton {triton.__version__}, {source_hash(kernels.sources)}"


def measure(kernels: PackedKernels, batches: tuple[int, ...] = BATCHES) -> Tuned:
    """Time every launch of the decode kernels on random states at every batch; the fastest of each."""
    names = ("step",) if kernels.spec.window == 1 else ("read", "fold")
    found: dict[str, list[tuple[int, Launch]]] = {name: [] for name in names}
    for batch in batches:
        try:
            calls = _calls(kernels, batch)
        except torch.OutOfMemoryError:
            log.warning("stepquant: no memory to choose launches at batch %d; those of smaller batches serve", batch)
            break
        for name in names:
            times: dict[Launch, float] = {}
            for launch in launches_of(kernels.spec, name):
                kernels.tuned = {name: ((batch, launch),)}
                try:
                    times[launch] = graph_time(calls[name], REPLAYS)
                except Exception as error:  # a launch that this GPU has no room for is no choice
                    log.info("stepquant: %s with %s does not run: %s", name, launch, error)
            if times:
                found[name].append((batch, min(times, key=lambda x: times[x])))
    kernels.tuned = {}
    torch.cuda.empty_cache()
    return {name: tuple(rows) for name, rows in found.items() if rows}


def _calls(kernels: PackedKernels, batch: int) -> dict[str, list[Call]]:
    """The kernels of layer 0 on `SETS` sets of slots, phases spread evenly."""
    spec, device = kernels.spec, kernels.device
    size = int(kernels.layout.layer_bytes[0])
    pages = torch.zeros(SETS * batch, size, dtype=torch.uint8, device=device)
    few = min(16, batch)
    states = torch.randn(few, spec.num_heads, spec.key_dim, spec.value_dim, device=device) * 0.02
    kernels.pack(0, pages, torch.arange(few, device=device, dtype=torch.int32), states)
    pages.copy_(pages[:few].repeat(-(-len(pages) // few), 1)[: len(pages)])
    gates = spec.num_heads * (spec.key_dim if spec.family == "kda" else 1)

    def half(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=device, dtype=torch.bfloat16)

    token: dict[str, Any] = {
        "q": half(spec.num_key_heads, spec.key_dim), "k": half(spec.num_key_heads, spec.key_dim),
        "v": half(spec.num_heads, spec.value_dim), "a": half(gates), "b": half(spec.num_heads),
        "A_log": torch.zeros(spec.num_heads, device=device), "dt_bias": torch.full((gates,), -4.0, device=device),
        "scale": spec.key_dim**-0.5, "out": half(spec.num_heads, spec.value_dim),
    }  # fmt: skip
    slots = torch.randperm(SETS * batch, device=device).int().chunk(SETS)
    if spec.window == 1:
        return {"step": [partial(kernels.step, 0, pages, s, **token) for s in slots]}
    buffers = WindowBuffers.allocate(spec, batch, device)
    for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios, buffers.k_now, buffers.u_now):
        x.copy_(torch.rand_like(x, dtype=torch.float32) * 0.1)
    rows = torch.arange(batch, device=device, dtype=torch.int32)
    phases = rows % spec.window
    folds = kernels.list_folds(phases)

    def read(s: Tensor) -> Any:
        return kernels.read(0, pages, s, **token, buffers=buffers, rows=rows, phases=phases, pending=phases)

    def fold(s: Tensor) -> Any:
        return kernels.fold(0, pages, s, buffers, rows, phases, phases, folds)

    return {"read": [partial(read, s) for s in slots], "fold": [partial(fold, s) for s in slots]}


def graph_time(calls: Sequence[Call], replays: int = 20) -> float:
    """Median microseconds of one call, from replays of a graph that makes every call once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(s.elapsed_time(e) for s, e in events) * 1e3 / len(calls)


def _read(path: Path) -> dict[str, Any]:
    """The file's entries; none where it is missing, damaged or out of proportion."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _parse(entry: Any) -> Tuned | None:
    """An entry as launches; None unless all of it is what `tuned_launches` writes."""
    if not isinstance(entry, Mapping) or not entry:
        return None
    found: dict[str, tuple[tuple[int, Launch], ...]] = {}
    for name, rows in entry.items():
        if name not in ("step", "read", "fold") or not isinstance(rows, list) or not rows:
            return None
        for row in rows:
            if not isinstance(row, list) or len(row) != 3 or type(row[0]) is not int or row[1] not in (1, 2, 4, 8):
                return None
            if row[2] is not None and (type(row[2]) is not int or not 32 <= row[2] <= 255):
                return None
        found[name] = tuple((batch, Launch(warps, registers)) for batch, warps, registers in rows)
    return found
