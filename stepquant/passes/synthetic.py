"""Seeded synthetic statistics: plans, bytes and kernels at any size from a geometry alone, no weights.

The distributions are those that small trained models showed: half-lives log-uniform from 0.3 to 3,000 tokens, row
impact log-normal, errors that fall about fourfold a bit. Such a plan is marked synthetic wherever it is shown.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepquant.codec.spec import PIVOT
from stepquant.passes.context import Context
from stepquant.passes.distortion import table_candidates
from stepquant.passes.protocol import Product, Products

SHORTEST, LONGEST = 0.3, 3000.0  # half-lives, tokens


def _generator(context: Context, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(context.recipe.seed * 1_000 + sum(name.encode()))


def _shape(context: Context) -> tuple[int, int, int]:
    g = context.geometry
    return g.num_delta_layers, g.num_heads, g.key_dim


def _normal(context: Context, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_generator(context, name), dtype=torch.float64)


class _Synthetic:
    name = ""
    version = 1
    reads: tuple[str, ...] = ("seed",)
    needs: tuple[str, ...] = ()

    def wanted(self, context: Context) -> bool:
        return True


class SyntheticGates(_Synthetic):
    """Mean log retention with log-uniform half-lives."""

    name = "gate_statistics"

    def run(self, context: Context, products: Products) -> Product:
        shape = _shape(context) if context.geometry.family == "kda" else _shape(context)[:2]
        uniform = torch.rand(shape, generator=_generator(context, self.name), dtype=torch.float64)
        half_life = SHORTEST * (LONGEST / SHORTEST) ** uniform
        return Product({"mean_log_gate": -math.log(2) / half_life}, {"tokens": 0})


class SyntheticImpact(_Synthetic):
    """Log-normal one-step row impact."""

    name = "row_impact"

    def run(self, context: Context, products: Products) -> Product:
        return Product({"omega": (1.5 * _normal(context, self.name, _shape(context)) - 9).exp()})


class SyntheticTransition(_Synthetic):
    """Gram diagonal: row impact over a lifetime."""

    name = "transition"
    needs: tuple[str, ...] = ("gate_statistics", "row_impact")

    def run(self, context: Context, products: Products) -> Product:
        rate = -products["gate_statistics"]["mean_log_gate"]
        life = (2 * rate).reciprocal().clamp_max(1_000).view(*rate.shape, *[1] * (3 - rate.dim()))
        return Product({"gram": products["row_impact"]["omega"] * life})


class SyntheticSensitivity(_Synthetic):
    """Log-normal output sensitivity of heads."""

    name = "sensitivity"

    def run(self, context: Context, products: Products) -> Product:
        return Product({"sensitivity": _normal(context, self.name, _shape(context)[:2]).exp()}, {"kind": "synthetic"})


class SyntheticDistortion(_Synthetic):
    """Row errors: a log-normal row energy times 4^-b."""

    name = "distortion"
    reads: tuple[str, ...] = ("seed", "spatial.codec")

    def run(self, context: Context, products: Products) -> Product:
        candidates = table_candidates(context)
        head = 2.0 * _normal(context, "head energy", (*_shape(context)[:2], 1))
        energy = (head + _normal(context, "row energy", _shape(context)) - 8).exp()
        factor = torch.tensor([4.0**-b if b != PIVOT else 4.0**-14 for b in candidates], dtype=torch.float64)
        return Product({"row_error": energy.unsqueeze(-1) * factor}, {"candidates": list(candidates)})


class SyntheticRollout(_Synthetic):
    """Costs of rows: the synthetic errors, read over a bounded lifetime, as rollouts of real states show."""

    name = "rollout"
    reads: tuple[str, ...] = ("window.length",)
    needs: tuple[str, ...] = ("distortion", "row_impact")

    def wanted(self, context: Context) -> bool:
        return context.recipe.temporal.weight == "rollout"

    def run(self, context: Context, products: Products) -> Product:
        error, omega = products["distortion"]["row_error"], products["row_impact"]["omega"]
        rows = error * (omega * context.geometry.value_dim / context.recipe.window.tokens).unsqueeze(-1)
        return Product({"rows": rows, "heads": rows.sum(2)}, products["distortion"].facts)


class SyntheticPivotDistortion(_Synthetic):
    """The same table: there are no states to fit again."""

    name = "pivot_distortion"
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("distortion", "pivots")

    def wanted(self, context: Context) -> bool:
        return context.unit == "row" and context.recipe.pivots.count > 0

    def run(self, context: Context, products: Products) -> Product:
        return products["distortion"]
