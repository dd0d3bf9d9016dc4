"""Capture of the delta rule: what every delta-rule layer feeds its recurrence, and a way to put another in its place.

The modelling files call a module-level function from each delta-rule layer. Within `capture_delta_rule` those functions
are replaced in the module's globals (and on instances that bound them), and restored afterwards. Nothing is retained:
an observer that wants to keep something copies it.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from stepquant.errors import ModelError
from stepquant.models.family_table import FAMILY_TABLE, GDN_FUNCTIONS, KDA_FUNCTIONS

_NAMES = re.compile(r"^(torch_|fused_)?(chunk|recurrent)_(gated_delta_rule|kimi_delta_attention|kda)$")
_ALIASES = {"q": "query", "k": "key", "v": "value"}
_EPS = 1e-6


@dataclass
class DeltaTrace:
    """Inputs of one call of a layer's delta rule, in the conventions of the paper.

    Attributes:
        layer: index among the delta-rule layers, from 0.
        q: ``[B, T, H, K]`` float32, L2-normalised, scaled by ``K^-1/2``; grouped key heads repeated to H value heads.
        k: ``[B, T, H, K]`` float32, L2-normalised.
        v: ``[B, T, H, V]`` float32.
        log_gate: ``[B, T, H]`` (GDN) or ``[B, T, H, K]`` (KDA) float32, natural log, at most 0.
        beta: ``[B, T, H]`` float32 write strength.
        initial_state: ``[B, H, K, V]`` state before the first token, or None for zeros.
        wants_state: the layer keeps a cache, so a replacement must also return the final state.
        recurrent: called through the token-by-token function (incremental decode).
        dtype: dtype in which the layer expects ``y``.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    log_gate: Tensor
    beta: Tensor
    initial_state: Tensor | None
    wants_state: bool
    recurrent: bool
    dtype: torch.dtype


Observer = Callable[[int, DeltaTrace], None]
Replacement = Callable[[int, DeltaTrace], "Tensor | tuple[Tensor, Tensor | None]"]
Edit = Callable[[int, Tensor], Tensor]


def find_delta_layers(model: nn.Module) -> list[nn.Module]:
    """Delta-rule modules of a model in the order of the layers they sit in.

    Raises:
        ModelError: none found.
    """
    classes = {family.layer_class for family in FAMILY_TABLE.values()}
    found = [module for module in model.modules() if type(module).__name__ in classes or _calls_delta_rule(module)]
    if not found:
        raise ModelError(
            f"{type(model).__name__} holds no delta-rule layer; expected modules of a class among "
            f"{', '.join(sorted(classes))}"
        )
    return sorted(found, key=lambda module: int(getattr(module, "layer_idx", 0)))


def _calls_delta_rule(module: nn.Module) -> bool:
    """A class outside the table whose own forward names a delta-rule function (remote code)."""
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    return hasattr(module, "layer_idx") and any(_NAMES.match(name) for name in names)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _EPS)


def _make_trace(layer: int, name: str, call: dict[str, Any]) -> DeltaTrace:
    """Bring one call's arguments to the conventions of `DeltaTrace`."""
    for refused in ("cu_seqlens", "use_gate_in_kernel", "transpose_state_layout", "state_v_first"):
        if call.get(refused) is not None and call.get(refused) is not False:
            raise ModelError(
                f"delta-rule layer {layer} calls {name} with {refused}; expected unpacked batches and ready gates"
            )
    query, key, value = call["query"], call["key"], call["value"]
    q, k, v, gate, beta = (x.to(torch.float32) for x in (query, key, value, call["g"], call["beta"]))
    if call.get("use_qk_l2norm_in_kernel"):
        q, k = _l2norm(q), _l2norm(k)
    scale = call.get("scale")
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    groups = v.shape[2] // k.shape[2]
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    return DeltaTrace(
        layer, q, k, v, gate, beta, call.get("initial_state"), bool(call.get("output_final_state")),
        "recurrent" in name, query.dtype,
    )  # fmt: skip


