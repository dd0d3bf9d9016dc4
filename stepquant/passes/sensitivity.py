"""Output sensitivity F_h: increase of the model's KL per unit of squared output error of a head (design 2.5 a).

``gradient``: to second order KL = 1/2 E[(g . dy)^2] with g = dL/dy of the model's own sampled next tokens (the Fisher
information; labels drawn from the model, not the text). Errors of different elements are taken as uncorrelated, so
F_h = 1/2 E[g^2], one backward a batch, no noise to average out, every head at once.

``local``: no backward through the model. Within each layer the same product of a random unit cotangent, from the
module's output (in units of the residual stream's RMS) back to y through output projection, gate and norm. It knows
how a head's output enters the residual stream, not what later layers make of it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from stepquant.models.capture import Observer, capture_delta_rule
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product

GRADIENT_TOKENS = 8192  # enough for second moments a head; a backward pass costs three forwards


class Sensitivity:
    """`sensitivity` `[L, H]`, of one squared output element a token; nats for ``gradient``, relative for ``local``."""

    name, version = "sensitivity", 1
    reads: tuple[str, ...] = ("temporal.sensitivity", "seed")
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return context.recipe.temporal.sensitivity != "none"

    def start(self, context: Context) -> SensitivityObservation:
        return SensitivityObservation(context)


class SensitivityObservation:
    """Sums of squared gradients at every head's output; runs the model itself, with a graph."""

    runs_model = True
    observer: Observer | None = None  # sees every layer's trace before its gradient

    def __init__(self, context: Context) -> None:
        self.context = context
        g = context.geometry
        self.total = torch.zeros(g.num_delta_layers, g.num_heads, dtype=torch.float64)
        self.count = torch.zeros(g.num_delta_layers, dtype=torch.float64)

    def observe(self, layer: int, trace: Any, segments: range) -> None:
        raise AssertionError("this observation runs the model itself")

    def run_model(self, tokens: Tensor, segments: range) -> None:
        """Forward and backward over one batch `[B, T]`, a segment at a time to bound the graph's memory."""
        local = self.context.recipe.temporal.sensitivity == "local"
        for row in range(tokens.shape[0]):
            if int(self.count.max()) >= GRADIENT_TOKENS * self.context.geometry.value_dim:
                return
            seed = self.context.recipe.seed * 1_000_003 + segments.start + row
            if local:
                self._local(tokens[row : row + 1], seed)
            else:
                self._gradient(tokens[row : row + 1], seed)

    def _add(self, layer: int, gradient: Tensor) -> None:
        self.total[layer] += gradient.float().square().sum((0, 1, 3), dtype=torch.float64).cpu()
        self.count[layer] += gradient.shape[0] * gradient.shape[1] * gradient.shape[3]

    def _gradient(self, tokens: Tensor, seed: int) -> None:
        def edit(layer: int, y: Tensor) -> Tensor:
            y = y if y.requires_grad else y.detach().requires_grad_()
            y.register_hook(lambda gradient: self._add(layer, gradient))
            return y

        with torch.enable_grad(), capture_delta_rule(self.context.model, self.observer, self.context.delta_rule, edit):
            logits = self.context.model.model(input_ids=tokens, use_cache=False).logits[0]
            with torch.no_grad():
                generator = torch.Generator().manual_seed(seed)
                uniform = torch.rand(logits.shape[0], 1, generator=generator).to(logits.device)
                cumulative = logits.float().softmax(-1).cumsum(-1)
                label = (cumulative < uniform * cumulative[:, -1:]).sum(-1, keepdim=True)
            logits.float().log_softmax(-1).gather(-1, label).sum().neg().backward()

    def _local(self, tokens: Tensor, seed: int) -> None:
        heads: dict[int, Tensor] = {}

        def edit(layer: int, y: Tensor) -> Tensor:
            heads[layer] = y.detach().requires_grad_()
            return heads[layer]

        def probe(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                out = output[0] if isinstance(output, tuple) else output
                generator = torch.Generator().manual_seed(seed + 7919 * layer)
                cotangent = torch.randn(out.shape, generator=generator).to(out)
                (gradient,) = torch.autograd.grad(out, heads.pop(layer), cotangent)
                self._add(layer, gradient / scale[layer])
                plain = out.detach()
                return (plain, *output[1:]) if isinstance(output, tuple) else plain

            return hook

        scale: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            modules = stack.enter_context(
                capture_delta_rule(self.context.model, self.observer, self.context.delta_rule, edit)
            )
            for layer, (module, block) in enumerate(zip(modules, _blocks(self.context, modules), strict=True)):
                handle = module.register_forward_hook(probe(layer), with_kwargs=True)
                stack.callback(handle.remove)

                def remember(_module: nn.Module, args: Any, kwargs: Any, layer: int = layer) -> None:
                    stream = args[0] if args else kwargs["hidden_states"]
                    scale[layer] = stream.detach().float().square().mean().sqrt()

                handle = block.register_forward_pre_hook(remember, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(torch.enable_grad())
            self.context.model.model(input_ids=tokens, use_cache=False, logits_to_keep=1)

    def state(self) -> dict[str, Tensor]:
        return {"total": self.total, "count": self.count}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.total, self.count = state["total"], state["count"]

    def finish(self) -> Product:
        kind = self.context.recipe.temporal.sensitivity
        return Product({"sensitivity": 0.5 * self.total / self.count.clamp_min(1).view(-1, 1)}, {"kind": kind})


def _blocks(context: Context, modules: list[nn.Module]) -> list[nn.Module]:
    """The decoder layers that hold the delta-rule modules: their input is the residual stream."""
    names = {id(module): name for name, module in context.model.model.named_modules()}
    return [context.model.model.get_submodule(names[id(module)].rpartition(".")[0]) for module in modules]
