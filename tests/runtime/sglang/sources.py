"""Real SGLang sources without SGLang: wheels fetched once without their dependencies, classes taken out by `ast`.

A class runs with stand-ins for what its module imports; its own code is SGLang's, to the letter. The wheels lie in
$STEPQUANT_SGLANG_WHEELS (by default ~/.cache/stepquant/sglang); where they cannot be fetched, tests are skipped, or
fail if STEPQUANT_REQUIRE_SGLANG is set, as CI does.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import logging
import os
import subprocess
import sys
import tempfile
import types
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepquant.runtime.sglang.versions import VERSIONS

POOL = "sglang.srt.mem_cache.memory_pool"
UTILS = "sglang.srt.configs.mamba_utils"
REGISTRY = "sglang.srt.plugins.hook_registry"


def wheel(version: str) -> zipfile.ZipFile:
    """The wheel of a version, fetched if it is not there; the test is skipped, or fails, if that cannot be done."""
    found = _fetched(version)
    if isinstance(found, Path):
        return _opened(found)
    message = f"the wheel of SGLang {version} cannot be fetched: {found}"
    if os.environ.get("STEPQUANT_REQUIRE_SGLANG"):
        pytest.fail(message)
    pytest.skip(message)


@functools.cache
def _opened(path: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


@functools.cache
def _fetched(version: str) -> Path | str:
    """Where the wheel lies, or what pip said; asked once in a process."""
    place = Path(os.environ.get("STEPQUANT_SGLANG_WHEELS", Path.home() / ".cache/stepquant/sglang"))
    place.mkdir(parents=True, exist_ok=True)
    if not list(place.glob(f"sglang-{version}-*.whl")):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64",
                "--platform", "any", "-d", folder, f"sglang=={version}",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                return done.stderr.strip()[-300:]
            for file in Path(folder).glob("*.whl"):
                file.rename(place / file.name)  # whole, whoever else fetches it
    return next(place.glob(f"sglang-{version}-*.whl"))


@functools.cache
def tree(version: str, module: str) -> ast.Module:
    """Syntax tree of a module of the wheel."""
    return ast.parse(wheel(version).read(module.replace(".", "/") + ".py"))


def split(version: str, path: str) -> tuple[str, list[str]]:
    """Module and names of a dotted path, by what files the wheel has."""
    files, parts = set(wheel(version).namelist()), path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if "/".join(parts[:cut]) + ".py" in files:
            return ".".join(parts[:cut]), parts[cut:]
    raise AssertionError(f"SGLang {version} has no module of {path}")


def definition(version: str, path: str) -> Any:
    """The definition of a class or function; an AssertionError names what is missing."""
    module, names = split(version, path)
    node: Any = tree(version, module)
    for name in names:
        found = [
            x for x in node.body
            if isinstance(x, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and x.name == name
        ]  # fmt: skip
        assert found, f"SGLang {version} has no {name} of {path}"
        node = found[-1]
    return node


def parameters(version: str, path: str) -> tuple[str, ...]:
    """Parameter names of a function, in order."""
    a = definition(version, path).args
    rest = [x for x in (a.kwarg,) if x is not None]
    return tuple(x.arg for x in (*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *rest))


class _Stub:
    """Stands in for anything that is called or asked for an attribute and whose answer does not matter."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _Stub()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Stub()


