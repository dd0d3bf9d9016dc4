"""A checkpoint with weights that are not finite is refused by the tensor's name, however it is loaded."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepquant.errors import ModelError
from stepquant.models.adapter import load_model
from stepquant.models.checkpoint import resolve_checkpoint
from stepquant.models.finite import check_finite
from stepquant.models.layerwise import load_layerwise


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("tensor", ["layers.2.mlp.down_proj.weight", "embed_tokens.weight"])
def test_it_is_named(tensor: str, value: float, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(resolve_checkpoint("builtin:tiny_gdn"), place)
    file = next(place.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith(tensor))
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 tensors hold NaN or infinities, first model\.{tensor}"):
        load_model(str(place), device="cpu")
    with pytest.raises(ModelError, match=rf"1 tensors hold NaN or infinities, first model\.{tensor}"):
        run_layers(place)


def run_layers(place: Path) -> None:
    load_layerwise(str(place), device="cpu").run(torch.zeros(1, 8, dtype=torch.int64), batch=1)


def test_sums_that_overflow_are_not_nan() -> None:
    check_finite("x", {"big": torch.full((8,), 3e38), "half": torch.full((9,), 6e4, dtype=torch.float16),
                       "codes": torch.zeros(3, dtype=torch.int8), "none": torch.zeros(0)})  # fmt: skip
