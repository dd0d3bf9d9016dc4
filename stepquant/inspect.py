"""``python -m stepquant.inspect DIR [DIR2]``: look at a plan, its bytes and the memory it saves; compare two plans."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stepquant.commands import Parser, exit_code, user_path
from stepquant.compare import compare_plans, comparison_tables
from stepquant.errors import RecipeError, StepQuantError
from stepquant.kernel_tables import kernel_summary, print_kernels, print_source
from stepquant.memory import SLOTS_PER_REQUEST
from stepquant.plan import load_plan
from stepquant.run_record import RUN_JSON, read_run, run_table
from stepquant.summary import plain_console, plan_summary, print_summary, serving_memory, serving_rows, serving_table
from stepquant.units import parse_bytes

OF_STATES = ("passes", "layers", "weights", "batch", "context", "slots", "memory")
OF_KERNELS = ("kernels", "layer", "source")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m stepquant.inspect",
        description="Show a plan: bits, bytes, serving memory (equation 24); with two plans, their differences.",
    )
    parser.add_argument("plan", type=user_path, help="artifact directory of stepquant.compile")
    parser.add_argument("other", type=user_path, nargs="?", help="a second artifact to compare with")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--passes", action="store_true", help="also print seconds and peak memory of every pass")
    parser.add_argument("--layers", action="store_true", help="also print the bits of every layer")
    parser.add_argument("--weights", type=_size, default=None, metavar="BYTES",
                        help="weights of one replica, e.g. 17776688128 or 16.56GiB (default: the recipe's "
                        "budget.weights_bytes, or 0)")  # fmt: skip
    parser.add_argument("--batch", type=_counts, default=[1, 32, 64, 128, 256, 512], metavar="B,B,...",
                        help="running requests to tabulate (default 1,32,64,128,256,512)")  # fmt: skip
    parser.add_argument(
        "--context", type=_count, default=4096, metavar="TOKENS", help="tokens a request (default 4096)"
    )
    parser.add_argument("--slots", type=_slots, default=5, metavar="N|STRATEGY",
                        help="slots a request: a number, or off | no_buffer | extra_buffer | extra_buffer_no_overlap "
                        "(1, 3, 5, 4; default extra_buffer)")  # fmt: skip
    parser.add_argument("--memory", type=_size, metavar="BYTES", help="also print how many requests fit, e.g. 320GiB")
    parser.add_argument("--kernels", action="store_true",
                        help="instead: the generated kernels, their figures, and the bytes of a page")  # fmt: skip
    parser.add_argument("--layer", type=_layer, metavar="N",
                        help="layer whose page --kernels shows (default: the first delta-rule layer)")  # fmt: skip
    parser.add_argument("--source", metavar="NAME", help="instead: the source of one of the generated kernels")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except StepQuantError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from 1 to 1,000,000,000")
    return int(text)


def _layer(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is no layer's number")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _slots(text: str) -> int:
    if text in SLOTS_PER_REQUEST:
        return SLOTS_PER_REQUEST[text]
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        known = ", ".join(SLOTS_PER_REQUEST)
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither a number from 1 to 999,999,999 nor one of {known}")
    return int(text)


def _weights(args: argparse.Namespace, summary: dict[str, Any]) -> int:
    """Bytes of weights: as told, as the recipe had them, or none."""
    return int((summary["budget"].get("weights_bytes") or 0) if args.weights is None else args.weights)


def full_summary(args: argparse.Namespace) -> dict[str, Any]:
    """The plan's summary with the serving table of the given memory settings."""
    plan = load_plan(args.plan)
    summary = plan_summary(plan)
    if (run := read_run(args.plan, plan.hash)) is not None:
        summary["run"] = run
    weights = _weights(args, summary)
    summary["serving"] = serving_rows(summary, weights, args.slots, args.batch, args.context)
    if args.memory is not None:
        summary["concurrency"] = {
            name: serving_memory(summary, weights, args.slots, fp32).concurrency(args.memory, args.context)
            for name, fp32 in (("fp32", True), ("plan", False))
        }
        summary["concurrency"]["weights"] = weights
    return summary


def show(args: argparse.Namespace, console: Console) -> None:
    """Print one plan, or the comparison of two."""
    if args.other is not None:
        _refuse_ignored(args, OF_STATES + OF_KERNELS, "for one plan, and two are compared; inspect each by itself")
        comparison = compare_plans(args.plan, args.other)
        if args.json:
            print(json.dumps(comparison, indent=2, sort_keys=True))
        else:
            for table in comparison_tables(comparison):
                console.print(table)
        return
    if not args.kernels:
        _refuse_ignored(args, ("layer",), "for --kernels, which is missing")
    if args.kernels or args.source is not None:
        _refuse_ignored(args, OF_STATES, "for the plan's memory, and its kernels are shown; leave it out")
        show_kernels(args, console)
        return
    summary = full_summary(args)
    if args.json:
        print(json.dumps(summary, indent=2, sort_keys=True))
        return
    print_summary(summary, console)
    if args.passes and "run" in summary:
        console.print(run_table(summary["run"]))
    elif args.passes:
        console.print(f"{args.plan / RUN_JSON} is missing, damaged or of another plan: compile again for the passes")
    if args.layers:
        console.print(layer_table(summary))
    console.print(serving_table(summary, _weights(args, summary), args.slots, args.batch, args.context))


def show_kernels(args: argparse.Namespace, console: Console) -> None:
    """Print the kernels of a plan, the source of one of them, or both."""
    summary, files = kernel_summary(args.plan, args.layer)
    source = None if args.source is None else files.source(args.source)
    if args.json:
        found = summary if args.kernels else {n: summary[n] for n in ("name", "plan_sha256")}
        if source is not None:
            found = {**found, "source": {args.source: source}}
        print(json.dumps(found, indent=2, sort_keys=True))
        return
    if args.kernels:
        print_kernels(summary, files, console)
    if source is not None:
        print_source(source, console)


def _refuse_ignored(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Refuse options that would do nothing.

    Raises:
        RecipeError: naming them and the reason.
    """
    defaults = _parser().parse_args([str(args.plan)])
    given = [f"--{n}" for n in names if getattr(args, n) != getattr(defaults, n)]
    if given:
        raise RecipeError(f"{', '.join(given)} is {reason}")


def layer_table(summary: dict[str, Any]) -> Table:
    """Units by precision in every delta-rule layer."""
    histogram = summary["bits_histogram"]
    names = sorted(histogram["total"], key=int)
    table = Table(title=f"{histogram['unit']}s by precision (16: FP16 pivots)")
    for name in ("layer", *names, "predicted cost"):
        table.add_column(name, justify="right")
    costs = summary["predicted"].get("by_layer") or [float("nan")] * len(histogram["layers"])
    for entry, cost in zip(histogram["layers"], costs, strict=True):
        table.add_row(str(entry["layer"]), *[str(entry["counts"].get(b, 0)) for b in names], f"{cost:.3g}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and print; return the exit code."""
    args = _parser().parse_intermixed_args(argv)  # A --json B: the second plan may follow an option
    return exit_code(lambda: show(args, plain_console()))


if __name__ == "__main__":
    sys.exit(main())
