"""Composing recipes with Hydra: shipped recipes, paths, overrides, sweeps, and what a command prints and returns."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from stepquant import config
from stepquant.compile import main
from stepquant.config import compose_recipe, conf_dir, hydra_command, hydra_config_command, recipes_dir
from stepquant.config_compose import literal
from stepquant.errors import InfeasibleError, RecipeError
from stepquant.recipe import Recipe, flatten
from stepquant.recipe_rules import PAPER_PINS

SHIPPED = sorted(path.stem for path in recipes_dir().glob("*.yaml"))
SYNTHETIC = "calibration=synthetic"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[Recipe], str, str]:
    """Exit code, the recipes the command was called with, stdout and stderr."""
    seen: list[Recipe] = []
    code = hydra_command(seen.append, "compile", argv)
    out, err = capsys.readouterr()
    return code, seen, out, err


def test_every_key_is_in_the_root_with_the_default_of_the_schema():
    root = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    root.pop("defaults")
    assert set(dict(flatten(root))) == set(Recipe.keys())
    neutral = Recipe.from_config({"model": {"path": "x"}, "budget": {"bits": 6}}).to_dict()
    root.update(name=neutral["name"], output=neutral["output"])
    root["model"]["path"], root["budget"]["bits"] = "x", 6
    assert root == neutral


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_compose(name):
    made = compose_recipe(name, [SYNTHETIC])
    assert (made.name, made.output) == (name, f"build/{name}")
    if made.model.geometry:
        made.check_geometry(made.model.geometry)
    else:
        assert made.model.path.startswith("builtin:tiny_")
    assert made.replace({"method": "paper"}).select(*PAPER_PINS) == PAPER_PINS


def test_a_user_that_is_not_there_is_one_line(capsys):
    assert main(["recipe=qwen_6bit", SYNTHETIC, "output=~nobodyhere/x"]) == 2
    assert "a path begins with ~ and a user that this machine does not have" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["reuse", "output"])
@pytest.mark.parametrize("place", ["build/qwen_6bit/budget.bits=4/spatial.gamma=0.5", "~/build/x", "~me/a=b"])
def test_a_path_needs_no_quotes(key, place, capsys):
    """Sweeps write to build/NAME/budget.bits=4, which is then given to the next command."""
    for given in (f"{key}={place}", f"{key}='{place}'"):
        code, seen, _, err = run(capsys, "recipe=qwen_6bit", SYNTHETIC, given)
        assert code == 0, err
        assert getattr(seen[0], key) == place
    code, _, _, err = run(capsys, "recipe=qwen_6bit", SYNTHETIC, "budget.bits=4=5")
    assert code == 2
    assert "budget.bits is '4=5'" in err
    assert run(capsys, "recipe=qwen_6bit", SYNTHETIC, f"{key}=[a=b")[0] == 2


def test_shipped_recipes_are_the_promised_ones():
    both = ("qwen_{}bit", "kimi_{}bit", "tiny_gdn_{}bit", "tiny_kda_{}bit", "baseline_int{}", "baseline_qmamba{}")
    both += ("ablation_spatial_{}", "ablation_temporal_{}", "ablation_temporal_no_pivots_{}")
    expected = {name.format(bits) for name in both for bits in (4, 6)}
    assert set(SHIPPED) == expected | {"baseline_int8", "baseline_nvfp4", "baseline_damp"}


def test_geometry_of_the_full_size_recipes():
    qwen = compose_recipe("qwen_6bit", [SYNTHETIC])
    assert qwen.model.geometry.layers == tuple(i for i in range(64) if (i + 1) % 4)
    assert qwen.model.geometry.fp32_bytes == 150_994_944
    assert (qwen.model.geometry.conv_bytes, qwen.model.geometry.kv_bytes_per_token) == (2_949_120, 65_536)
    assert (qwen.pivots.count, qwen.data.source, qwen.data.segments, qwen.data.length) == (32, "wikitext2", 32, 2048)
    kimi = compose_recipe("kimi_4bit", [SYNTHETIC])
    full = {3, 7, 11, 15, 19, 23, 26}
    assert kimi.model.geometry.layers == tuple(i for i in range(27) if i not in full)
    assert kimi.model.geometry.fp32_bytes == 41_943_040
    assert (kimi.pivots.count, kimi.budget.strategy) == (512, "off")
    assert compose_recipe("tiny_kda_6bit").pivots.count == 38


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("budget.bits=5", "budget.bits", 5.0),
        ("spatial.gamma=0.5", "spatial.gamma", 0.5),
        ("pivots.count=0", "pivots.count", 0),
        ("temporal.horizon=512", "temporal.horizon", 512),
        ("solver=ilp", "solver", "ilp"),
        ("method=paper", "method", "paper"),
        ("budget.candidates=[4,6,8]", "budget.candidates", [4, 6, 8]),
        ("dry_run=true", "dry_run", True),
        ("output=/tmp/x y", "output", "/tmp/x y"),
        ("reuse=build/old", "reuse", "build/old"),
        ("json=out.json", "json", "out.json"),
        ("budget.bytes_per_request=24MiB", "budget.bytes_per_request", 24 << 20),
        ("allocation.caps={0:6,4/1:8}", "allocation.caps", {"0": 6, "4/1": 8}),
        ("codegen.targets=[sm_90,sm_100]", "codegen.targets", ["sm_90", "sm_100"]),
        ("model.geometry.num_heads=32", "model.geometry.num_heads", 32),
        ("budget.strategy=off", "budget.strategy", "off"),
        ("temporal.sensitivity=none", "temporal.sensitivity", "none"),
        ("model.path=/models/Qwen3.8-27B", "model.path", "/models/Qwen3.8-27B"),
        ("data=builtin", "data.source", "builtin"),
        ("preset=temporal_only", "spatial.codec", "rowwise"),
        ("name=mine", "output", "build/mine"),
    ],
)
def test_overrides_as_people_write_them(capsys, override, key, value):
    code, (made,), _, _ = run(capsys, "recipe=qwen_6bit", SYNTHETIC, override)
    assert code == 0
    assert made.select(key) == {key: value}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["recipe=qwen_6bot"], ["unknown recipe 'qwen_6bot'", "did you mean 'qwen_6bit'", "tiny_gdn_6bit"]),
        ([], ["recipe is not given", "qwen_6bit"]),
        (["recip=qwen_6bit"], ["recipe"]),
        (["recipe=qwen_6bit", "budget.bitz=5"], ["unknown key budget.bitz", "did you mean 'budget.bits'"]),
        (["recipe=qwen_6bit", "bits=5"], ["unknown key bits", "did you mean 'budget.bits'"]),
        (["recipe=qwen_6bit", "modle=tiny_gdn"], ["unknown key modle", "did you mean 'model'"]),
        (["recipe=qwen_6bit", "model=tiny_gdm"], ["unknown model 'tiny_gdm'", "did you mean 'tiny_gdn'"]),
        (["recipe=qwen_6bit", "+budget.bitz=5"], ["unknown key budget.bitz", "did you mean 'budget.bits'"]),
        (["recipe=qwen_6bit", "budget.bits=12"], ["budget.bits is 12", "from 2 to 8"]),
        (["recipe=qwen_6bit", "budget.bits=[4"], ["'budget.bits=[4' cannot be read"]),
        (["recipe=qwen_6bit", "budget.bits"], ["'budget.bits' cannot be read"]),
        (["recipe=qwen_6bit", "budget.bits=4,6"], ["add -m"]),
        (["recipe=qwen_6bit", "budget=5"], ["budget is 5"]),
        (["recipe=qwen_6bit"], ["model.path is not set; give model.path=/path or calibration=synthetic"]),
        (["recipe=./no.yaml"], ["'./no.yaml' is no file"]),
        (["recipe=qwen_6bit", "seed=1", "seed=2"], ["seed is given twice: seed=1 and seed=2; leave one out"]),
        (["recipe=qwen_6bit", "recipe=qwen_4bit"], ["recipe is given twice: recipe=qwen_6bit and recipe=qwen_4bit"]),
        (["recipe=qwen_6bit", "budget={bits:4}", "budget.bits=5"], ["budget.bits is given twice"]),
        (["recipe=qwen_6bit", "-m", "seed=1,2", "seed=3"], ["seed is given twice: seed=1,2 and seed=3"]),
        (["recipe=qwen_6bit", "name=${nam}"], ["nam"]),
        (["recipe=qwen_6bit", "method=paper", "temporal.horizon=512"], ["temporal.horizon is 512", "method=paper"]),
        (["recipe=qwen_6bit", "method=paper", "temporal={horizon:512}"], ["temporal.horizon is 512", "method=paper"]),
        (["recipe=qwen_6bit", "budget.bits=5", "budget.concurrency=3"], ["are both given"]),
        (["recipe=qwen_6bit", "--config-dir", "nowhere"], ["--config-dir is 'nowhere'"]),
        (["recipe=qwen_6bit", SYNTHETIC, "-m", "budget.bits=interval(4,6)"], ["cannot be enumerated"]),
        ([SYNTHETIC, "-m", "recipe=glob(nothing*)"], ["matches nothing"]),
        (["recipe=qwen_6bit", SYNTHETIC, "-m", "budget.bits=4,12"], ["budget.bits is 12"]),
        (["recipe=qwen_6bit", SYNTHETIC, "-m", "budget.bits=4,4"], ["two jobs", "build/qwen_6bit/budget.bits=4"]),
    ],
)
def test_refusals_are_one_line_and_exit_2(capsys, argv, words):
    code, seen, out, err = run(capsys, *argv)
    assert (code, seen, out) == (2, [], "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_bad_arguments_exit_2(capsys):
    with pytest.raises(SystemExit) as caught:
        hydra_command(lambda recipe: 0, "compile", ["--cgf", "job"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_sweep_runs_every_job_into_its_own_directory(capsys):
    argv = ("recipe=tiny_gdn_6bit", "json=o/s.json", "-m", "budget.bits=4,6", "window.length=1,8")
    code, seen, out, _ = run(capsys, *argv)
    assert code == 0
    assert [made.output for made in seen] == [
        f"build/tiny_gdn_6bit/budget.bits={bits},window.length={length}" for bits in (4, 6) for length in (1, 8)
    ]
    assert seen[0].json == "o/s.budget.bits=4,window.length=1.json"
    assert "[4/4] budget.bits=6,window.length=8" in out


def test_sweeps_over_recipes_lists_and_ranges(capsys):
    _, seen, _, _ = run(capsys, "-m", "recipe=tiny_gdn_6bit,tiny_kda_6bit")
    assert [made.output for made in seen] == ["build/tiny_gdn_6bit", "build/tiny_kda_6bit"]
    _, seen, _, _ = run(capsys, "-m", "recipe=tiny_gdn_6bit,tiny_kda_6bit", "output=out")
    assert [made.output for made in seen] == ["out/recipe=tiny_gdn_6bit", "out/recipe=tiny_kda_6bit"]
    _, seen, _, _ = run(capsys, "recipe=tiny_gdn_6bit", "-m", "budget.candidates=[2,4],[4,6,8]", "budget.bits=4")
    assert [made.budget.candidates for made in seen] == [(2, 4), (4, 6, 8)]
    _, seen, _, _ = run(capsys, "recipe=tiny_gdn_6bit", "-m", "budget.bits=range(4,7)")
    assert [made.budget.bits for made in seen] == [4, 5, 6]
    _, seen, _, _ = run(capsys, "-m", "recipe=glob(baseline_int*)")
    assert [made.name for made in seen] == ["baseline_int4", "baseline_int6", "baseline_int8"]


def test_a_failing_job_does_not_stop_a_sweep(capsys):
    done = []

    def command(made: Recipe) -> None:
        if made.budget.bits == 4:
            raise InfeasibleError("budget.bits is too small")
        done.append(made.budget.bits)

    assert hydra_command(command, "compile", ["recipe=tiny_gdn_6bit", "-m", "budget.bits=4,6"]) == 2
    assert done == [6]
    assert capsys.readouterr().err == "error: budget.bits=4: budget.bits is too small\n"


def test_exit_codes_of_the_command(capsys):
    assert hydra_command(lambda made: 3, "compile", ["recipe=tiny_gdn_6bit"]) == 3

    def interrupted(made: Recipe) -> None:
        raise KeyboardInterrupt

    assert hydra_command(interrupted, "compile", ["recipe=tiny_gdn_6bit"]) == 130
    assert "resume" in capsys.readouterr().err


def test_ctrl_c_that_c_code_replaces_by_an_error_of_its_own(capsys):
    """torch asks a storage for an item and says ValueError where that call raised; SIGINT is Python's own again."""

    class Storage(torch.UntypedStorage):
        def __getitem__(self, at: int) -> int:
            signal.raise_signal(signal.SIGINT)
            return at

    def loading(_: Recipe) -> None:
        with pytest.raises(ValueError, match="could not determine the shape") as hidden:
            torch.tensor(Storage(4), dtype=torch.uint8)
        assert hidden.value.__context__ is None
        raise hidden.value

    seen: list[Recipe] = []
    sweep = ["recipe=tiny_gdn_6bit", "-m", "budget.bits=5,6"]
    assert hydra_command(lambda recipe: seen.append(recipe) or loading(recipe), "compile", sweep) == 130
    assert len(seen) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted; run the same command again to resume")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def broken(_: Recipe) -> None:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):  # the note is gone with the command
        hydra_command(broken, "compile", ["recipe=tiny_gdn_6bit"])


