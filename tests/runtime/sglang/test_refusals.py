"""What is refused before weights load, by name; and that what is fine passes."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepquant.codec.spec import CodecSpec
from stepquant.errors import ArtifactError, BackendError
from stepquant.models.families import geometry_from_config
from stepquant.models.fingerprint import fingerprint
from stepquant.models.tiny import tiny_model_path
from stepquant.plan import LayoutPlan, WindowSpec
from stepquant.runtime.load import load_rank_plan
from stepquant.runtime.sglang import plugin, refusals
from stepquant.runtime.sglang.state import Accept, activate
from stepquant.runtime.sglang.versions import VERSIONS
from tests.runtime.sglang.test_hooks import state_of

MODEL = tiny_model_path("tiny_gdn")


def plan_of(**more: Any) -> LayoutPlan:
    g = geometry_from_config(MODEL)
    shape = (g.num_delta_layers, g.num_heads, g.key_dim)
    fields = {
        "name": "test", "geometry": g, "codec": CodecSpec(), "bits": torch.full(shape, 6, dtype=torch.uint8),
        "w": torch.ones(shape), "permutation": torch.arange(g.key_dim).short().expand(shape).contiguous(),
        "granularity": 8, "window": WindowSpec(8), "fingerprint": fingerprint(MODEL), "weight_format": "unquantised",
    }  # fmt: skip
    return LayoutPlan(**{**fields, **more})


def check_checkpoint(model: Path, plan: LayoutPlan, **accepted: bool) -> None:
    refusals.check_checkpoint(str(model), plan, Path("nowhere"), Accept(**accepted))


def arguments(**more: Any) -> SimpleNamespace:
    """SGLang 0.5.12's arguments with their defaults, as far as they are looked at."""
    known = {
        "speculative_algorithm": None, "disaggregation_mode": "null", "pp_size": 1, "enable_dp_attention": False,
        "attn_cp_size": 1, "enable_hierarchical_cache": False, "enable_memory_saver": False,
        "enable_two_batch_overlap": False, "enable_pdmux": False, "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None, "linear_attn_prefill_backend": None, "mamba_ssm_dtype": None, "tp_size": 1,
        "mamba_track_interval": 256, "model_path": str(MODEL),
    }  # fmt: skip
    return SimpleNamespace(**{**known, **more})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", "EAGLE"), ("disaggregation_mode", "decode"), ("pp_size", 2),
        ("enable_dp_attention", True), ("attn_cp_size", 2), ("enable_hierarchical_cache", True),
        ("enable_streaming_session", True),
        ("enable_memory_saver", True), ("enable_two_batch_overlap", True), ("enable_pdmux", True),
        ("linear_attn_backend", "flashinfer"), ("linear_attn_decode_backend", "cutedsl"),
        ("linear_attn_prefill_backend", "flashinfer"), ("mamba_ssm_dtype", "bfloat16"),
        ("enable_linear_replayssm", True), ("enable_unified_memory", True),
    ],
)  # fmt: skip
def test_argument(name: str, value: Any) -> None:
    with pytest.raises(BackendError, match=f"--{name.replace('_', '-')} is {value!r}; with a packed state it must be"):
        refusals.check_arguments(arguments(**{name: value}), plan_of())


def test_what_is_served_passes() -> None:
    refusals.check_arguments(arguments(), plan_of())
    refusals.check_arguments(arguments(tp_size=4, mamba_ssm_dtype="float32"), plan_of())
    check_checkpoint(MODEL, plan_of())


def test_heads_must_divide(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="--tp 8 does not divide the plan's 8 value heads and 4 key heads"):
        refusals.check_arguments(arguments(tp_size=8), plan_of())
    plan_of().save(tmp_path)
    with pytest.raises(BackendError, match="do not divide by tp 3"):
        load_rank_plan(tmp_path, 0, 3)


def test_tracked_prefixes_end_on_whole_windows() -> None:
    with pytest.raises(BackendError, match=r"--mamba-track-interval is 100; .* a multiple of 8"):
        refusals.check_arguments(arguments(mamba_track_interval=100), plan_of())


