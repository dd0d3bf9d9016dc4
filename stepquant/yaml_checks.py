"""A recipe file before it becomes a configuration: aliases are copied then, and a few lines may become billions; and
interpolations are replaced, which may fetch what the recipe's reader never wrote into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from stepquant.errors import RecipeError, shown

MAX_RECIPE_BYTES = 1 << 20
MAX_NODES = 20_000  # with every alias copied; conf/config.yaml has 150
MAX_DEPTH = 32


def check_yaml(text: str) -> None:
    """Refuse YAML that grows out of proportion.

    Raises:
        ValueError: an alias inside of what it stands for, or too many values, or nested too deep.
        yaml.YAMLError: it is no YAML.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None and _size(root, {}, 0) > MAX_NODES:
        raise ValueError(f"it holds more than {MAX_NODES} values once its aliases are copied")


def _size(node: Any, known: dict[int, int], depth: int) -> int:
    """Values of a node and below it; `known` has what was counted, -1 for what is being counted."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if id(node) in known:
        if known[id(node)] < 0:
            raise ValueError("an alias stands inside of what it stands for")
        return known[id(node)]
    known[id(node)] = -1
    size = 1
    if isinstance(node, yaml.MappingNode):
        size += sum(_size(part, known, depth + 1) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(part, known, depth + 1) for part in node.value)
    known[id(node)] = size
    return size


def refuse_resolvers(value: Any, key: str = "") -> None:
    """Refuse ``${oc.env:NAME}`` and every other interpolation that computes something.

    Values of a recipe go into artifacts, which are given away: a recipe from elsewhere could carry a secret out of the
    environment. ``${name}``, another key of the same recipe, is all that is left.

    Args:
        value: a configuration as it is written, interpolations not replaced.
        key: its dotted key, for the message.

    Raises:
        RecipeError: naming the key.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            refuse_resolvers(name, key or str(name))
            refuse_resolvers(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_resolvers(item, key)
    elif isinstance(value, str) and _calls_resolver(value):
        raise RecipeError(
            f"{key} is {shown(value)}; recipes read nothing from the environment, since an artifact would carry it: "
            f"expected a value, ${{another.key}}, or {key}=... on the command line, where the shell puts it in"
        )


def _calls_resolver(text: str) -> bool:
    """Whether a colon stands inside ``${...}``: ``${oc.env:HOME}``, ``${oc.${a}:HOME}``."""
    depth = 0
    for at, character in enumerate(text):
        if character == "{" and text[at - 1 : at] == "$":
            depth += 1
        elif character == "}" and depth:
            depth -= 1
        elif character == ":" and depth:
            return True
    return False
