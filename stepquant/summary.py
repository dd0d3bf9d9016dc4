"""What a compile prints and `inspect` shows: one dictionary with stable names, and its tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from stepquant.accounting import account, packable
from stepquant.codec.spec import PIVOT
from stepquant.memory import GIB, ServingMemory, window_bytes
from stepquant.passes.context import Context
from stepquant.passes.notes import geometry_notes
from stepquant.plan import LayoutPlan
from stepquant.units import format_bytes

SYNTHETIC_NOTE = "SYNTHETIC: made from invented statistics or random weights; for sizes and kernels, never for serving"


def bits_histogram(plan: LayoutPlan) -> dict[str, Any]:
    """Units by precision: in all, and in every layer; 16 are FP16 pivots."""
    by_head = plan.codec.codebook == "head"
    map_ = plan.bits[..., 0] if by_head else plan.bits.flatten(1)
    return {
        "unit": "head" if by_head else "row",
        "total": _counts(map_),
        "layers": [{"layer": i, "counts": _counts(row)} for i, row in zip(plan.geometry.layers, map_, strict=True)],
    }


def _counts(map_: Tensor) -> dict[str, int]:
    values, counts = map_.unique(return_counts=True)
    return {str(int(b)): int(n) for b, n in zip(values, counts, strict=True)}


def plan_summary(plan: LayoutPlan) -> dict[str, Any]:
    """Everything that is shown of a plan, JSON-ready."""
    g = plan.geometry
    return {
        "name": plan.name,
        "synthetic": plan.synthetic,
        "fingerprint": plan.fingerprint,
        "weight_format": plan.weight_format,
        "geometry": g.to_json(),
        "codec": {"kind": plan.codec.kind, "codebook": plan.codec.codebook, "refits": plan.codec.refits},
        "packable": packable(plan),
        "granularity": plan.granularity,
        "window": {"length": plan.window.length, "dtype": plan.window.dtype},
        "bits_histogram": bits_histogram(plan),
        "budget": plan.budget,
        "predicted": plan.predicted,
        "settings": plan.settings,
        "notes": [str(note) for note in plan.provenance.get("notes") or []],
        "provenance": plan.provenance,
        "plan_sha256": plan.hash,
        **account(plan).to_json(),
    }


def serving_memory(summary: dict[str, Any], weights: int, slots: int, fp32: bool = False) -> ServingMemory:
    """Equation 24's terms of a summarised plan, with its own state (as the pool allocates it) or FP32's."""
    g = summary["geometry"]
    state = summary["bytes_per_request"]["fp32" if fp32 else "allocated"]
    running = 0 if fp32 else summary["bytes_per_running_request"]
    return ServingMemory(weights, state + g["conv_bytes"], g["kv_bytes_per_token"], slots, running)


def dry_run_summary(context: Context, passes: list[str]) -> dict[str, Any]:
    """Geometry, bytes and projected concurrency from a recipe and a config alone: no weights, no text."""
    g, recipe = context.geometry, context.recipe
    bits = recipe.budget.bits
    found: dict[str, Any] = {
        "name": recipe.name, "dry_run": True, "geometry": g.to_json(), "unit": context.unit,
        "units": g.num_delta_layers * g.num_heads * (g.key_dim if context.unit == "row" else 1),
        "codec": {"kind": context.codec.kind, "codebook": context.codec.codebook, "refits": recipe.spatial.refits},
        "passes": passes, "window": {"length": recipe.window.length, "dtype": recipe.window.dtype},
        "bytes_per_running_request": window_bytes(g, recipe.window.tokens, recipe.window.dtype),
        "bytes_per_request": {"fp32": g.fp32_bytes}, "synthetic": context.synthetic,
        "notes": geometry_notes(g),
    }  # fmt: skip
    if bits is not None:
        total = estimated_bytes(context, bits)
        found["bytes_per_request"]["total"] = total
        found["bits_per_value"] = 8 * total / g.elements
        found["compression_fp32"] = g.fp32_bytes / total
        found["notes"] = [*found["notes"], *_estimate_notes(context)]
        if recipe.budget.gpu_memory is not None:
            found["concurrency"] = _projected(context, total)
    return found


def _estimate_notes(context: Context) -> list[str]:
    """What `estimated_bytes` cannot know before a solve."""
    if context.unit == "row":
        return ["bytes a slot are an estimate: rows are padded to whole words, which the solve decides"]
    if 2 in context.recipe.candidates():
        return ["bytes a slot are an estimate: heads that the solve gives two bits have more scales"]
    return []


def estimated_bytes(context: Context, bits: float) -> int:
    """Bytes of a slot when the budget is used up, before any solve: codes, two scale vectors a head, pivots."""
    g, count = context.geometry, context.recipe.pivots.count
    by_head = context.unit == "head"
    pivot_elements = count * (g.head_elements if by_head else g.value_dim)
    scaled_heads = g.num_delta_layers * g.num_heads - (count if by_head else 0)
    charge = bits if context.recipe.allocation.mode == "uniform" else 8  # there pivots come on top of the budget
    codes = (bits * g.elements - charge * pivot_elements) / 8
    return int(codes) + scaled_heads * 2 * (g.key_dim + g.value_dim) + 2 * pivot_elements


def _projected(context: Context, state: int) -> dict[str, int]:
    from stepquant.passes.targets import serving_memory as recipe_memory

    budget, g = context.recipe.budget, context.geometry
    assert budget.gpu_memory is not None
    memory, length = budget.gpu_memory * budget.gpus, budget.context_length
    packed = recipe_memory(context, state + g.conv_bytes)
    plain = replace(recipe_memory(context, g.fp32_bytes + g.conv_bytes), per_running_request=0)  # no window is needed
    return {"fp32": plain.concurrency(memory, length), "plan": packed.concurrency(memory, length)}


def plain_console() -> Console:
    """A console that shows text as it is: a name in a plan may look like markup or an emoji code."""
    return Console(highlight=False, markup=False, emoji=False)


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print a summary (of a plan or of a dry run) as one table on stdout."""
    console = console or plain_console()
    if summary.get("synthetic"):
        console.print(SYNTHETIC_NOTE, style="bold yellow")
    g, size = summary["geometry"], summary["bytes_per_request"]
    budget = summary.get("budget") or {}
    nominal = f", {budget['bits']:.4g} bits nominal" if budget.get("bits") is not None else ""
    title = f"{summary['name']}{nominal}{' (dry run)' if summary.get('dry_run') else ''}"
    table = Table(title=title, show_header=False)
    table.add_row("model", f"{g['model_type']}: {len(g['layers'])} delta-rule layers of {g['num_layers']}, "
                  f"{g['num_heads']} heads of {g['key_dim']} x {g['value_dim']} ({g['family'].upper()})")  # fmt: skip
    codec = summary["codec"]
    table.add_row("codec", f"{codec['kind']}, {codec['codebook']} codebook, refits: {codec['refits']}")
    if "bits_histogram" in summary:
        histogram = summary["bits_histogram"]
        parts = [f"{n} x {'FP16' if b == str(PIVOT) else b + ' bits'}" for b, n in histogram["total"].items()]
        table.add_row(f"{histogram['unit']}s", ", ".join(parts))
    if "total" in size:
        table.add_row("bytes a slot", f"{size['total']:,} ({format_bytes(size['total'])}), FP32 {size['fp32']:,}")
    if "codes" in size:
        table.add_row("  of which", f"codes {size['codes']:,}, scales {size['scales']:,}, pivots {size['pivots']:,}")
        table.add_row("  on top", f"padding {size['padding']:,}; the pool allocates {size['allocated']:,}")
    if "bits_per_value" in summary:
        table.add_row("bits a value", f"{summary['bits_per_value']:.4f} stored, with scales and FP16 pivots"
                      f"{nominal and ' (' + nominal[2:] + ': pivots charged 8 bits, scales not)'}; compression "
                      f"{summary['compression_fp32']:.2f}x")  # fmt: skip
    window = summary["window"]
    running = summary["bytes_per_running_request"]
    chosen = (
        "chosen by the solver"
        if window["length"] == "auto"
        else f"{window['length']} token{'s' if window['length'] > 1 else ''}"
    )
    if running:
        chosen += f" in {window['dtype']}, {running:,} bytes a running request"
        if (slot := size.get("allocated", size.get("total"))) is not None:
            chosen += f", {slot + running:,} with its slot"
    table.add_row("write window", chosen)
    predicted = summary.get("predicted", {})
    if "solver" in predicted:
        proof = f", gap {predicted['gap']:.1e}" if "gap" in predicted else ""
        cost = f"predicted cost a token {predicted.get('predicted_cost_per_token', float('nan')):.3g}"
        table.add_row("solver", f"{predicted['solver']}, {predicted.get('status', '-')}{proof}; {cost}")
    for tried in predicted.get("windows", []):
        table.add_row(f"  W = {tried['window']}", f"{tried['bits']:.4f} nominal bits a value would cost "
                      f"{tried['predicted_cost_per_token']:.3g} a token")  # fmt: skip
    if "concurrency" in summary:
        weights = summary["concurrency"].get("weights")
        beside = "" if weights is None else f", beside {format_bytes(weights)} of weights"
        hint = "; --weights BYTES counts the model" if weights == 0 else ""
        found = summary["concurrency"]
        table.add_row("requests", f"{found['plan']} (FP32 {found['fp32']}){beside}{hint}")
    if "passes" in summary:
        table.add_row("would run", ", ".join(summary["passes"]))
    for note in summary.get("notes", []):
        table.add_row("note", note)
    console.print(table)


