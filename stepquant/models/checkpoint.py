"""Checkpoints on disk: where a `model.path` lies, its config.json, the format of its weights. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepquant.errors import ModelError, closest


def read_config(path: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint directory (or that file itself, or an alias).

    Raises:
        ModelError: missing, not JSON, or not an object.
    """
    path = resolve_checkpoint(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot read {file}: {error.strerror or error}; expected a checkpoint directory with config.json"
        ) from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}; expected a JSON object")
    return config


def resolve_checkpoint(path: str | Path) -> Path:
    """Directory (or config file) that a recipe's ``model.path`` means.

    ``builtin:tiny_gdn`` and ``builtin:tiny_kda`` are the packaged models; ``org/name`` is looked up in the local
    Hugging Face cache, never on the network.

    Raises:
        ModelError: nothing there; the message says what was tried.
    """
    name = str(path)
    if name.startswith("builtin:"):
        return _builtin(name.removeprefix("builtin:"))
    local = Path(name).expanduser()
    if local.exists():
        return local
    if name.count("/") == 1 and importlib.util.find_spec("huggingface_hub"):
        from huggingface_hub import snapshot_download

        with contextlib.suppress(OSError, ValueError):  # not cached: told below like any other missing path
            return Path(snapshot_download(name, local_files_only=True))
    raise ModelError(
        f"model.path {name!r} does not exist; expected a checkpoint directory, builtin:tiny_gdn, builtin:tiny_kda, or "
        f"the name of a model in the local Hugging Face cache (fill it with: hf download {name})"
    )


def _builtin(name: str) -> Path:
    known = ("tiny_gdn", "tiny_kda")
    if name not in known:
        raise ModelError(f"no built-in model {name!r}{closest(name, known)}; known: {', '.join(known)}")
    from stepquant.models.tiny import tiny_model_path

    return Path(tiny_model_path(name))


def weight_format(config: Mapping[str, Any]) -> str:
    """Format of the weights as the config states it: ``unquantised``, or the method and bits, such as ``awq-4bit``."""
    section = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(section, Mapping):
        return "unquantised"
    name = str(section.get("quant_method") or section.get("quant_algo") or "unknown")
    bits = section.get("bits") or section.get("w_bit")
    if bits is None and isinstance(groups := section.get("config_groups"), Mapping):
        found = {str((group.get("weights") or {}).get("num_bits")) for group in groups.values() if group}
        bits = "+".join(sorted(found - {"None"})) or None
    suffix = section.get("format") or (section.get("fmt") if name == "fp8" else None)
    return "-".join(str(part) for part in (name, f"{bits}bit" if bits else None, suffix) if part)