class _Interceptor:
    """State shared by the patched functions of one `capture_delta_rule`."""

    def __init__(self, observer: Observer | None, replace: Replacement | None, edit: Edit | None) -> None:
        self.observer, self.replace, self.edit = observer, replace, edit
        self.stack: list[list[int]] = []  # [delta layer, calls seen] of the modules being run

    def enter(self, layer: int) -> None:
        self.stack.append([layer, 0])

    def leave(self, check: bool) -> None:
        layer, calls = self.stack.pop()
        if check and not calls:
            raise ModelError(
                f"delta-rule layer {layer} ran without calling a delta-rule function of its modelling file (a replaced "
                "kernel?); load the model without hub kernels (use_kernels=False)"
            )

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def intercepted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            if not self.stack:
                return function(*args, **kwargs)
            bound = signature.bind_partial(*args, **kwargs)
            call = {**bound.arguments, **bound.arguments.get("kwargs", {})}
            call = {_ALIASES.get(key, key): item for key, item in call.items()}
            self.stack[-1][1] += 1
            layer = self.stack[-1][0]
            trace = _make_trace(layer, name, call)
            if self.observer is not None:
                self.observer(layer, trace)
            if self.replace is None:
                del trace, call
                output = function(*args, **kwargs)
                return output if self.edit is None else (self.edit(layer, output[0]), *output[1:])
            y, state = _replaced(self.replace(layer, trace), trace)
            return (y if self.edit is None else self.edit(layer, y)), state

        return intercepted


def _replaced(result: Tensor | tuple[Tensor, Tensor | None], trace: DeltaTrace) -> tuple[Tensor, Tensor | None]:
    y, state = result if isinstance(result, tuple) else (result, None)
    if y.shape != trace.v.shape:
        raise ModelError(
            f"replacement of layer {trace.layer} returned y {list(y.shape)}; expected {list(trace.v.shape)}"
        )
    if trace.wants_state and state is None:
        raise ModelError(
            f"replacement of layer {trace.layer} returned no final state but the model keeps a cache; return "
            "(y, state) or run with use_cache=False"
        )
    return y.to(trace.dtype), state


def _patch_targets(modules: list[nn.Module]) -> Iterator[tuple[ModuleType | nn.Module, str, Callable[..., Any]]]:
    """(holder, attribute, function) for every binding of a delta-rule function."""
    files = {type(module).__module__ for module in modules}
    for name in sorted(files):
        for attribute, function in list(vars(sys.modules[name]).items()):
            if callable(function) and _NAMES.match(attribute):
                yield sys.modules[name], attribute, function
    for module in modules:
        for attribute, function in list(vars(module).items()):
            if callable(function) and _NAMES.match(attribute):
                yield module, attribute, function


@contextlib.contextmanager
def capture_delta_rule(
    model: Any, observer: Observer | None = None, replace: Replacement | None = None, edit: Edit | None = None
) -> Iterator[list[nn.Module]]:
    """Intercept the delta rule of every layer while the context is open.

    Args:
        model: a transformers model or a `LoadedModel`.
        observer: called as ``observer(layer, trace)`` before each layer's delta rule runs. Tensors belong to the call;
            they carry an autograd graph where gradients are enabled.
        replace: called as ``replace(layer, trace)`` instead of the native function; returns ``y [B, T, H, V]``, or
            ``(y, final_state)`` where the model keeps a cache. Differentiable replacements keep the graph.
        edit: called as ``edit(layer, y)`` on the function's output ``[B, T, H, V]``; what it returns goes on
            into the layer. For gradients and noise at the heads' outputs.

    Yields:
        The delta-rule modules, in layer order.

    Raises:
        ModelError: no delta-rule layer or function found, a layer that bypasses them, or a bad replacement result.
    """
    model = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    modules = find_delta_layers(model)
    interceptor = _Interceptor(observer, replace, edit)
    with contextlib.ExitStack() as stack:
        targets = list(_patch_targets(modules))
        if not targets:
            expected = ", ".join((*GDN_FUNCTIONS, *KDA_FUNCTIONS))
            raise ModelError(f"{type(modules[0]).__module__} has no delta-rule function; expected one of {expected}")
        for holder, attribute, function in targets:
            setattr(holder, attribute, interceptor.wrap(attribute, function))
            stack.callback(setattr, holder, attribute, function)
        for index, module in enumerate(modules):
            handle = module.register_forward_pre_hook(lambda _m, _a, layer=index: interceptor.enter(layer))
            stack.callback(handle.remove)
            handle = module.register_forward_hook(
                lambda _m, _a, output: interceptor.leave(check=output is not None), always_call=True
            )
            stack.callback(handle.remove)
        yield modules