def test_another_checkpoint(tmp_path: Path) -> None:
    copy = tmp_path / "tuned"
    shutil.copytree(MODEL, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ArtifactError, match=r"nowhere was made for a checkpoint with fingerprint .* any_checkpoint="):
        check_checkpoint(copy, plan_of())
    check_checkpoint(copy, plan_of(), any_checkpoint=True)
    with pytest.raises(
        ArtifactError, match=r"nowhere is for a qwen3_5_text .* another kimi_linear: family kda \(the plan: gdn\)"
    ):
        check_checkpoint(tiny_model_path("tiny_kda"), plan_of(), any_checkpoint=True)
    with pytest.raises(ArtifactError, match=r"made for awq weights, .* holds unquantised ones.*any_weight_format="):
        check_checkpoint(MODEL, plan_of(weight_format="awq"), any_checkpoint=True)
    check_checkpoint(MODEL, plan_of(weight_format="awq"), any_weight_format=True)
    with pytest.raises(BackendError, match=r"--model-path: .*nowhere"):
        refusals.local_checkpoint("nowhere")


def test_a_synthetic_plan_is_served_only_when_forced() -> None:
    plan = plan_of(synthetic=True, fingerprint="synthetic")
    with pytest.raises(BackendError, match=r"is synthetic .* force=true"):
        check_checkpoint(MODEL, plan, any_checkpoint=True)
    check_checkpoint(MODEL, plan, force=True)
    with pytest.raises(ArtifactError, match="is for a qwen3_5_text with states"):
        check_checkpoint(tiny_model_path("tiny_kda"), plan, force=True)


def test_what_is_accepted_reaches_every_process() -> None:
    for accept in (Accept(), Accept(force=True), Accept(True, True, True), Accept(any_weight_format=True)):
        assert Accept.from_text(accept.text) == accept
    with pytest.raises(BackendError, match="STEPQUANT_ACCEPT is 'force,all'; expected some of force, any_checkpoint"):
        Accept.from_text("force,all")


def test_a_plugin_list_without_stepquant() -> None:
    refusals.check_plugin_allowed(None)
    refusals.check_plugin_allowed("other, stepquant")
    with pytest.raises(BackendError, match="SGLANG_PLUGINS is 'other' and leaves out stepquant"):
        refusals.check_plugin_allowed("other")


def test_a_codec_that_is_simulated_only(tmp_path: Path) -> None:
    plan_of(bits=torch.full_like(plan_of().bits, 5)).save(tmp_path)
    with pytest.raises(BackendError, match=r"precisions \[5\] is simulated only"):
        load_rank_plan(tmp_path)


def test_a_prefix_cache_that_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = VERSIONS["0.5.12"].refused
    monkeypatch.delenv("SGLANG_ENABLE_UNIFIED_RADIX_TREE", raising=False)
    refusals.check_environment(refused)
    monkeypatch.setenv("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "1")
    with pytest.raises(BackendError, match=r"SGLANG_ENABLE_UNIFIED_RADIX_TREE is '1'; .* must be unset"):
        refusals.check_environment(refused)


def test_the_server_checks_its_arguments_before_it_starts(tmp_path: Path) -> None:
    """The hook on ServerArgs.check_server_args, which SGLang calls before it starts a process."""
    plan_of().save(tmp_path)
    state = state_of("0.5.12")
    state.directory = tmp_path
    activate(state)
    assert plugin.check_server(lambda _: "checked", arguments()) == "checked"
    with pytest.raises(BackendError, match="--pp-size is 2"):
        plugin.check_server(lambda _: "checked", arguments(pp_size=2))


def test_ranks_are_slices_that_agree_on_their_slots(tmp_path: Path) -> None:
    plan = plan_of()
    plan.bits[:, 5] = 8  # one rank's pages are larger
    plan.save(tmp_path)
    whole, ranks = load_rank_plan(tmp_path), [load_rank_plan(tmp_path, i, 2) for i in range(2)]
    assert len({rank.slot_bytes for rank in ranks}) == 1
    assert ranks[0].slot_bytes == max(int(rank.layout.layer_bytes.sum()) for rank in ranks)
    assert int(ranks[0].layout.layer_bytes.sum()) < int(ranks[1].layout.layer_bytes.sum())
    assert torch.equal(torch.cat([rank.w for rank in ranks], 1), whole.w)
    assert [rank.num_key_heads for rank in ranks] == [2, 2]
    together = torch.cat([torch.from_numpy(rank.layout.bits) for rank in ranks], 1)
    assert torch.equal(together, plan.bits)
