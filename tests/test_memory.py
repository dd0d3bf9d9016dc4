"""Equation 24, window buffers, and the byte figures of full-size plans, as the paper and the design state them."""

from __future__ import annotations

import pytest
import torch

from stepquant.accounting import account, byte_count, packable, page_layout
from stepquant.codec.spec import CodecSpec
from stepquant.codegen.spec import KernelSpec
from stepquant.config import compose_recipe
from stepquant.errors import InfeasibleError, RecipeError
from stepquant.geometry import Geometry
from stepquant.memory import GIB, SLOTS_PER_REQUEST, ServingMemory, window_bytes
from stepquant.passes.context import Context
from stepquant.passes.layout import make_plan
from stepquant.passes.pipeline import Pipeline
from stepquant.passes.progress import Progress
from stepquant.passes.targets import choose_window
from stepquant.runtime.window import WindowBuffers, bytes_per_request
from stepquant.summary import plan_summary, serving_memory, serving_rows
from tests.plans import small_plan, synthetic_plan

W4_WEIGHTS = 17_776_688_128


@pytest.fixture(scope="module")
def qwen():
    return synthetic_plan("qwen_6bit", "method=paper")


def test_qwen_6_bits(qwen):
    found = account(qwen)
    assert (found.slot.total, found.slot.allocated, found.fp32) == (29_999_104, 29_999_104, 150_994_944)
    assert (found.slot.codes, found.slot.scales, found.slot.pivots) == (27_787_264, 1_163_264, 1_048_576)
    assert round(found.bits_per_value, 4) == 6.3576
    assert round(found.paper_bits_per_value, 4) == 6.3611
    assert found.running == 0
    heads = qwen.bits[..., 0]
    assert int((heads == 16).sum()) == qwen.predicted["pivot_units"] == 32
    assert qwen.predicted["integer_budget_bits"] == 13_568 * 128 * 128
    assert int(heads[heads != 16].sum()) == 13_568  # used up


def test_qwen_4_bits():
    plan = synthetic_plan("qwen_4bit", "method=paper")
    heads = plan.bits[..., 0]
    assert int((heads == 16).sum()) == 32
    assert int(heads[heads != 16].sum()) == 4 * 2304 - 8 * 32  # the budget is used up
    assert account(plan).slot.total == 20_561_920 + 768 * int((heads == 2).sum())


@pytest.mark.parametrize(("bits", "total", "compression"), [(6, 8_257_536, 5.08), (4, 5_636_096, 7.44)])
def test_kimi(bits, total, compression):
    plan = synthetic_plan(f"kimi_{bits}bit", "method=paper")
    found = account(plan)
    assert (found.slot.total, found.fp32) == (total, 41_943_040)
    assert round(found.fp32 / found.slot.total, 2) == compression
    assert int((plan.bits == 16).sum()) == plan.predicted["pivot_units"] == 512
    assert (found.slot.scales, found.slot.pivots) == (327_680, 131_072)
    assert 0 < found.slot.padding < 0.05 * total
    assert found.slot.allocated >= found.slot.total + found.slot.padding


def test_equation_24(qwen):
    summary = plan_summary(qwen)
    row = serving_rows(summary, 0, 5, [64], 4096)[0]
    assert round(row["state_fp32"] / GIB, 2) == 46.02
    assert round(row["state_plan"] / GIB, 2) == 9.85
    row = serving_rows(summary, W4_WEIGHTS, 5, [512], 1152)[0]
    assert round(row["total_fp32"] / GIB, 2) == 419.73
    assert round(row["total_plan"] / GIB, 1) == 131.1
    slot = 29_999_104 + 2_949_120
    assert row["total_plan"] == W4_WEIGHTS + (5 * 512 + 1) * slot + 512 * 1152 * 65_536


def test_capacity_counts_what_the_pool_allocates():
    plan = synthetic_plan("kimi_4bit", "method=paper")
    summary = plan_summary(plan)
    assert serving_memory(summary, 0, 1).slot == byte_count(plan).allocated + plan.geometry.conv_bytes
    assert serving_memory(summary, 0, 1, fp32=True).slot == 41_943_040 + plan.geometry.conv_bytes


