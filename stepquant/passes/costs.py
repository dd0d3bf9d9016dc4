"""What a state error costs: the weight of every key row, and the solver's table over units.

The paper (equation 8): L_u d_u(b), with the row weights w^2 inside d_u where a unit is a head (equation 17) and none
where it is a row (equation 18). Past it (design 2.5): the transition-aware Gram diagonal instead of L and w^2, and the
output sensitivity of the head in front of either. Or the measured rollout, which replaces all of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stepquant.errors import RecipeError
from stepquant.passes.context import Context
from stepquant.passes.gate_statistics import lifetime
from stepquant.passes.protocol import Products
from stepquant.passes.rollout import rollout_table


def row_costs(context: Context, products: Products) -> Tensor:
    """Cost of one squared error in every key row, `[L, H, K]` float64.

    With ``temporal.weight=transition`` and a ``gradient`` sensitivity the sum over rows of this times the row's squared
    error is the predicted KL in nats a token, were the state requantised after each token.
    """
    g, temporal = context.geometry, context.recipe.temporal
    if temporal.weight == "transition":
        cost = products["transition"]["gram"].double()
    else:
        weight = lifetime(products["gate_statistics"]["mean_log_gate"], temporal.horizon)
        if g.family == "gdn":
            weight = weight.unsqueeze(-1).expand(-1, -1, g.key_dim)
        cost = weight * products["row_weights"]["w"].double().square() if context.unit == "head" else weight
    if temporal.sensitivity != "none":
        cost = cost * products["sensitivity"]["sensitivity"].double().unsqueeze(-1)
    return cost.expand(g.num_delta_layers, g.num_heads, g.key_dim) * g.value_dim


def cost_table(context: Context, products: Products, source: str = "distortion") -> Tensor:
    """Cost of every key row at every candidate, `[L, H, K, C]` float64; the columns are ``source``'s candidates.

    Args:
        source: ``distortion``, or ``pivot_distortion`` with pivot rows out of the column fit.
    """
    if context.recipe.temporal.weight == "rollout":
        return rollout_table(products, context.unit == "head", source)
    return row_costs(context, products).unsqueeze(-1) * products[source]["row_error"]


def cost_per_token(context: Context, cost: float) -> float:
    """A cost of `cost_table` a token: rollouts measure it with the window, other costs are a requantisation's."""
    return cost if context.recipe.temporal.weight == "rollout" else cost / context.recipe.window.tokens


def unit_table(context: Context, table: Tensor) -> np.ndarray:
    """Costs of units by candidate, `[U, C]`: rows summed over their head where a unit is a head."""
    if context.unit == "head":
        table = table.sum(2)
    return table.reshape(-1, table.shape[-1]).numpy()


def unit_sizes(context: Context) -> np.ndarray:
    """State elements of every unit, `[U]` int64."""
    g = context.geometry
    heads = g.num_delta_layers * g.num_heads
    if context.unit == "head":
        return np.full(heads, g.head_elements, dtype=np.int64)
    return np.full(heads * g.key_dim, g.value_dim, dtype=np.int64)


def to_rows(context: Context, units: np.ndarray) -> Tensor:
    """Spread a value a unit, `[U]`, over the rows `[L, H, K]`."""
    g = context.geometry
    spread = torch.as_tensor(np.asarray(units))
    if context.unit == "head":
        return spread.view(g.num_delta_layers, g.num_heads, 1).expand(-1, -1, g.key_dim).contiguous()
    return spread.view(g.num_delta_layers, g.num_heads, g.key_dim)


def columns(candidates: tuple[int, ...], available: list[int]) -> list[int]:
    """Positions of `candidates` in a table's columns.

    Raises:
        RecipeError: when the table has no such precision (an artifact reused at other candidates).
    """
    missing = [b for b in candidates if b not in available]
    if missing:
        raise RecipeError(
            f"budget.candidates asks for {missing} bits, but the distortion table holds {available}; compile without "
            "reuse, or choose among those"
        )
    return [available.index(b) for b in candidates]
