"""What a plan says of its gates and its recurrence."""

from __future__ import annotations

import math

import pytest
import torch

from stepquant.codec.dual_axis import DualAxisCodec
from stepquant.codec.spec import CodecSpec
from stepquant.config import compose_recipe
from stepquant.geometry import Geometry
from stepquant.passes.compile import compile_recipe
from stepquant.passes.notes import gate_sampling, geometry_notes, sampling_notes


def test_counts_are_of_the_units_that_are_uncertain_or_outlive_the_text():
    half_lives = torch.tensor([1.0, 10.0, 100.0, 400.0, 600.0, 5000.0], dtype=torch.float64)
    mean = -math.log(2) / half_lives
    error = torch.zeros(6, dtype=torch.float64)
    error[2] = -mean[2] / 4  # +- half of the rate: a lifetime of 2/3 to 2 of it, a factor of 3
    error[3] = -mean[3] / 2.5  # +- 0.8 of the rate: a factor of 9, but for the horizon
    error[0] = 0.5  # l = -0.69 +- 1: from exactly the horizon to 1 / (1 - exp(-3.4))
    found = gate_sampling(mean, error, tokens=99, length=1000, horizon=2048)
    assert found == {"units": 6, "tokens": 99, "uncertain": 2, "outlive": 2}
    notes = sampling_notes(found, 1000)
    assert "for 2 of 6 units 99 tokens" in notes[0]
    assert "raise data.segments" in notes[0]
    assert "2 of 6 units remember for more than half a segment of 1,000 tokens" in notes[1]


def test_a_hundredth_of_the_units_may_be_under_sampled():
    quiet = {"units": 1000, "tokens": 5, "uncertain": 10, "outlive": 10}
    assert sampling_notes(quiet, 64) == []
    assert len(sampling_notes({**quiet, "uncertain": 11, "outlive": 11}, 64)) == 2


def test_negative_eigenvalues_are_said():
    plain = Geometry("gdn", "olmo_hybrid", (0,), 2, 2, 16, 16)
    assert geometry_notes(plain) == []
    (note,) = geometry_notes(Geometry("gdn", "olmo_hybrid", (0,), 2, 2, 16, 16, beta_max=2.0))
    assert note.startswith("negative eigenvalues: beta reaches 2")


@pytest.mark.parametrize(
    ("recipe", "overrides", "noted"),
    [("tiny_kda_4bit", ["window.length=1"], True), ("tiny_kda_4bit", ["window.length=1", "spatial.sample=0"], False),
     ("tiny_kda_4bit", [], False), ("tiny_gdn_4bit", ["window.length=1"], False)],
)  # fmt: skip
def test_sampled_row_factors_of_two_bit_rows_are_noted_at_one_token(recipe, overrides, noted, tmp_path):
    given = [*overrides, "calibration=synthetic", "cache.enabled=false", f"output={tmp_path / 'x'}"]
    plan = compile_recipe(compose_recipe(recipe, given), quiet=True).plan
    assert bool((plan.bits == 2).any())
    assert any("spatial.sample=0 takes all columns" in note for note in plan.provenance["notes"]) == noted


def test_a_row_without_codes_in_the_sample_spoils_a_column():
    """What the note is about: one value outside the sampled columns, in a row of two bits that is zero elsewhere."""
    bits = torch.full((1, 32), 4, dtype=torch.uint8)
    bits[0, 5] = 2
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0))
    x[0, 5] = 1e-7
    x[0, 5, 20] = 0.5
    scales = {}
    for sample in (16, 0):
        codec = DualAxisCodec(bits, torch.ones(1, 32), CodecSpec(codebook="shared", sample=sample), 64)
        stored = codec.fit(x)
        scales[sample] = float(stored.c[0, 20] / stored.c[0].median())
        assert bool((stored.codes[0, :5, 20] == 0).all()) == (sample == 16)
    assert scales[16] > 100 > 10 > scales[0]
