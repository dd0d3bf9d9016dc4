"""The sections of a report about the plan itself: what was compiled, precisions, half-lives, distortion, trade-off."""

from __future__ import annotations

from typing import Any

from stepquant.report import figures
from stepquant.report.evidence import Evidence, number
from stepquant.report.html import Markup, esc, flat, join, pairs, table
from stepquant.report.style import precision_name
from stepquant.report.tradeoff import tradeoff
from stepquant.summary import SYNTHETIC_NOTE
from stepquant.units import format_bytes

Figures = dict[str, figures.Figure]


def section(identity: str, title: str, *parts: str) -> Markup:
    """A titled part of the page."""
    return Markup(f'<section id="{identity}"><h2>{esc(title)}</h2>{join(parts)}</section>')


def figure(identity: str, label: str, caption: str) -> Markup:
    """The place of a figure; the page's script draws it."""
    return Markup(
        f'<figure><div class="plot" id="plot-{identity}" role="img" aria-label="{esc(label)}"></div>'
        f"<figcaption>{esc(caption)}</figcaption></figure>"
    )


def note(text: str | None) -> Markup:
    """A remark about something that cannot be shown."""
    return Markup(f'<p class="note">{esc(text)}</p>' if text else "")


def header(evidence: Evidence) -> Markup:
    """Name, the figures that matter most, and the warning of a synthetic plan."""
    summary = evidence.summary
    size = summary["bytes_per_request"]
    banner = f'<p class="banner" role="alert">{esc(SYNTHETIC_NOTE)}</p>' if summary["synthetic"] else ""
    tiles = [
        (format_bytes(size["total"]), "a slot", f"{size['total']:,} bytes; FP32 {format_bytes(size['fp32'])}"),
        (f"{summary['compression_fp32']:.2f}x", "smaller than FP32", f"{summary['compression_bf16']:.2f}x than BF16"),
        (f"{summary['bits_per_value']:.4f}", "bits a value", _paper_count(summary)),
    ]
    running = summary["bytes_per_running_request"]
    if running:
        window = summary["window"]
        tiles.append((format_bytes(running), "a running request on top", f"window of {window['length']} tokens"))
    cards = "".join(
        f"<li><strong>{esc(big)}</strong> {esc(what)}<small>{esc(more)}</small></li>" for big, what, more in tiles
    )
    mark = '<span class="synthetic">synthetic</span> ' if summary["synthetic"] else ""
    return Markup(f'<header><h1>{mark}{esc(summary["name"])}</h1>{banner}<ul class="tiles">{cards}</ul></header>')


def _paper_count(summary: dict[str, Any]) -> str:
    paper = summary["paper_bits_per_value"]
    return "codes, scales and pivots" if paper is None else f"{paper:.4f} in the paper's count"


def compiled(evidence: Evidence) -> Markup:
    """What was compiled and from what."""
    summary, plan = evidence.summary, evidence.plan
    g, codec, predicted, provenance = plan.geometry, summary["codec"], plan.predicted, plan.provenance
    histogram = summary["bits_histogram"]
    parts = ", ".join(f"{n:,} x {precision_name(int(b))}" for b, n in histogram["total"].items())
    items: list[tuple[str, object]] = [
        ("model", f"{g.model_type}: {g.num_delta_layers} delta-rule layers of {g.num_layers}, {g.num_heads} heads of "
                  f"{g.key_dim} x {g.value_dim} ({g.family.upper()})"),
        ("checkpoint", f"{plan.fingerprint} ({plan.weight_format})"),
        ("calibration", _calibration(provenance)),
        ("method", plan.settings.get("method", "-")),
        ("codec", f"{codec['kind']}, {codec['codebook']} codebook, {codec['refits']} refit(s)"
                  + ("" if summary["packable"] else "; simulated only, there are no kernels for it")),
        (f"{histogram['unit']}s", parts),
        ("write window", f"{plan.window.length} token(s), pending ones in {plan.window.dtype}"
                         if plan.window.length > 1 else "none: requantised after every token"),
        ("solver", _solver(predicted)),
        ("budget", _budget(plan.budget)),
        ("made with", ", ".join(f"{n} {provenance[n]}" for n in ("stepquant", "torch", "python") if n in provenance)),
        ("plan", plan.hash),
    ]  # fmt: skip
    items += [("note", note) for note in summary["notes"]]
    settings = table("Every setting that shaped the plan", ["key", "value"], flat(plan.settings), text_columns=2)
    return section("compiled", "What was compiled", pairs(items),
                   Markup(f"<details><summary>all settings</summary>{settings}</details>"))  # fmt: skip


def _calibration(provenance: dict[str, Any]) -> str:
    data, kind = provenance.get("data"), str(provenance.get("calibration", "-"))
    if not isinstance(data, dict):
        return kind
    shape = data.get("segments")
    size = f", {shape[0]} segments of {shape[1]} tokens" if isinstance(shape, list) and len(shape) == 2 else ""
    return f"{kind} of {data.get('source', '-')}{size}; text {str(data.get('fingerprint', '-'))[:23]}"


def _solver(predicted: dict[str, Any]) -> str:
    gap = number(predicted.get("gap"))
    proof = "" if gap is None else f", proven gap {gap:.1e}"
    return f"{predicted.get('solver', '-')}, {predicted.get('status', '-')}{proof}"


