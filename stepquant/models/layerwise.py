"""Run a model whose weights do not fit the device: one decoder layer there at a time, every segment through it.

The model's own forward is run once over all segments; each decoder layer, when it is called, is materialised, applied
in micro-batches and freed again. Hidden states wait between layers on the host (or stay on the device). Weights are
read once, whatever the number of segments.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from stepquant.errors import ArtifactError, ModelError
from stepquant.files import hash_json, hash_tensors, read_hashed, replacing
from stepquant.models.adapter import (
    LoadedModel,
    check_layers,
    checked_device,
    load_tokenizer,
    parse_weights,
    resolve_dtype,
)
from stepquant.models.capture import find_delta_layers
from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
from stepquant.models.families import check_transformers, find_family, geometry_from_config
from stepquant.models.layer_source import LayerSource
from stepquant.models.random_weights import build_meta

PROGRESS_FILE = "layerwise.safetensors"


@dataclass(frozen=True)
class LayerDone:
    """A decoder layer has been applied to all segments: `layer` of `layers` (whole model, from 0), in `seconds`."""

    layer: int
    layers: int
    seconds: float


@dataclass(frozen=True)
class Reached:
    """Where a run is: the first layer still to run, the output of the one before it, the observers' accumulators."""

    next_layer: int
    output: Any
    state: dict[str, Tensor]


