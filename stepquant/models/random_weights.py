"""A model with seeded random weights built from its configuration alone, filled on its device module by module.

Nothing is written and no second copy is ever held, so a 27B or 48B model fits wherever its weights do. Scales follow
the model's own initialisation, with changes that make the recurrence behave like a trained one: convolutions of unit
gain, decay rates log-uniform in 1..16 (1 for bounded gates), and time steps whose softplus is log-uniform in
0.001..0.1 (half-lives from a token to about 700 tokens).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepquant.errors import ModelError
from stepquant.models.family_table import ModelFamily


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings while the context is open; they are restored afterwards."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def build_random(
    directory: Path,
    family: ModelFamily,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | str,
    *,
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
) -> nn.Module:
    """Build the family's language model from config.json and fill it with random weights.

    Args:
        directory: where config.json lies.
        family: entry of the table.
        seed: every module's values depend on this seed and its own name only, not on the order of filling.
        device: target of every module when there is no device map.
        dtype: dtype of the weights; ``auto`` takes the config's, else bfloat16.
        device_map: ``auto`` or a map of module names to devices (needs accelerate).
        attn_implementation: passed to transformers.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    model: Any = build_meta(directory, family, dtype, attn_implementation=attn_implementation)
    places = _placement(model, device_map, dtype)
    for name, module in model.named_modules():
        fill_module(initialiser(model, name), name, module, seed, places(name) if places else device)
    model.tie_weights()
    if device_map is not None:
        from accelerate import dispatch_model

        model = dispatch_model(model, device_map=places.map)  # type: ignore[union-attr]
    return model


def build_meta(
    directory: Path, family: ModelFamily, dtype: torch.dtype | str, *, attn_implementation: str | None = None
) -> nn.Module:
    """The model on the meta device: structure and dtypes, no memory.

    Raises:
        ModelError: transformers refuses the configuration.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory))
        if dtype == "auto":
            stated = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
            dtype = stated if isinstance(stated, torch.dtype) else torch.bfloat16
        if family.auto_class == "AutoModelForCausalLM":
            config = config.get_text_config()
        options = {"attn_implementation": attn_implementation} if attn_implementation else {}
        with torch.device("meta"):
            return family.load_auto_class().from_config(config, dtype=dtype, **options)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"transformers cannot build a {family.model_type} model from {directory}: {error}") from error


def initialiser(model: nn.Module, name: str) -> Any:
    """The innermost transformers model that holds a module: its own rules initialise it."""
    owner = model
    parts = name.split(".") if name else []
    for count in range(1, len(parts)):
        candidate = model.get_submodule(".".join(parts[:count]))
        owner = candidate if hasattr(candidate, "_init_weights") else owner
    return owner


def fill_module(owner: Any, name: str, module: nn.Module, seed: int, device: torch.device) -> None:
    """Materialise one module's own parameters and buffers (not its children's) and give them seeded values.

    Args:
        owner: transformers model whose ``_init_weights`` knows the module.
        name: the module's name in the whole model; with `seed` it determines the values.
        module: the module, on the meta device or not.
        seed: seed of the model.
        device: where its tensors go.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if not own:
        return
    module.to_empty(device=device, recurse=False)
    state = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(state)
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
        owner._init_weights(module)
        _fill_special(module)


def _fill_special(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d) and module.groups == module.in_channels and module.groups > 1:
        module.weight.normal_(std=module.kernel_size[0] ** -0.5)
    rate, step = getattr(module, "A_log", None), getattr(module, "dt_bias", None)
    if isinstance(rate, Tensor):
        bounded = getattr(module, "safe_gate_lower_bound", None) is not None or getattr(module, "safe_gate", False)
        rate.copy_(torch.empty_like(rate, dtype=torch.float32).uniform_(0.0, 0.0 if bounded else math.log(16.0)))
    if isinstance(step, Tensor):
        dt = torch.empty_like(step, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        step.copy_(dt + torch.log(-torch.expm1(-dt)))


class _Places:
    """Device of a module by the longest prefix of its name in a device map."""

    def __init__(self, device_map: Mapping[str, Any]) -> None:
        self.map = dict(device_map)

    def __call__(self, name: str) -> torch.device:
        prefix = name
        while prefix not in self.map and prefix:
            prefix = prefix.rpartition(".")[0]
        return torch.device(self.map.get(prefix, next(iter(self.map.values()))))


def _placement(
    model: nn.Module, device_map: str | Mapping[str, Any] | None, dtype: torch.dtype | str
) -> _Places | None:
    if device_map is None:
        return None
    if isinstance(device_map, Mapping):
        return _Places(device_map)
    try:
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory
    except ImportError:
        raise ModelError(f"model.device_map={device_map} needs accelerate: pip install accelerate") from None
    blocks = list(getattr(model, "_no_split_modules", None) or [])
    memory = get_balanced_memory(model, no_split_module_classes=blocks)
    return _Places(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=blocks))
