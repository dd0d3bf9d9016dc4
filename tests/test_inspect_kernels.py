"""``inspect --kernels``: figures of kernel_plan.json, bytes of a page, sources; what is missing or damaged by name."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from stepquant import serve
from stepquant.accounting import byte_count, page_layout
from stepquant.codec.dual_axis import Codes
from stepquant.codec.packed import PackedCodec
from stepquant.codec.spec import CodecSpec
from stepquant.errors import ArtifactError
from stepquant.inspect import main
from stepquant.kernel_tables import MAX_HEADS, print_source
from stepquant.layout import PARTS
from stepquant.passes.codegen import write_kernels
from stepquant.passes.layout import permutation
from stepquant.plan import LayoutPlan, load_plan
from stepquant.runtime import launch
from stepquant.runtime.load import load_rank_plan
from stepquant.runtime.sglang import refusals
from tests.plans import small_plan, synthetic_plan

REPORT = {
    "launch": {"warps": 4, "registers": None}, "registers": 93, "spill_bytes": 24, "shared_bytes": 31_744,
    "instructions": 777, "instructions_per_element": 98.76, "seconds": 5.6, "rejected": ["2 warps spill 999 bytes"],
}  # fmt: skip


def own_plan(**changes: Any) -> LayoutPlan:
    """A small plan that there are kernels for."""
    return small_plan(**{"codec": CodecSpec(group=16), **changes})


def save(plan: LayoutPlan, directory: Path) -> Path:
    plan.save(directory)
    write_kernels(directory, plan, ())
    return directory


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(synthetic_plan("kimi_4bit"), tmp_path_factory.mktemp("kimi") / "plan")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(synthetic_plan("qwen_6bit", "method=paper"), tmp_path_factory.mktemp("qwen") / "plan")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save(own_plan(), tmp_path / "small")


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    code, out, err = run(capsys, *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def words(text: str) -> str:
    """Text without the lines of tables and without line breaks."""
    return " ".join("".join(" " if 0x2500 <= ord(c) < 0x2600 else c for c in text).split())


def kernel_json(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "kernels" / "kernel_plan.json").read_text())


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = kernel_json(directory)
    change(data)
    (directory / "kernels" / "kernel_plan.json").write_text(json.dumps(data))


@pytest.mark.parametrize(("name", "variants"), [("kimi", {"read", "fold", "flush", "pack", "unpack"}),
                                                ("qwen", {"step", "pack", "unpack"})])  # fmt: skip
def test_figures_are_those_of_the_file(name, variants, request, capsys):
    directory = request.getfixturevalue(name)
    found, written = run_json(capsys, directory, "--kernels"), kernel_json(directory)
    assert found["kernel_plan"] == written
    assert {v["name"] for v in written["variants"]} == variants
    assert found["plan_sha256"] == load_plan(directory).hash
    assert (found["current"], found["synthetic"], found["predicted_batch"]) == (True, True, 512)
    code, out, err = run(capsys, directory, "--kernels")
    assert (code, err) == (0, "")
    text = words(out)
    for v in written["variants"]:
        tile, launch = v["tile"], v["launch"]
        assert (
            f"{v['name']} {v['programs']} {tile['rows']} x {tile['columns']} {launch['warps']} {v['stages']} " in text
        )
        assert f"{v['name']} {v['bytes_read']:,} {v['bytes_written']:,} {v['flops']:,}" in text
        assert f"{v['name']} " + " ".join(f"{us:,.1f}" for us in v["predicted_us"].values()) in text
        assert all(part in text for part in v["title"].split()[:3])
    assert "…" not in out
    assert "batch 512, from bytes alone" in text
    assert "not compiled: codegen.targets=[sm_90]" in text


def test_predictions_are_of_the_batch_that_is_named(qwen, capsys):
    """From the bandwidth that NVIDIA names: 4.8 TB/s, less a tenth or so that no kernel reaches."""
    found = run_json(capsys, qwen, "--kernels")
    for v in found["kernel_plan"]["variants"]:
        nominal = found["predicted_batch"] * (v["bytes_read"] + v["bytes_written"]) / 4.8e6
        assert nominal < v["predicted_us"]["H200"] < 1.15 * nominal


def compiled_for_a100(data: dict[str, Any]) -> None:
    """The first kernel with a report, and the time that follows: 108 multiprocessors issue 128 lanes at 1.41 GHz, of
    which six in ten are counted on."""
    first = data["variants"][0]
    first["targets"]["sm_80"] = REPORT
    instructions = 512 * first["elements"] * 98.76
    first["predicted_us"]["A100"] = round(1e6 * instructions / (0.6 * 108 * 128 * 1.41e9), 1)


def test_reports_of_targets_are_shown(small, capsys):
    edit(small, compiled_for_a100)
    code, out, err = run(capsys, small, "--kernels")
    assert (code, err) == (0, "")
    text, first = words(out), kernel_json(small)["variants"][0]["name"]
    assert f"{first} sm_80 4 93/255 24 31,744 98.76 5.6" in text
    assert f"{first} for sm_80: 2 warps spill 999 bytes" in text
    assert "…" not in out
    assert "from bytes; A100 also from instructions" in text
    assert "not compiled" not in text


def plans() -> list[LayoutPlan]:
    """By head and by row; a granularity of one, so that rows stay in wider slots and some slots are unused."""
    gen = torch.Generator().manual_seed(5)
    bits = torch.tensor([2, 4, 6, 8, 16], dtype=torch.uint8)[torch.randint(5, (2, 4, 16), generator=gen)]
    mixed = small_plan(bits=bits, permutation=permutation(bits), codec=CodecSpec(codebook="shared"),
                       predicted={"solver": "dp", "unit": "row"})  # fmt: skip
    return [own_plan(), mixed]


@pytest.mark.parametrize("index", [0, 1])
def test_parts_are_the_bytes_of_the_page(index, tmp_path, capsys):
    """Offsets against what the torch packer writes: scales and pivots found where the table says, no byte unnamed."""
    plan = plans()[index]
    directory, pages = save(plan, tmp_path / "plan"), page_layout(plan)
    total = 0
    for i, layer in enumerate(plan.geometry.layers):
        page = run_json(capsys, directory, "--kernels", "--layer", layer)["page"]
        assert (page["layer"], page["bytes"]) == (layer, int(pages.layer_bytes[i]))
        assert page["slot_offset"] == total
        total += page["bytes"]
        owner = [None] * page["bytes"]
        for head in page["heads"]:
            assert set(head["parts"]) <= set(PARTS)
            for name, (offset, size) in head["parts"].items():
                assert (offset, size) == pages.part(i, head["head"], name)
                assert owner[offset : offset + size] == [None] * size
                owner[offset : offset + size] = [name] * size
            assert sum(head["rows"].values()) == 16
        assert page["parts"] == {name: owner.count(name) for name in PARTS}
        assert owner.count(None) == page["alignment"]
        count = pages.layers[i]
        planes = sum(page["parts"][n] for n in ("high4", "low4", "low2", "top2"))
        assert planes == count.codes + count.padding
        assert page["parts"]["r"] + page["parts"]["c"] == count.scales
        assert page["parts"]["pivots"] == count.pivots
        check_bytes(plan, i, page)
    assert total == byte_count(plan).allocated
    assert byte_count(plan).padding > 0 or index == 0


def check_bytes(plan: LayoutPlan, i: int, page: dict[str, Any]) -> None:
    """Random states, packed: FP16 rows and column scales lie where `page` says, and planes hold no zeros only."""
    codec = PackedCodec(page_layout(plan), i, plan.w[i], plan.codec)
    x = torch.randn(1, 4, 16, 32, generator=torch.Generator().manual_seed(i))
    memory, stored = codec.pack(x)[0], codec.codec.fit(x)
    assert isinstance(stored, Codes)
    for head in page["heads"]:
        h = head["head"]
        bits = plan.bits[i, h]
        parts = {n: memory[o : o + size] for n, (o, size) in head["parts"].items()}
        assert {b: int((bits == int(b)).sum()) for b in head["rows"]} == head["rows"]
        if "pivots" in parts:
            assert torch.equal(parts["pivots"].view(torch.float16).view(-1, 32), x[0, h, bits == 16].half())
        if "c" in parts:
            assert torch.equal(parts["c"].view(torch.float16), stored.c[0, h].half().flatten())
        for name in {"high4", "low4", "low2", "top2"} & set(parts):
            assert parts[name].unique().numel() > 1


def test_page_as_text(kimi, capsys):
    found = run_json(capsys, kimi, "--kernels", "--layer", "4")["page"]
    text = words(run(capsys, kimi, "--kernels", "--layer", "4")[1])
    assert f"page of layer 4, at byte {found['slot_offset']:,} of a slot" in text
    for head in found["heads"][:MAX_HEADS]:
        for bits, count in head["rows"].items():
            assert not count or (f"{count} in FP16" if bits == "16" else f"{count} of {bits} bits") in text
        assert all(f"{offset:,} {size:,}" in text for offset, size in head["parts"].values())
    assert "26 of 8 bits in 32 slots" in text
    left = found["heads"][MAX_HEADS]["offset"]
    assert f"and 26 more heads, bytes {left:,} to {found['bytes'] - found['alignment'] - 1:,}" in text
    terms = {**{n: found["parts"][n] for n in PARTS}, "alignment": found["alignment"]}
    line = " + ".join(f"{n} {size:,}" for n, size in terms.items())
    assert sum(terms.values()) == found["bytes"]
    assert f"{line} = {found['bytes']:,} bytes; the page has {found['bytes']:,}" in text
    assert "page of layer 0, at byte 0 of a slot" in words(run(capsys, kimi, "--kernels")[1])


@pytest.mark.parametrize("kernels", [[], ["--kernels"]])
def test_source(kimi, capsys, kernels):
    text = (kimi / "kernels" / "read.py").read_text()
    code, out, err = run(capsys, kimi, *kernels, "--source", "read")
    assert (code, err) == (0, "")
    assert out.endswith(text)
    assert (out == text) == (not kernels)
    found = run_json(capsys, kimi, *kernels, "--source", "read")
    assert found["source"] == {"read": text}
    assert ("page" in found) == bool(kernels)


def test_source_has_colours_on_a_terminal_only():
    text = "@triton.jit\ndef read(pages):\n    return 1\n"
    screen = io.StringIO()
    print_source(text, Console(file=screen, force_terminal=True, color_system="standard", width=80))
    assert "\x1b[" in screen.getvalue()
    plain = Console(width=80).render_str(screen.getvalue()).plain
    assert "triton" in plain


def test_source_through_a_pipe(small):
    command = [sys.executable, "-m", "stepquant.inspect", str(small), "--source", "step"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (small / "kernels" / "step.py").read_bytes()


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The line that a refusal prints."""
    for extra in ([], ["--json"]):
        code, out, err = run(capsys, *args, *extra)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    return err


