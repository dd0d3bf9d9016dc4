"""``python -m stepquant.compile recipe=NAME [KEY=VALUE ...]``: from a checkpoint to an artifact directory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stepquant.config import hydra_command
from stepquant.recipe import Recipe


def run(recipe: Recipe) -> None:
    """Run every pass of a recipe and write its artifact; see `stepquant.passes.compile`."""
    from stepquant.passes.compile import compile_recipe

    compile_recipe(recipe)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the recipe from arguments and compile it; return the exit code."""
    return hydra_command(run, "compile", argv)


if __name__ == "__main__":
    sys.exit(main())
