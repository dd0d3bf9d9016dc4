"""transformers models on packed states: ``wrap(model, plan).generate(...)`` decodes from a plan's pages.

The delta rule of every layer is replaced (`stepquant.models.capture`): a prefill runs exactly, in FP32, and its final
state is packed; a decode step reads and updates the page. What the model's cache keeps as a recurrent state is a handle
`[B, 1, 1, 1]` that names a slot: reordering a cache (beam search) reorders handles, and a slot that two beams share is
forked before it is written.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stepquant.codec.chunks import delta_rule
from stepquant.errors import BackendError
from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.runtime.load import RankPlan, load_rank_plan
from stepquant.runtime.pool import PackedPool
from stepquant.runtime.raw import raw_gates

GROUP_SLOTS = 1 << 12
"""Handles are group * GROUP_SLOTS + slot, exact in float32 up to 2^24."""


WRAPPED = "stepquant_plan"  # attribute of a wrapped model: its plan's name


def wrap(model: Any, plan: str | Path, *, any_checkpoint: bool = False) -> PackedModel:
    """Let a loaded model decode from the packed states of a plan.

    Args:
        model: a transformers model with delta-rule layers, or a `LoadedModel`; it is changed in place until `close`.
        plan: artifact directory of stepquant.compile.
        any_checkpoint: take a plan whose checkpoint cannot be told from the model's (`model.name_or_path`).

    Raises:
        BackendError: the plan is for other states, or for another checkpoint than the model was loaded from; the model
            is wrapped already, or is none.
        ArtifactError: the artifact is damaged.
    """
    return PackedModel(model, load_rank_plan(Path(plan).expanduser()), any_checkpoint)


class PackedModel:
    """A model whose delta-rule layers keep packed states; made by `wrap`, closed by `close` or a ``with`` block.

    Calls and `generate` are the model's own. States live until `reset`; those made inside one `generate` end with it.
    """

    def __init__(self, model: Any, plan: RankPlan, any_checkpoint: bool = False) -> None:
        found = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
        if not isinstance(found, torch.nn.Module):
            raise BackendError(f"wrap takes a loaded transformers model; got {type(model).__name__}")
        if (other := getattr(found, WRAPPED, None)) is not None:
            raise BackendError(f"the model decodes from the states of plan {other!r} already; close that wrapper first")
        self.model = found
        self.plan = plan
        self._groups: dict[int, PackedPool] = {}
        self._next = 0
        self._current: _Step | None = None
        self._kernels: Any = None
        self._stack = ExitStack()
        self._open = False
        modules = self._stack.enter_context(capture_delta_rule(self.model, replace=self._replace))
        try:
            self._check(len(modules), any_checkpoint)
        except BackendError:
            self.close()
            raise
        setattr(self.model, WRAPPED, plan.plan.name)
        self._stack.callback(delattr, self.model, WRAPPED)
        self._open = True

    def _check(self, layers: int, any_checkpoint: bool) -> None:
        plan, g = self.plan.plan, self.plan.plan.geometry
        if layers != g.num_delta_layers:
            raise BackendError(f"the model has {layers} delta-rule layers, the plan {g.num_delta_layers}")
        if g.beta_max > 1:
            raise BackendError(f"the model's write strength goes up to {g.beta_max}; the kernels take at most 1")
        path = Path(str(getattr(self.model, "name_or_path", "")))
        if any_checkpoint or plan.synthetic:
            return
        if not (path / "config.json").is_file():
            raise BackendError(
                f"the model does not say which checkpoint it was loaded from (name_or_path {str(path)!r}); say "
                "any_checkpoint=True if the plan is its own"
            )
        from stepquant.models.fingerprint import fingerprint

        found = fingerprint(path)
        if found != plan.fingerprint:
            raise BackendError(
                f"{path} has fingerprint {found[:23]}, plan {plan.name!r} was made for {plan.fingerprint[:23]}; "
                "compile a plan for this checkpoint, or say any_checkpoint=True"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        self._check_open()
        return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`; its states are freed at the end unless ``past_key_values`` is given."""
        self._check_open()
        before = set(self._groups)
        try:
            return self.model.generate(*args, **kwargs)  # type: ignore[operator]
        finally:
            if kwargs.get("past_key_values") is None:
                for group in set(self._groups) - before:
                    del self._groups[group]

    @property
    def state_bytes(self) -> int:
        """Bytes of all packed states that are alive, window buffers included."""
        return sum(pool.nbytes for pool in self._groups.values())

    def reset(self) -> None:
        """Free every state; caches made before are void."""
        self._groups.clear()

    def close(self) -> None:
        """Give the model its own delta rule back."""
        self._open = False
        self._stack.close()
        self.reset()

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError("this wrapper is closed: the model has its own states again; call it, or wrap it anew")

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _replace(self, layer: int, trace: DeltaTrace) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if layer == 0:
                self._current = self._begin(trace)
            step = self._current
            if step is None:
                raise BackendError(f"layer {layer} runs before layer 0")
            if trace.initial_state is not None and trace.v.shape[1] == 1:
                return step.decode(layer, trace), step.handle
            return step.extend(layer, trace), step.handle

    def _begin(self, trace: DeltaTrace) -> _Step:
        """What the layers of this forward share: the slots of its requests."""
        batch, tokens, device = trace.v.shape[0], trace.v.shape[1], trace.v.device
        if self._kernels is None:
            self._kernels = self.plan.kernels(device)
        if trace.initial_state is None:
            if batch >= GROUP_SLOTS:
                raise BackendError(f"a batch of {batch}; expected fewer than {GROUP_SLOTS}")
            self._next += 1
            group = self._next
            self._groups[group] = PackedPool(self.plan.layout, self._kernels, batch, batch, device)
            slots = self._groups[group].alloc(batch)
            prefixes = torch.zeros(batch, dtype=torch.int32, device=device)
        else:
            group, slots = self._slots(trace.initial_state)
            prefixes = torch.ones(batch, dtype=torch.int32, device=device)
        pool = self._groups[group]
        if slots is None:
            raise BackendError(f"no slots for a batch of {batch}")
        if tokens > 1 or trace.initial_state is None:
            lengths = pool.table[1, slots] * prefixes + tokens
            pool.begin_extend(slots, slots, prefixes, lengths)
        handle = (group * GROUP_SLOTS + slots).to(torch.float32).view(-1, 1, 1, 1)
        return _Step(pool, slots, handle)

    def _slots(self, handle: Tensor) -> tuple[int, Tensor]:
        """Group and distinct slots of a batch; a slot that two rows share is forked, one that none has is freed."""
        numbers = [round(x) for x in handle.flatten().tolist()]
        group = numbers[0] // GROUP_SLOTS
        pool = self._groups.get(group)
        if pool is None:
            raise BackendError("the cache belongs to a state that was freed; generate, reset or close ended it")
        slots = [number - group * GROUP_SLOTS for number in numbers]
        unused = sorted(pool.owned - set(slots))
        if unused:
            pool.free(torch.tensor(unused, device=handle.device))
        seen: set[int] = set()
        for place, slot in enumerate(slots):
            if slot in seen:
                made = pool.fork(torch.tensor([slot], device=handle.device))
                if made is None:
                    raise BackendError(f"no slot is free to fork slot {slot}; the batch grew beyond its prefill's")
                pool.table[0, made] = made.int()  # a fork of a running request runs too, in the row of its own number
                slots[place] = int(made)
            seen.add(slots[place])
        return group, torch.tensor(slots, device=handle.device)


