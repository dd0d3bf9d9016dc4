"""Checks before anything expensive: seconds, no weights loaded. Each says what it found and what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepquant.errors import DataError, ModelError, StepQuantError
from stepquant.geometry import Geometry
from stepquant.models.checkpoint import read_config, resolve_checkpoint, weight_format
from stepquant.models.families import check_transformers, find_family, gate_lower_bound, geometry_from_config
from stepquant.models.fingerprint import TensorEntry, checkpoint_tensors
from stepquant.models.text import WIKITEXT, check_file, stdlib_documents

MAX_KEY_DIM = 256
MULTIPLE = 16
GIB = 1 << 30
_GATE = re.compile(r"^(?!mtp\.)(?:.*\.)?layers\.(\d+)\..*A_log$")
_NEEDED_PACKAGES = {
    "compressed-tensors": "compressed_tensors",
    "awq": "gptqmodel",
    "gptq": "gptqmodel",
    "fp8": "accelerate",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tiktoken.model")


class Check(NamedTuple):
    """One check: its name, whether it passed, and what was found (and what to do, where it did not pass)."""

    name: str
    ok: bool
    detail: str


def check_all(
    path: str | Path,
    *,
    weights: str = "checkpoint",
    loading: str = "whole",
    device: str = "auto",
    device_map: str | None = None,
    source: str = "builtin",
    data_path: str | Path | None = None,
    cache_dir: str | Path | None = None,
    cache_bytes: int = 0,
) -> list[Check]:
    """All checks of a calibration run, in the order in which they would stop it.

    Args:
        path: ``model.path``.
        weights: ``checkpoint`` or ``random:SEED``.
        loading: ``whole`` or ``layerwise``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        device_map: ``auto`` where the model may be spread over all GPUs.
        source: ``data.source``.
        data_path: ``data.path``.
        cache_dir: where the cache goes; None leaves the disk out.
        cache_bytes: what a run writes there.

    Returns:
        The checks; nothing is raised for a failed one. What depends on a failed check is left out.
    """
    try:
        directory = resolve_checkpoint(path)
        config = read_config(directory)
        geometry = geometry_from_config(config)
    except StepQuantError as error:
        return [Check("config", False, str(error))]
    checks = [
        Check("config", True, f"{geometry.model_type}: {describe(geometry, config)}"),
        _run("transformers", lambda: f"transformers {check_transformers(find_family(config))}"),
        _run("dimensions", lambda: check_dimensions(geometry)),
    ]
    size = 0
    if weights == "checkpoint":
        try:
            tensors = checkpoint_tensors(directory)
            size = sum(entry.size for entry in tensors.values())
            checks.append(_run("layers", lambda: check_gates(tensors, geometry)))
            checks.append(_run("weights", lambda: _check_format(config, size, loading)))
        except ModelError as error:
            checks.append(Check("weights", False, str(error)))
        checks.append(_run("tokenizer", lambda: _check_tokenizer(directory)))
    checks.append(_run("device", lambda: _check_device(device, device_map, loading, size)))
    if cache_dir is not None:
        checks.append(_run("disk", lambda: check_disk(Path(cache_dir), cache_bytes)))
    checks.append(_run("data", lambda: check_data(source, data_path)))
    return checks


def describe(geometry: Geometry, config: Mapping[str, Any]) -> str:
    """One line about a model's recurrent state, with what is unusual about its gates."""
    text = (
        f"{geometry.family.upper()}, {geometry.num_delta_layers} of {geometry.num_layers} layers, {geometry.num_heads} "
        f"value heads on {geometry.num_key_heads} key heads, {geometry.key_dim} x {geometry.value_dim}"
    )
    if geometry.beta_max > 1:
        text += f"; beta up to {geometry.beta_max:g} (negative eigenvalues: the contraction bound does not hold)"
    bound = gate_lower_bound(config)
    return text if bound is None else f"{text}; gates bounded below by {bound:g}"


def check_dimensions(geometry: Geometry) -> str:
    """Check that packers and kernels take K and V.

    Raises:
        ModelError: K or V not a multiple of 16, or K above 256.
    """
    k, v = geometry.key_dim, geometry.value_dim
    if k % MULTIPLE or v % MULTIPLE or k > MAX_KEY_DIM:
        raise ModelError(
            f"{geometry.model_type} has states of {k} x {v}; the packed layout takes multiples of {MULTIPLE}, and at "
            f"most {MAX_KEY_DIM} key rows"
        )
    return f"{k} key rows x {v} value columns"