def test_options_that_do_not_go_together(small, capsys):
    assert "did you mean 'step'?); this plan has pack, step, unpack" in refused(capsys, small, "--source", "stp")
    assert "plans with window.length=2 or more have it; this plan has" in refused(capsys, small, "--source", "read")
    assert "--layer 1 is no delta-rule layer of the plan; expected one of [0, 2]" in refused(
        capsys, small, "--kernels", "--layer", 1
    )
    assert "--layer is for --kernels" in refused(capsys, small, "--layer", 0)
    assert "--layer is for --kernels" in refused(capsys, small, "--layer", 0, "--source", "step")
    for option in (["--batch", "4"], ["--passes"], ["--memory", "1GiB"]):
        assert f"{option[0]} is for the plan's memory" in refused(capsys, small, "--kernels", *option)
        assert f"{option[0]} is for the plan's memory" in refused(capsys, small, "--source", "step", *option)


@pytest.mark.parametrize("option", [["--kernels"], ["--layer", "0"], ["--source", "step"]])
def test_options_are_refused_for_two_plans(small, capsys, option):
    message = f"error: {option[0]} is for one plan, and two are compared; inspect each by itself\n"
    assert refused(capsys, small, small, *option) == message


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9" * 12])
def test_layer_is_a_number(small, capsys, number):
    with pytest.raises(SystemExit) as stop:
        main([str(small), "--kernels", "--layer", number])
    assert stop.value.code == 2
    assert "layer" in capsys.readouterr().err


