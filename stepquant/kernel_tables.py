"""What ``inspect --kernels`` shows: variants of a plan's kernels, the bytes of a layer's page, a variant's source."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from stepquant.accounting import page_layout
from stepquant.codegen.kernel_plan import GPUS, PREDICTED_BATCH
from stepquant.errors import RecipeError, shown
from stepquant.kernel_files import KernelFiles, read_kernels
from stepquant.layout import CLASSES, PARTS, PageLayout
from stepquant.plan import LayoutPlan, load_plan
from stepquant.swap import read_whole

MAX_HEADS = 6  # of a page that are printed; --json has all
PART_TITLES = {
    "high4": "upper nibbles of rows of 8, 6 and 4 bits",
    "low4": "lower nibbles of rows of 8 bits",
    "low2": "the two bits under the nibble of rows of 6 bits",
    "top2": "rows of 2 bits",
    "r": "row factors, FP16",
    "c": "column scales, FP16",
    "pivots": "FP16 rows",
}


def kernel_summary(directory: Path, layer: int | None = None) -> tuple[dict[str, Any], KernelFiles]:
    """The dictionary of ``inspect --kernels --json``, and the kernels that it is about.

    Args:
        layer: of the model, for the page; the first delta-rule layer if None.

    Raises:
        StepQuantError: the plan or its kernels are not what they should be, or there is no such layer.
    """

    def read() -> tuple[LayoutPlan, KernelFiles]:
        plan = load_plan(directory)
        return plan, read_kernels(directory, plan)

    plan, files = read_whole(directory, read)
    return {
        "name": plan.name,
        "synthetic": plan.synthetic,
        "plan_sha256": plan.hash,
        "current": files.current,
        "predicted_batch": PREDICTED_BATCH,
        "kernel_plan": files.data,
        "page": page_summary(plan, layer),
    }, files


def page_summary(plan: LayoutPlan, layer: int | None = None) -> dict[str, Any]:
    """Which bytes of a layer's page hold what; offsets of heads and parts count from the page's first byte.

    Raises:
        RecipeError: when `layer` is no delta-rule layer.
    """
    layers = plan.geometry.layers
    layer = layers[0] if layer is None else layer
    if layer not in layers:
        raise RecipeError(f"--layer {layer} is no delta-rule layer of the plan; expected one of {shown(list(layers))}")
    pages, index = page_layout(plan), layers.index(layer)
    heads = [_head(pages, index, head) for head in range(pages.num_heads)]
    size = int(pages.layer_bytes[index])
    end = max(offset + length for head in heads for offset, length in head["parts"].values())
    return {
        "layer": layer,
        "slot_offset": int(pages.layer_offsets[index]),
        "bytes": size,
        "parts": {n: sum(head["parts"].get(n, (0, 0))[1] for head in heads) for n in PARTS},
        "alignment": size - end,
        "heads": heads,
    }


def _head(pages: PageLayout, index: int, head: int) -> dict[str, Any]:
    parts = {name: pages.part(index, head, name) for name in PARTS}
    by_class = zip(map(str, CLASSES), pages.rows[index, head].tolist(), pages.slots[index, head].tolist(), strict=True)
    rows = list(by_class)
    return {
        "head": head,
        "offset": int(pages.head_offsets[index, head]),
        "bytes": int(pages.sizes[index, head].sum()),
        "rows": {**{bits: n for bits, n, _ in rows}, "16": int(pages.num_pivots[index, head])},
        "slots": {bits: n for bits, _, n in rows},
        "parts": {name: pair for name, pair in parts.items() if pair[1]},
    }


def print_kernels(summary: dict[str, Any], files: KernelFiles, console: Console) -> None:
    """Print the tables of `kernel_summary`."""
    if not files.current:
        console.print("another version of stepquant generated these kernels; compile the plan again to serve it")
    for table in (variant_table(files), bytes_table(files), prediction_table(files)):
        console.print(table)
    compiled = sorted({target for v in files.variants for target in v.targets})
    if compiled:
        console.print(compile_table(files))
        for v in files.variants:
            for target, report in v.targets.items():
                for reason in report.rejected:
                    console.print(f"{v.name} for {target}: {reason}, so the next launch was tried")
    else:
        console.print("registers, spills, shared memory: not compiled: codegen.targets=[sm_90]")
    print_page(summary["page"], console)


def variant_table(files: KernelFiles) -> Table:
    """What the variants do and how they are launched."""
    table = _table("variants: programs of a request and layer, rows x columns of one, the warps tried first",
                   ("variant", "programs", "tile", "warps", "stages", "does"), left=("variant", "does"))  # fmt: skip
    for v in files.variants:
        tile = " x ".join(str(v.tile[name]) for name in ("rows", "columns") if name in v.tile)
        table.add_row(v.name, str(v.programs), tile, str(v.launch.warps), str(v.stages), v.title)
    return table


def bytes_table(files: KernelFiles) -> Table:
    """What a step moves and computes."""
    windows = "; read with half a window, fold and flush with a full one" if _windows(files) else ""
    table = _table(f"one request, all layers{windows}", ("variant", "bytes read", "bytes written", "flops"))
    for v in files.variants:
        table.add_row(v.name, *[f"{n:,}" for n in (v.bytes_read, v.bytes_written, v.flops)])
    return table


def _windows(files: KernelFiles) -> bool:
    return any(v.name == "read" for v in files.variants)


def prediction_table(files: KernelFiles) -> Table:
    """Predicted times on named GPUs."""
    gpus = list(dict.fromkeys(name for v in files.variants for name in v.predicted_us))
    compiled = {target for v in files.variants for target in v.targets}
    known = [name for name in gpus if name in GPUS and GPUS[name].target in compiled]
    basis = f"from bytes; {', '.join(known)} also from instructions" if known else "from bytes alone"
    steps = "; a step takes read + fold / W" if _windows(files) else ""
    title = f"predicted microseconds, all layers, batch {PREDICTED_BATCH}, {basis}{steps}"
    table = _table(title, ("variant", *gpus))
    for v in files.variants:
        table.add_row(v.name, *[f"{v.predicted_us[n]:,.1f}" if n in v.predicted_us else "-" for n in gpus])
    return table


def compile_table(files: KernelFiles) -> Table:
    """What the ahead-of-time compile says, a row a variant and target."""
    names = ("variant", "target", "warps", "registers", "spilled", "shared", "an element", "seconds")
    title = "compiled ahead of time: registers/allowed, bytes spilled and shared, instructions an element"
    table = _table(title, names)
    for v in files.variants:
        for target, r in v.targets.items():
            registers = f"{r.registers}/{r.launch.registers or 255}"
            table.add_row(v.name, target, str(r.launch.warps), registers, f"{r.spill_bytes:,}",
                          f"{r.shared_bytes:,}", f"{r.instructions_per_element:.2f}", f"{r.seconds:.1f}")  # fmt: skip
    return table


def print_page(page: dict[str, Any], console: Console) -> None:
    """Print the first heads of a page, and what all of its parts add up to."""
    title = f"page of layer {page['layer']}, at byte {page['slot_offset']:,} of a slot"
    table = _table(title, ("head", "rows", "part", "first byte", "bytes"), left=("head", "rows", "part"))
    table.show_lines = True
    for head in page["heads"][:MAX_HEADS]:
        parts = head["parts"]
        table.add_row(str(head["head"]), "\n".join(_rows(head)), "\n".join(parts),
                      "\n".join(f"{offset:,}" for offset, _ in parts.values()),
                      "\n".join(f"{size:,}" for _, size in parts.values()))  # fmt: skip
    console.print(table)
    if rest := page["heads"][MAX_HEADS:]:
        last = rest[-1]["offset"] + rest[-1]["bytes"] - 1
        console.print(f"and {len(rest)} more heads, bytes {rest[0]['offset']:,} to {last:,}: --json has all of them")
    present = {name: size for name, size in page["parts"].items() if size}
    for name in present:
        console.print(f"  {name:6} {PART_TITLES[name]}")
    terms = " + ".join(f"{name} {size:,}" for name, size in {**present, "alignment": page["alignment"]}.items())
    total = sum(present.values()) + page["alignment"]
    console.print(f"{terms} = {total:,} bytes; the page has {page['bytes']:,}")


def _rows(head: dict[str, Any]) -> Iterable[str]:
    """Rows by precision, with the slots that they are kept in where these are more or fewer."""
    rows, slots = head["rows"], head["slots"]
    for bits, count in rows.items():
        if bits == "16":
            if count:
                yield f"{count} in FP16"
        elif count or slots[bits]:
            yield f"{count} of {bits} bits" + (f" in {slots[bits]} slots" if slots[bits] != count else "")


def print_source(text: str, console: Console) -> None:
    """Print a variant's source: with syntax colours on a terminal, byte for byte elsewhere."""
    if console.is_terminal:
        console.print(Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def _table(title: str, names: Iterable[str], left: Collection[str] = ("variant", "target")) -> Table:
    """A table of figures, right-justified but for the columns `left`."""
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table
