"""Where a model's weights come from when they are loaded one decoder layer at a time: safetensors files or a seed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from stepquant.errors import BackendError, ModelError
from stepquant.models.capture import find_delta_layers
from stepquant.models.fingerprint import TensorEntry, checkpoint_tensors
from stepquant.models.finite import check_finite
from stepquant.models.random_weights import fill_module, initialiser, quiet_transformers


class LayerSource:
    """Materialises parts of a meta-device model on a device, and takes them back.

    Args:
        model: language model on the meta device.
        directory: its checkpoint.
        device: where parts are materialised.
        seed: seed of random weights, or None to read the checkpoint's safetensors files.

    Raises:
        ModelError: the decoder layers cannot be found, or the checkpoint is not safetensors.
        BackendError: this transformers has no conversion of checkpoint names that can be used part by part.
    """

    def __init__(self, model: Any, directory: Path, device: torch.device, seed: int | None) -> None:
        self.model, self.directory, self.device, self.seed = model, directory, device, seed
        self.trunk_path = decoder_path(model)
        self.text_model: Any = model.get_submodule(self.trunk_path)
        self.layers = list(self.text_model.layers)
        self.entries: dict[str, TensorEntry] = {}
        self.keys: dict[str, list[str]] = {}
        if seed is None:
            self.entries = checkpoint_tensors(directory)
            self._assign_keys()

    def load_layer(self, index: int) -> None:
        """Put decoder layer `index` on the device."""
        self._load(f"{self._prefix}layers.{index}")

    def free_layer(self, index: int) -> None:
        """Return decoder layer `index` to the meta device."""
        self.layers[index].to("meta")

    def load_trunk(self) -> None:
        """Put what is not a decoder layer (embedding, norms, rotary tables) on the device; the head stays away."""
        for name, _ in self.text_model.named_children():
            if name != "layers":
                self._load(f"{self._prefix}{name}")
        self._load(self.trunk_path, recurse=False)

    def prefetch_layer(self, index: int) -> None:
        """Ask the operating system to read a layer's bytes ahead; returns at once."""
        if index >= len(self.layers) or self.seed is not None or not hasattr(os, "posix_fadvise"):
            return
        for key in self.keys.get(f"{self._prefix}layers.{index}", ()):
            entry = self.entries[key]
            descriptor = os.open(entry.file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, entry.start, entry.end - entry.start, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    @property
    def _prefix(self) -> str:
        return f"{self.trunk_path}." if self.trunk_path else ""

    def _load(self, path: str, recurse: bool = True) -> None:
        part = self.model.get_submodule(path)
        named = part.named_modules(prefix=path) if recurse else [(path, part)]
        for name, module in named:
            if self.seed is not None:
                fill_module(initialiser(self.model, name), name, module, self.seed, self.device)
            else:
                self._fill_computed_buffers(name, module)
        if self.seed is None:
            self._read(path, part, recurse)

    def _fill_computed_buffers(self, name: str, module: nn.Module) -> None:
        """Buffers that no checkpoint stores (rotary tables): made again by the model's own initialisation."""
        computed = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        for key in computed:
            module._buffers[key] = torch.zeros_like(module.get_buffer(key), device=self.device)
        if computed:
            with torch.no_grad():
                initialiser(self.model, name)._init_weights(module)

    def _read(self, path: str, part: nn.Module, recurse: bool) -> None:
        group = path if recurse else f"{path}:own"
        keys = self.keys.get(group, [])
        if keys:
            with quiet_transformers():
                info = self._convert(keys)
            bad = sorted(str(item) for item in info.mismatched_keys)
            if bad:
                raise ModelError(f"{self.directory}: shapes that differ from the config's, first {bad[0]}")
        tensors = part.state_dict() if recurse else dict(part.named_parameters(recurse=False))
        missing = [name for name, tensor in tensors.items() if tensor.is_meta]
        if missing:
            raise ModelError(
                f"{self.directory} lacks {len(missing)} tensors of {path}, first {missing[0]}; the checkpoint is "
                "incomplete or its config.json is another model's"
            )
        check_finite(self.directory, {f"{path}.{name}": tensor for name, tensor in tensors.items()})

    def _convert(self, keys: list[str]) -> Any:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        dtype = next(p.dtype for p in self.text_model.embed_tokens.parameters())
        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=dtype,
            dtype_plan=self.model._get_dtype_plan(dtype),
            weight_mapping=_conversions(self.model),
        )
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(file, framework="pt"))
                for file in {self.entries[key].file for key in keys}
            }
            slices = {key: files[self.entries[key].file].get_slice(key) for key in keys}
            info, _ = convert_and_load_state_dict_in_model(self.model, slices, config, None)
        return info

    def _assign_keys(self) -> None:
        """Group the checkpoint's tensor names by the part of the model they end up in."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = _conversions(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        known = self.model.state_dict()
        for key in self.entries:
            name, _ = rename_source_key(key, renamings, converters, self.model.base_model_prefix, known)
            if name not in known and key in known:
                name, _ = rename_source_key(key, [], [], self.model.base_model_prefix, known)
            if name in known and name.startswith(self._prefix):
                self.keys.setdefault(self._group(name), []).append(key)

    def _group(self, name: str) -> str:
        parts = name.removeprefix(self._prefix).split(".")
        if parts[0] == "layers":
            return f"{self._prefix}layers.{parts[1]}"
        return f"{self._prefix}{parts[0]}" if len(parts) > 1 else f"{self.trunk_path}:own"


def decoder_path(model: nn.Module) -> str:
    """Name of the submodule that owns the decoder layers (``model``, ``model.language_model``).

    Raises:
        ModelError: the delta-rule layers are not in a list called ``layers``.
    """
    names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
    first = names[find_delta_layers(model)[0]]
    match = re.match(r"^(?:(.*)\.)?layers\.\d+\.", first)
    if match is None:
        raise ModelError(f"delta-rule layer {first!r} is not inside a list of decoder layers called 'layers'")
    return match.group(1) or ""


def _conversions(model: Any) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key  # noqa: F401
    except ImportError as error:
        raise BackendError(
            f"model.loading=layerwise needs transformers' conversion of checkpoint names ({error}); install "
            "transformers 5.24, or use model.loading=whole"
        ) from None
    return list(get_model_conversion_mapping(model))