def check_gates(tensors: Mapping[str, TensorEntry], geometry: Geometry) -> str:
    """Compare the layers that hold gate tensors (``A_log``), and their head counts, with what the config promises.

    Raises:
        ModelError: other layers or another number of heads; both sides are in the message.
    """
    heads: dict[int, int] = {}
    for name, entry in tensors.items():
        match = _GATE.match(name)
        if match and int(match.group(1)) < geometry.num_layers:
            count = 1
            for extent in entry.shape:
                count *= extent
            heads[int(match.group(1))] = count
    found = sorted(heads)
    if found != list(geometry.layers):
        raise ModelError(
            f"delta-rule layers found in the checkpoint {found}, promised by its config {list(geometry.layers)}; the "
            "layer list in config.json is not this checkpoint's"
        )
    wrong = {layer: count for layer, count in heads.items() if count != geometry.num_heads}
    if wrong:
        layer, count = next(iter(wrong.items()))
        raise ModelError(f"layer {layer} has gates for {count} heads, its config promises {geometry.num_heads}")
    return f"{len(found)} delta-rule layers, as promised"


def check_disk(directory: Path, need: int) -> str:
    """Check that the cache's file system is writable and holds `need` more bytes.

    Raises:
        ModelError: it does not.
    """
    existing = next(
        parent
        for parent in (directory.expanduser().absolute(), *directory.expanduser().absolute().parents)
        if parent.exists()
    )
    if not os.access(existing, os.W_OK):
        raise ModelError(f"cache.dir {str(directory)!r} is not writable; choose another with cache.dir=DIR")
    free = shutil.disk_usage(existing).free
    if free < need:
        raise ModelError(
            f"cache.dir {str(directory)!r} has {free / GIB:.1f} GiB free, a run writes up to {need / GIB:.1f} GiB; "
            "choose another with cache.dir=DIR, or lower samples.per_layer"
        )
    return f"{free / GIB:.1f} GiB free, up to {need / GIB:.1f} GiB needed"


def check_data(source: str, path: str | Path | None = None) -> str:
    """Check that a text source can be reached, without reading or downloading it.

    Raises:
        DataError: it cannot; the message names the alternatives.
    """
    if source == "builtin":
        next(iter(stdlib_documents("train")))
        return "the standard library of this Python"
    if source == "file":
        if path is None:
            raise DataError("data.source=file needs data.path: a text file, .jsonl or .parquet")
        return f"{check_file(Path(path)).stat().st_size:,} bytes of local text"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            "data.source=wikitext2 needs the package datasets: pip install 'stepquant[data]', or data.source=builtin"
        )
    return _check_hub(*WIKITEXT)


def _check_hub(name: str, subset: str) -> str:
    """Whether a data set is in the datasets cache, or else its page answers within seconds."""
    from datasets import config as datasets_config

    if any(Path(datasets_config.HF_DATASETS_CACHE).glob(f"{name.replace('/', '___')}/{subset}*")):
        return f"{name} is in the datasets cache"
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=5)
    except Exception as error:
        raise DataError(
            f"{name} is not cached and the Hugging Face hub does not answer ({type(error).__name__}); use "
            "data.source=builtin, or data.source=file data.path=FILE"
        ) from None
    return f"{name} can be downloaded"


def _check_format(config: Mapping[str, Any], size: int, loading: str) -> str:
    kind = weight_format(config)
    if kind != "unquantised" and loading == "layerwise":
        raise ModelError(f"the weights are {kind}; model.loading=layerwise takes unquantised ones, use whole")
    method = next((name for name in _NEEDED_PACKAGES if kind.startswith(name)), None)
    if method is not None and importlib.util.find_spec(_NEEDED_PACKAGES[method]) is None:
        package = _NEEDED_PACKAGES[method].replace("_", "-")
        raise ModelError(
            f"the weights are {kind}; transformers loads them with {package}, not installed: pip install {package}"
        )
    return f"{kind}, {size / GIB:.2f} GiB"


def _check_tokenizer(directory: Path) -> str:
    found = next((name for name in _TOKENIZER_FILES if (directory / name).exists()), None)
    if found is None:
        raise ModelError(
            f"{directory} has none of {', '.join(_TOKENIZER_FILES)}; copy the checkpoint's tokenizer files there"
        )
    return found


def _check_device(device: str, device_map: str | None, loading: str, size: int) -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device.startswith("cuda") and not count:
        raise ModelError(f"model.device is {device} but torch sees no CUDA device; use model.device=cpu")
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise ModelError(f"model.device_map={device_map} needs accelerate: pip install accelerate")
    if device == "cpu":
        return "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise ModelError(f"model.device is {device} but torch sees {count} CUDA device(s)")
    used = range(count) if device_map is not None else [index]
    memory = sum(torch.cuda.get_device_properties(i).total_memory for i in used)
    if loading == "whole" and size > 0.95 * memory:
        raise ModelError(
            f"{size / GIB:.1f} GiB of weights do not fit {memory / GIB:.1f} GiB on the GPU; use model.loading=layerwise"
            + ("" if device_map else " or model.device_map=auto over several GPUs")
        )
    return f"{device}, {memory / GIB:.1f} GiB"


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except StepQuantError as error:
        return Check(name, False, str(error))
