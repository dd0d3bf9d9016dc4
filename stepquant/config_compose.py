"""Composing with Hydra: recipes as a group, recipes given as paths, sweeps, and Hydra's errors in one line."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from stepquant import recipe_rules as rules
from stepquant.config_overrides import expand, parse, refuse_repeated, written
from stepquant.errors import RecipeError, closest
from stepquant.recipe import flatten
from stepquant.recipe_checks import suggest
from stepquant.yaml_checks import MAX_RECIPE_BYTES, check_yaml, refuse_resolvers

GROUP = "recipe"
_registered: dict[Path, tuple[int, int]] = {}


@dataclass(frozen=True)
class Job:
    """One composed configuration.

    Attributes:
        config: without Hydra's own node; for a recipe with ``name``, ``output`` and the pins of its method set.
        hydra: Hydra's own node.
        explicit: dotted keys that the user wrote, on the command line or in a recipe with ``method: paper``.
        label: the swept overrides, ``budget.bits=4``; empty outside a sweep.
    """

    config: DictConfig
    hydra: DictConfig
    explicit: tuple[str, ...]
    label: str


def register_recipes(directory: Path) -> None:
    """Serve every YAML file of a directory as the Hydra group `recipe`."""
    for path in sorted(directory.glob("*.yaml")):
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size)
        if _registered.get(path) != version:
            _store(path.stem, path)
            _registered[path] = version


def compose_jobs(root: str, overrides: Sequence[str], sweep: bool) -> list[Job]:
    """Compose one job, or one for every combination of a sweep. Hydra must be initialised.

    Raises:
        RecipeError: in one line, for anything that Hydra refuses.
    """
    overrides, files = _serve_paths(overrides)
    try:
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = [parse(parser, text) for text in overrides]
        refuse_repeated(parsed)
        if not sweep:
            return [_compose(root, parsed, [], files)]
        jobs = [_compose(root, fixed, swept, files) for fixed, swept in expand(parser, parsed)]
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError(_explain(error, root, overrides)) from None
    outputs = [OmegaConf.select(job.config, "output") for job in jobs]
    for index, output in enumerate(outputs):
        if output is not None and output in outputs[:index]:
            raise RecipeError(f"two jobs of the sweep would write to {output}; give them different names or values")
    return jobs


def literal(value: Any) -> str:
    """A Python value in Hydra's override grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(literal, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", str(value)) + "'"


def search_path_override(directory: str) -> str:
    """The override that adds a directory of configuration groups.

    Raises:
        RecipeError: when there is no such directory.
    """
    path = Path(directory).expanduser().resolve()
    if not path.is_dir():
        raise RecipeError(f"--config-dir is {directory!r}; expected an existing directory")
    return f"hydra.searchpath=[{literal(f'file://{path}')}]"


def describe_groups(root: str) -> str:
    """The groups and their options, or the keys of a root without groups, for --help."""
    if root != "config":
        return "Keys:\n  " + "\n  ".join(_known_keys(root))
    lines = [f"{group}: {', '.join(_options(group))}" for group in _groups(root)]
    return "Groups (GROUP=NAME), printed with --cfg job:\n  " + "\n  ".join(lines)


def _store(name: str, path: Path) -> DictConfig:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RECIPE_BYTES + 1)
        if len(text) > MAX_RECIPE_BYTES:
            raise RecipeError(
                f"recipe {str(path)!r} has more than {MAX_RECIPE_BYTES} bytes; expected a short YAML file"
            )
        check_yaml(text.decode())
        node = OmegaConf.load(io.StringIO(text.decode()))
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(f"recipe {str(path)!r} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # PyYAML's and OmegaConf's many kinds
        raise RecipeError(f"recipe {str(path)!r} is no YAML that can be read: {_one_line(str(error))[:300]}") from None
    if not isinstance(node, DictConfig):
        raise RecipeError(f"recipe {str(path)!r} is not a mapping; expected keys such as budget: {{bits: 6}}")
    refuse_resolvers(_container(node))
    ConfigStore.instance().store(group=GROUP, name=name, node=node, package="_global_", provider="stepquant")
    return node


def _serve_paths(overrides: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, DictConfig]]]:
    """Replace ``recipe=./my.yaml`` by a name that the group serves; return the files by that name."""
    result: list[str] = []
    files: dict[str, tuple[str, DictConfig]] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if key == GROUP and equals:
            names = []
            for entry in value.split(","):
                entry = entry.strip("'\" ")
                if re.search(r"\.ya?ml$", entry) or "/" in entry:
                    path = Path(entry).expanduser()
                    if not path.is_file():
                        raise RecipeError(_no_file(entry, path))
                    token = re.sub(r"\W", "_", path.stem) + f"__file{len(files)}"
                    files[token] = (re.sub(r"[^\w.+-]", "_", path.stem), _store(token, path))
                    entry = token
                names.append(entry)
            text = f"{key}={','.join(names)}"
        result.append(text)
    return result, files


