"""Smallest GDN and KDA models, built once, with plans of every kind for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from stepquant.codec.spec import PIVOT, CodecSpec
from stepquant.config import compose_recipe
from stepquant.evaluation.streams import Streams
from stepquant.models.adapter import LoadedModel, load_model
from stepquant.models.data import data_fingerprint
from stepquant.passes.compile import compile_recipe
from stepquant.plan import LayoutPlan
from tests.models.checkpoints import CONFIGS, save_checkpoint

TYPES = {"gdn": "qwen3_5", "kda": "kimi_linear"}


@pytest.fixture(scope="session", params=["gdn", "kda"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.models.checkpoints.CONFIGS", _wider(CONFIGS))
        return load_model(save_checkpoint(TYPES[request.param], directory), tokenizer=False)


def _wider(configs: dict[str, Any]) -> dict[str, Any]:
    """The smallest configurations with states of 32 x 32: two-bit heads share row factors over 32 columns."""
    configs = copy.deepcopy(configs)
    configs["qwen3_5"]["text_config"].update(linear_key_head_dim=32, linear_value_head_dim=32)
    configs["kimi_linear"]["linear_attn_config"]["head_dim"] = 32
    return configs


@pytest.fixture
def streams(loaded: LoadedModel) -> Streams:
    ids = torch.randint(3, 64, (3, 24 + 40 + 1), generator=torch.Generator().manual_seed(0))
    return Streams(ids, 24, 40, "random tokens", data_fingerprint(ids))


def make_plan(loaded: LoadedModel, bits: int = 6, seed: int = 0) -> LayoutPlan:
    """A packable plan with mixed precision and a pivot: by head for GDN, by row for KDA."""
    g = loaded.geometry
    shape = (g.num_delta_layers, g.num_heads, g.key_dim)
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor([4, 6, 8, PIVOT] if bits == 6 else [2, 4, 6, 8], dtype=torch.uint8)
    if g.family == "gdn":
        table = choice[torch.randint(0, 4, shape[:2], generator=generator)].unsqueeze(-1).expand(shape).contiguous()
    else:
        table = choice[torch.randint(0, 4, shape, generator=generator)]
    w = 0.2 * torch.randn(shape, generator=generator)
    w = torch.exp(w - w.mean(-1, keepdim=True))
    spec = CodecSpec(codebook="head" if g.family == "gdn" else "shared", group=16)
    order = torch.argsort(-table.masked_fill(table == PIVOT, 0).short(), dim=-1, stable=True).short()
    return LayoutPlan("plan", g, spec, table, w, order, fingerprint=loaded.fingerprint)


@pytest.fixture
def plan(loaded: LoadedModel) -> LayoutPlan:
    return make_plan(loaded)


@pytest.fixture(scope="session")
def artifact(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan compiled with calibration tables, on random tokens."""
    output = tmp_path_factory.mktemp("artifact") / loaded.geometry.family
    overrides = [
        f"model.path={loaded.path}", "model.weights=random:0", "model.device=cpu", "data.segments=2", "data.length=48",
        "data.batch=2", "samples.per_layer=4", "budget.bits=6", "pivots.count=1", f"output={output}",
        f"cache.dir={output.parent / 'cache'}", "method=paper",
    ]  # fmt: skip
    compile_recipe(compose_recipe(f"tiny_{loaded.geometry.family}_6bit", overrides), quiet=True)
    return output
