"""Sections about bytes and serving memory (equation 24), with the numbers that the page's inputs start from."""

from __future__ import annotations

from typing import Any

from stepquant.memory import GIB, SLOTS_PER_REQUEST, ServingMemory
from stepquant.report import figures
from stepquant.report.evidence import Evidence, number
from stepquant.report.html import Markup, esc, table
from stepquant.report.sections import Figures, figure, section
from stepquant.summary import serving_memory

STATES = ("FP32", "BF16", "this plan")


def storage(evidence: Evidence, drawn: Figures) -> Markup:
    """Bytes of a slot by what they hold."""
    size = evidence.summary["bytes_per_request"]
    drawn["bytes"] = figures.slot_bytes(evidence.summary)
    rows = [(name, f"{size[name]:,}", f"{size[name] / size['total']:.1%}") for name in ("codes", "scales", "pivots")]
    rows.append(("total", f"{size['total']:,}", "100.0%"))
    rows.append(("padding on top", f"{size['padding']:,}", f"{size['padding'] / size['total']:.1%}"))
    rows.append(("allocated, with the alignment of pages", f"{size['allocated']:,}",
                 f"{size['allocated'] / size['total']:.1%}"))  # fmt: skip
    rows.append(("FP32 state", f"{size['fp32']:,}", f"{size['fp32'] / size['total']:.1%}"))
    return section("bytes", "Bytes of a slot", figure("bytes", "Bars of the bytes of a slot", "One slot holds the "
                   "recurrent state of one request; the prefix cache of a server keeps several slots a request."),
                   table("Bytes of one slot", ["part", "bytes", "of total"], rows, identity="slot-bytes"))  # fmt: skip


def start_values(evidence: Evidence) -> dict[str, Any]:
    """What the calculator starts with: the recipe's own figures where it has them."""
    budget = evidence.plan.budget
    memory, gpus = number(budget.get("gpu_memory")), number(budget.get("gpus")) or 1
    strategy = budget.get("strategy")
    context, batch = number(budget.get("context_length")), number(budget.get("concurrency"))
    return {
        "memory": round(memory * gpus / GIB, 2) if memory else 80,
        "weights": round((number(budget.get("weights_bytes")) or 0) / GIB, 3),
        "context": int(context) if context and context >= 1 else 4096,
        "strategy": strategy if strategy in SLOTS_PER_REQUEST else "extra_buffer",
        "batch": int(batch) if batch and batch >= 1 else 64,
    }


def equation_terms(evidence: Evidence) -> dict[str, Any]:
    """Bytes that the page's script needs for equation 24."""
    summary = evidence.summary
    geometry = summary["geometry"]
    plain, packed = (serving_memory(summary, 0, 1, fp32) for fp32 in (True, False))
    bf16 = summary["bytes_per_request"]["fp32"] // 2 + geometry["conv_bytes"]
    return {
        "states": STATES, "slots": dict(zip(STATES, (plain.slot, bf16, packed.slot), strict=True)),
        "running": dict(zip(STATES, (0, 0, packed.per_running_request), strict=True)),
        "kv": geometry["kv_bytes_per_token"], "strategies": SLOTS_PER_REQUEST, "start": start_values(evidence),
    }  # fmt: skip


def capacity_rows(terms: dict[str, Any]) -> list[tuple[str, ...]]:
    """The calculator's table at its start values; the page's script writes the same."""
    start = terms["start"]
    memory, weights = round(start["memory"] * GIB), round(start["weights"] * GIB)
    rows: list[tuple[str, ...]] = []
    fits_fp32 = 0
    for name in STATES:
        term = ServingMemory(weights, terms["slots"][name], terms["kv"], SLOTS_PER_REQUEST[start["strategy"]],
                             terms["running"][name])  # fmt: skip
        fits = term.concurrency(memory, start["context"])
        fits_fp32 = fits if name == "FP32" else fits_fp32
        gain = f"{fits / fits_fp32:.2f}x" if fits_fp32 else "-"
        rows.append((name, f"{term.slot / 2**20:,.3f}", f"{term.state(start['batch']) / GIB:,.2f}",
                     f"{term.total(start['batch'], start['context']) / GIB:,.2f}", f"{fits:,}", gain))  # fmt: skip
    return rows


def capacity(evidence: Evidence, drawn: Figures) -> Markup:
    """Requests that fit into given memory: inputs, table, figure."""
    terms = equation_terms(evidence)
    start = terms["start"]
    drawn["capacity"] = figures.serving_frame()
    options = "".join(
        f'<option value="{n}"{" selected" if n == start["strategy"] else ""}>{esc(n)}: {r} a request</option>'
        for n, r in SLOTS_PER_REQUEST.items()
    )
    inputs = "".join([
        _input("memory", "memory, GiB", start["memory"], 'min="0" step="any"'),
        _input("weights", "weights, GiB", start["weights"], 'min="0" step="any"'),
        _input("context", "tokens a request", start["context"], 'min="0" step="1"'),
        f'<label>slots (prefix cache)<select id="in-strategy">{options}</select></label>',
        _input("batch", "running requests", start["batch"], 'min="0" step="1"'),
    ])  # fmt: skip
    head = ["state", "slot, MiB", "pool, GiB", "all, GiB", "fit", "of FP32's"]
    shown = table("Serving memory and the requests that fit", head, capacity_rows(terms), identity="capacity-table")
    caption = (
        "Equation 24: M(B, L) = W + (r B + 1) S + B L K, plus the window buffers of running requests. A slot is "
        "counted as the pool allocates it, with the convolution state. Pool and all memory are those of the running "
        "requests given, and fit says how many requests fill the memory; weights are those on all its GPUs together."
    )
    return section("capacity", "Requests that fit", Markup(f'<form class="inputs" id="calculator">{inputs}</form>'),
                   shown, figure("capacity", "Memory against running requests", caption))  # fmt: skip


def _input(name: str, label: str, value: object, limits: str) -> str:
    return (
        f'<label>{esc(label)}<input id="in-{name}" type="number" inputmode="decimal" value="{esc(value)}" {limits}>'
        "</label>"
    )
