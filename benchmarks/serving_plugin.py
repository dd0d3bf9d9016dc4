"""What the serving check changes inside SGLang's processes, as an SGLang plugin; each part waits for its variable.

- SERVING_STEPS=FILE: every decode forward's CUDA events and host times go to FILE.<rank>, a line for each run of steps.
- SERVING_BREAK=N: the state of a request of N tokens becomes NaN after its prefill.
- SERVING_ONE_GPU=nccl or host: tensor-parallel ranks share one GPU. NCCL refuses that of one host, so each rank calls
  itself another host; or all-reduce and all-gather go through the host with gloo.
- SERVING_IN_PLACE=1: folds run on the forward's own stream, not beside the layers that follow.
- SERVING_ONE_CONFIG=1: autotuned kernels take their first configuration (a cold Kimi prefill tunes for minutes).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import pkgutil
import time
from pathlib import Path
from typing import Any

STEPS, BREAK, ONE_GPU, ONE_CONFIG = "SERVING_STEPS", "SERVING_BREAK", "SERVING_ONE_GPU", "SERVING_ONE_CONFIG"
IN_PLACE = "SERVING_IN_PLACE"


def install(folder: Path) -> None:
    """Make the plugin findable from `folder`, which belongs on PYTHONPATH."""
    info = folder / "serving_check-0.0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: serving-check\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nserving_check = serving_plugin:register\n")


def register() -> None:
    """Called by SGLang in every process."""
    if os.environ.get(STEPS):
        record_steps(os.environ[STEPS])
    if os.environ.get(BREAK):
        break_states(int(os.environ[BREAK]))
    if os.environ.get(ONE_GPU):
        share_one_gpu(os.environ[ONE_GPU])
    if os.environ.get(IN_PLACE):
        fold_in_place()
    if os.environ.get(ONE_CONFIG):
        one_config()


def wrap(path: str, function: Any) -> None:
    """Put `function(original, ...)` around a method. Not through SGLang's registry, which leaves out hooks on what
    another plugin hooked before."""
    holder, name = path.rsplit(".", 1)
    owner = pkgutil.resolve_name(holder)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, wrapped)


class Steps:
    """Consecutive decode forwards of one rank, until a prefill ends the run."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, []

    def forward(self, original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """`ModelRunner.forward`, timed where it decodes."""
        import torch

        if not forward_batch.forward_mode.is_decode():
            self.close(runner.tp_rank)
            return original(runner, forward_batch, *args, **kwargs)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        begun = time.perf_counter()
        result = original(runner, forward_batch, *args, **kwargs)
        host = time.perf_counter() - begun
        events[1].record()
        self.rows.append((int(forward_batch.batch_size), *events, begun, host))
        return result

    def close(self, rank: int) -> None:
        """Write the run: batch sizes, start to next start, start to end, host time inside and between forwards."""
        rows, self.rows = self.rows, []
        if len(rows) < 2:
            return
        rows[-1][2].synchronize()
        pairs = list(itertools.pairwise(rows))
        found = {
            "batch": [a[0] if a[0] == b[0] else 0 for a, b in pairs],
            "interval_ms": [round(a[1].elapsed_time(b[1]), 4) for a, b in pairs],
            "forward_ms": [round(a[1].elapsed_time(a[2]), 4) for a, _ in pairs],
            "host_forward_ms": [round(1e3 * a[4], 4) for a, _ in pairs],
            "host_interval_ms": [round(1e3 * (b[3] - a[3]), 4) for a, b in pairs],
        }
        with open(f"{self.path}.{rank}", "a") as file:
            file.write(json.dumps(found) + "\n")


def record_steps(path: str) -> None:
    """Time every decode forward."""
    steps = Steps(path)

    def forward(original: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return steps.forward(original, self, forward_batch, *args, **kwargs)

    wrap("sglang.srt.model_executor.model_runner.ModelRunner.forward", forward)


def break_states(length: int) -> None:
    """Fill the pages of requests of `length` tokens with a NaN pattern after the last layer of their prefill."""
    import torch

    from stepquant.runtime.slots import SlotStore

    begin, extend = SlotStore.begin_extend, SlotStore.extend_layer

    def begin_extend(self: Any, slots: Any, rows: Any, prefixes: Any, lengths: Any) -> None:
        begin(self, slots, rows, prefixes, lengths)
        self.to_break = slots[(lengths == length) & (slots > 0)].long()

    def extend_layer(self: Any, layer: int, *args: Any, **kwargs: Any) -> None:
        extend(self, layer, *args, **kwargs)
        if layer == self.layout.num_layers - 1 and len(self.to_break):
            torch.Tensor.index_fill_(self.pages, 0, self.to_break, 0x7F)  # 0x7f7f is a NaN in FP16

    SlotStore.begin_extend, SlotStore.extend_layer = begin_extend, extend_layer


def fold_in_place() -> None:
    """Packed pools without a stream for their folds."""
    from stepquant.runtime.slots import SlotStore

    build = SlotStore.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.aside = None

    SlotStore.__init__ = init  # type: ignore[method-assign]


def share_one_gpu(how: str) -> None:
    """All tensor-parallel ranks on GPU 0."""

    def check(original: Any, self: Any) -> Any:
        result = original(self)
        self.gpu_id_step = 0  # SGLang refuses 0 as an argument
        return result

    wrap("sglang.srt.server_args.ServerArgs.check_server_args", check)
    os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    if how == "nccl":
        os.environ.update(NCCL_HOSTID=f"host{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        return
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    wrap(f"{group}.all_reduce", host_all_reduce)
    wrap(f"{group}._all_gather_into_tensor", host_all_gather)
    wrap("sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__", no_nccl)


def no_nccl(original: Any, self: Any, group: Any, *_: Any, **__: Any) -> None:
    """`PyNcclCommunicator.__init__`: as it leaves itself where NCCL is not installed."""
    self.rank, self.world_size, self.group = 0, 1, group
    self.available, self.disabled = False, True


def host_all_reduce(original: Any, self: Any, input_: Any) -> Any:
    """`GroupCoordinator.all_reduce` through the host, in FP32."""
    import torch.distributed as dist

    if self.world_size == 1:
        return original(self, input_)
    whole = input_.float().cpu()
    dist.all_reduce(whole, group=self.cpu_group)
    input_.copy_(whole)
    return input_


def host_all_gather(original: Any, self: Any, output: Any, input: Any) -> None:
    """`GroupCoordinator._all_gather_into_tensor` through the host."""
    import torch
    import torch.distributed as dist

    own = input.float().cpu().contiguous()
    parts = [torch.empty_like(own) for _ in range(self.world_size)]
    dist.all_gather(parts, own, group=self.cpu_group)
    output.copy_(torch.cat(parts).view(output.shape))


def one_config() -> None:
    """Keep the first configuration of every autotuned linear-attention kernel; results are the same up to rounding."""
    import sglang.srt.layers.attention.fla as fla
    from triton.runtime.autotuner import Autotuner

    for found in pkgutil.iter_modules(fla.__path__, fla.__name__ + "."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue
        for value in vars(module).values():
            kernel = value
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]
