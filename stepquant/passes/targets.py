"""Targets as users think of them: bytes or requests that must fit become bits a value (design 2.4, eq. 24).

The largest nominal budget whose solved layout still fits is found by bisection over exact solves; every probe reads the
same tables, so a target costs a few solves and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stepquant.errors import InfeasibleError, RecipeError
from stepquant.layout import KERNEL_GRANULARITY, PageLayout
from stepquant.memory import GIB, ServingMemory, window_bytes
from stepquant.passes.allocation import PIVOT_CHARGE
from stepquant.passes.context import Context
from stepquant.passes.costs import cost_per_token
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.plan import WINDOW_LENGTHS
from stepquant.recipe import Recipe
from stepquant.recipe_rules import check_weights

RESOLUTION = 1 / 256  # bits a value


def resolve_budget(pipeline: Pipeline) -> Pipeline:
    """The pipeline with ``budget.bits`` decided; unchanged where the recipe gives bits itself.

    Raises:
        InfeasibleError: with the smallest slot that can be had, when the target is below it.
    """
    context = pipeline.context
    budget = context.recipe.budget
    if budget.target == "bits":
        return pipeline
    target = slot_target(context)
    for need in pipeline.passes["allocation"].needs:  # before the probes, which report nothing
        if need in pipeline.passes:
            pipeline[need]
    low, high = smallest_bits(context), 8.0
    smallest = _bytes_at(pipeline, low)
    if smallest is None and context.recipe.allocation.floors and _bytes_at(pipeline, high) is not None:
        low = _lowest_met(pipeline, low, high)
        smallest = _bytes_at(pipeline, low)
    if smallest is None or smallest > target:
        raise _too_small(context, target, smallest)
    if (largest := _bytes_at(pipeline, high)) is not None and largest <= target:
        low = high
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        size = _bytes_at(pipeline, middle)
        low, high = (middle, high) if size is not None and size <= target else (low, middle)
    context.progress.say(f"budget.{budget.target}: {target:,} bytes a slot give {low:.4f} nominal bits a value")
    return _with_bits(pipeline, low)


def _lowest_met(pipeline: Pipeline, low: float, high: float) -> float:
    """The fewest bits a value, to `RESOLUTION`, that pay for the recipe's floors: more than `low`, at most `high`."""
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        low, high = (low, middle) if _bytes_at(pipeline, middle) is not None else (middle, high)
    return high


def _too_small(context: Context, target: int, smallest: int | None) -> InfeasibleError:
    """The refusal of a target below the smallest plan: what was given, what it leaves a slot, and what would do."""
    budget, pivots = context.recipe.budget, context.recipe.pivots.count
    running = window_bytes(context.geometry, context.recipe.window.tokens, context.recipe.window.dtype)
    if budget.target == "bytes_per_request":
        given = f"budget.bytes_per_request is {budget.bytes_per_request:,}"
        taken, enough = f"window buffers ({running:,})", f"raise it to {(smallest or 0) + running:,}"
    else:
        assert budget.gpu_memory is not None
        given = f"budget.concurrency is {budget.concurrency:,} in {budget.gpu_memory * budget.gpus / GIB:.2f} GiB"
        taken, enough = "weights, KV cache, convolution state and window buffers", "lower it, or give more memory"
    few = f", or lower pivots.count ({pivots})" if pivots else ""
    if smallest is None:
        return InfeasibleError(
            f"{given}, but no plan meets the side constraints even at {smallest_bits(context):.4g} bits a value; relax "
            f"caps, floors, allocation.granularity or target.tensor_parallel{few}"
        )
    return InfeasibleError(
        f"{given}, which leaves {target:,} bytes a slot beside {taken}; expected at least the smallest plan, "
        f"{smallest:,} bytes; {enough}{few}"
    )


def choose_window(pipeline: Pipeline) -> tuple[Pipeline, list[dict[str, Any]]]:
    """The pipeline with ``budget.bits`` and ``window.length`` decided, and what every length would have given.

    A longer window takes bytes from the slots and adds noise less often; the predicted cost of the plan that fits at
    each length decides. With ``window.length`` given there is nothing to choose.

    Raises:
        InfeasibleError: no length leaves room for a plan.
        RecipeError: with ``reuse`` of an artifact whose costs were measured at one length.
    """
    if pipeline.context.recipe.window.length != "auto":
        return resolve_budget(pipeline), []
    tried: list[dict[str, Any]] = []
    best, refusal = None, None
    for number, length in enumerate(WINDOW_LENGTHS, 1):
        pipeline.context.progress.say(f"window {number} of {len(WINDOW_LENGTHS)}: length {length}")
        recipe = pipeline.context.recipe
        candidate = _with_recipe(pipeline, replace(recipe, window=replace(recipe.window, length=length)))
        try:
            solved = resolve_budget(candidate)
        except InfeasibleError as error:
            refusal = refusal or error
            continue
        except RecipeError as error:
            if recipe.reuse is None or not str(error).startswith("window.length is "):
                raise
            raise RecipeError(f"window.length=auto tries lengths that the artifact has no costs of: {error}") from None
        cost = cost_per_token(solved.context, float(solved["allocation"].facts["cost"]))
        bits = solved.context.recipe.budget.bits
        tried.append({"window": length, "bits": bits, "predicted_cost_per_token": cost})
        solved.context.progress.say(f"window.length={length}: {bits:.4f} nominal bits, predicted cost {cost:.3g}")
        if best is None or cost < best[0]:
            best = cost, solved
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1], tried


