"""What every pass may ask for: the recipe, the geometry, the cache, and, only when really needed, model and text."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stepquant.codec.chunks import delta_rule
from stepquant.codec.spec import CodecSpec
from stepquant.errors import ModelError, RecipeError
from stepquant.geometry import Geometry
from stepquant.passes.cache import Cache
from stepquant.passes.out_of_memory import explain_memory
from stepquant.passes.progress import Progress
from stepquant.recipe import Recipe
from stepquant.small_operations import keep_freed_memory

if TYPE_CHECKING:
    from stepquant.models.adapter import LoadedModel
    from stepquant.models.capture import DeltaTrace, Replacement
    from stepquant.models.layerwise import LayerwiseModel
    from stepquant.passes.calibration_text import CalibrationText


@dataclass
class Context:
    """One compile: everything is found lazily, so that a run whose products are cached loads nothing.

    Attributes:
        recipe: checked recipe.
        geometry: of the checkpoint, or the recipe's own for synthetic calibration.
        cache: product cache.
        progress: where passes report.
        model_loaded: whether this run had to load the model.
    """

    recipe: Recipe
    geometry: Geometry
    cache: Cache
    progress: Progress = field(default_factory=Progress)
    model_loaded: bool = False

    @classmethod
    def open(cls, recipe: Recipe, progress: Progress | None = None) -> Context:
        """Find the geometry and check the recipe against it; reads config.json at most.

        Raises:
            RecipeError, ModelError: when recipe, checkpoint and geometry do not fit together.
        """
        geometry = find_geometry(recipe)
        recipe.check_geometry(geometry)
        if recipe.model.loading == "layerwise" and recipe.calibration == "trace" and recipe.reuse is None:
            check_layerwise(recipe)
        cache = Cache(Path(recipe.cache.dir).expanduser(), recipe.cache.enabled)
        return cls(recipe, geometry, cache, progress or Progress())

    @property
    def synthetic(self) -> bool:
        """Statistics are made up, or the weights are random."""
        return self.recipe.calibration == "synthetic" or self.recipe.model.weights_seed is not None

    @property
    def unit(self) -> str:
        """Unit of the allocation: ``head`` or ``row``."""
        return self.recipe.unit(self.geometry.family)

    @property
    def codec(self) -> CodecSpec:
        """The spatial codec: rows of different precision in a head need the shared codebook."""
        spatial = self.recipe.spatial
        codebook = "head" if self.geometry.family == "gdn" and self.unit == "head" else "shared"
        return CodecSpec(spatial.codec, codebook, spatial.refits, sample=spatial.sample)  # type: ignore[arg-type]

    @property
    def candidates(self) -> tuple[int, ...]:
        """Candidate integer precisions, ascending."""
        return self.recipe.candidates(self.recipe.budget.bits)

    @cached_property
    def device(self) -> torch.device:
        """Where the model and the passes run."""
        name = self.recipe.model.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    @cached_property
    def model(self) -> LoadedModel:
        """The model, loaded on first use."""
        from stepquant.models.adapter import load_model

        settings = self.recipe.model
        if settings.loading == "layerwise":
            return self.runner.loaded
        path = self._starting()
        with explain_memory(self, "load", "loading the model"), self.progress.step("load"):
            return load_model(
                path, device=self.device, dtype=settings.dtype, device_map=settings.device_map,
                weights=settings.weights, trust_remote_code=settings.trust_remote_code,
            )  # fmt: skip

    @cached_property
    def runner(self) -> LayerwiseModel:
        """The model with its decoder layers still in the checkpoint (model.loading=layerwise)."""
        from stepquant.models.layerwise import load_layerwise

        settings = self.recipe.model
        path = self._starting()
        with explain_memory(self, "load", "loading embedding and norms"), self.progress.step("load"):
            return load_layerwise(path, device=self.device, dtype=settings.dtype, weights=settings.weights)

    def _starting(self) -> str:
        path = self.recipe.model.path
        if path is None:
            raise ModelError("model.path is not set; give model.path=/path/to/checkpoint or calibration=synthetic")
        self.progress.say(f"loading {path} on {self.device}")
        if self.device.type == "cpu":
            keep_freed_memory()
        self.model_loaded = True
        return path

    @cached_property
    def delta_rule(self) -> Replacement | None:
        """What runs in place of transformers' own delta rule: nothing where flash-linear-attention serves the device,
        else the chunked form here, which is ten times faster than transformers' plain torch reference."""
        if self.model.device.type == "cuda" and importlib.util.find_spec("fla") is not None:
            return None
        return chunked_delta_rule

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the checkpoint's tensors; ``synthetic`` for made-up statistics."""
        if self.recipe.calibration == "synthetic":
            return "synthetic"
        from stepquant.models.checkpoint import resolve_checkpoint
        from stepquant.models.fingerprint import fingerprint

        return fingerprint(resolve_checkpoint(str(self.recipe.model.path)), weights=self.recipe.model.weights)

    @cached_property
    def weight_format(self) -> str:
        """How the checkpoint stores its weights; a plan belongs to it."""
        if self.recipe.model.path is None:
            return "synthetic"
        from stepquant.models.checkpoint import read_config, weight_format

        return weight_format(read_config(self.recipe.model.path))

    @cached_property
    def data(self) -> CalibrationText:
        """Calibration text, tokenised."""
        from stepquant.passes.calibration_text import calibration_text

        return calibration_text(self.recipe.data, self.recipe.model, self.cache)

    @property
    def calibration_key(self) -> dict[str, object]:
        """What every calibration product depends on: weights, text, and how the model was run."""
        if self.recipe.calibration == "synthetic":
            return {"calibration": "synthetic", "geometry": self.geometry.to_json(), "seed": self.recipe.seed}
        return {
            "fingerprint": self.fingerprint,
            "data": self.data.fingerprint,
            "dtype": self.recipe.model.dtype if self.recipe.model.dtype != "auto" else f"auto:{self.device.type}",
            "family": self.geometry.family,
        }