def test_no_kernels(small, tmp_path, capsys):
    shutil.rmtree(small / "kernels")
    assert f"{small / 'kernels'}: the directory of generated kernels is missing" in refused(capsys, small, "--kernels")
    (small / "kernels").write_text("not a directory")
    assert "kernel_plan.json" in refused(capsys, small, "--kernels")
    simulated = save(small_plan(codec=CodecSpec(kind="rowwise", codebook="shared")), tmp_path / "rowwise")
    assert "there are no kernels: codec 'rowwise' is simulated only" in refused(capsys, simulated, "--kernels")


def test_edited_and_missing_sources(small, capsys):
    path = small / "kernels" / "step.py"
    text = path.read_text()
    path.write_text(text.replace("tl.float32", "tl.float16", 1))
    for option in (["--kernels"], ["--source", "pack"]):
        message = refused(capsys, small, *option)
        assert "the sources do not match source_sha256 of kernel_plan.json (step.py differ" in message
    path.write_text(text + "# \x1b[31m\n")
    assert "step.py: the generated kernel holds control characters" in refused(capsys, small, "--source", "step")
    path.write_bytes(b"\xff" + text.encode())
    assert "step.py: the generated kernel cannot be read" in refused(capsys, small, "--source", "step")
    path.unlink()
    assert "step.py: a generated kernel is missing" in refused(capsys, small, "--kernels")


def test_kernels_of_another_plan_are_not_served(small):
    """A server reads no more of kernel_plan.json than whose kernels these are, and their hash."""
    assert load_rank_plan(small).kernel_hash == kernel_json(small)["source_sha256"]
    edit(small, lambda data: data.update(plan="0" * 64))
    with pytest.raises(ArtifactError, match="plan is '0000"):
        load_rank_plan(small)


