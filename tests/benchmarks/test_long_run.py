"""Figures of the long run from KL that is known, and their table."""

from __future__ import annotations

import pytest
import torch

from benchmarks.long_run import EVERY, FIRST, LAST, body, figures, table


def test_the_ratio_compares_the_last_thousand_tokens_with_the_first_ten_thousand() -> None:
    kl = torch.full((3, FIRST + 2 * LAST), 2.0, dtype=torch.float64)
    kl[:, FIRST : FIRST + LAST] = 100.0  # neither first nor last
    kl[:, -LAST:] = torch.tensor([[2.0], [3.0], [4.0]], dtype=torch.float64)
    found = figures(kl)
    assert (found["kl_first"], found["kl_last"], found["ratio"]) == (2.0, 3.0, 1.5)
    assert found["median_ratio"] == 1.5
    assert 1 <= found["ratio_ci"][0] <= 1.5 <= found["ratio_ci"][1] <= 2
    assert len(found["kl"]) == len(found["kl_body"]) == -(-kl.shape[1] // EVERY)
    assert found["kl"][0] == 2.0


def test_the_body_leaves_out_the_worst_hundredth() -> None:
    kl = torch.ones(2, 100)
    kl[0, 3] = kl[1, 50] = 1e6
    assert body(kl) == 1.0


def test_the_table_has_a_row_a_variant() -> None:
    row = figures(torch.rand(2, 3 * EVERY, dtype=torch.float64))
    model = {"model": "tiny_gdn", "variants": {"BF16": row}, "nll": [1.0, 1.25], "packed_late": {"kl_last": 3e-3}}
    text = table([model])
    assert f"| BF16 | {row['kl'][0]:.2e} | {row['kl_first']:.2e} | {row['kl_last']:.2e} | {row['ratio']:.2f} (" in text
    assert "3.00e-03 over the last 1,000" in text
    assert "1.250 in the last" in text
    assert row["ratio"] == pytest.approx(row["kl_last"] / row["kl_first"])