class _Step:
    """One forward of a batch: its pool, slots int64 `[B]`, and the handle that the model's cache keeps."""

    def __init__(self, pool: PackedPool, slots: Tensor, handle: Tensor) -> None:
        self.pool, self.slots, self.handle = pool, slots, handle

    def extend(self, layer: int, trace: DeltaTrace) -> Tensor:
        """A prefill in FP32 from the state that is there, packed at its end; y `[B, T, H, V]`."""
        batch, _, heads, value_dim = trace.v.shape
        start = trace.v.new_zeros(batch, heads, trace.k.shape[-1], value_dim)
        self.pool.read_states(layer, self.slots, start, v_first=False)
        y, state = delta_rule(trace.q, trace.k, trace.v, trace.log_gate, trace.beta, start)
        self.pool.extend_layer(layer, self.slots, state, v_first=False)
        return y

    def decode(self, layer: int, trace: DeltaTrace) -> Tensor:
        """One token on the pages; y `[B, 1, H, V]`. The trace has gates and strengths ready, the kernels make them from
        raw inputs: those that give the same ones are handed over."""
        spec = self.pool.kernels.spec
        repeat = spec.num_heads // spec.num_key_heads
        q, k = (x[:, 0, ::repeat].contiguous() for x in (trace.q, trace.k))
        a, b = raw_gates(trace.log_gate[:, 0].flatten(1), trace.beta[:, 0])
        zeros = a.new_zeros(a.shape[1])
        out = torch.empty_like(trace.v[:, 0])
        self.pool.decode(
            layer, self.slots.int(), q, k, trace.v[:, 0].contiguous(), a, b, zeros[: spec.num_heads], zeros, 1.0, out,
            l2norm=False,
        )  # fmt: skip
        return out.unsqueeze(1)
