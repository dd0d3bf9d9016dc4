"""The pipeline: one visible order of passes from recipe to plan, each product cached under what it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from stepquant import __version__
from stepquant.files import hash_json
from stepquant.passes.allocation import Allocation
from stepquant.passes.context import Context
from stepquant.passes.distortion import Distortion, PivotDistortion
from stepquant.passes.gate_statistics import GateStatistics
from stepquant.passes.out_of_memory import explain_memory
from stepquant.passes.pivots import Pivots
from stepquant.passes.protocol import ObserverPass, Pass, Product
from stepquant.passes.reuse import Reused, needs_states
from stepquant.passes.rollout import Rollout
from stepquant.passes.rollout_traces import RolloutTraces
from stepquant.passes.row_impact import RowImpact
from stepquant.passes.row_weights import RowWeights
from stepquant.passes.sensitivity import Sensitivity
from stepquant.passes.state_samples import StateSamples
from stepquant.passes.synthetic import (
    SyntheticDistortion,
    SyntheticGates,
    SyntheticImpact,
    SyntheticPivotDistortion,
    SyntheticRollout,
    SyntheticSensitivity,
    SyntheticTransition,
)
from stepquant.passes.trace import run_observers
from stepquant.passes.transition import Transition

AnyPass = Pass | ObserverPass

# Watching one run of the model ...
TRACED: Sequence[AnyPass] = (
    GateStatistics(), RowImpact(), Transition(), Sensitivity(), RolloutTraces(), StateSamples(),
)  # fmt: skip
# ... or, with calibration=synthetic, made up.
SYNTHETIC: Sequence[AnyPass] = (SyntheticGates(), SyntheticImpact(), SyntheticTransition(), SyntheticSensitivity())
WEIGHTS: Sequence[AnyPass] = (RowWeights(),)
TABLES: Sequence[AnyPass] = (Distortion(), Rollout(), Pivots(), PivotDistortion())
SYNTHETIC_TABLES: Sequence[AnyPass] = (
    SyntheticDistortion(), SyntheticRollout(), Pivots(), SyntheticPivotDistortion(),
)  # fmt: skip
SOLVE: Sequence[AnyPass] = (Allocation(),)

KEPT_IN_ARTIFACT = (
    "gate_statistics", "row_impact", "transition", "sensitivity", "row_weights", "distortion", "rollout", "pivots",
    "pivot_distortion",
)  # fmt: skip
UNCACHED = {"allocation"}  # cheap, and their answer depends on everything


def passes_for(context: Context) -> tuple[AnyPass, ...]:
    """The passes of a recipe in their order."""
    if context.recipe.calibration == "synthetic":
        order = (*SYNTHETIC, *WEIGHTS, *SYNTHETIC_TABLES, *SOLVE)
    else:
        order = (*TRACED, *WEIGHTS, *TABLES, *SOLVE)
    needless = _needless(context)
    return tuple(p for p in order if p.wanted(context) and p.name not in needless)


def _needless(context: Context) -> set[str]:
    """Synthetic passes have no `wanted` of their own: what the recipe does not read is left out."""
    temporal, needless = context.recipe.temporal, set()
    if "transition" not in (temporal.weight, context.recipe.spatial.impact):
        needless.add("transition")
    if temporal.sensitivity == "none" or temporal.weight == "rollout":
        needless.add("sensitivity")
    return needless


@dataclass
class Pipeline(Mapping[str, Product]):
    """Products by name, loaded from the cache or made on first use.

    Args:
        context: what passes may ask for.
        reused: an artifact (``reuse``) whose products are taken; state samples are never among them.

    Attributes:
        base_key: what calibration products depend on; the artifact's own when one is reused.
    """

    context: Context
    reused: Reused | None = None

    def __post_init__(self) -> None:
        self.passes = {p.name: p for p in passes_for(self.context)}
        self.given = self.reused.products if self.reused else {}
        base = self.reused.base_key if self.reused else self.context.calibration_key
        self.base_key = base
        self.cache_keys: dict[str, str] = {}
        for name, step in self.passes.items():
            calibrates = isinstance(step, ObserverPass) or self.context.recipe.calibration == "synthetic"
            self.cache_keys[name] = hash_json({
                "pass": name, "version": step.version, "stepquant": __version__,
                "reads": self.context.recipe.select(*step.reads),
                "needs": {need: self.cache_keys[need] for need in step.needs if need in self.cache_keys},
                "base": base if calibrates else None,
            })  # fmt: skip
        self.made: dict[str, Product] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, name: str) -> Product:
        if name not in self.made:
            self.made[name] = self._find(name) or self._make(name)
        return self.made[name]

    def run(self) -> None:
        """Run what is missing, in order; products that only missing passes would read are not touched."""
        needed = self._missing()
        for name in self.passes:
            if name in needed:
                self[name]
            elif name not in self.made and (name in self.given or self.context.cache.has(name, self.cache_keys[name])):
                self.context.progress.reuse(name)

    def planned(self) -> list[str]:
        """Names of the passes that `run` would run, in order.

        Raises:
            RecipeError: if one of them needs the model and an artifact's tables are reused.
        """
        missing = self._missing()
        if self.reused is not None and any(isinstance(self.passes[name], ObserverPass) for name in missing):
            raise needs_states(self.context.recipe, self.reused, self._reads_of_missing(self.reused))
        return [name for name in self.passes if name in missing]

    def _missing(self) -> set[str]:
        """Passes that must run: the solver, and backwards whatever a missing pass needs and is not there."""
        missing: set[str] = set()
        wanted = {*UNCACHED, *KEPT_IN_ARTIFACT} & set(self.passes)
        for name in reversed(list(self.passes)):
            if name in wanted and not self._available(name):
                missing.add(name)
                wanted |= set(self.passes[name].needs) & set(self.passes)
        return missing

    def _available(self, name: str) -> bool:
        if name in self.given and self.given[name][0] == self.cache_keys[name]:
            return True
        return name not in UNCACHED and self.context.cache.has(name, self.cache_keys[name])

    def _find(self, name: str) -> Product | None:
        if name in self.given and self.given[name][0] == self.cache_keys[name]:
            return self.given[name][1]
        return None if name in UNCACHED else self.context.cache.load(name, self.cache_keys[name])

    def _make(self, name: str) -> Product:
        step = self.passes[name]
        if isinstance(step, ObserverPass):
            return self._trace(name)
        for need in step.needs:  # in order, and outside this pass's own time
            if need in self.passes and need not in self.made and not self._available(need):
                self[need]
        if name in UNCACHED:
            with self._explained(name), self.context.progress.step(name):
                return step.run(self.context, self)
        with self._alone(self.cache_keys[name], name):
            if (found := self._waited_for(name)) is not None:
                return found
            with self._explained(name), self.context.progress.step(name):
                product = step.run(self.context, self)
                self.context.cache.store(name, self.cache_keys[name], product)
        return product

    def _trace(self, name: str) -> Product:
        """One run of the model makes every observer's missing product."""
        if self.reused is not None:
            raise needs_states(self.context.recipe, self.reused, self._reads_of_missing(self.reused))
        with self._alone(hash_json(self.base_key), "trace"):
            if (found := self._waited_for(name)) is not None:
                return found
            missing = [
                p for p in self.passes.values()
                if isinstance(p, ObserverPass) and p.name not in self.made and not self._available(p.name)
            ]  # fmt: skip
            key = hash_json([self.cache_keys[p.name] for p in missing])
            _ = self.context.model  # loaded outside the trace's own time
            title = f"trace ({', '.join(p.name for p in missing)})"
            with self._explained("trace", title), self.context.progress.step(title, self.context.data.segments.numel()):
                products = run_observers(self.context, missing, key)
                for made, product in products.items():
                    self.context.cache.store(made, self.cache_keys[made], product)
                    self.made[made] = product
            self.context.cache.drop_partial(key)
        return self.made[name]

    def _reads_of_missing(self, reused: Reused) -> set[str]:
        """Keys that decide about the products that the artifact does not hold."""
        missing = [p for p in self.passes.values() if p.name not in UNCACHED and not self._available(p.name)]
        reads = {key for p in missing for key in p.reads}
        if any(p.name in KEPT_IN_ARTIFACT and p.name not in reused.products for p in missing):
            reads |= {"temporal.weight", "temporal.sensitivity", "spatial.impact", "allocation.unit", "pivots.count"}
        return reads

    def _alone(self, key: str, what: str) -> AbstractContextManager[None]:
        """While no other process makes the same in this cache."""
        return self.context.cache.locked(key, what, self.context.progress.say)

    def _waited_for(self, name: str) -> Product | None:
        """What another compile made while this one waited."""
        if (found := self._find(name)) is not None:
            self.context.progress.reuse(name)
        return found

    def _explained(self, name: str, doing: str | None = None) -> AbstractContextManager[None]:
        return explain_memory(self.context, name, doing or name)

    def artifact_products(self) -> dict[str, tuple[str, Product]]:
        """What goes into tables.safetensors: statistics and distortions with their keys, no state samples."""
        return {name: (self.cache_keys[name], self[name]) for name in KEPT_IN_ARTIFACT if name in self.passes}


def provenance(context: Context) -> dict[str, Any]:
    """Versions and text that a plan was made with; no path, no user name."""
    import platform

    import torch

    found: dict[str, Any] = {
        "stepquant": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "calibration": context.recipe.calibration, "model_type": context.geometry.model_type,
    }  # fmt: skip
    if context.recipe.calibration == "trace":
        found["data"] = {"source": context.data.source, "fingerprint": context.data.fingerprint,
                         "segments": list(context.data.segments.shape)}  # fmt: skip
        found["weights"] = context.recipe.model.weights
    return found
