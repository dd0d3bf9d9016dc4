"""Hooking functions of SGLang, and proof that every hook is in place.

SGLang's registry logs a hook that it cannot apply and goes on; a server would then quietly keep FP32 states. So each
hook is verified: the target must exist with the parameters that were checked, and carry the plugin's mark afterwards.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from stepquant.errors import BackendError
from stepquant.runtime.sglang.versions import Target, Version

MARK = "__stepquant__"


def resolve(path: str) -> tuple[Any, str, Any]:
    """Holder, attribute and value of a dotted path ``package.module.Class.method``.

    Raises:
        BackendError: naming the part that is not there.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            holder: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name is not None and ".".join(parts[:cut]).startswith(error.name):
                continue
            raise BackendError(f"{path} cannot be imported: {error}") from None
        for name in parts[cut:-1]:
            holder = getattr(holder, name, None)
        if holder is None or not hasattr(holder, parts[-1]):
            break
        return holder, parts[-1], getattr(holder, parts[-1])
    raise BackendError(f"SGLang has no {path}; this stepquant was checked with another SGLang")


def check_signature(target: Target) -> None:
    """Raises BackendError if the target is missing or takes other parameters than were checked."""
    found = tuple(inspect.signature(inspect.unwrap(resolve(target.path)[2])).parameters)
    if found != target.parameters:
        raise BackendError(
            f"{target.path} takes {', '.join(found)}; this stepquant was checked with {', '.join(target.parameters)}"
        )


def apply_hooks(version: Version, functions: dict[str, Callable[..., Any]]) -> None:
    """Put every hook of a version in place through SGLang's registry and verify each.

    Args:
        version: entry of the table.
        functions: the plugin's functions by the table's names, each ``function(original, *args, **kwargs)``.

    Raises:
        BackendError: naming a hook without a function, a target that is not what was checked, or one that did not
            apply.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if set(functions) != set(version.targets):
        raise BackendError(f"hooks {sorted(set(functions) ^ set(version.targets))} have no target or no function")
    for target in version.targets.values():
        check_signature(target)
    for name, target in version.targets.items():
        hook = functions[name]
        HookRegistry.register(target.path, _marked(hook), HookType.AROUND)
    HookRegistry.apply_hooks()
    verify_hooks(version)


def _marked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The registry calls ``hook(original, ...)``; the wrapper it makes copies the original's attributes only, so the
    mark is looked for in its closure (see `verify_hooks`)."""
    setattr(hook, MARK, hook.__name__)
    return hook


def verify_hooks(version: Version) -> None:
    """Raises BackendError naming every target of the version that does not run the plugin's hook."""
    missing = [target.path for target in version.targets.values() if not hooked(resolve(target.path)[2])]
    if missing:
        raise BackendError(
            f"the plugin's hook on {', '.join(missing)} did not apply; SGLang would keep its FP32 state pool there, so "
            "it is not started. Look for another plugin on the same function"
        )


def hooked(function: Any) -> bool:
    """Whether some wrapper around a function is the plugin's."""
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if hasattr(function, MARK) or any(hasattr(_content(cell), MARK) for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