def find_geometry(recipe: Recipe) -> Geometry:
    """Geometry of the recipe's checkpoint, or its own where no checkpoint is named.

    Raises:
        RecipeError: when there is neither, or the checkpoint is of another family than the recipe expects.
    """
    settings = recipe.model
    if settings.path is not None:
        from stepquant.models.checkpoint import read_config
        from stepquant.models.families import geometry_from_config

        return geometry_from_config(read_config(settings.path))
    if settings.geometry is not None and recipe.calibration == "synthetic":
        return settings.geometry
    raise RecipeError(
        "model.path is not set; give model.path=/path/to/checkpoint, or calibration=synthetic for a plan from the "
        "recipe's own geometry"
    )


def check_layerwise(recipe: Recipe) -> None:
    """Refuse what cannot be had with one layer on the device at a time.

    Raises:
        RecipeError, ModelError: naming the key and what to use instead.
    """
    from stepquant.models.checkpoint import read_config, weight_format

    if recipe.temporal.sensitivity == "gradient":
        raise RecipeError(
            "temporal.sensitivity is 'gradient', whose backward pass needs every layer of the model at once, but "
            "model.loading is 'layerwise'; use temporal.sensitivity=local, or model.loading=whole"
        )
    if recipe.model.trust_remote_code:
        raise RecipeError(
            "model.trust_remote_code is true, but model.loading=layerwise builds the model from transformers' own "
            "classes; leave model.trust_remote_code out, or use model.loading=whole"
        )
    kind = weight_format(read_config(str(recipe.model.path)))
    if kind != "unquantised" and recipe.model.weights_seed is None:
        raise ModelError(
            f"{recipe.model.path} holds {kind} weights; model.loading=layerwise takes unquantised ones, use "
            "model.loading=whole"
        )


def chunked_delta_rule(layer: int, trace: DeltaTrace) -> tuple[Tensor, Tensor]:
    """The exact recurrence in chunks, recomputed in the backward pass instead of keeping its intermediates."""
    inputs = (trace.q, trace.k, trace.v, trace.log_gate, trace.beta, trace.initial_state)
    if torch.is_grad_enabled():
        result: tuple[Tensor, Tensor] = checkpoint(delta_rule, *inputs, use_reentrant=False)
        return result
    return delta_rule(*inputs)
