"""Distortion table: mean squared reconstruction error of every key row at every candidate precision (design 2.1).

`row_error` `[L, H, K, C]` float64 is the mean over state samples and value columns of (Xhat - X)^2 when the whole head
is coded at candidate c by the plan's codec; the last column is FP16. d_u(b) of equations 17 and 18 are weighted sums of
it over a unit's rows, so that new weights, horizons and budgets never read a state again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stepquant.codec.registry import make_codec
from stepquant.codec.spec import PACKED_MENU, PIVOT, CodecSpec
from stepquant.passes.context import Context
from stepquant.passes.protocol import Product, Products
from stepquant.small_operations import small_operations

SLICES = {"cpu": 2**18, "cuda": 2**25}  # state elements coded at a time: within the cache, or filling the device


def table_candidates(context: Context) -> tuple[int, ...]:
    """Precisions of the table: all that a recipe can ask for, so that other candidates need no new table; then FP16."""
    kind = context.recipe.spatial.codec
    menu = {4} if kind == "nvfp4" else {8} if kind == "damp" else set(PACKED_MENU)
    if context.codec.codebook == "head" and context.geometry.value_dim % context.codec.group:
        menu.discard(2)  # four-level heads have a row factor for each whole group of columns
    return (*sorted(menu), PIVOT)


def row_errors(
    states: Tensor, w: Tensor, spec: CodecSpec, candidates: tuple[int, ...], pivots: Tensor | None = None
) -> Tensor:
    """Table of one layer.

    Args:
        states: samples `[n, H, K, V]` float32.
        w: row weights `[H, K]`.
        spec: spatial codec.
        candidates: precisions, the last one 16.
        pivots: bool `[H, K]`, rows kept in FP16 and left out of the column fit.

    Returns:
        float64 `[H, K, C]`.
    """
    count, heads, rows, columns = states.shape
    table = torch.zeros(heads, rows, len(candidates), dtype=torch.float64)
    for index, bits in enumerate(candidates):
        map_ = torch.full((heads, rows), bits, dtype=torch.uint8, device=states.device)
        if pivots is not None:
            map_[pivots.to(states.device)] = PIVOT
        codec = make_codec(map_, w.to(states.device), spec, columns)
        for part in slices(states):
            error = codec.roundtrip(part).sub_(part).square_().mean(-1)
            table[..., index] += error.sum(0, dtype=torch.float64).cpu() / count
    return table


def slices(states: Tensor) -> Iterator[Tensor]:
    """Pieces of `[n, H, K, V]` along n of at most `SLICES` elements, at least one sample."""
    step = max(1, SLICES.get(states.device.type, SLICES["cuda"]) // states[0].numel())
    for start in range(0, states.shape[0], step):
        yield states[start : start + step]


def table_of(context: Context, products: Products, pivots: Tensor | None) -> Product:
    """`row_error` over all layers, with a progress bar."""
    candidates, w = table_candidates(context), products["row_weights"]["w"]
    samples = products["state_samples"]
    layers = []
    with small_operations(context.device), context.progress.bar("distortion", w.shape[0]) as bar:
        for layer in range(w.shape[0]):
            states = samples[f"states.{layer}"].to(context.device)
            marked = None if pivots is None else pivots[layer]
            layers.append(row_errors(states, w[layer], context.codec, candidates, marked))
            bar.advance()
    return Product({"row_error": torch.stack(layers)}, {"candidates": list(candidates)})


class Distortion:
    """The table with no row left out."""

    name, version = "distortion", 1
    reads: tuple[str, ...] = ("spatial.codec", "spatial.refits", "spatial.sample", "allocation.unit")
    needs: tuple[str, ...] = ("state_samples", "row_weights")

    def wanted(self, context: Context) -> bool:
        return True

    def run(self, context: Context, products: Products) -> Product:
        return table_of(context, products, None)


class PivotDistortion:
    """The table again with pivot rows out of the column fit (appendix C.2); only where units are rows."""

    name, version = "pivot_distortion", 1
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("distortion", "state_samples", "row_weights", "pivots")

    def wanted(self, context: Context) -> bool:
        return context.unit == "row" and context.recipe.pivots.count > 0

    def run(self, context: Context, products: Products) -> Product:
        return table_of(context, products, products["pivots"]["pivots"].bool())