def _no_file(given: str, path: Path) -> str:
    siblings = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    return f"recipe {given!r} is no file{closest(path.name, siblings)}; expected a YAML file or a shipped name"


def _compose(root: str, fixed: Sequence[Override], swept: Sequence[Override], files: Mapping[str, Any]) -> Job:
    given = [*fixed, *swept]
    lines = [str(override.input_line) for override in given]
    try:
        config = compose(root, lines, return_hydra_config=True)
    except ValueError as error:  # Hydra refuses the type of a group's value so, e.g. model=3
        found = str(error).splitlines()[0]
        raise RecipeError(f"{', '.join(lines)}: {found}; give the name of one of the group") from None
    hydra = config.hydra
    with open_dict(config):
        del config["hydra"]
    refuse_resolvers(_container(config))
    explicit = [key for override in given for key in written(override)]
    labels = [_label(override, files) for override in swept]
    config = _sweep_paths(config, explicit, labels)
    choice = hydra.runtime.choices.get(GROUP)
    if choice is not None:
        stem, node = files.get(choice, (choice, {}))
        if node.get("method") == "paper":
            explicit += dict(flatten({key: value for key, value in node.items() if key != "defaults"}))
        config = _finish(config, stem, explicit)
    return Job(config, hydra, tuple(explicit), ",".join(labels))


def _sweep_paths(config: DictConfig, explicit: Collection[str], labels: Sequence[str]) -> DictConfig:
    """Give a job of a sweep its own ``output`` and ``json``."""
    parts = [label for label in labels if not label.startswith(f"{GROUP}=") or "output" in explicit]
    plain = _container(config)
    if parts and plain.get("output"):  # a swept recipe is told apart by its name already
        plain["output"] = f"{plain['output']}/{','.join(parts).replace('/', '_')}"
    if labels and plain.get("json"):
        path = Path(str(plain["json"]))
        plain["json"] = str(path.with_name(f"{path.stem}.{','.join(labels).replace('/', '_')}{path.suffix}"))
    return OmegaConf.create(plain)


def _finish(config: DictConfig, stem: str, explicit: Collection[str]) -> DictConfig:
    """Set a recipe's name, the one target of its budget and what its method pins."""
    plain = _container(config)
    if plain.get("name") is None:
        plain["name"] = stem
    plain = rules.resolve_target(plain, explicit)
    if plain.get("method") == "paper":
        plain = rules.apply_paper(plain, frozenset(explicit))
    return OmegaConf.create(plain)


def _container(config: DictConfig) -> dict[str, Any]:
    return {str(key): value for key, value in OmegaConf.to_container(config).items()}  # type: ignore[union-attr]


def _label(override: Override, files: Mapping[str, Any]) -> str:
    key, value = str(override.input_line).split("=", 1)
    return f"{key.lstrip('+')}={files[value][0] if value in files else value}"


def _groups(root: str) -> list[str]:
    """Groups that the root chooses from."""
    loader = GlobalHydra.instance().config_loader()
    groups = loader.get_group_options("", results_filter=ObjectType.GROUP)
    return [group for group in groups if group != "hydra" and (root == "config" or group != GROUP)]


def _options(group: str) -> list[str]:
    names = GlobalHydra.instance().config_loader().get_group_options(group, results_filter=ObjectType.CONFIG)
    return [name for name in names if "__file" not in name]


def _known_keys(root: str) -> list[str]:
    """Every dotted key of a root: of a recipe's schema, or of the composed configuration."""
    if root == "config":
        from stepquant.recipe import Recipe

        return list(Recipe.keys())
    return [key for key, _ in flatten(_container(compose(root)))]


def _explain(error: Exception, root: str, overrides: Sequence[str]) -> str:
    """Say in one line what Hydra refused, with the closest name that it would have taken."""
    message = str(error) + (f": {error.__cause__}" if error.__cause__ else "")
    if f"must specify '{GROUP}'" in message:
        known = ", ".join(_options(GROUP))
        return f"recipe is not given; give recipe=/path/to/my.yaml or recipe=NAME with NAME one of {known}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = _options(group) if group else []
        if options:
            return f"unknown {group} {name!r}{closest(name, options)}; expected one of {', '.join(options)}"
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    groups, keys = _groups(root), _known_keys(root)
    for text in overrides:
        override = parse(parser, text)
        key = override.key_or_group
        if override.is_sweep_override() and "multirun" in message:
            return f"{text} gives several values; add -m to sweep over them, or write a list as {key}=[...]"
        if override.is_hydra_override() or override.is_add() or override.is_force_add():
            continue
        if key not in groups and not rules.is_known(key, keys):
            return f"unknown key {key}{suggest(key, [*keys, *groups])}; --cfg job prints the keys there are"
    return _one_line(message)


def _one_line(message: str) -> str:
    return "; ".join(line.strip() for line in message.splitlines() if line.strip())
