"""Solutions by going through every assignment, to hold the solvers against."""

from __future__ import annotations

import itertools

import numpy as np


def best_allocation(costs, candidates, sizes, budget):
    """The least (cost, bits) over every assignment within the budget, or None."""
    sizes = np.asarray(sizes)
    best = None
    for choice in itertools.product(range(len(candidates)), repeat=len(sizes)):
        bits = int(np.asarray(candidates)[list(choice)] @ sizes)
        if bits <= budget:
            cost = float(sum(costs[u][c] for u, c in enumerate(choice)))
            if best is None or (cost, bits) < best:
                best = (cost, bits)
    return best


def head_prices(costs, candidates, granularity, spare_groups):
    """{row bits: least cost} of one head [N, C], over every assignment and every way to pad it."""
    rows, count = costs.shape
    choices = np.array(list(itertools.product(range(count), repeat=rows)), int).reshape(count**rows, rows)
    totals = costs[np.arange(rows), choices].sum(axis=1)
    groups = np.stack([-(-(choices == option).sum(axis=1) // granularity) for option in range(count)], axis=1)
    fewest = -(-rows // granularity)
    prices = {}
    for used in np.unique(groups, axis=0):
        cost = float(totals[(groups == used).all(axis=1)].min())
        for total in range(fewest, fewest + (spare_groups if rows else 0) + 1):
            for padding in itertools.product(range(total - int(used.sum()) + 1), repeat=count):
                if sum(padding) == total - used.sum():
                    bits = int(granularity * (used + padding) @ np.asarray(candidates))
                    prices[bits] = min(cost, prices.get(bits, np.inf))
    return prices


def best_rows(problem):
    """The least cost of a RowProblem (limits given as arrays), or None when no assignment meets it.

    Goes through every assignment of every head, then through every combination of totals of the heads.
    """
    costs = np.asarray(problem.costs)
    layers, heads, rows, _ = costs.shape
    pivots = np.zeros((layers, heads, rows), bool) if problem.pivots is None else problem.pivots
    options = []
    for layer, head in itertools.product(range(layers), range(heads)):
        left = ~pivots[layer, head]
        extra = int(pivots[layer, head].sum()) * problem.value_dim
        prices = head_prices(costs[layer, head][left], problem.candidates, problem.granularity, problem.spare_groups)
        here = []
        for bits, cost in prices.items():
            charge = bits * problem.value_dim + extra * problem.pivot_charge
            if _within(charge, problem.head_floor, problem.head_cap, (layer, head), rows * problem.value_dim):
                here.append((cost, charge, bits * problem.value_dim + 16 * extra))
        options.append(here)
    return best_options(problem, options, layers, heads, rows * problem.value_dim)


def best_heads(problem):
    """The least cost of a HeadProblem, or None."""
    costs = np.asarray(problem.costs)
    layers, heads, count = costs.shape
    stored = problem.stored_bytes
    if stored is None:
        stored = [problem.elements * bits // 8 for bits in (*problem.candidates, 16)]
    options = []
    for layer, head in itertools.product(range(layers), range(heads)):
        pivot = problem.pivots is not None and problem.pivots[layer, head]
        here = []
        for option in [count] if pivot else range(count):
            bits = problem.pivot_charge if pivot else problem.candidates[option]
            charge = 8 * stored[option] if problem.charge_stored else problem.elements * bits
            if _within(charge, problem.head_floor, problem.head_cap, (layer, head), problem.elements):
                here.append((0.0 if pivot else float(costs[layer, head, option]), charge, 8 * stored[option]))
        options.append(here)
    return best_options(problem, options, layers, heads, problem.elements)


def best_options(problem, options, layers, heads, elements):
    """The least cost over one option (cost, charge, stored) a head, under the side constraints; None for none."""
    ranks = problem.tensor_parallel
    # Every combination of options; those with the same charges of layers and bits of ranks differ by their cost only.
    totals = {((0,) * layers, (0,) * ranks): 0.0}
    for head, here in enumerate(options):
        layer, rank = head // heads, head % heads * ranks // heads
        combined = {}
        for (charges, stored), so_far in totals.items():
            for cost, charge, bits in here:
                key = (_add(charges, layer, charge), _add(stored, rank, bits))
                combined[key] = min(so_far + cost, combined.get(key, np.inf))
        totals = combined
    fitting = [
        cost
        for (charges, stored), cost in totals.items()
        if sum(charges) <= problem.budget
        and len(set(stored)) == 1
        and all(
            _within(charge, problem.layer_floor, problem.layer_cap, layer, elements * heads)
            for layer, charge in enumerate(charges)
        )
    ]
    return min(fitting, default=None)


def _add(values, place, more):
    return (*values[:place], values[place] + more, *values[place + 1 :])


def _within(charge, floor, cap, place, elements):
    low = -np.inf if floor is None or np.isnan(floor[place]) else floor[place] * elements
    high = np.inf if cap is None or np.isnan(cap[place]) else cap[place] * elements
    return low - 1e-6 <= charge <= high + 1e-6
