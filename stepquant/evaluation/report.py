"""Tables of an evaluation, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stepquant.evaluation.metrics import EDGE
from stepquant.evaluation.settings import EvaluateSettings

HEADER = ("variant", "bits/value", "W", "KL first {edge}", "KL last {edge}", "KL all", "95%", "x plan", "excess NLL",
          "top-1")  # fmt: skip


def print_rows(rows: Sequence[dict[str, Any]], settings: EvaluateSettings) -> None:
    """Print the rows as tables on stdout."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # nothing is cut where the output goes to a file
    first = rows[0]
    path = {"simulated": "the simulated codec", "packed": "the bytes that are served"}.get(settings.path)
    path = path or ", ".join(sorted({str(r["path"]) for r in rows if str(r["path"]).startswith("served")}))
    console.print(
        f"{first['streams']} streams of {settings.prefill} + {first['tokens']} tokens, {first['data']}; KL from the "
        f"FP32-state model in nats a token; {path}"
    )
    console.print(quality_table(rows))
    if any("layers" in row for row in rows):
        console.print(layer_table(rows))
    if any("greedy_length" in row for row in rows):
        console.print(greedy_table(rows))


def quality_table(rows: Sequence[dict[str, Any]]) -> Table:
    """KL, excess NLL and agreement."""
    table = Table()
    for name in header(rows):
        table.add_column(name, no_wrap=name in ("variant", "95%"))
    for row in rows:
        table.add_row(*cells(row))
    return table


def header(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Column names; where fewer than 256 tokens are decoded, the first and the last stretch are all of them."""
    return [name.format(edge=min(EDGE, rows[0]["tokens"])) for name in HEADER]


def cells(row: dict[str, Any]) -> list[str]:
    """The row as text, in the order of `HEADER`; an interval over few streams may reach below zero."""
    ci, window = row["kl_all_ci"], row["window"]
    return [
        str(row["variant"]), f"{row['bits_per_value']:.3f}", str(window), _kl(row["kl_first"]), _kl(row["kl_last"]),
        _kl(row["kl_all"]), "-" if ci is None else f"{_kl(ci[0])} .. {_kl(ci[1])}",
        "-" if row.get("kl_ratio") is None else f"{row['kl_ratio']:.3g}",
        f"{row['excess_nll_all']:+.1e}", f"{100 * row['top1_all']:.2f}%",
    ]  # fmt: skip


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """The same as a Markdown table."""
    lines = ["| " + " | ".join(header(rows)) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def layer_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Relative RMS errors of state and readout by delta-rule layer (all decode tokens, identical inputs)."""
    with_layers = [row for row in rows if "layers" in row]
    table = Table("delta layer", *[f"{r['variant']} {what}" for r in with_layers for what in ("state", "readout")])
    for index in range(len(with_layers[0]["layers"])):
        found = [row["layers"][index] for row in with_layers]
        table.add_row(str(index), *[f"{e[k]:.2e}" for e in found for k in ("state_all", "readout_all")])
    return table


def greedy_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Greedy generation beside the FP32-state model's."""
    table = Table("variant", "agreement", "tokens before the first difference", "length", "FP32 length", "ended")
    for row in (r for r in rows if "greedy_length" in r):
        table.add_row(str(row["variant"]), f"{100 * row['greedy_agreement']:.1f}%", f"{row['greedy_prefix']:.0f}",
                      f"{row['greedy_length']:.0f}", f"{row['greedy_length_fp32']:.0f}",
                      f"{100 * row['greedy_ended']:.0f}%")  # fmt: skip
    return table


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"
