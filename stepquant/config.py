"""Hydra plumbing of the commands: where `conf/` and `recipes/` lie, composing, sweeps, and the exit codes.

A command is a function of one checked `Recipe` (or of another root's DictConfig):

    def main(argv: Sequence[str] | None = None) -> int:
        return hydra_command(run, "compile", argv)

Hydra composes and parses the overrides; its job runner, which makes directories and log files of its own, is not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from stepquant import config_compose as composing
from stepquant.commands import EXIT_ERROR, EXIT_INTERRUPTED, Parser, exit_code, interrupted
from stepquant.config_compose import Job
from stepquant.errors import StepQuantError
from stepquant.recipe import Recipe, plain_config

T = TypeVar("T")


def hydra_command(
    main: Callable[[Recipe], int | None], name: str, argv: Sequence[str] | None = None, root: str = "config"
) -> int:
    """Run a command that takes a recipe; return its exit code.

    Handles ``recipe=NAME|PATH``, overrides, ``-m`` (one call of `main` a job, each with its own ``output``),
    ``--cfg job|hydra|all``, ``--help``. A `StepQuantError`, or anything Hydra refuses, is printed as ``error: ...`` and
    gives 2; Ctrl-C gives 130.

    Args:
        main: the command itself; its return value is the exit code, None meaning 0.
        name: the command's name, for messages: ``compile``.
        argv: arguments; by default those of the process.
        root: primary configuration in `conf/`.
    """

    def warn_and_run(recipe: Recipe) -> int | None:
        for warning in recipe.warnings():
            print(f"warning: {warning}", file=sys.stderr)
        return main(recipe)

    return _run(warn_and_run, lambda job: Recipe.from_config(job.config, explicit=job.explicit), name, argv, root)


def hydra_config_command(
    main: Callable[[DictConfig], int | None], name: str, root: str, argv: Sequence[str] | None = None
) -> int:
    """Like `hydra_command` for a command with a configuration of its own, `conf/<root>.yaml`, given resolved."""
    return _run(main, lambda job: OmegaConf.create(plain_config(job.config, root)), name, argv, root)


def compose_recipe(recipe: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Compose and check a recipe from Python.

    Args:
        recipe: a shipped recipe's name, or the path of a YAML file.
        overrides: as on the command line (``["budget.bits=5"]``), or dotted keys and values (``{"budget.bits": 5}``).

    Raises:
        RecipeError: naming what cannot be composed.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={composing.literal(value)}" for key, value in overrides.items()]
    with _configuration():
        (job,) = composing.compose_jobs("config", [f"recipe={recipe}", *overrides], sweep=False)
    return Recipe.from_config(job.config, explicit=job.explicit)


def conf_dir() -> Path:
    """Directory of the root configurations and groups: inside an installed package, or the checkout's `conf/`."""
    return _resource("conf")


def recipes_dir() -> Path:
    """Directory of the shipped recipes."""
    return _resource("recipes")


def _resource(name: str) -> Path:
    package = Path(__file__).resolve().parent
    installed, checkout = package / f"_{name}", package.parent / name
    return installed if installed.is_dir() else checkout


def _configuration() -> Any:
    composing.register_recipes(recipes_dir())
    return initialize_config_dir(str(conf_dir()), job_name="stepquant", version_base="1.3")


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m stepquant.{name}",
        usage=f"python -m stepquant.{name} [KEY=VALUE ...] [-m] [--cfg job]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides in Hydra's grammar")
    parser.add_argument("--help", "-h", action="store_true", help="print this and what there is to set")
    parser.add_argument("--multirun", "-m", action="store_true", help="sweep over values given as a,b or range(...)")
    parser.add_argument(
        "--cfg", "-c", choices=("job", "hydra", "all"), help="print the configuration instead of running"
    )
    parser.add_argument("--resolve", action="store_true", help="resolve interpolations in --cfg")
    parser.add_argument("--package", "-p", help="print only this part in --cfg, e.g. budget")
    parser.add_argument("--config-dir", "-cd", help="another directory of configuration groups")
    return parser


def _run(
    main: Callable[[T], int | None],
    prepare: Callable[[Job], T],
    name: str,
    argv: Sequence[str] | None,
    root: str,
) -> int:
    def command() -> int:
        parser = _parser(name)
        args = parser.parse_intermixed_args(None if argv is None else list(argv))
        with _configuration():
            if args.help:
                print(parser.format_help())
                print(composing.describe_groups(root))
                return 0
            overrides = list(args.overrides)
            if args.config_dir is not None:
                overrides.append(composing.search_path_override(args.config_dir))
            jobs = composing.compose_jobs(root, overrides, sweep=args.multirun)
            if args.cfg:
                _show(jobs, args)
                return 0
        prepared = [prepare(job) for job in jobs]
        try:
            return _run_jobs(main, jobs, prepared)
        except (KeyboardInterrupt, Exception) as error:
            if not interrupted(error):
                raise
            print("interrupted; run the same command again to resume from the last finished step", file=sys.stderr)
            return EXIT_INTERRUPTED

    return exit_code(command)


def _run_jobs(main: Callable[[T], int | None], jobs: Sequence[Job], prepared: Sequence[T]) -> int:
    """Run every job; one that fails with a `StepQuantError` does not keep the others of a sweep from running."""
    code = 0
    for number, (job, value) in enumerate(zip(jobs, prepared, strict=True), 1):
        if len(jobs) > 1:
            print(f"[{number}/{len(jobs)}] {job.label}", flush=True)
        try:
            code = max(code, main(value) or 0)
        except StepQuantError as error:
            if interrupted(error):
                raise
            where = f"{job.label}: " if len(jobs) > 1 else ""
            print(f"error: {where}{error}", file=sys.stderr)
            code = EXIT_ERROR
    return code


def _show(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    for job in jobs:
        shown: Any = {"job": job.config, "hydra": OmegaConf.create({"hydra": job.hydra})}.get(args.cfg)
        if shown is None:
            shown = OmegaConf.merge({"hydra": job.hydra}, job.config)
        if args.package:
            shown = OmegaConf.select(shown, args.package)
        if len(jobs) > 1:
            print(f"# {job.label}")
        resolve = args.resolve and args.cfg == "job"
        print(OmegaConf.to_yaml(shown, resolve=resolve) if OmegaConf.is_config(shown) else shown)