@pytest.mark.parametrize("kind", [AttributeError, RecipeError])
def test_ctrl_c_behind_an_error_of_a_library_that_tidies_up(capsys, monkeypatch, kind):
    """Before a job runs (Hydra composes), and in a job of a sweep, which must not go on with the next one."""

    def tidying(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise kind("a flag could not be put back")

    seen: list[Recipe] = []
    sweep = ["recipe=tiny_gdn_6bit", SYNTHETIC, "-m", "budget.bits=5,6"]
    assert hydra_command(lambda recipe: seen.append(recipe) or tidying(), "compile", sweep) == 130
    assert len(seen) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("interrupted; run the same command again to resume")
    monkeypatch.setattr(config.composing, "compose_jobs", tidying)
    assert hydra_command(seen.append, "compile", sweep) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_recipe_from_a_path(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("defaults:\n  - qwen_6bit\nbudget:\n  bits: 5\n")
    Path("qwen_6bit.yaml").write_text("model: {path: builtin:tiny_gdn}\nbudget: {bits: 7}\n")
    for given in ("my.yaml", "./my.yaml", str(tmp_path / "my.yaml")):
        code, (made,), _, _ = run(capsys, f"recipe={given}", SYNTHETIC)
        assert (code, made.name, made.budget.bits, made.pivots.count) == (0, "my", 5, 32)
    _, (made,), _, _ = run(capsys, "recipe=./qwen_6bit.yaml", "budget.bits=4")
    assert (made.name, made.budget.bits, made.pivots.count) == ("qwen_6bit", 4, 0)
    _, seen, _, _ = run(capsys, "-m", "recipe=./my.yaml,./qwen_6bit.yaml", SYNTHETIC)
    assert [made.output for made in seen] == ["build/my", "build/qwen_6bit"]
    assert compose_recipe(tmp_path / "my.yaml", {"calibration": "synthetic"}).budget.bits == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budgt: {bits: 5}\n", ["unknown key budgt.bits", "did you mean 'budget.bits'"]),
        ("budget: {bits: 50}\n", ["budget.bits is 50"]),
        ("budget: [1\n", ["no YAML"]),
        ("- 1\n", ["not a mapping"]),
        ("defaults:\n  - override /model: tiny_gdm\n", ["unknown model 'tiny_gdm'", "'tiny_gdn'"]),
        ("budget: {bits: 6, bytes_per_request: 24MiB, concurrency: 3}\n", ["are both set"]),
        ("method: paper\nwindow: {length: 8}\nbudget: {bits: 6}\n", ["window.length is 8", "method=paper"]),
    ],
)
def test_refusals_of_what_a_recipe_file_says(capsys, tmp_path, text, words):
    (tmp_path / "my.yaml").write_text(text)
    code, _, _, err = run(capsys, f"recipe={tmp_path}/my.yaml", "model.path=x")
    assert code == 2
    assert err.count("\n") == 1
    for word in words:
        assert word in err


