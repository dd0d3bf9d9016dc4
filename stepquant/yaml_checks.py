"""A recipe file before it becomes a configuration: aliases are copied then, and a few lines may become billions."""

from __future__ import annotations

from typing import Any

import yaml

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
