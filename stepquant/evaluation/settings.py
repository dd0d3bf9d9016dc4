"""Settings of the commands that run a model over held-out text, checked value by value like a recipe's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from stepquant import recipe_rules as rules
from stepquant.errors import RecipeError
from stepquant.recipe import flatten
from stepquant.recipe_checks import choice, flag, integer, optional, setting, suggest, text
from stepquant.recipe_sections import CacheSettings, ModelSettings

T = TypeVar("T")


def place(key: str, value: Any) -> str:
    """A path, "~" expanded."""
    return os.path.expanduser(text(key, value))


def words(key: str, value: Any) -> tuple[str, ...]:
    """A list of names and paths, "~" expanded."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
        raise RecipeError(f"{key} is {value!r}; expected a list of names such as [int8,int6]")
    return tuple(os.path.expanduser(str(item)) for item in value)


@dataclass(frozen=True)
class TextSettings:
    """Held-out text; calibration takes the split ``train``. A group's segments, length and batch are not read."""

    source: str = setting("builtin", choice("builtin", "wikitext2", "file"))
    path: str | None = setting(None, optional(text))
    seed: int = setting(0, integer(0))
    split: str = setting("test", choice("train", "validation", "test"))


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of ``python -m stepquant.evaluate``.

    Attributes:
        plan: artifact directory.
        against: names of variants (`stepquant.evaluation.variants`) and other artifact directories.
        path: ``simulated`` runs the codec, ``packed`` the bytes that are served, ``served`` the runtime itself: the
            generated kernels on a GPU, their twin in plain torch on a CPU.
        streams, prefill, decode: text: how many streams, tokens of exact prefill, decode tokens.
        batch: streams in one forward; 0 chooses by the device and the size of a layer's trace.
        workers: processes on a CPU, one thread each; 0 takes all cores.
        layers: also measure state and readout errors of every layer.
        greedy: tokens to generate greedily after the prefill; 0 leaves it out.
        any_checkpoint: evaluate a plan on a checkpoint that it was not made for.
        any_weight_format: evaluate a plan on a checkpoint whose weights are stored in another format.
        json: file for the rows.
    """

    plan: str | None = setting(None, optional(place))
    against: tuple[str, ...] = setting(("int8", "int6", "int4", "bf16"), words)
    path: str = setting("simulated", choice("simulated", "packed", "served"))
    model: ModelSettings = field(default_factory=ModelSettings)
    data: TextSettings = field(default_factory=TextSettings)
    streams: int = setting(8, integer(1))
    prefill: int = setting(512, integer(1))
    decode: int = setting(1024, integer(1))
    batch: int = setting(0, integer(0))
    workers: int = setting(0, integer(0))
    layers: bool = setting(False, flag)
    greedy: int = setting(0, integer(0))
    any_checkpoint: bool = setting(False, flag)
    any_weight_format: bool = setting(False, flag)
    json: str | None = setting(None, optional(text))
    cache: CacheSettings = field(default_factory=CacheSettings)


@dataclass(frozen=True)
class AnalyseSettings:
    """Settings of ``python -m stepquant.analyse NAME``.

    Attributes:
        plan: artifact directory; its calibration tables are used.
        bits: precision of the rowwise INT that the analysis replays; by default the paper's (6, for octiles 4).
        streams, prefill, decode: held-out text.
        texts: more text files, for ``lifetimes``.
        output: where numbers and figure go, by default build/analysis/NAME.
        figure: write a figure.
    """

    plan: str | None = setting(None, optional(place))
    bits: int | None = setting(None, optional(integer(2, 8)))
    model: ModelSettings = field(default_factory=ModelSettings)
    data: TextSettings = field(default_factory=TextSettings)
    streams: int = setting(4, integer(1))
    prefill: int = setting(512, integer(1))
    decode: int = setting(1536, integer(1))
    batch: int = setting(0, integer(0))
    texts: tuple[str, ...] = setting((), words)
    output: str | None = setting(None, optional(text))
    figure: bool = setting(True, flag)
    any_checkpoint: bool = setting(False, flag)
    any_weight_format: bool = setting(False, flag)
    cache: CacheSettings = field(default_factory=CacheSettings)


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of ``python -m stepquant.harness``.

    Attributes:
        plan: artifact directory.
        against: other variants, as of `EvaluateSettings`; ``fp32`` is the reference.
        tasks: names of lm-eval tasks.
        include: directory of more task files.
        limit: samples of a task, all by default.
        num_fewshot: examples in the prompt, the task's own number by default.
        max_tokens: most tokens of an answer, the task's own limit by default.
        chat: put prompts into the tokenizer's chat template.
        likelihood: ``refuse`` likelihood tasks, or ``decode`` them token by token.
        path: ``simulated`` or ``packed``.
        seed: of few-shot choices and sampling.
        json: file for the rows.
    """

    plan: str | None = setting(None, optional(place))
    against: tuple[str, ...] = setting(("fp32",), words)
    tasks: tuple[str, ...] = setting((), words)
    include: str | None = setting(None, optional(text))
    limit: int | None = setting(None, optional(integer(1)))
    num_fewshot: int | None = setting(None, optional(integer(0)))
    max_tokens: int | None = setting(None, optional(integer(1)))
    chat: bool = setting(False, flag)
    likelihood: str = setting("refuse", choice("refuse", "decode"))
    path: str = setting("simulated", choice("simulated", "packed"))
    model: ModelSettings = field(default_factory=ModelSettings)
    any_checkpoint: bool = setting(False, flag)
    any_weight_format: bool = setting(False, flag)
    seed: int = setting(0, integer(0))
    json: str | None = setting(None, optional(text))


_UNREAD = {"data.segments", "data.length", "data.batch"}  # keys that the group `data` carries for calibration


def from_config(cls: type[T], config: Any) -> T:
    """Check a composed configuration (DictConfig or mapping) and build settings of a class made of `setting` fields.

    Raises:
        RecipeError: an unknown key or a value that its key cannot take.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    known = set(_keys(cls))
    for key in (key for key, _ in flatten(plain)):
        if key not in known and key not in _UNREAD:
            raise RecipeError(f"unknown key {key}{suggest(key, sorted(known))}; --cfg job prints the keys there are")
    built: T = _build(cls, "", plain)
    if isinstance(data := getattr(built, "data", None), TextSettings):
        rules.check_text(data.source, data.path)
    return built


def _keys(cls: Any, prefix: str = "") -> list[str]:
    found = []
    for item in fields(cls):
        found += [f"{prefix}{item.name}"] if "check" in item.metadata else _keys(item.default_factory, f"{item.name}.")
    return found


def _build(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for item in (item for item in fields(cls) if item.name in values):
        key, value = f"{prefix}{item.name}", values[item.name]
        if "check" in item.metadata:
            given[item.name] = item.metadata["check"](key, value)
        elif not isinstance(value, Mapping):
            raise RecipeError(f"{key} is {value!r}; expected keys under it, such as {key}.{_first(item)}=...")
        else:
            given[item.name] = _build(item.default_factory, f"{key}.", value)
    return cls(**given)


def _first(item: Any) -> str:
    return fields(item.default_factory)[0].name