SECRET = "sk-very-secret"
FETCHING = ["${oc.env:STEPQUANT_SECRET}", "x${oc.env:STEPQUANT_SECRET,y}", "${oc.decode:${oc.env:STEPQUANT_SECRET}}",
            "${oc.${seed}:STEPQUANT_SECRET}", "${hydra:runtime.cwd}", "${ oc.env : STEPQUANT_SECRET }"]  # fmt: skip


@pytest.mark.parametrize("value", FETCHING)
@pytest.mark.parametrize("where", ["name: '{}'", "model: {{path: '{}'}}", "defaults: [tiny_gdn_6bit, model: '{}']"])
def test_recipes_read_nothing_from_the_environment(capsys, tmp_path, monkeypatch, value, where):
    """A recipe from elsewhere could carry a secret into an artifact that is given away."""
    monkeypatch.setenv("STEPQUANT_SECRET", SECRET)
    text = where.format(value)
    (tmp_path / "mine.yaml").write_text(text if "defaults" in text else f"defaults: [tiny_gdn_6bit]\n{text}\n")
    code, seen, out, err = run(capsys, f"recipe={tmp_path / 'mine.yaml'}", SYNTHETIC)
    assert (code, seen) == (2, [])
    assert SECRET not in out + err
    assert "recipes read nothing from the environment" in err
    assert re.search(r"error: (name|model\.path|defaults\.model) is ", err)


