"""Arguments of the kernel benchmarks: lists are checked item by item, and a GPU is asked for by name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence

import torch


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Type of an argument: names among `known`, with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def counts(text: str) -> list[int]:
    """Type of an argument: whole numbers from 1 on, with commas between them."""
    for number in text.split(","):
        if not re.fullmatch("[1-9][0-9]{0,8}", number):
            raise argparse.ArgumentTypeError(f"{number!r} is no whole number from 1 on")
    return [int(number) for number in text.split(",")]


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Exit with code 2 where there is no GPU to time."""
    if not torch.cuda.is_available():
        parser.error("this benchmark runs on an NVIDIA GPU, and torch sees none here")