def serving_table(summary: dict[str, Any], weights: int, slots: int, batches: list[int], context: int) -> Table:
    """Equation 24 for several batch sizes, FP32 beside the plan."""
    table = Table(title=f"serving memory, GiB: {slots} slots a request, {context} tokens, weights {weights / GIB:.2f}")
    for name in ("batch", "state FP32", "state plan", "total FP32", "total plan", "saved"):
        table.add_column(name, justify="right")
    for row in serving_rows(summary, weights, slots, batches, context):
        figures = [f"{row[k] / GIB:.2f}" for k in ("state_fp32", "state_plan", "total_fp32", "total_plan")]
        table.add_row(str(row["batch"]), *figures, f"{1 - row['total_plan'] / row['total_fp32']:.1%}")
    return table


def serving_rows(
    summary: dict[str, Any], weights: int, slots: int, batches: list[int], context: int
) -> list[dict[str, int]]:
    """The same as data, bytes."""
    plain, packed = (serving_memory(summary, weights, slots, fp32) for fp32 in (True, False))
    return [
        {"batch": b, "context": context, "slots_per_request": slots, "weights": weights,
         "state_fp32": plain.state(b), "state_plan": packed.state(b),
         "total_fp32": plain.total(b, context), "total_plan": packed.total(b, context)}
        for b in batches
    ]  # fmt: skip