def test_concurrency_is_the_largest_that_fits():
    term = ServingMemory(10 * GIB, 30_000_000, 65_536, 5, 1_000_000)
    for memory, context in ((80 * GIB, 4096), (12 * GIB, 1), (10 * GIB + 30_000_000, 8)):
        fits = term.concurrency(memory, context)
        assert term.total(fits, context) <= memory < term.total(fits + 1, context)
    assert term.concurrency(10 * GIB, 1) == 0
    assert term.concurrency(0, 1) == 0


def test_the_slot_for_a_concurrency_is_the_largest_that_works():
    term = ServingMemory(W4_WEIGHTS, 0, 65_536, 5)
    slot = term.slot_for(80 * GIB, 4096, 128)
    for size, fits in ((slot, True), (slot + 1, False)):
        assert (ServingMemory(W4_WEIGHTS, size, 65_536, 5).total(128, 4096) <= 80 * GIB) == fits
    with pytest.raises(InfeasibleError, match=r"budget.concurrency=128 does not fit: 16.00 GiB less 16.56 GiB"):
        term.slot_for(16 * GIB, 4096, 128)


def test_slots_per_request_of_sglang():
    assert SLOTS_PER_REQUEST == {"off": 1, "no_buffer": 3, "extra_buffer": 5, "extra_buffer_no_overlap": 4}


GDN = Geometry("gdn", "q", tuple(range(48)), 48, 16, 128, 128)
KDA = Geometry("kda", "k", tuple(range(20)), 32, 32, 128, 128)


def test_window_buffers():
    """7 pending tokens at W = 8: by hand, and in bits a state value."""
    assert window_bytes(GDN, 1, "fp16") == window_bytes(KDA, 1, "bf16") == 0
    for dtype in ("fp16", "bf16"):
        assert window_bytes(GDN, 8, dtype) == 48 * (7 * (48 * 128 * 2 + 16 * 128 * 2 + 48 * 8) + 48 * 8)
        assert window_bytes(KDA, 8, dtype) == 20 * (7 * 32 * 2 * 128 * 2 + 32 * 128 * 4)
    # Design 2.5 counts 8 entries, 1.33 and 2.25 bits a state value at W = 8; the last one is never stored. GDN's gates,
    # eight numbers a head, are kept twice and not counted there.
    gates = 2 * 8 * 32 / 128**2
    assert 8 * window_bytes(GDN, 8, "fp16") / GDN.elements == pytest.approx(1.33 * 7 / 8 + gates, abs=0.02)
    assert 8 * window_bytes(KDA, 8, "fp16") / KDA.elements == pytest.approx(0.25 + 2.0 * 7 / 8, abs=0.02)
    assert window_bytes(GDN, 8, "int8") == 48 * (7 * (48 * 130 + 16 * 130 + 48 * 8) + 48 * 8)
    assert window_bytes(GDN, 8, "fp32") > 1.9 * window_bytes(GDN, 8, "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp32"])
@pytest.mark.parametrize("length", [2, 8, 16])
@pytest.mark.parametrize("geometry", [GDN, KDA])
def test_window_buffers_are_those_of_the_runtime(geometry, length, dtype):
    """What the memory formula counts is what the runtime allocates for a request."""
    spec = KernelSpec(geometry.family, geometry.num_heads, geometry.num_key_heads, 128, 128, (4, 6), True, False,
                      "none", False, window=length, buffer=dtype)  # fmt: skip
    buffers = WindowBuffers.allocate(spec, 1, "cpu")
    parts = [buffers.keys, buffers.us, buffers.gammas]
    parts += [buffers.ratios] if geometry.family == "gdn" else []
    parts += [buffers.key_scale, buffers.u_scale] if dtype == "int8" else []
    counted = window_bytes(geometry, length, dtype)
    assert counted == geometry.num_delta_layers * sum(x.nbytes for x in parts)
    assert counted == geometry.num_delta_layers * bytes_per_request(spec)


def test_window_is_counted_for_running_requests_only():
    plan = synthetic_plan("tiny_gdn_6bit", "window.length=8")
    summary = plan_summary(plan)
    running = summary["bytes_per_running_request"]
    assert running == window_bytes(plan.geometry, 8, plan.window.dtype) > 0
    packed, plain = serving_memory(summary, 0, 5), serving_memory(summary, 0, 5, fp32=True)
    assert packed.state(3) == 16 * packed.slot + 3 * running
    assert plain.per_running_request == 0