def test_a_kernel_too_many(small, capsys):
    (small / "kernels" / "more.py").write_text("print('run me')\n")
    assert "more.py: kernel_plan.json has no such kernel" in refused(capsys, small, "--kernels")


def test_another_generator_is_said(small, capsys, monkeypatch):
    """What an older stepquant wrote is sound, though this one would write another text, and a GPU refuses it."""
    from stepquant.codegen.generate import source_hash

    dry = [f"plan={small}", "dry_run=true", "memory=1GiB", "weights=0B"]
    load_rank_plan(small).check_kernels()
    assert serve.main(dry) == 0
    assert "refuse" not in capsys.readouterr().out
    path = small / "kernels" / "step.py"
    path.write_text(path.read_text() + "# as an older version ended\n")
    sources = {p.stem: p.read_text() for p in (small / "kernels").glob("*.py")}
    edit(small, lambda data: data.update(source_sha256=source_hash(sources)))
    assert "another version of stepquant generated these kernels" in words(run(capsys, small, "--kernels")[1])
    assert run_json(capsys, small, "--kernels")["current"] is False
    with pytest.raises(ArtifactError, match="compile the plan again with this version: reuse=DIR"):
        load_rank_plan(small).check_kernels()
    assert serve.main(dry) == 0
    assert "a server on a GPU would refuse this plan: kernels/ was generated as" in words(capsys.readouterr().out)
    for name in ("installed_version", "plugin_target"):  # as if SGLang were here
        monkeypatch.setattr(launch, name, lambda: "there")
    monkeypatch.setattr(refusals, "check_checkpoint", lambda *_: None)
    assert serve.main([f"plan={small}", "--", "--model-path", "x"]) == 2
    assert "kernels/ was generated as" in capsys.readouterr().err


def _first(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["variants"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(plan="0" * 64), "plan is '0000"),
        (lambda d: d.update(schema_version=7), "schema_version is 7; this stepquant reads 1"),
        (lambda d: d.pop("variants"), "variants is missing; expected a list"),
        (lambda d: d.update(extra=1), "'extra' is unknown"),
        (lambda d: d.update(variants=[]), "variants are []"),
        (lambda d: d.update(variants=[1]), "variants[0] is a whole number; expected an object"),
        (lambda d: d["variants"].append(d["variants"][0]), "each once"),
        (lambda d: d.update(source_sha256="0" * 64), "(none differ from"),
        (_first(name="../../plan"), "variants[0] is '../../plan'"),
        (_first(file="../plan.json"), "'../plan.json'; expected one of"),
        (_first(bytes_read="many"), "variants[0].bytes_read is 'many'; expected a whole number"),
        (_first(bytes_read=True), "variants[0].bytes_read is True"), (_first(flops=-1), "expected no negative number"),
        (_first(title="\x1b[2J"), "variants[0].title is '\\x1b[2J'; expected printable"),
        (_first(tile={"rows": 128}), "tile.columns is missing; expected a whole number"),
        (_first(predicted_us={"H200": "fast"}), "predicted_us.H200 is 'fast'; expected a whole number"),
        (_first(predicted_us=[1]), "predicted_us is [1]; expected an object"),
        (_first(launch={"warps": 8}), "variants[0].launch.registers is missing"),
        (_first(targets={"sm_90": {}}), "variants[0].targets.sm_90."),
        (_first(targets={"sm_90": {**REPORT, "rejected": [1]}}), "sm_90.rejected is [1]"),
        (_first(targets={"\x1b": REPORT}), "variants[0].targets.'\\x1b' is no name"),
        (_first(targets={"x" * 3000: REPORT}), "xxx... is no name"),
        (_first(launch={"warps": 3, "registers": None}), "variants[0].launch.warps is 3; expected 4"),
        (_first(bytes_written=1), "variants[0].bytes_written is 1; expected"),
        (lambda d: d["variants"][1]["predicted_us"].update(H200=0.1), "variants[1].predicted_us.H200 is 0.1; expected"),
        (lambda d: d.update(generator_version="3"), "generator_version is '3'; the sources are of version"),
        (lambda d: d["spec"].update(window=8), "spec.window is 8; expected 1"),
        (lambda d: d["variants"].reverse(), "variants[0].bytes_read is"),
        (_first(targets={"sm_80": REPORT}), "variants[0].predicted_us.A100 is"),
        (_first(targets={"sm_90": {**REPORT, "launch": {"warps": 3, "registers": None}}}),
         "the launch of pack for 'sm_90' is Launch(warps=3, registers=None); expected one of Launch(warps=4, reg"),
        (_first(targets={"sm_90": {**REPORT, "instructions_per_element": 10**10}}), "expected at most 1000000"),
    ],
)  # fmt: skip
def test_damaged_kernel_plan(small, capsys, change, message):
    edit(small, change)
    assert message in refused(capsys, small, "--kernels")
