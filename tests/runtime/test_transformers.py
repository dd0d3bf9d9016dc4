"""`wrap(model, plan).generate` against the evaluation's packed decode path, on the built-in models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stepquant.codec.spec import CodecSpec
from stepquant.errors import BackendError
from stepquant.evaluation.generate import DecodeHook
from stepquant.evaluation.variants import from_plan
from stepquant.models.adapter import LoadedModel, load_model
from stepquant.models.capture import capture_delta_rule
from stepquant.models.tiny import byte_ids, stdlib_text
from stepquant.plan import LayoutPlan, WindowSpec, load_plan
from stepquant.runtime import wrap

PROMPT, NEW = 53, 21


@pytest.fixture(scope="module", params=["gdn", "kda"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    """A built-in model and a coarse plan for it: 4 bits, one pivot head or a few pivot rows, windows of 4."""
    loaded = load_model(f"builtin:tiny_{request.param}", device="cpu", dtype="float32", tokenizer=False)
    g = loaded.geometry
    bits = torch.full((g.num_delta_layers, g.num_heads, g.key_dim), 4, dtype=torch.uint8)
    if request.param == "gdn":
        bits[0, 3] = 16
        bits[1, :2] = 8
    else:
        bits[:, :, :16], bits[2, 1, 40:48] = 6, 16
    order = torch.where(bits == 16, 0, bits).short().neg().argsort(dim=-1, stable=True).short()
    spec = {"codebook": "head" if request.param == "gdn" else "shared"}
    plan = LayoutPlan(
        "test", g, CodecSpec(**spec), bits, torch.ones(bits.shape), order, granularity=8,
        window=WindowSpec(4, "fp16"), fingerprint=loaded.fingerprint, weight_format=loaded.weight_format,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp(request.param)
    plan.save(directory)
    return loaded, directory


def prompts() -> torch.Tensor:
    ids = byte_ids(stdlib_text("evaluation", min_bytes=3000)[0])
    return torch.tensor([ids[:PROMPT], ids[400 : 400 + PROMPT]])


@torch.no_grad()
def evaluated(loaded: LoadedModel, directory: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    """Logits at every generated token `[B, N, V]`, tokens given, by the evaluation's packed decode."""
    variant = None if directory is None else from_plan(load_plan(directory), path="packed")
    now, cache, found = tokens[:, :PROMPT], None, []
    with capture_delta_rule(loaded, replace=DecodeHook(variant)):
        for t in range(PROMPT, tokens.shape[1]):
            more = {} if cache is None else {"past_key_values": cache}
            out = loaded.model(input_ids=now, use_cache=True, logits_to_keep=1, **more)
            cache, now = out.past_key_values, tokens[:, t : t + 1]
            found.append(out.logits[:, -1])
    return torch.stack(found, 1)


def generate(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **more)


def test_generate_is_the_evaluated_packed_decode(served: tuple[LoadedModel, Path]) -> None:
    loaded, directory = served
    with wrap(loaded, directory) as model:
        out = generate(model, prompts(), output_logits=True, return_dict_in_generate=True)
        assert model.state_bytes == 0
    logits = torch.stack(out.logits, 1)
    expected = evaluated(loaded, directory, out.sequences)
    exact = evaluated(loaded, None, out.sequences)
    error, quantisation = (logits - expected).abs().mean(), (exact - expected).abs().mean()
    assert error < 0.1 * quantisation  # codes that fall the other way after sums in another order
    assert quantisation > 0.003  # FP32 states would not pass


def test_the_model_is_its_own_again(served: tuple[LoadedModel, Path]) -> None:
    loaded, directory = served
    before = generate(loaded.model, prompts())
    model = wrap(loaded.model, directory)
    generate(model, prompts())
    model.close()
    assert torch.equal(generate(loaded.model, prompts()), before)


def test_states_are_packed_while_a_cache_lives(served: tuple[LoadedModel, Path]) -> None:
    loaded, directory = served
    with wrap(loaded, directory) as model, torch.no_grad():
        out = model(input_ids=prompts(), use_cache=True)
        slots = 2 + 1
        assert 0 < model.state_bytes < slots * loaded.geometry.fp32_bytes / 2
        model.reset()
        with pytest.raises(BackendError, match="state that was freed"):
            model(input_ids=prompts()[:, :1], past_key_values=out.past_key_values)


def test_a_prompt_in_two_pieces_is_a_prompt(served: tuple[LoadedModel, Path]) -> None:
    """Within quantisation error: the state was packed between the pieces."""
    loaded, directory = served
    with wrap(loaded, directory) as model, torch.no_grad():
        whole = model(input_ids=prompts(), use_cache=True).logits[:, -1]
        first = model(input_ids=prompts()[:, :30], use_cache=True)
        second = model(input_ids=prompts()[:, 30:], past_key_values=first.past_key_values).logits[:, -1]
        restart = model(input_ids=prompts()[:, 30:], use_cache=True).logits[:, -1]
    assert (whole - second).abs().mean() < 0.2 * (whole - restart).abs().mean()


def test_beams_fork_their_states(served: tuple[LoadedModel, Path]) -> None:
    """Beam search over packed states finds what it finds when every beam is decoded alone."""
    loaded, directory = served
    with wrap(loaded, directory) as model:
        found = generate(model, prompts()[:1], num_beams=3, num_return_sequences=3, return_dict_in_generate=True,
                         output_scores=True)  # fmt: skip
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        logits = evaluated(loaded, directory, sequence[None])[0].log_softmax(-1)
        alone = logits.gather(-1, sequence[PROMPT:, None]).sum() / sequence[PROMPT:].numel()
        assert abs(alone - score) < 0.02


def test_another_checkpoint_and_another_model_are_refused(served: tuple[LoadedModel, Path], tmp_path: Path) -> None:
    loaded, directory = served
    plan = load_plan(directory)
    fields = {n: getattr(plan, n) for n in plan.__dataclass_fields__}
    LayoutPlan(**{**fields, "fingerprint": "sha256:" + "0" * 64}).save(tmp_path / "other")
    with pytest.raises(BackendError, match="made for sha256:0000"):
        wrap(loaded, tmp_path / "other")
    with wrap(loaded, tmp_path / "other", any_checkpoint=True):
        pass
    name = "tiny_kda" if loaded.geometry.family == "gdn" else "tiny_gdn"
    path = loaded.model.config._name_or_path
    try:
        loaded.model.name_or_path = name
        with pytest.raises(BackendError, match="does not say which checkpoint"):
            wrap(loaded, directory)
    finally:
        loaded.model.name_or_path = path


def test_a_model_is_wrapped_once_and_a_closed_wrapper_says_so(served: tuple[LoadedModel, Path]) -> None:
    loaded, directory = served
    packed = wrap(loaded, directory)
    with pytest.raises(BackendError, match="decodes from the states of plan 'test' already; close that wrapper first"):
        wrap(loaded.model, directory)
    packed.close()
    packed.close()
    for call in (packed, packed.generate):
        with pytest.raises(BackendError, match="this wrapper is closed"):
            call(prompts()[:1])
    with wrap(loaded, directory) as again:
        assert again(prompts()[:1]).logits.isfinite().all()
    with pytest.raises(BackendError, match="wrap takes a loaded transformers model; got str"):
        wrap("gdn", directory)
