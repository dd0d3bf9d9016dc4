"""Compiles a plan's kernels for a GPU that is not there and runs them in the PTX emulator; prints figures as JSON.

    python -m tests.codegen.compiled read|step|fold|fold_int8|dense NAME TARGET [LAUNCH]

with the launch at that place of `launches_of`, or the first. A read has a program for each block of columns, as of few
requests, with the first launch; with the others, and in front of a fold, one a head.

A process of its own, because the tests' own process has the building blocks decorated for Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.recurrence import step
from stepquant.codec.window import WriteWindow
from stepquant.codegen.aot import build
from stepquant.codegen.kernel_plan import launches_of
from stepquant.runtime import step as runtime_step
from stepquant.runtime.step import PackedKernels
from stepquant.runtime.window import WindowBuffers
from tests.codegen.cases import Case, relative
from tests.codegen.ptx import Memory, Program, parse

WINDOW = 8


class Emulated(PackedKernels):
    """`PackedKernels` whose launches run in the emulator: arguments go into its memory and come back out."""

    place = 0  # of the launch, as far as a kernel has so many

    def __init__(self, case: Case, target: str, window: int = WINDOW, buffer: str = "fp16") -> None:
        super().__init__(
            case.layout, case.w, case.codec, case.family, case.key_heads, "0" * 64, window, buffer, device="cpu"
        )
        self.target = target
        self.compiled: dict[str, Any] = {}

    def _launch(self, name: str, layer: int, pages: Tensor, slots: Tensor, *args: Any) -> None:
        table, launches = self.tables[layer], launches_of(self.spec, name)
        launch = launches[min(self.place, len(launches) - 1)]
        fixed = (pages, pages.stride(0), *(table[n] for n in ("table", "row_w", "row_limits", "order")))
        constants: dict[str, Any] = {}
        if name in ("pack", "unpack"):
            *args, constants["stride_row"], constants["stride_col"] = args
        if name == "read":
            *args, constants["FEW"], constants["PARTS"] = args
        key = f"{name} {constants}"
        if key not in self.compiled:
            built = build(self.spec, name, self.sources[name], self.target, launch, constants)
            self.compiled[key] = parse(built.asm["ptx"])
        memory, places = Memory(), {}
        bound: list[int] = []
        for x in (*fixed, slots, slots.stride(0), *args):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in places:
                    whole = torch.tensor([], dtype=torch.uint8).set_(storage)
                    places[storage.data_ptr()] = (memory.put(whole.numpy()), whole)
                bound.append(places[storage.data_ptr()][0] + x.storage_offset() * x.element_size())
            elif not isinstance(x, bool):  # constants are compiled in
                bound.append(int(np.float32(x).view(np.uint32)) if isinstance(x, float) else int(x))
        grid = self.grid(name, slots.shape[0])
        for place in product(*map(range, grid)):
            Program(self.compiled[key], launch.warps, memory, bound, place, grid).run()
        for at, whole in places.values():
            whole.copy_(torch.from_numpy(memory.get(at, whole.numpy())))


def token(case: Case, count: int, seed: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Inputs in bfloat16, and as the recurrence takes them; SGLang rounds GDN's write strength to the model's dtype."""
    t = case.token(count, seed, torch.bfloat16)
    *inputs, beta = case.exact(t, torch.float32)
    return t, (*inputs, beta.bfloat16().float() if case.family == "gdn" else beta)


def check_read(case: Case, target: str, tokens: int = 3) -> dict[str, Any]:
    """Tokens of two requests at different phases and a padded row, against the torch reference."""
    return _check_window(case, target, tokens, (0, WINDOW - 1 - tokens), False)


def check_fold(case: Case, target: str, buffer: str = "fp16") -> dict[str, Any]:
    """The same of requests one of which folds at its second token, then a flush of both."""
    return _check_window(case, target, 3, (WINDOW - 5, WINDOW - 2), True, buffer)


def check_fold_int8(case: Case, target: str) -> dict[str, Any]:
    """The same with INT8 buffers."""
    return check_fold(case, target, "int8")