def test_small_plan_by_hand():
    plan = small_plan()
    assert packable(plan)
    count = byte_count(plan)
    # Heads of 16 x 32: 4, 6, 8 bits, FP16; 2, 4, 6, 8 bits. One scaled head: r[16] and c[32] in FP16.
    assert count.codes == 512 * (4 + 6 + 8 + 2 + 4 + 6 + 8) // 8
    assert count.scales == 7 * 2 * (16 + 32)
    assert count.pivots == 512 * 2
    assert (count.padding, count.total) == (0, count.codes + count.scales + count.pivots)
    assert count.allocated == int(page_layout(plan).layer_bytes.sum()) >= count.total
    figures = account(plan)
    assert figures.bits_per_value == 8 * count.total / (8 * 512)
    assert figures.paper_bits_per_value == 6 + 16 / 16 + 16 / 32 + 8 / 8
    assert account(small_plan(budget={})).paper_bits_per_value is None


@pytest.mark.parametrize(
    ("kind", "bits", "scales"),
    [("float", 32, 0), ("float", 16, 0), ("rowwise", 8, 8 * 16 * 2), ("rowwise", 4, 8 * 16 * 2)],
)
def test_baselines_are_counted_too(kind, bits, scales):
    map_ = torch.full((2, 4, 16), bits, dtype=torch.uint8)
    rows = torch.arange(16, dtype=torch.int16).expand(2, 4, 16)
    plan = small_plan(bits=map_, permutation=rows.contiguous(), codec=CodecSpec(kind))
    plan.verify()
    assert not packable(plan)
    count = byte_count(plan)
    assert (count.codes, count.padding, count.allocated) == (8 * 512 * bits // 8, 0, count.total)
    assert count.scales == scales
    assert count.pivots == 0


def solved_for(*overrides: str):
    """A synthetic plan compiled for a target, with what the solver tried."""
    recipe = compose_recipe("tiny_gdn_6bit", ["calibration=synthetic", "cache.enabled=false", *overrides])
    context = Context.open(recipe, Progress(quiet=True))
    pipeline, windows = choose_window(Pipeline(context))
    return make_plan(pipeline.context, pipeline, windows=windows)


def test_solver_chooses_bits_and_window_together():
    """The least predicted cost of all lengths, each with the bits that fit beside its buffers."""
    target = 640 * 2**10
    plan = solved_for("window.length=auto", f"budget.bytes_per_request={target}")
    tried = {row["window"]: row for row in plan.predicted["windows"]}
    assert list(tried) == [1, 2, 4, 8, 16]
    assert [row["bits"] for row in tried.values()] == sorted((row["bits"] for row in tried.values()), reverse=True)
    assert tried[plan.window.length]["predicted_cost_per_token"] == min(
        row["predicted_cost_per_token"] for row in tried.values()
    )
    assert 1 < plan.window.length < 16  # neither extreme: there was something to weigh
    figures = account(plan)
    assert 0.98 * target < figures.slot.allocated + figures.running <= target
    for length in (2, 16):
        alone = solved_for(f"window.length={length}", f"budget.bytes_per_request={target}")
        assert alone.predicted["predicted_cost_per_token"] == pytest.approx(tried[length]["predicted_cost_per_token"])
        assert "windows" not in alone.predicted


def test_window_is_weighed_for_a_concurrency_too():
    """More slots a request make buffers cheaper beside them: the chosen window grows."""
    memory = ("budget.gpu_memory=1GiB", "budget.weights_bytes=100MiB", "window.length=auto")
    one = solved_for("budget.concurrency=1400", "budget.strategy=off", "budget.context_length=1", *memory)
    five = solved_for("budget.concurrency=300", "budget.strategy=extra_buffer", "budget.context_length=1", *memory)
    assert one.window.length <= five.window.length
    assert one.predicted["windows"] != five.predicted["windows"]


@pytest.mark.parametrize("override", ["budget.bits=5", "allocation.mode=uniform"])
def test_automatic_window_needs_a_target_it_can_be_weighed_against(override):
    with pytest.raises(RecipeError, match=r"window\.length is 'auto'"):
        compose_recipe("qwen_6bit", ["calibration=synthetic", "model=qwen3_8_27b", "window.length=auto", override])


def test_buffers_larger_than_the_target_are_named():
    with pytest.raises(InfeasibleError, match=r"buffers of window\.length=16 alone take"):
        solved_for("window.length=16", "budget.bytes_per_request=128KiB")
