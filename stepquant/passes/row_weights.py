"""Row weights: w_i = omega_i^(gamma/2) / geometric mean over the rows of the head (footnote of equation 13, 21)."""

from __future__ import annotations

from torch import Tensor

from stepquant.passes.context import Context
from stepquant.passes.protocol import Product, Products

IMPACT_FLOOR = 1e-20


def row_weights(omega: Tensor, gamma: float) -> Tensor:
    """w `[..., K]` float32 with geometric mean 1 over the last axis, from row impacts omega `[..., K]`."""
    log = omega.double().clamp_min(IMPACT_FLOOR).log() * (gamma / 2)
    return (log - log.mean(-1, keepdim=True)).exp().float()


class RowWeights:
    """`w` `[L, H, K]` from one-step row impact, or from the transition-aware Gram diagonal."""

    name, version = "row_weights", 1
    reads: tuple[str, ...] = ("spatial.gamma", "spatial.impact")
    needs: tuple[str, ...] = ("row_impact", "transition")

    def wanted(self, context: Context) -> bool:
        return True

    def run(self, context: Context, products: Products) -> Product:
        transition = context.recipe.spatial.impact == "transition"
        omega = products["transition"]["gram"] if transition else products["row_impact"]["omega"]
        return Product({"w": row_weights(omega, context.recipe.spatial.gamma)})