def _check_window(
    case: Case, target: str, tokens: int, start: tuple[int, int], flush: bool, buffer: str = "fp16"
) -> dict[str, Any]:
    kernels, codec = Emulated(case, target, WINDOW, buffer), case.torch_codec
    pages = codec.pack(case.states(3))
    before, slots = pages.clone(), torch.tensor([2, -1, 0], dtype=torch.int32)
    buffers, rows = WindowBuffers.allocate(kernels.spec, 3, "cpu"), torch.tensor([1, 0, 2], dtype=torch.int32)
    for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios, buffers.k_now, buffers.u_now):
        x.fill_(torch.nan if x.is_floating_point() else 99)
    phases, pending = torch.tensor([start[0], 0, start[1]], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    windows = {i: WriteWindow(WINDOW, buffer, start[i // 2]) for i in (0, 2)}
    base = {i: codec.unpack(pages[int(slots[i])][None])[0] for i in windows}
    found: dict[str, Any] = {"error": 0.0, "padded": True, "folds": 0, "flips": 0.0}
    for n in range(tokens):
        t, inputs = token(case, 3, 20 + n)
        kernels.window_step(0, pages, slots, **t, buffers=buffers, rows=rows, phases=phases, pending=pending)
        found["padded"] &= bool((t["out"][1] == 0).all())
        for i, reference in windows.items():
            base[i], y, new = reference.step(base[i], *(x[i] for x in inputs))
            error = relative(t["out"][i], y.bfloat16())
            found["error"] = error if not error <= found["error"] else found["error"]  # NaN stays
            if new:
                base[i] = _count_flips(case, pages[int(slots[i])], base[i], found)
        pending = torch.where(phases == WINDOW - 1, 0, pending + 1).int()
        phases = ((phases + 1) % WINDOW).int()
    if flush:
        kernels.flush(0, pages, slots, buffers, rows, phases, pending)
        for i, reference in windows.items():
            _count_flips(case, pages[int(slots[i])], reference.fold(base[i]), found)
    return found | {"untouched": torch.equal(pages[1:2] if flush else pages, before[1:2] if flush else before)}


def _count_flips(case: Case, page: Tensor, state: Tensor, found: dict[str, Any]) -> Tensor:
    """Add a fold and the largest share of codes that differ; what the page reads back as."""
    flips, total = case.flips(page[None], state[None])
    found["folds"], found["flips"] = found["folds"] + 1, max(found["flips"], flips / total)
    return case.torch_codec.unpack(page[None])[0]


def check_step(case: Case, target: str) -> dict[str, Any]:
    """W = 1: states packed, one decode step of two requests and a padded row, and unpacked again."""
    kernels, codec, x = Emulated(case, target, 1), case.torch_codec, case.states(3)
    used, slots = int(case.layout.sizes[0].sum()), torch.tensor([2, -1, 0], dtype=torch.int32)
    pages = torch.full_like(codec.pack(x), 255)
    kernels.pack(0, pages, torch.tensor([0, 2], dtype=torch.int32), x[[0, 2]])
    found: dict[str, Any] = {"untouched": bool((pages[1] == 255).all()), "folds": 0, "flips": 0.0}
    different = (pages[[0, 2]] != codec.pack(x)[[0, 2]])[:, :used]
    found["packed"] = float(different.float().mean())
    state, (t, inputs) = codec.unpack(pages[[2, 0]]), token(case, 3, 3)
    kernels.step(0, pages, slots, **t)
    updated, y = step(state.double(), *(x[[0, 2]].double() for x in inputs))
    found |= {"error": relative(t["out"][[0, 2]], y.bfloat16()), "padded": bool((t["out"][1] == 0).all())}
    back = torch.full_like(x, torch.nan)
    kernels.unpack(0, pages, slots, back)
    for place, i in ((0, 2), (2, 0)):
        want = _count_flips(case, pages[i], updated[place // 2].float(), found)
        found[f"unpacked {i}"] = relative(back[place], want)
    found["untouched"] &= bool((pages[1] == 255).all() & back[1].isnan().all())
    return found


def check_dense(case: Case, target: str) -> dict[str, Any]:
    """States packed and unpacked again, in both orders of their axes, as SGLang keeps them first."""
    kernels, codec, x = Emulated(case, target), case.torch_codec, case.states(1)
    used, slots = int(case.layout.sizes[0].sum()), torch.tensor([2], dtype=torch.int32)
    found: dict[str, Any] = {"packed": 0.0, "unpacked": 0.0, "untouched": True}
    for v_first in (True, False):
        state = x.transpose(-1, -2).contiguous() if v_first else x
        pages = torch.full((3, codec.pack(x).shape[1]), 255, dtype=torch.uint8)
        kernels.pack(0, pages, slots, state, v_first)
        different = float((pages[2:] != codec.pack(x))[:, :used].float().mean())
        back = torch.full_like(state, torch.nan)
        kernels.unpack(0, pages, slots, back, v_first)
        error = relative(back.transpose(-1, -2) if v_first else back, codec.unpack(pages[2:]))
        found["packed"] = max(found["packed"], different)
        found["unpacked"] = error if not error <= found["unpacked"] else found["unpacked"]  # NaN stays
        found["untouched"] &= bool((pages[:2] == 255).all())
    return found


CHECKS = {
    "read": check_read, "step": check_step, "fold": check_fold, "fold_int8": check_fold_int8, "dense": check_dense,
}  # fmt: skip


def case_of(recipe: str) -> Case:
    """A head of every kind, at full size, fitted as the recipe's plans are."""
    case = Case.make(recipe, 128, 128)
    return replace(case, codec=replace(case.codec, refits=0, sample=16))


if __name__ == "__main__":
    check = CHECKS[sys.argv[1]]
    Emulated.place = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    if sys.argv[1] != "read" or Emulated.place > 0:
        runtime_step.read_parts = lambda spec, batch: 1  # as of a large batch
    print(json.dumps(check(case_of(sys.argv[2]), sys.argv[3])))
