import numpy as np
import pytest

from stepquant.errors import DataError, InfeasibleError, RecipeError
from stepquant.solvers.dp import solve_dp
from stepquant.solvers.lagrangian import solve_lagrangian
from stepquant.solvers.table import smallest_feasible

COSTS = [[4.0, 2.0, 1.0], [8.0, 4.0, 1.0]]


@pytest.mark.parametrize("solve", [solve_dp, solve_lagrangian])
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"costs": [[1.0, np.nan, 1.0], [1.0, 1.0, 1.0]]}, DataError, ["nan", "[0, 1]", "finite", "calibrate again"]),
        ({"costs": [[1.0, np.inf, 1.0], [1.0, 1.0, 1.0]]}, DataError, ["inf", "finite"]),
        ({"costs": [[1.0, 1.0, 1.0], [1.0, 1.0, -2.0]]}, DataError, ["-2.0", "[1, 2]", "negative"]),
        ({"costs": [[1.0, 1.0], [1.0, 1.0]]}, DataError, ["[2, 2]", "[units, 3]", "rebuild"]),
        ({"costs": np.zeros((0, 3))}, DataError, ["[0, 3]", "at least one unit"]),
        ({"costs": [["a", "b", "c"]]}, DataError, ["not an array of numbers"]),
        ({"candidates": (8, 6, 4)}, RecipeError, ["(8, 6, 4)", "ascending", "sort"]),
        ({"candidates": (4, 4, 6)}, RecipeError, ["ascending"]),
        ({"candidates": (0, 4, 6)}, RecipeError, ["positive"]),
        ({"candidates": (4.5, 6, 8)}, RecipeError, ["4.5", "integers"]),
        ({"candidates": ()}, RecipeError, ["expected positive integers"]),
        ({"sizes": [5, 0]}, DataError, ["found 0", "positive"]),
        ({"sizes": [5]}, DataError, ["shape [1]", "expected 2"]),
        ({"sizes": [5, 2.5]}, DataError, ["whole numbers"]),
        ({"budget": 70.5}, RecipeError, ["70.5", "whole number of bits"]),
        ({"budget": float("inf")}, RecipeError, ["inf", "whole number"]),
        ({"budget": 59}, InfeasibleError, ["59 bits", "3.9333 a value", "60 bits", "4.0000 a value", "below 4 bits"]),
    ],
)
def test_wrong_input_is_refused_by_name(solve, change, kind, words):
    arguments = {"costs": COSTS, "candidates": (4, 6, 8), "sizes": [10, 5], "budget": 90} | change
    with pytest.raises(kind) as caught:
        solve(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_smallest_feasible():
    assert smallest_feasible((4, 6, 8), [10, 5]) == 60
    assert solve_dp(COSTS, (4, 6, 8), [10, 5], 60).bits.tolist() == [4, 4]
    with pytest.raises(InfeasibleError):
        solve_dp(COSTS, (4, 6, 8), [10, 5], 59)