@pytest.mark.parametrize("value", FETCHING)
def test_overrides_and_python_read_nothing_from_the_environment(capsys, monkeypatch, value):
    monkeypatch.setenv("STEPQUANT_SECRET", SECRET)
    code, seen, out, err = run(capsys, "recipe=tiny_gdn_6bit", SYNTHETIC, f"data.path={literal(value)}", "--cfg", "job",
                               "--resolve")  # fmt: skip
    assert (code, seen) == (2, [])
    assert SECRET not in out + err
    assert "data.path is" in err
    with pytest.raises(RecipeError, match="recipes read nothing from the environment"):
        Recipe.from_config(OmegaConf.create({"name": value, "model": {"path": "x"}, "budget": {"bits": 6}}))


def test_a_recipe_may_refer_to_its_own_keys(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [tiny_gdn_6bit]\nseed: 4\ndata: {seed: '${seed}'}\n")
    _, (made,), _, _ = run(capsys, f"recipe={tmp_path / 'mine.yaml'}", SYNTHETIC, "output='a:b/${name}'")
    assert (made.data.seed, made.output) == (4, "a:b/mine")


def test_targets_on_the_command_line_replace_the_recipes(capsys, tmp_path):
    _, (made,), _, _ = run(capsys, "recipe=tiny_gdn_6bit", "budget.bytes_per_request=1MiB")
    assert made.budget.target == "bytes_per_request"
    (tmp_path / "my.yaml").write_text("model: {path: x}\nbudget: {bytes_per_request: 24MiB}\n")
    _, (made,), _, _ = run(capsys, f"recipe={tmp_path}/my.yaml", "budget.bits=5")
    assert (made.budget.target, made.budget.bytes_per_request) == ("bits", None)


def test_cfg_prints_the_configuration_and_runs_nothing(capsys):
    code, seen, out, _ = run(capsys, "recipe=qwen_6bit", "budget.bits=5", "method=paper", "--cfg", "job", "--resolve")
    shown = OmegaConf.create(out)
    assert (code, seen) == (0, [])
    assert (shown.name, shown.output, shown.budget.bits) == ("qwen_6bit", "build/qwen_6bit", 5)
    assert "hydra" not in shown
    _, _, out, _ = run(capsys, "recipe=qwen_6bit", "--cfg", "job", "--package", "pivots")
    assert out.strip() == "count: 32"
    _, _, out, _ = run(capsys, "recipe=qwen_6bit", "-m", "budget.bits=4,6", "--cfg", "job", "-p", "output")
    assert "build/qwen_6bit/budget.bits=6" in out
    assert "hydra:" in run(capsys, "recipe=qwen_6bit", "--cfg", "all")[2]


def test_help_lists_the_recipes(capsys):
    code, _, out, _ = run(capsys, "--help")
    assert code == 0
    assert "python -m stepquant.compile" in out
    assert all(name in out for name in SHIPPED)


def test_config_dir_adds_groups(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: builtin:tiny_kda\n")
    _, (made,), _, _ = run(capsys, "recipe=baseline_int8", "model=mine", "--config-dir", str(tmp_path))
    assert made.model.path == "builtin:tiny_kda"


def test_warnings_go_to_stderr(capsys):
    code, _, _, err = run(capsys, "recipe=qwen_6bit", SYNTHETIC)
    assert code == 0
    assert err.startswith("warning: calibration=synthetic")


def test_a_command_with_a_root_of_its_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "probe.yaml").write_text("plan: null\noutput: out\nstreams:\n  count: 4\n")
    monkeypatch.setattr(config, "conf_dir", lambda: tmp_path)
    seen = []
    assert hydra_config_command(seen.append, "probe", "probe", ["plan=build/x"]) == 0
    assert (seen[0].plan, seen[0].streams.count) == ("build/x", 4)
    assert hydra_config_command(seen.append, "probe", "probe", ["-m", "streams.count=1,2"]) == 0
    assert [entry.output for entry in seen[1:]] == ["out/streams.count=1", "out/streams.count=2"]
    assert hydra_config_command(seen.append, "probe", "probe", ["--help"]) == 0
    assert "streams.count" in capsys.readouterr().out
    assert hydra_config_command(seen.append, "probe", "probe", ["streams.cuont=3"]) == 2
    assert "unknown key streams.cuont (did you mean 'streams.count'?)" in capsys.readouterr().err
    assert hydra_config_command(seen.append, "probe", "probe", ["plan=a", "plan=b"]) == 2
    assert "plan is given twice: plan=a and plan=b" in capsys.readouterr().err


def test_overrides_from_python():
    made = compose_recipe(
        "tiny_gdn_6bit", {"output": "it's \\here,x", "allocation.caps": {0: 6}, "cache.enabled": False}
    )
    assert (made.output, made.allocation.caps, made.cache.enabled) == ("it's \\here,x", {"0": 6}, False)
    assert literal([1, None, 2.5, (True,)]) == "[1,null,2.5,[true]]"
    with pytest.raises(RecipeError, match=r"unknown key budget\.bitz"):
        compose_recipe("tiny_gdn_6bit", {"budget.bitz": 1})


def test_the_command_from_another_directory_leaves_nothing_behind(tmp_path):
    def python(*argv: str) -> subprocess.CompletedProcess[str]:
        argv = (sys.executable, "-m", "stepquant.compile", *argv)
        environment = {"PYTHONPATH": str(Path(config.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    shown = python("recipe=qwen_6bit", "--cfg", "job")
    assert (shown.returncode, OmegaConf.create(shown.stdout).pivots.count) == (0, 32)
    refused = python("recipe=qwen_6bot")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: unknown recipe 'qwen_6bot' (did you mean 'qwen_6bit'?)")
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []
