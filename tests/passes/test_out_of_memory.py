"""Memory that runs out in any step: one line with the arithmetic and the setting to lower, exit code 2, and a run at a
smaller setting that goes on from there to the plan of an undisturbed one."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from stepquant.compile import main as compile_command
from stepquant.config import compose_recipe
from stepquant.errors import BackendError, ModelError
from stepquant.evaluate import main as evaluate_command
from stepquant.evaluation import drift
from stepquant.models import adapter
from stepquant.passes import context as context_module
from stepquant.passes import distortion, rollout, trace
from stepquant.passes.context import Context
from stepquant.passes.out_of_memory import explain_memory, out_of_memory
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.plan import load_plan
from tests.passes.test_pipeline import SMALL

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Process 1 has 77.80 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch."
)
SMALL_GPU = "Tried to allocate 512.00 KiB. GPU 0 has a total capacity of 512.00 MiB of which 0 bytes is free. ..."
MODEL, LAYER = "tiny_gdn_6bit", 4 * 8 * 3 * 128  # bytes of q, k, v a token in a layer of the built-in GDN model


def arguments(place, cache, **changes):
    changes = {"data.batch": 2, **{key.replace("__", "."): value for key, value in changes.items()}}
    settings = {**SMALL, "cache.dir": str(cache), "output": str(place), **changes}
    return [f"recipe={MODEL}", *(f"{key}={value}" for key, value in settings.items())]


def fails_at(monkeypatch, owner, name, call=1):
    """Make the `call`-th call of a function raise what torch does on a full GPU."""
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return calls


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The plan of a compile in which nothing goes wrong."""
    root, made = tmp_path_factory.mktemp("undisturbed"), {}

    def plan(**changes):
        key = str(sorted(changes.items()))
        if key not in made:
            assert compile_command(arguments(root / str(len(made)), root / "cache", **changes)) == 0
            made[key] = load_plan(root / str(len(made)))
        return made[key]

    return plan


# step: where it fails (call counted from 1), what the line says of shares and settings, the setting to go on with
STEPS = {
    "load": (
        transformers.AutoModelForCausalLM, "from_pretrained", 1,  # whose errors the adapter puts in its own words
        r"loading the model: .*weights took .+iB; set model\.loading=layerwise", {},
    ),
    "trace": (
        context_module, "chunked_delta_rule", 15,  # in the second batch of 12 calls
        rf"trace \(.*data\.batch=2 x data\.length=64 tokens took {2 * 64 * LAYER / 2**20:.2f} MiB for one layer's q, "
        r"k, v .* set data\.batch=1 or model\.loading=layerwise.* the next run goes on from there", {"data__batch": 1},
    ),
    "layers": (
        context_module, "chunked_delta_rule", 5, r"trace \(.*one layer of them at a time\); set data\.batch=1\. ",
        {"data__batch": 1, "model__loading": "layerwise"},
    ),
    "distortion": (
        distortion, "row_errors", 2,
        r"distortion: .*samples\.per_layer=4 took 2\.00 MiB for a layer's states.*set samples\.per_layer=2\. "
        "Products are kept: the same command again leaves the model out", {},
    ),
    "rollout": (
        rollout, "rollout", 2, r"rollout: .*data\.length=64 took .* for 64 tokens of each; set data\.length=32\. ", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_every_step_says_what_took_how_much_and_the_next_run_goes_on(step, undisturbed, tmp_path, monkeypatch, capsys):
    expected, (owner, name, call, says, smaller) = undisturbed(), STEPS[step]  # made before anything is patched
    first = {key: value for key, value in smaller.items() if key == "model__loading"}
    batches = []
    with monkeypatch.context() as patched:
        fails_at(patched, owner, name, call)
        assert compile_command(arguments(tmp_path / "out", tmp_path / "cache", **first)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: out of memory in ")
    assert "2.00 GiB more were needed on GPU 3, of whose 79.10 GiB 1.25 GiB were free; " in line
    assert re.search(says, line), line
    assert not (tmp_path / "out" / "plan.json").exists()

    original = trace.watch_batch
    monkeypatch.setattr(trace, "watch_batch", lambda c, t, rows, o: (batches.append(rows), original(c, t, rows, o)))
    if step in ("distortion", "rollout"):
        monkeypatch.setattr(adapter, "load_model", lambda *a, **k: pytest.fail("the model was loaded again"))
    assert compile_command(arguments(tmp_path / "out", tmp_path / "cache", **smaller)) == 0
    if step == "trace":  # two of four segments had been done, in one batch
        assert [(r.start, r.stop) for r in batches] == [(2, 3), (3, 4)]
    found = load_plan(tmp_path / "out")
    assert torch.equal(found.bits, expected.bits)
    torch.testing.assert_close(found.w, expected.w, rtol=1e-3, atol=0)
    assert found.provenance == expected.provenance


def test_a_resumed_trace_counts_every_token_once(tmp_path, monkeypatch):
    """Batches of two, then of three, over seven segments: sums over tokens show a segment left out or taken twice."""
    sums = {}
    for name, sizes in {"plain": (2,), "cut": (2, 3)}.items():
        for batch in sizes:
            recipe = compose_recipe(MODEL, {**SMALL, "data.segments": 7, "data.batch": batch,
                                            "cache.dir": str(tmp_path / name)})  # fmt: skip
            pipeline = Pipeline(Context.open(recipe, Progress(quiet=True)))
            with monkeypatch.context() as patched:
                if batch != sizes[-1]:
                    fails_at(patched, trace, "watch_batch", 3)
                    with pytest.raises(BackendError, match="out of memory"):
                        _ = pipeline["gate_statistics"]
                    continue
                sums[name] = pipeline["gate_statistics"]
    assert sums["cut"].facts == sums["plain"].facts == {"tokens": 7 * 64}
    torch.testing.assert_close(sums["cut"]["mean_log_gate"], sums["plain"]["mean_log_gate"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError(TORCH_SAYS), "2.00 GiB more were needed on GPU 3, of whose 79.10 GiB 1.25 GiB were f"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "20.00 MiB|0.02 GiB"),
        (torch.OutOfMemoryError(SMALL_GPU), "0.50 MiB more were needed on GPU 0, of whose 0.50 GiB 0.00 MiB were free"),
        (RuntimeError("CUDA error: out of memory"), "more was needed on the GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "more was needed on the GPU"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes"),
         r"4\.00 GiB more were needed of host memory, the process held \d"),
        (MemoryError(), r"more was needed of host memory"),
        (RuntimeError("shapes cannot be multiplied"), None),
    ],
)  # fmt: skip
def test_what_was_needed_and_what_was_free(error, says):
    found = out_of_memory(error)
    assert (found is None) == (says is None)
    assert says is None or re.match(says, found), found


def test_a_full_gpu_as_torch_says_it_in_many_lines_is_one_line():
    """What an H200 said to the first tensor of a model, of whose 0.3 GiB CUDA itself had taken all."""
    says = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported.\nCompile with ..."
    recipe = compose_recipe(MODEL)
    telling = explain_memory(Context.open(recipe), "load", "loading the model")
    with pytest.raises(BackendError, match="in loading the model: more was needed on the GPU") as found, telling:
        raise ModelError(f"transformers cannot load x: AcceleratorError: {says}") from RuntimeError(says)
    assert "\n" not in str(found.value)


def test_another_error_is_left_as_it_is():
    recipe = compose_recipe(MODEL)
    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as found, explain_memory(Context.open(recipe), "trace", "the trace"):
        raise error
    assert found.value is error


def test_an_evaluation_names_its_batch(undisturbed, tmp_path, monkeypatch, capsys):
    assert compile_command(arguments(tmp_path / "out", tmp_path / "cache")) == 0
    fails_at(monkeypatch, drift, "run_variant")
    few = ["against=[]", "streams=2", "prefill=32", "decode=16", "batch=2", "workers=1"]
    found = evaluate_command([f"plan={tmp_path / 'out'}", f"cache.dir={tmp_path / 'cache'}", *few])
    assert found == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"^error: out of memory in the evaluation: 2\.00 GiB .* batch=2 streams of \d+ tokens.*set batch=1$", line
    )
