"""One adapter for all families: load a checkpoint (or build it with random weights) and check it against its config."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepquant.errors import ModelError
from stepquant.geometry import Geometry
from stepquant.models.capture import find_delta_layers
from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
from stepquant.models.families import check_transformers, find_family, geometry_from_config
from stepquant.models.family_table import ModelFamily
from stepquant.models.fingerprint import fingerprint
from stepquant.models.finite import check_finite
from stepquant.models.random_weights import build_random, quiet_transformers

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class LoadedModel:
    """A delta-rule model ready to run, in evaluation mode, its parameters not requiring gradients.

    Attributes:
        model: transformers model with a language-modelling head; call it with ``input_ids``.
        tokenizer: the checkpoint's tokenizer, or None where it has none (random weights from a bare config).
        geometry: shapes of its recurrent state.
        family: its entry in the table of families.
        delta_layers: delta-rule modules in layer order.
        config: the checkpoint's config.json.
        path: checkpoint directory.
        weights: ``checkpoint`` or ``random:SEED``; plans from random weights are marked synthetic.
        weight_format: ``unquantised``, or what the weights were quantised with.
        device: where inputs go (the first device of a device map).
    """

    model: nn.Module
    tokenizer: Any
    geometry: Geometry
    family: ModelFamily
    delta_layers: list[nn.Module]
    config: Mapping[str, Any]
    path: Path
    weights: str
    weight_format: str
    device: torch.device
    _fingerprint: str | None = field(default=None, repr=False)

    @property
    def synthetic(self) -> bool:
        """The weights are random."""
        return self.weights != "checkpoint"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint (see `stepquant.models.fingerprint`), read once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.path, weights=self.weights)
        return self._fingerprint


def parse_weights(weights: str) -> int | None:
    """Seed of ``random:SEED``, or None for ``checkpoint``.

    Raises:
        ModelError: anything else.
    """
    if weights == "checkpoint":
        return None
    kind, _, seed = str(weights).partition(":")
    if kind == "random" and (seed or "0").isdecimal():
        return int(seed or 0)
    raise ModelError(
        f"model.weights is {weights!r}; expected checkpoint or random:SEED with a non-negative integer SEED"
    )


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """The dtype to load in: ``auto`` is the checkpoint's own on an accelerator and float32 on a CPU.

    Raises:
        ModelError: unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise ModelError(f"model.dtype is {dtype!r}; expected auto or one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    weights: str = "checkpoint",
    trust_remote_code: bool = False,
    tokenizer: bool = True,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """Load a checkpoint of a known family, checked against what its config promises.

    Args:
        path: checkpoint directory, ``builtin:tiny_gdn``, ``builtin:tiny_kda``, or a name in the Hugging Face cache.
        device: where the model goes when there is no device map; ``auto`` is a GPU where there is one.
        dtype: dtype of the weights (see `resolve_dtype`).
        device_map: ``auto`` or an explicit map, to spread the model over several devices (needs accelerate).
        weights: ``checkpoint``, or ``random:SEED`` to build from config.json alone and fill module by module.
        trust_remote_code: passed to transformers.
        tokenizer: load the tokenizer too, where there is one.
        attn_implementation: passed to transformers for the attention layers.

    Raises:
        ModelError: unknown family, transformers without it, incomplete checkpoint, or layers, heads or dimensions that
            are not what the config promises.
    """
    directory, seed = resolve_checkpoint(path), parse_weights(weights)
    config = read_config(directory)
    family, geometry = find_family(config), geometry_from_config(config)
    if not trust_remote_code:
        check_transformers(family)
    target = checked_device(device)
    torch_dtype = resolve_dtype(dtype, target)
    if seed is None:
        model = _from_pretrained(
            directory, family, target, torch_dtype, device_map, trust_remote_code, attn_implementation
        )
    else:
        model = build_random(
            directory, family, seed, target, torch_dtype, device_map=device_map, attn_implementation=attn_implementation
        )
    model.eval().requires_grad_(requires_grad=False)
    layers = find_delta_layers(model)
    check_layers(layers, geometry, config)
    check_finite(directory, model.named_parameters())
    first = next((p.device for p in model.parameters() if p.device.type != "meta"), target)
    found = load_tokenizer(directory, trust_remote_code=trust_remote_code) if tokenizer else None
    return LoadedModel(
        model, found, geometry, family, layers, config, directory, weights, weight_format(config), first
    )  # fmt: skip


def checked_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"model.device is {device!r}: {str(error).splitlines()[0]}") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {str(target)!r} but torch sees no CUDA device; use model.device=cpu")
    return target


def _from_pretrained(
    directory: Path,
    family: ModelFamily,
    device: torch.device,
    dtype: torch.dtype | str,
    device_map: str | Mapping[str, Any] | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device_map is not None:
        options["device_map"] = device_map
    elif device.type != "cpu" and importlib.util.find_spec("accelerate"):
        options["device_map"] = {"": device}  # straight to the device, with no copy of the whole model on the host
    try:
        with quiet_transformers():
            model, info = family.load_auto_class().from_pretrained(str(directory), **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load {directory}: {type(error).__name__}: {error}") from error
    problems = {key: sorted(map(str, info.get(key) or ())) for key in ("missing_keys", "mismatched_keys")}
    for key, names in problems.items():
        if names:
            raise ModelError(
                f"{directory} does not match its config: {len(names)} {key.replace('_', ' ')}, first {names[0]}; the "
                "checkpoint is incomplete or its config.json is another model's"
            )
    if "device_map" not in options and device.type != "cpu":
        model = model.to(device)
    return model


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer, or None where it has no tokenizer files.

    Raises:
        ModelError: tokenizer files that transformers cannot load.
    """
    directory = resolve_checkpoint(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tiktoken.model")
    if not any((directory / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"transformers cannot load the tokenizer of {directory}: {error}") from error


def check_layers(layers: Sequence[nn.Module], geometry: Geometry, config: Mapping[str, Any]) -> None:
    """Compare the delta-rule modules found in a model with what its config promises.

    Raises:
        ModelError: other layers, head counts or dimensions; both sides are in the message.
    """
    name = config.get("model_type")
    found = [int(getattr(module, "layer_idx", -1)) for module in layers]
    if found != list(geometry.layers):
        raise ModelError(
            f"{name}: delta-rule layers found in the model {found}, promised by its config {list(geometry.layers)}; "
            "the layer list in config.json is not this model's"
        )
    promised = {
        "value heads": (("num_v_heads", "num_heads"), geometry.num_heads),
        "key heads": (("num_k_heads", "num_heads"), geometry.num_key_heads),
        "key rows": (("head_k_dim", "head_dim"), geometry.key_dim),
        "value columns": (("head_v_dim", "head_dim"), geometry.value_dim),
    }
    for index, module in zip(found, layers, strict=True):
        for what, (attributes, expected) in promised.items():
            value = next(
                (getattr(module, a) for a in attributes if isinstance(getattr(module, a, None), int)), expected
            )
            if value != expected:
                raise ModelError(
                    f"{name} layer {index}: {value} {what} in the model, {expected} promised by its config"
                )