def _budget(budget: dict[str, Any]) -> str:
    units = {"bits": "bits a value", "bytes_per_request": "bytes a slot", "concurrency": "requests"}
    asked = [f"{budget[k]:,g} {unit}" for k, unit in units.items() if number(budget.get(k)) is not None]
    pivots = budget.get("pivots", 0)
    return ", ".join([*asked, f"{pivots} pivot{'' if pivots == 1 else 's'} (each counted as 8 bits a value)"])


def precisions(evidence: Evidence, drawn: Figures) -> Markup:
    """Bits per layer and head, and the counts by layer."""
    summary = evidence.summary
    drawn["bits"] = figures.bits_map(evidence.plan)
    histogram = summary["bits_histogram"]
    names = sorted(histogram["total"], key=int)
    rows = [(entry["layer"], *[f"{entry['counts'].get(b, 0):,}" for b in names]) for entry in histogram["layers"]]
    rows.append(("all", *[f"{histogram['total'][b]:,}" for b in names]))
    counts = table(f"{histogram['unit']}s by precision", ["layer", *[precision_name(int(b)) for b in names]], rows)
    mixed = bool((evidence.plan.bits != evidence.plan.bits[..., :1]).any())
    caption = "Mean bits of a head's key rows; FP16 rows count 16." if mixed else "Precision of every head."
    return section("precisions", "Bits per layer and head",
                   figure("bits", "Heat map of precision by layer and head", caption),
                   Markup(f"<details><summary>counts by layer</summary>{counts}</details>"))  # fmt: skip


def lives(evidence: Evidence, drawn: Figures) -> Markup:
    """Half-lives of the gates against bits."""
    found = figures.half_lives(evidence)
    if found is None:
        missing = evidence.notes.get("half_lives") or evidence.notes.get("tables")
        return section("half-lives", "Half-lives against bits", note(missing or "No gate statistics in the tables."))
    drawn["half_lives"], facts = found
    medians = ", ".join(f"{name} {_tokens(m)}" for name, m in facts["medians"].items() if m is not None)
    few = f"{facts['shown']:,} of {facts['units']:,} {facts['unit']}s"
    unit = few if facts["shown"] < facts["units"] else f"All {facts['units']:,} {facts['unit']}s"
    never = f" {facts['infinite']:,} never decay and are left out." if facts["infinite"] else ""
    caption = (
        f"{unit}, spread within their precision; bars mark medians (tokens: {medians}). An error in a state with a "
        f"long half-life stays for many tokens, so that long-lived units tend to get more bits.{never}"
    )
    shown = figure("half_lives", "Half-life against precision", caption)
    return section("half-lives", "Half-lives against bits", shown)


def _tokens(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def by_layer(evidence: Evidence, drawn: Figures) -> Markup:
    """Predicted distortion by layer."""
    plan = evidence.plan
    found = figures.distortion(plan)
    if found is None:
        return section("distortion", "Predicted distortion by layer", note("The plan records no cost by layer."))
    drawn["distortion"] = found
    costs = [float(c) for c in plan.predicted["by_layer"]]
    total, worst = sum(costs), max(range(len(costs)), key=costs.__getitem__)
    share = f"; layer {plan.geometry.layers[worst]} has {costs[worst] / total:.1%} of it" if total > 0 else ""
    caption = f"{_cost_meaning(plan.settings)} In all {total:.4g} a token{share}."
    return section("distortion", "Predicted distortion by layer",
                   figure("distortion", "Bars of predicted cost by layer", caption))  # fmt: skip


def _cost_meaning(settings: dict[str, Any]) -> str:
    temporal = settings.get("temporal")
    temporal = temporal if isinstance(temporal, dict) else {}
    if temporal.get("weight") in ("transition", "rollout") and temporal.get("sensitivity") == "gradient":
        return "Predicted KL divergence from the FP32 state, nats."
    return "State error weighted by how long it lasts and how much it matters; no unit, to compare by."


def budget_curve(evidence: Evidence, drawn: Figures) -> Markup:
    """The solver's Pareto curve with the chosen point."""
    curve = tradeoff(evidence)
    title = "What a bit buys"
    if curve is None:
        missing = evidence.notes.get("tradeoff") or evidence.notes.get("tables")
        return section("tradeoff", title, note(missing or "This plan has one precision: there is nothing to trade."))
    drawn["pareto"] = figures.pareto(curve)
    how = "Exact optimum at every budget (dynamic programming)" if curve.exact else (
        "Optima along a sweep of the Lagrange multiplier")  # fmt: skip
    menu = ", ".join(map(str, curve.candidates))
    caption = (
        f"{how} over {menu} bits, the plan's pivots kept and counted as 8 bits. The star is this plan: "
        f"{curve.chosen[0]:.4f} nominal bits a value, predicted cost {curve.chosen[1]:.4g} a token."
    )
    rows = [(f"uniform {b} bits", f"{b:.4f}", f"{c:.4g}") for b, c in curve.uniform]
    rows.append(("this plan", f"{curve.chosen[0]:.4f}", f"{curve.chosen[1]:.4g}"))
    shown = table("Predicted cost", ["allocation", "nominal bits", "cost a token"], rows)
    return section("tradeoff", title, figure("pareto", "Predicted cost against bits a value", caption), shown)
