"""Compiles a plan's read for a GPU that is not there and runs it in the PTX emulator; prints figures as JSON.

    python -m tests.codegen.compiled NAME TARGET

A process of its own, because the tests' own process has the building blocks decorated for Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepquant.codec.window import WriteWindow
from stepquant.codegen.aot import build
from stepquant.codegen.kernel_plan import LAUNCHES
from stepquant.runtime.step import PackedKernels
from stepquant.runtime.window import WindowBuffers
from tests.codegen.cases import Case, relative
from tests.codegen.ptx import Memory, Program, parse

WINDOW = 8


class Emulated(PackedKernels):
    """`PackedKernels` whose launches run in the emulator: arguments go into its memory and come back out."""

    def __init__(self, case: Case, target: str) -> None:
        super().__init__(case.layout, case.w, case.codec, case.family, case.key_heads, "0" * 64, WINDOW, device="cpu")
        self.target = target
        self.compiled: dict[str, Any] = {}

    def _launch(self, name: str, layer: int, pages: Tensor, slots: Tensor, *args: Any) -> None:
        if name == "fold":  # no window is ever full here
            return
        table, launch = self.tables[layer], LAUNCHES[name][0]
        fixed = (pages, pages.stride(0), *(table[n] for n in ("table", "row_w", "row_bits", "order")))
        if name not in self.compiled:
            built = build(self.spec, name, self.sources[name], self.target, launch)
            self.compiled[name] = parse(built.asm["ptx"])
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
        for i_n in range(slots.shape[0]):
            for i_h in range(self.spec.num_heads):
                Program(self.compiled[name], launch.warps, memory, bound, (i_h, i_n)).run()
        for at, whole in places.values():
            whole.copy_(torch.from_numpy(memory.get(at, whole.numpy())))


def check_read(case: Case, target: str, tokens: int = 3) -> dict[str, Any]:
    """Tokens of two requests at different phases and a padded row, against the torch reference."""
    kernels, codec = Emulated(case, target), case.torch_codec
    pages = codec.pack(case.states(3))
    before, slots = pages.clone(), torch.tensor([2, -1, 0], dtype=torch.int32)
    buffers, rows = WindowBuffers.allocate(kernels.spec, 3, "cpu"), torch.tensor([1, 0, 2], dtype=torch.int32)
    for x in (buffers.keys, buffers.us, buffers.gammas, buffers.ratios, buffers.u_now):
        x.fill_(torch.nan)
    start = [0, 0, WINDOW - 1 - tokens]
    phases, pending = torch.tensor(start, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    windows = {i: WriteWindow(WINDOW, "fp16", start[i]) for i in (0, 2)}
    base = {i: codec.unpack(pages[int(slots[i])][None])[0] for i in windows}
    worst, padded = 0.0, True
    for n in range(tokens):
        t = case.token(3, 20 + n, torch.bfloat16)
        inputs = case.exact(t, torch.float32)
        kernels.window_step(0, pages, slots, **t, buffers=buffers, rows=rows, phases=phases, pending=pending)
        padded &= bool((t["out"][1] == 0).all())
        for i, reference in windows.items():
            _, y, _ = reference.step(base[i], *(x[i] for x in inputs))
            error = relative(t["out"][i], y.bfloat16())
            worst = error if not error <= worst else worst  # NaN stays
        phases, pending = phases + 1, pending + 1
    return {"error": worst, "padded": padded, "untouched": torch.equal(pages, before)}


if __name__ == "__main__":
    print(json.dumps(check_read(Case.make(sys.argv[1], 128, 128), sys.argv[2])))