def check_budget(context: Context) -> None:
    """Refuse, before anything is computed, a budget that no plan can meet.

    Raises:
        InfeasibleError: with the smallest budget that one does.
    """
    recipe = context.recipe
    if recipe.allocation.mode == "uniform":
        return
    if recipe.budget.bits is None:
        slot_target(context)
        return
    least = smallest_bits(context)
    if recipe.budget.bits < least - 1e-9:
        raise InfeasibleError(
            f"budget.bits is {recipe.budget.bits:g}; with {recipe.pivots.count} pivots charged {PIVOT_CHARGE} bits a "
            f"value the smallest plan takes {math.ceil(least * 1000) / 1000:g}; raise budget.bits to that, or lower "
            "pivots.count"
        )


def smallest_bits(context: Context) -> float:
    """Nominal bits a value at which every unit has the lowest candidate and pivots are charged 8 bits."""
    g, count = context.geometry, context.recipe.pivots.count
    pivots = count * (g.head_elements if context.unit == "head" else g.value_dim) / g.elements
    lowest = (context.recipe.budget.candidates or (2,))[0]
    return lowest * (1 - pivots) + PIVOT_CHARGE * pivots


def slot_target(context: Context) -> int:
    """Bytes of state that a slot may take under the recipe's target."""
    budget, g = context.recipe.budget, context.geometry
    if budget.bytes_per_request is not None:
        running = window_bytes(g, context.recipe.window.tokens, context.recipe.window.dtype)
        if running >= budget.bytes_per_request:
            raise InfeasibleError(
                f"budget.bytes_per_request is {budget.bytes_per_request:,}, but the buffers of window.length="
                f"{context.recipe.window.tokens} alone take {running:,}; raise it, or lower window.length"
            )
        return budget.bytes_per_request - running
    assert budget.concurrency is not None
    assert budget.gpu_memory is not None
    memory = serving_memory(context, slot=0)
    slot = memory.slot_for(budget.gpu_memory * budget.gpus, budget.context_length, budget.concurrency)
    if slot <= g.conv_bytes:
        raise InfeasibleError(
            f"budget.concurrency={budget.concurrency} leaves {slot:,} bytes a slot, the convolution state alone takes "
            f"{g.conv_bytes:,}; lower it, or give more than {budget.gpu_memory * budget.gpus / GIB:.1f} GiB"
        )
    return slot - g.conv_bytes


def serving_memory(context: Context, slot: int) -> ServingMemory:
    """Equation 24's terms for the recipe; `slot` is state plus convolution state, bytes."""
    budget, g, window = context.recipe.budget, context.geometry, context.recipe.window
    check_weights(context.recipe)
    weights = budget.weights_bytes
    if weights is None:
        weights = checkpoint_bytes(str(context.recipe.model.path))
    running = window_bytes(g, window.tokens, window.dtype)
    return ServingMemory(weights, slot, g.kv_bytes_per_token, budget.slots_per_request, running)


def checkpoint_bytes(path: str) -> int:
    """Bytes of a checkpoint's text weights (appendix F.3 leaves vision and draft layers out)."""
    from stepquant.models.checkpoint import resolve_checkpoint
    from stepquant.models.fingerprint import checkpoint_tensors

    entries = checkpoint_tensors(resolve_checkpoint(path)).items()
    return sum(e.end - e.start for name, e in entries if not any(part in name for part in ("visual", "vision", "mtp.")))


def _with_bits(pipeline: Pipeline, bits: float) -> Pipeline:
    recipe = pipeline.context.recipe
    return _with_recipe(pipeline, replace(recipe, budget=replace(recipe.budget, bits=bits)))


def _with_recipe(pipeline: Pipeline, recipe: Recipe) -> Pipeline:
    """A pipeline of another recipe that keeps every product the change does not concern."""
    context = replace(pipeline.context, recipe=recipe)
    for name, value in vars(pipeline.context).items():  # what was found lazily stays found
        vars(context).setdefault(name, value)
    other = Pipeline(context, pipeline.reused)
    other.made.update({n: p for n, p in pipeline.made.items() if other.cache_keys.get(n) == pipeline.cache_keys[n]})
    other.made.pop("allocation", None)
    return other


def _bytes_at(pipeline: Pipeline, bits: float) -> int | None:
    """Allocated bytes of the plan at `bits` a value, None where no assignment meets it."""
    probe = _with_bits(pipeline, bits)
    probe.context.progress = Progress(quiet=True)
    try:
        map_: torch.Tensor = probe["allocation"]["bits"]
    except InfeasibleError:
        return None
    finally:
        pipeline.made.update({n: p for n, p in probe.made.items() if n != "allocation"})
    context = probe.context
    granularity = max(context.recipe.allocation.granularity, KERNEL_GRANULARITY)
    layout = PageLayout(context.geometry, np.asarray(map_), context.codec.codebook, granularity, context.codec.group)
    return layout.bytes.allocated