class _Adapter(_Stub):
    def region(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    @classmethod
    def create(cls, **_: Any) -> _Adapter:
        return cls()


def _bytes(x: Any) -> int:
    return sum(map(_bytes, x)) if isinstance(x, list | tuple) else x.nbytes


class _Flag:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


def _names() -> dict[str, Any]:
    """What the extracted classes find instead of their module's imports."""
    import numpy as np

    envs = types.SimpleNamespace(
        SGLANG_DEBUG_MEMORY_POOL=_Flag(False), SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS=_Flag(True),
        SGLANG_MAMBA_CONV_DTYPE=_Flag("bfloat16"), SGLANG_MAMBA_SSM_DTYPE=_Flag(None),
    )  # fmt: skip
    return {
        "torch": torch, "np": np, "logger": logging.getLogger("sglang"), "logging": logging, "GB": 2**30,
        "dataclass": dataclasses.dataclass, "fields": dataclasses.fields, "field": dataclasses.field,
        "dataclasses": dataclasses, "cached_property": functools.cached_property, "nullcontext": contextlib.nullcontext,
        "get_tensor_size_bytes": _bytes, "TorchMemorySaverAdapter": _Adapter, "GPU_MEMORY_TYPE_KV_CACHE": "kv",
        "maybe_init_custom_mem_pool": lambda **_: (False, None, None), "_is_npu": False, "_is_cpu": False,
        "_cpu_has_amx_support": False, "envs": envs, "current_platform": _Stub(), "ABC": object,
        "divide": lambda a, b: a // b, "time": __import__("time"), "math": __import__("math"),
        "extra_groups_for_head_shards": lambda n, tp: 0 if n % tp == 0 else tp - n,
        **{n: getattr(typing, n) for n in ("List", "Optional", "Tuple", "Union", "Any", "Dict")},
    }  # fmt: skip


def _run(version: str, module: types.ModuleType, nodes: list[Any]) -> None:
    """Execute definitions of a module with annotations left as text."""
    future = ast.parse("from __future__ import annotations").body
    code = ast.Module([*future, *nodes], [])
    exec(compile(ast.fix_missing_locations(code), f"<sglang {version} {module.__name__}>", "exec"), module.__dict__)


def _cut(node: Any, names: set[str]) -> Any:
    """A class reduced to some of its methods, without bases."""
    body = [x for x in node.body if getattr(x, "name", None) in names]
    for method in body:
        method.decorator_list = []
    more: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}
    return ast.ClassDef(node.name, [], [], body or [ast.Pass()], [], **more)


@contextlib.contextmanager
def fake_sglang(version: str) -> Iterator[None]:
    """A package `sglang` of real code: the hook registry, MambaPool and its parameters whole, the other targets' own
    functions. Restored afterwards."""
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "sglang"}
    targets = [target.path for target in VERSIONS[version].targets.values()]
    wanted: dict[str, dict[str, set[str]]] = {}
    for path in targets:
        module, (kind, method) = split(version, path)
        wanted.setdefault(module, {}).setdefault(kind, set()).add(method)
    wanted.setdefault(UTILS, {})
    try:
        for name in wanted:
            module = _package(name)
            module.__dict__.update(_names())
            if name == UTILS:
                nodes = [x for x in tree(version, name).body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
            else:
                found = {kind: definition(version, f"{name}.{kind}") for kind in wanted[name]}
                nodes = [n if kind == "MambaPool" else _cut(n, wanted[name][kind]) for kind, n in found.items()]
            _run(version, module, nodes)
        registry = _package(REGISTRY)
        exec(compile(wheel(version).read(REGISTRY.replace(".", "/") + ".py"), REGISTRY, "exec"), registry.__dict__)
        sys.modules["sglang"].__version__ = version  # type: ignore[attr-defined]
        state = _package("sglang.srt.distributed.parallel_state")
        state.get_attn_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
        state.get_attn_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
        yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(saved)


def _package(name: str) -> types.ModuleType:
    """A module in `sys.modules` with all its parents."""
    parts, parent = name.split("."), None
    for cut in range(1, len(parts) + 1):
        full = ".".join(parts[:cut])
        if full not in sys.modules:
            sys.modules[full] = types.ModuleType(full)
            sys.modules[full].__path__ = []  # type: ignore[attr-defined]
            if parent is not None:
                setattr(parent, parts[cut - 1], sys.modules[full])
        parent = sys.modules[full]
    return sys.modules[name]
