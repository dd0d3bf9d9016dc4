"""``python -m stepquant.compile recipe=NAME [KEY=VALUE ...]``: from a checkpoint to an artifact directory.

The module can be called from Python too: ``stepquant.compile("tiny_gdn_6bit", {"budget.bits": 5})``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stepquant.config import compose_recipe, hydra_command
from stepquant.recipe import Recipe

if TYPE_CHECKING:
    from stepquant.passes.compile import Compiled


def run(recipe: Recipe) -> None:
    """Run every pass of a recipe and write its artifact; see `stepquant.passes.compile`."""
    from stepquant.passes.compile import compile_recipe

    compile_recipe(recipe)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the recipe from arguments and compile it; return the exit code."""
    return hydra_command(run, "compile", argv)


class _Callable(ModuleType):
    """The module as a function."""

    def __call__(
        self, recipe: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), *, quiet: bool = True
    ) -> Compiled:
        """Compile a recipe from Python.

        Args:
            recipe: a shipped recipe's name, or the path of a YAML file.
            overrides: as on the command line (``["budget.bits=5"]``), or dotted keys and values.
            quiet: print nothing.

        Raises:
            StepQuantError: naming what cannot be done.
        """
        from stepquant.passes.compile import compile_recipe

        return compile_recipe(compose_recipe(recipe, overrides), quiet=quiet)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
