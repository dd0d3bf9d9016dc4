"""Packaging beyond pyproject.toml: a wheel carries conf/ and recipes/ as stepquant/_conf and stepquant/_recipes.

An editable installation reads both from the checkout instead.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = {"conf": "_conf", "recipes": "_recipes"}


class BuildWithConfiguration(build_py):
    """Copies the configuration tree into the package that is being built."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, name in CARRIED.items():
            target = Path(self.build_lib) / "stepquant" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(__file__).parent / source, target)


# Not build/, which holds what the compiler writes.
setup(cmdclass={"build_py": BuildWithConfiguration}, options={"build": {"build_base": "dist/.build"}})
