"""Instructions of a compiled kernel, and how many of them a thread runs, from the disassembler's listing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_LABEL, _TARGET = re.compile(r"^(\.L_x_\d+):"), re.compile(r"`\((\.L_x_\d+)\)")
_TABLE = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_BARRIER = re.compile(r"\bB\d+\b")
_CONDITION = re.compile(r"\bU?P\d\b")  # as an operand, from sm_100 on: BRA.U !UP0, `(.L_x_0)


@dataclass
class _Instruction:
    """One instruction: where it may go on, as labels, whether the next one is among that, and whether a label before it
    makes a loop."""

    targets: list[str] = field(default_factory=list)
    falls: bool = True
    loops: bool = True


def count_instructions(listing: str, trips: int) -> tuple[int, int]:
    """Instructions of a kernel, and how many a thread runs on the longest way through it, loops taking `trips` trips.

    A loop is what lies between a label and a branch back to it. A kernel that chooses between bodies counts its longest
    body and what all programs share. Loops over pivot rows or groups of four-level heads take fewer trips than loops
    over blocks, and not every head has the longest body: the second figure errs on the high side.
    """
    code, labels = _parse(listing)
    weights = [1] * len(code)
    for at, instruction in enumerate(code):
        for target in instruction.targets:
            # What jumps to itself, behind the end, is no loop.
            if instruction.loops and labels.get(target, len(code)) < at:
                weights[labels[target] : at + 1] = [trips] * (at + 1 - labels[target])
    longest = [0] * (len(code) + 1)
    for at in range(len(code) - 1, -1, -1):
        ahead = [labels[t] for t in code[at].targets if labels.get(t, -1) > at] + [at + 1] * code[at].falls
        longest[at] = weights[at] + max((longest[n] for n in ahead), default=0)
    return len(code), longest[0]


def _parse(listing: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions but NOPs, and the number of the one that follows each label."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    joins: dict[str, str] = {}  # where threads of a BSSY go on together, by its barrier
    for line in listing.splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(code)
        if (found := _OPCODE.match(line)) is None or found[2] == "NOP":
            continue
        name, target = found[2].partition(".")[0], _TARGET.search(line)
        always = found[1] is None and _CONDITION.search(line) is None
        instruction = _Instruction()
        if name == "BRA" and target is not None:
            instruction = _Instruction([target[1]], not always)
        elif name == "BRX" and (table := _TABLE.search(line)) is not None:
            instruction = _Instruction(table[1].split(","), not always)
        elif name == "EXIT":
            instruction = _Instruction([], not always)
        elif (barrier := _BARRIER.search(line)) is not None and name == "BSSY" and target is not None:
            joins[barrier[0]] = target[1]
        elif barrier is not None and name == "BSYNC" and barrier[0] in joins:
            instruction = _Instruction([joins[barrier[0]]], not always, loops=False)  # back from a way out of line
        code.append(instruction)
    return code, labels
