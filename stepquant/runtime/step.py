"""Run the generated kernels of a plan on packed pages: decode step, pack and unpack.

The source is generated here from the layout and the codec; an artifact's own text is only compared with it
(`expected_hash`), never executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from stepquant.codec.spec import CodecSpec
from stepquant.codegen.folds import list_folds
from stepquant.codegen.generate import check_source, generate, load_source, source_hash
from stepquant.codegen.kernel_plan import RESIDENT_READS, Launch, few_programs, launches_of, read_parts
from stepquant.codegen.spec import KernelSpec, head_tables, power_of_two
from stepquant.layout import PageLayout
from stepquant.runtime.window import WindowBuffers, WindowSteps

Tuned = Mapping[str, tuple[tuple[int, Launch], ...]]
"""By kernel, ascending: a batch and the launch that serves up to it (`stepquant.runtime.tuning`)."""


class PackedKernels(WindowSteps):
    """The kernels of one plan on one device. Its reads run one after another, on one stream: programs that share a head
    count each other in `arrivals`.

    Args:
        layout: pages of this rank.
        w: row weights float32 `[L, H, K]` of this rank.
        codec: codec settings.
        family: ``gdn`` or ``kda``.
        num_key_heads: key heads of this rank.
        plan_hash: identity of the plan.
        window, buffer: write window.
        device: where pages and tables live.
        expected_hash: hash of the source that the artifact was made with.

    Raises:
        ArtifactError: if the source generated now is another one than the artifact's.
        BackendError: if the kernels cannot take the layout.
    """

    def __init__(
        self, layout: PageLayout, w: Tensor, codec: CodecSpec, family: Literal["gdn", "kda"], num_key_heads: int,
        plan_hash: str, window: int = 1, buffer: str = "fp16", device: torch.device | str = "cuda",
        expected_hash: str | None = None,
    ) -> None:  # fmt: skip
        self.spec = KernelSpec.of(family, num_key_heads, layout, codec, window, buffer)
        self.layout, self.device = layout, torch.device(device)
        self.sources = generate(self.spec, plan_hash)
        check_source(source_hash(self.sources), expected_hash)
        self.modules = {name: load_source(name, text) for name, text in self.sources.items()}
        self.tables = [
            {name: torch.from_numpy(x).to(self.device) for name, x in head_tables(layout, i, w[i], self.spec).items()}
            for i in range(layout.num_layers)
        ]
        self.launches: dict[str, Launch] = {}  # in place of what is preferred at a batch
        self.tuned: Tuned = {}
        self.arch = _arch(self.device)
        self.arrivals = torch.zeros(RESIDENT_READS, dtype=torch.int32, device=self.device)  # back at 0 after a read

    def step(
        self, layer: int, pages: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """One decode step of a layer in place: pages are updated, `out` is filled and returned.

        Args:
            pages: uint8 `[slots, page_bytes]`, any slot stride that is a multiple of 16.
            slots: int32 or int64 `[B]`; -1 marks padding, which touches nothing and gives zeros.
            q, k: `[B, HK, K]`; v: `[B, H, V]`; the last two axes contiguous, any token stride (views of a packed
                projection will do). a: `[B, H]` (GDN) or `[B, H * K]` (KDA); b: `[B, H]`.
            A_log: `[H]`; dt_bias: `[H]` or `[H * K]`.
            scale: multiplies q. out: `[B, H, V]`. l2norm: normalise q and k here.
        """
        token = _strided(q, k, v, a, b, A_log, dt_bias, scale, out)
        self._launch("step", layer, pages, slots, *token, l2norm)
        return out

    def read(
        self, layer: int, pages: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor, buffers: WindowBuffers, rows: Tensor,
        phases: Tensor, pending: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """The first half of `window_step`: pages are not written, tokens that complete a window go to k_now, u_now."""
        token = _strided(q, k, v, a, b, A_log, dt_bias, scale, out)
        window = (rows, phases, pending, *buffers.arguments, buffers.k_now, buffers.u_now)
        batch = slots.shape[0]
        parts = read_parts(self.spec, batch)
        few = few_programs(self.spec, batch)
        self._launch("read", layer, pages, slots, *token, *window, self.arrivals, l2norm, few, parts)
        return out

    def fold(
        self, layer: int, pages: Tensor, slots: Tensor, buffers: WindowBuffers, rows: Tensor, phases: Tensor,
        pending: Tensor, folds: Tensor,
    ) -> None:  # fmt: skip
        """The second half: windows that the tokens just read complete go into the pages.

        Args:
            phases, pending: as they were before the tokens; folds: `list_folds(phases)`, the same for every layer.
        """
        window = (rows, phases, pending, *buffers.arguments, buffers.k_now, buffers.u_now)
        self._launch("fold", layer, pages, slots, *window, folds)

    def list_folds(self, phases: Tensor) -> Tensor:
        """What `fold` takes as `folds`, int32 `[B + 1]`, from the phases int32 `[B]` before the token."""
        if not phases.is_cuda:
            return super().list_folds(phases)
        folds = torch.zeros(len(phases) + 1, dtype=torch.int32, device=phases.device)
        block = min(1024, power_of_two(max(len(phases), 16)))
        list_folds[(1,)](phases, folds, len(phases), self.spec.window, block, num_warps=max(1, block // 256))
        return folds

    def flush(
        self, layer: int, pages: Tensor, slots: Tensor, buffers: WindowBuffers, rows: Tensor, phases: Tensor,
        pending: Tensor,
    ) -> None:  # fmt: skip
        """Fold what is pending into the pages `slots`; the caller sets `pending` to 0 afterwards."""
        self._launch("flush", layer, pages, slots, rows, phases, pending, *buffers.arguments)

    def pack(self, layer: int, pages: Tensor, slots: Tensor, state: Tensor, v_first: bool = False) -> None:
        """Quantise dense states into pages (prefill boundary).

        Args:
            pages, slots: as in `step`.
            state: FP32 `[B, H, K, V]`, or `[B, H, V, K]` with `v_first` (as SGLang keeps it); any strides, those of the
                last two axes compiled in.
        """
        self._dense("pack", layer, pages, slots, state, v_first)

    def unpack(self, layer: int, pages: Tensor, slots: Tensor, state: Tensor, v_first: bool = False) -> Tensor:
        """Write pages out as dense FP32 states, the inverse of `pack`; rows of `state` at -1 are not touched."""
        self._dense("unpack", layer, pages, slots, state, v_first)
        return state

    def _dense(self, name: str, layer: int, pages: Tensor, slots: Tensor, state: Tensor, v_first: bool) -> None:
        row, column = (3, 2) if v_first else (2, 3)
        strides = (state.stride(0), state.stride(1), state.stride(row), state.stride(column))
        self._launch(name, layer, pages, slots, state, *strides)

    def launch_of(self, name: str, batch: int) -> Launch:
        """Warps and register cap at a batch: as tuned for the next larger one, or the first preference."""
        if rows := self.tuned.get(name, ()):
            return next((x for most, x in rows if batch <= most), rows[-1][1])
        return self.launches.get(name) or launches_of(self.spec, name, batch)[0]

    def _launch(self, name: str, layer: int, pages: Tensor, slots: Tensor, *args: Any) -> None:
        table, batch = self.tables[layer], slots.shape[0]
        launch = self.launch_of(name, batch)
        getattr(self.modules[name], name)[self.grid(name, batch)](
            pages, pages.stride(0), table["table"], table["row_w"], table["row_limits"], table["order"],
            slots, slots.stride(0), *args, self.arch,
            num_warps=launch.warps, maxnreg=launch.registers, enable_fp_fusion=True,
        )  # fmt: skip

    def grid(self, name: str, batch: int) -> tuple[int, int, int]:
        """Programs of a kernel: neighbours run the same head, so that they run the same instructions.

        A fold's programs take one request after another of those that complete a window; an unpack's have a block of
        columns each, and those of a read of few requests.
        """
        requests = -(-batch // self.spec.window) if name == "fold" else batch
        if name == "unpack":
            return requests, self.spec.num_heads, self.spec.blocks
        return requests, self.spec.num_heads, read_parts(self.spec, batch) if name == "read" else 1


def _strided(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor
) -> tuple[Any, ...]:
    """A token's arguments as the kernels take them, with strides between requests."""
    return (
        q, q.stride(0), k, k.stride(0), v, v.stride(0), a, a.stride(0), b, b.stride(0), A_log, dt_bias, scale,
        out, out.stride(0),
    )  # fmt: skip


def _arch(device: torch.device) -> int:
    """Compute capability as Triton writes it (90); 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