class _Stop(Exception):
    """The last layer that was asked for has run."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass
class LayerwiseModel:
    """A model with its weights still in the checkpoint. `loaded.model` is there for `capture_delta_rule` only."""

    loaded: LoadedModel
    source: LayerSource
    rows: range = range(0)
    """Segments of the micro-batch that is running, for observers."""
    inside: bool = False
    """A layer is running on one micro-batch (hooks of decoder layers also see the call with all segments)."""

    def run(
        self,
        ids: Tensor,
        *,
        batch: int,
        activations: str = "host",
        last_layer: int | None = None,
        on_layer: Callable[[LayerDone], None] | None = None,
        directory: Path | None = None,
        key: str = "",
        save_seconds: float = 60.0,
        state: Callable[[], dict[str, Tensor]] = dict,
        restore: Callable[[dict[str, Tensor], int], bool] = lambda _state, _layers: True,
    ) -> Tensor:
        """Apply the decoder layers to all segments, layer by layer.

        Within `capture_delta_rule` the observer sees, for each delta-rule layer, every micro-batch in order of
        segments, before the next layer starts. A run that is interrupted writes the last layer's output, and the
        observers' state as it was then, and resumes at the layer it had reached.

        Args:
            ids: token ids ``[n, T]``.
            batch: segments of a micro-batch.
            activations: where hidden states wait between layers, ``host`` or ``device``.
            last_layer: decoder layer after which to stop; by default the last delta-rule layer.
            on_layer: called after each layer.
            directory: where to keep hidden states so that an interrupted run resumes; None keeps nothing.
            key: what the run is made from; a progress file under another key is ignored.
            save_seconds: least time between two writes of the progress file while all goes well.
            state: the observers' accumulators, written with the hidden states.
            restore: given what `state` had returned and the number of layers done; False starts over.

        Returns:
            Hidden states ``[n, T, ...]`` after the last layer that ran, before the final norm.

        Raises:
            ModelError: tensors missing from the checkpoint, or of other shapes.
            ArtifactError: the progress file cannot be written.
        """
        layers = self.source.layers
        last = self.loaded.geometry.layers[-1] if last_layer is None else last_layer
        found = load_progress(directory, key) if directory is not None else None
        start, saved = (
            (found.next_layer, found.output) if found and restore(found.state, found.next_layer) else (0, None)
        )
        reached: list[Reached] = []
        written, wrote = start, time.monotonic()

        def make(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal written, wrote
                if index < start:
                    output = saved
                else:
                    began = time.monotonic()
                    output = self._apply(index, args, kwargs, len(ids), batch, activations)
                    kept = {name: tensor.clone() for name, tensor in state().items()}
                    reached[:] = [Reached(index + 1, output, kept)]
                    if on_layer is not None:
                        on_layer(LayerDone(index, len(layers), time.monotonic() - began))
                    if directory is not None and time.monotonic() - wrote >= save_seconds:
                        save_progress(directory, key, reached[0])
                        written, wrote = index + 1, time.monotonic()
                if index == last:
                    raise _Stop(output)
                return output

            return forward

        try:
            for index, layer in enumerate(layers):
                layer.forward = make(index)
            with torch.no_grad():
                self.source.text_model(input_ids=ids.to(self.source.device), use_cache=False)
        except _Stop as stop:
            return stop.output[0] if isinstance(stop.output, tuple) else stop.output
        except BaseException:
            if directory is not None and reached and reached[0].next_layer > written:
                with contextlib.suppress(ArtifactError):  # what interrupted the run is what has to be said
                    save_progress(directory, key, reached[0])
            raise
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)
        raise ModelError(f"layer {last} was never reached; the model has {len(layers)} decoder layers")

    def _apply(self, index: int, args: Any, kwargs: Any, rows: int, batch: int, activations: str) -> Any:
        """One layer over all micro-batches: tensors whose first dimension is the batch are cut, the rest are shared."""
        device, layer = self.source.device, self.source.layers[index]
        ours = vars(layer).pop("forward")
        self.source.load_layer(index)
        self.source.prefetch_layer(index + 1)
        outputs: list[Any] = []
        for first in range(0, rows, batch):
            self.rows = range(first, min(first + batch, rows))

            def cut(item: Any, first: int = first) -> Any:
                if not isinstance(item, Tensor):
                    return item
                whole = item.ndim >= 2 and item.shape[0] == rows
                return (item[first : first + batch] if whole else item).to(device)

            own_args, own_kwargs = pytree.tree_map(cut, (args, kwargs))
            self.inside = True
            try:
                output = layer(*own_args, **own_kwargs)
            finally:
                self.inside = False
            if activations == "host":
                output = pytree.tree_map(lambda item: item.cpu() if isinstance(item, Tensor) else item, output)
            outputs.append(output)
        self.source.free_layer(index)
        layer.forward = ours
        return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)


def load_layerwise(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    weights: str = "checkpoint",
    tokenizer: bool = True,
    attn_implementation: str | None = None,
) -> LayerwiseModel:
    """Prepare a checkpoint for layer-by-layer runs: structure on the meta device, embedding and norms on the device.

    Args:
        path: as in `load_model`; the checkpoint must be unquantised safetensors.
        device: where layers are materialised.
        dtype: see `resolve_dtype`.
        weights: ``checkpoint`` or ``random:SEED``: the same values as `load_model` gives for that seed.
        tokenizer: load the tokenizer too, where there is one.
        attn_implementation: passed to transformers.

    Raises:
        ModelError: as `load_model`; also already-quantised weights.
        BackendError: a transformers too old for it.
    """
    directory, seed = resolve_checkpoint(path), parse_weights(weights)
    config = read_config(directory)
    family, geometry, kind = find_family(config), geometry_from_config(config), weight_format(config)
    if kind != "unquantised" and seed is None:
        raise ModelError(
            f"{directory} holds {kind} weights; model.loading=layerwise takes unquantised ones, use model.loading=whole"
        )
    check_transformers(family)
    target = checked_device(device)
    model = build_meta(directory, family, resolve_dtype(dtype, target), attn_implementation=attn_implementation)
    model.eval().requires_grad_(requires_grad=False)
    modules = find_delta_layers(model)
    check_layers(modules, geometry, config)
    source = LayerSource(model, directory, target, seed)
    source.load_trunk()
    found = load_tokenizer(directory) if tokenizer else None
    loaded = LoadedModel(model, found, geometry, family, modules, config, directory, weights, kind, target)
    return LayerwiseModel(loaded, source)


def save_progress(directory: Path, key: str, reached: Reached) -> None:
    """Write where a run has got to atomically.

    Raises:
        ArtifactError: the disk is full or not writable.
    """
    output = reached.output
    items = output if isinstance(output, tuple) else (output,)
    tensors = {str(i): item.contiguous().cpu() for i, item in enumerate(items) if isinstance(item, Tensor)}
    tensors.update({f"state/{name}": tensor.contiguous().cpu() for name, tensor in reached.state.items()})
    facts = {"key": key, "next_layer": reached.next_layer, "items": len(items), "tuple": isinstance(output, tuple)}
    text = json.dumps(facts)
    try:
        with replacing(directory / PROGRESS_FILE) as temporary:
            save_file(tensors, temporary, metadata={"facts": text, "sha256": hash_json([text, hash_tensors(tensors)])})
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{directory / PROGRESS_FILE} could not be written ({error}); free the disk or choose another with "
            "cache.dir=DIR"
        ) from None


def load_progress(directory: Path, key: str) -> Reached | None:
    """Where an interrupted run under `key` had got to; None where there is nothing to resume, or it is damaged."""
    try:
        tensors, facts = read_hashed(directory / PROGRESS_FILE, "the progress of a run")
    except ArtifactError:
        return None
    if facts["key"] != key:
        return None
    items = tuple(tensors.get(str(i)) for i in range(facts["items"]))
    state = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("state/")}
    return Reached(facts["next_layer"], items if facts["tuple"] else items[0], state)
