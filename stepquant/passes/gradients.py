"""Gradients at the heads' outputs: what an error of a head's readout does to the model (docs/method.md).

``local``: while the model runs forward, each delta-rule module is run once more for the segments that are wanted, with
a graph from the heads' outputs through norm, gate and output projection to the module's output, and a random unit
cotangent in units of the residual stream's RMS is pulled back. Nothing of other layers is needed, so this also works
when only one layer is on the device.

``gradient``: a forward and a backward pass through the whole model, against labels drawn from the model (Fisher).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stepquant.models.capture import capture_delta_rule
from stepquant.passes.context import Context


@runtime_checkable
class GradientObservation(Protocol):
    """An observation that wants gradients at the heads' outputs beside the traces.

    Attributes:
        kind: ``local``, ``gradient``, or ``none`` for no gradients.
        tokens: how many of a segment's first tokens they are wanted for.
    """

    kind: str
    tokens: int

    def wanted_segments(self, segments: range) -> list[int]:
        """Which of these segments gradients are wanted for."""
        ...

    def take_gradient(self, layer: int, segment: int, gradient: Tensor) -> None:
        """Take in a gradient `[T, H, V]` of one layer and segment."""
        ...


class LocalProbe:
    """Runs delta-rule modules again with a graph, for all observations of kind ``local``.

    Args:
        observations: who wants gradients.
        seed: of the recipe.
        rows: the segments of the batch that is running.
        running: whether what runs is a batch (in layer-by-layer runs blocks are also called with all segments at once).
    """

    def __init__(
        self, observations: Sequence[GradientObservation], seed: int, rows: Callable[[], range],
        running: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.observations, self.seed, self.rows, self.running = observations, seed, rows, running
        self.busy = False
        self._output: Tensor | None = None
        self._streams: dict[int, Tensor] = {}

    def edit(self, layer: int, y: Tensor) -> Tensor:
        """The `edit` of `capture_delta_rule`: cuts the graph at the heads' outputs."""
        if not self.busy:
            return y
        self._output = y.detach().requires_grad_()
        return self._output

    @contextlib.contextmanager
    def attached(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Probe `modules`, whose decoder layers are `blocks`, while the context is open."""
        with contextlib.ExitStack() as stack:
            for layer, (module, block) in enumerate(zip(modules, blocks, strict=True)):
                handle = block.register_forward_pre_hook(self._remember(layer), with_kwargs=True)
                stack.callback(handle.remove)
                handle = module.register_forward_hook(self._probe(layer), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _remember(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.running():
                self._streams[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _probe(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            if self.busy:
                return
            rows, stream = self.rows(), self._streams.pop(layer)
            for observation in self.observations:
                for segment in observation.wanted_segments(rows):
                    one = segment - rows.start
                    scale = stream[one, : observation.tokens].detach().float().square().mean().sqrt()
                    inputs = pytree.tree_map(_cut(one, observation.tokens, len(rows)), (args, kwargs))
                    gradient = self._pull_back(layer, module, inputs, segment)
                    observation.take_gradient(layer, segment, gradient / scale.to(gradient.device))

        return hook

    def _pull_back(self, layer: int, module: nn.Module, inputs: Any, segment: int) -> Tensor:
        self.busy = True
        try:
            with torch.enable_grad():
                output = module(*inputs[0], **inputs[1])
                output = output[0] if isinstance(output, tuple) else output
                seed = self.seed * 1_000_003 + segment + 7919 * layer
                generator = torch.Generator(output.device).manual_seed(seed)
                cotangent = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
                assert self._output is not None
                with warnings.catch_warnings():  # the first product of a backward thread says that it has no context
                    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
                    (gradient,) = torch.autograd.grad(output, self._output, cotangent)
            return gradient[0].float()
        finally:
            self.busy, self._output = False, None


def _cut(one: int, tokens: int, rows: int) -> Callable[[Any], Any]:
    """One segment's first tokens of every tensor that has segments first."""

    def cut(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.dim() < 2 or item.shape[0] != rows:
            return item
        return item[one : one + 1, :tokens]

    return cut


def blocks_of(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layers that hold the delta-rule modules: their input is the residual stream."""
    names = {id(module): name for name, module in model.named_modules()}
    return [model.get_submodule(names[id(module)].rpartition(".")[0]) for module in modules]


def fisher_gradients(context: Context, tokens: Tensor, segment: int, observation: GradientObservation) -> None:
    """Forward and backward of the whole model over one segment's `tokens` `[1, T]`; every layer's gradient is taken."""

    def edit(layer: int, y: Tensor) -> Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()
        y.register_hook(lambda gradient: observation.take_gradient(layer, segment, gradient[0].float()))
        return y

    seed = context.recipe.seed * 1_000_003 + segment
    with torch.enable_grad(), capture_delta_rule(context.model, None, context.delta_rule, edit):
        logits = context.model.model(input_ids=tokens, use_cache=False).logits[0]
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            uniform = torch.rand(logits.shape[0], 1, generator=generator).to(logits.device)
            cumulative = logits.float().softmax(-1).cumsum(-1)
            label = (cumulative < uniform * cumulative[:, -1:]).sum(-1, keepdim=True)
        logits.float().log_softmax(-1).gather(-1, label).sum().neg().backward()
