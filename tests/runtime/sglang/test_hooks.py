"""Every hook target exists in the real SGLang releases with the parameters that were checked, and takes its hook."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stepquant.errors import BackendError
from stepquant.runtime.sglang import hooks, plugin
from stepquant.runtime.sglang.state import Accept, PluginState
from stepquant.runtime.sglang.versions import VERSIONS, Target, checked_version
from tests.runtime.sglang.sources import definition, fake_sglang, parameters

TARGETS = [(version, name) for version, entry in VERSIONS.items() for name in entry.targets]


@pytest.mark.parametrize(("version", "name"), TARGETS)
def test_target_has_the_parameters_that_were_checked(version: str, name: str) -> None:
    target = VERSIONS[version].targets[name]
    assert parameters(version, target.path) == target.parameters


@pytest.mark.parametrize("version", VERSIONS)
def test_slot_bytes_are_a_property_and_the_ratio_a_method(version: str) -> None:
    found = definition(version, f"{VERSIONS[version].state_params}.mamba_cache_per_req")
    assert [getattr(d, "id", None) for d in found.decorator_list] == ["property"]
    sizing = VERSIONS[version].targets["sizing"].path.rsplit(".", 1)[0]
    assert parameters(version, f"{sizing}._calculate_mamba_ratio") == ("self",)


@pytest.mark.parametrize("version", VERSIONS)
def test_dispatchers_hand_on_what_the_packed_kernel_takes(version: str) -> None:
    """Keyword names of the calls that `PackedKernel` receives, read off the real dispatchers."""
    for name in ("gdn", "kda"):
        path = VERSIONS[version].targets[name].path.rsplit(".", 1)[0]
        decode = parameters(version, f"{path}.decode")
        assert decode[:11] == ("self", "q", "k", "v", "a", "b", "A_log", "dt_bias", "ssm_states", "cache_indices",
                               "query_start_loc")  # fmt: skip
        extend = parameters(version, f"{path}.extend")
        assert extend == (
            "self",
            "q",
            "k",
            "v",
            "g",
            "beta",
            "ssm_states",
            "cache_indices",
            "query_start_loc",
            "kwargs",
        )
    path = VERSIONS[version].targets["gdn"].path.rsplit(".", 1)[0]
    assert parameters(version, f"{path}.packed_decode") == (
        "self", "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "ssm_states", "cache_indices", "num_v_heads",
        "head_v_dim", "kwargs",
    )  # fmt: skip


def state_of(version: str) -> PluginState:
    return PluginState(Path("nowhere"), Accept(), VERSIONS[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_hooks_apply_through_the_real_registry_and_are_seen(version: str) -> None:
    entry = VERSIONS[version]
    with fake_sglang(version):
        with pytest.raises(BackendError, match="did not apply"):
            hooks.verify_hooks(entry)
        hooks.apply_hooks(entry, plugin.functions(state_of(version)))
        hooks.verify_hooks(entry)
        assert all(hooks.hooked(hooks.resolve(t.path)[2]) for t in entry.targets.values())


def test_a_hook_that_another_plugin_undoes_is_refused() -> None:
    entry = VERSIONS["0.5.12"]
    with fake_sglang("0.5.12"):
        holder, name, original = hooks.resolve(entry.targets["gdn"].path)
        hooks.apply_hooks(entry, plugin.functions(state_of("0.5.12")))
        setattr(holder, name, original)
        with pytest.raises(BackendError, match=r"GDNKernelDispatcher.__init__ did not apply.*FP32"):
            hooks.verify_hooks(entry)


def test_a_target_with_other_parameters_is_refused() -> None:
    entry = VERSIONS["0.5.12"]
    with fake_sglang("0.5.12"):
        changed = Target(entry.targets["copy"].path, ("self", "elsewhere"))
        wrong = dataclasses.replace(entry, targets={**entry.targets, "copy": changed})
        with pytest.raises(
            BackendError, match=r"copy_from takes self, src_index, dst_index; .* checked with self, else"
        ):
            hooks.apply_hooks(wrong, plugin.functions(state_of("0.5.12")))
        assert not hooks.hooked(hooks.resolve(entry.targets["copy"].path)[2])


def test_a_target_that_is_gone_is_refused() -> None:
    with fake_sglang("0.5.12"), pytest.raises(BackendError, match=r"SGLang has no .*MambaPool\.vanished"):
        hooks.resolve("sglang.srt.mem_cache.memory_pool.MambaPool.vanished")


def test_an_unchecked_version_is_refused() -> None:
    with pytest.raises(BackendError, match=r"SGLang 0\.6\.0 was not checked .* expected one of 0\.5\.12, 0\.5\.23"):
        checked_version("0.6.0")


def test_the_plugin_does_nothing_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPQUANT_PLAN", raising=False)
    with fake_sglang("0.5.12"):
        plugin.register()
        assert not any(hooks.hooked(hooks.resolve(t.path)[2]) for t in VERSIONS["0.5.12"].targets.values())


def test_the_plugin_ends_the_process_rather_than_serve_fp32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPQUANT_PLAN", str(tmp_path / "gone"))
    with fake_sglang("0.5.12"), pytest.raises(SystemExit) as stopped:
        plugin.register()
    assert stopped.value.code == 2
    assert "stepquant could not take over the state pool" in capsys.readouterr().err
