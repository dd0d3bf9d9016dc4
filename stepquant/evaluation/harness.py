"""lm-eval-harness on a model whose states are stored by a codec: the harness' own tasks, prompts and scoring.

Generation tasks run as they would be served: exact prefill of the prompt, then token by token from the stored state.
Likelihood tasks score text that the harness already has: one prefill would do, and a prefill never reads a stored
state, so they are refused, or with ``likelihood=decode`` forced through decode: all of the context but its last token
is the prefill, and the rest is read token by token from the stored state. An answer that a task cannot extract counts
as wrong (appendix E.1; the tasks' own filters do that).

lm-eval is an extra (``pip install 'stepquant[eval]'``) and imported only here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from stepquant.errors import BackendError, DataError, RecipeError
from stepquant.evaluation import demands
from stepquant.evaluation.forward import Readout, run_variant
from stepquant.evaluation.generate import DecodeHook
from stepquant.evaluation.variants import Variant
from stepquant.models.capture import capture_delta_rule
from stepquant.passes.out_of_memory import told
from stepquant.passes.progress import Progress

if TYPE_CHECKING:
    from stepquant.evaluation.settings import HarnessSettings
    from stepquant.models.adapter import LoadedModel

MAX_TOKENS = 256  # generated where neither the task nor the command says


def require_lm_eval() -> None:
    """Refuse to go on without lm-eval.

    Raises:
        BackendError: saying how to install it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise BackendError("the task harness needs the package lm_eval: pip install 'stepquant[eval]'")


@dataclass
class StateModel:
    """What the harness asks of a model, answered with states stored by `variant`.

    Attributes:
        loaded: model with a tokenizer.
        variant: None keeps FP32 states.
        max_tokens: most tokens of an answer; None leaves it to the task.
        progress: where to report.
        lengths: tokens of every answer so far.
        capped: answers that were cut at the limit.
        tokens: of the prompt that is being read.
    """

    loaded: LoadedModel
    variant: Variant | None
    max_tokens: int | None
    progress: Progress
    lengths: list[int] = field(default_factory=list)
    capped: int = 0
    tokens: int = 0

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens; an empty context becomes the end-of-text token."""
        tokenizer = self.loaded.tokenizer
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids or [tokenizer.eos_token_id or 0]

    @torch.no_grad()
    def answer(self, context: str, options: dict[str, Any]) -> str:
        """Continue a context until a stop string, the end of the text or the limit."""
        from transformers import StoppingCriteriaList

        tokenizer = self.loaded.tokenizer
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        limit = self.max_tokens or int(options.get("max_gen_toks") or options.get("max_new_tokens") or MAX_TOKENS)
        prompt = torch.tensor([self.encode(context)], device=self.loaded.device)
        self.tokens = start = prompt.shape[1]
        more: dict[str, Any] = {"do_sample": False}
        if options.get("do_sample") and float(options.get("temperature") or 0) > 0:
            more = {k: options[k] for k in ("temperature", "top_p", "top_k") if options.get(k) is not None}
            more["do_sample"] = True
        criteria = StoppingCriteriaList([_AtStop(tokenizer, start, stops)])
        with capture_delta_rule(self.loaded, replace=DecodeHook(self.variant)):
            out = self.loaded.model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, stopping_criteria=criteria,
                use_cache=True, pad_token_id=tokenizer.eos_token_id, **more,
            )  # fmt: skip
        new = out[0, start:]
        self.lengths.append(int(new.numel()))
        self.capped += int(new.numel()) >= limit
        text = tokenizer.decode(new, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log likelihood of a continuation read token by token after the context, and whether it is the greedy one."""
        prefix = self.encode(context)
        whole = self.loaded.tokenizer(context + continuation, add_special_tokens=False, verbose=False)["input_ids"]
        suffix = whole[len(prefix) :] if whole[: len(prefix)] == prefix else self.encode(continuation)
        return self._score(prefix, suffix)

    def rolling(self, text: str) -> float:
        """Log likelihood of a whole text after the end-of-text token."""
        return self._score([self.loaded.tokenizer.eos_token_id or 0], self.encode(text))[0]

    def _score(self, prefix: list[int], suffix: list[int]) -> tuple[float, bool]:
        readout = self._readout()
        tokens = torch.tensor([prefix + suffix[:-1]])
        self.tokens = tokens.shape[1]
        features = run_variant(self.loaded, readout, tokens, len(prefix) - 1, self.variant)
        logits = readout.logits(features)[0].double().log_softmax(-1).cpu()
        target = torch.tensor(suffix)
        found = logits.gather(-1, target.unsqueeze(-1)).sum()
        return float(found), bool((logits.argmax(-1) == target).all())

    def _readout(self) -> Readout:
        if not hasattr(self, "_made"):
            self._made = Readout(self.loaded)
        return self._made


class _AtStop:
    """Stops generation once the new text holds a stop string."""

    def __init__(self, tokenizer: Any, start: int, stops: Sequence[str]) -> None:
        self.tokenizer, self.start, self.stops = tokenizer, start, [s for s in stops if s]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        tail = self.tokenizer.decode(input_ids[0, self.start :][-64:])
        found = any(stop in tail for stop in self.stops)
        return torch.tensor([found], device=input_ids.device)


def harness_model(model: StateModel) -> Any:
    """`model` as the harness' own kind of model."""
    from lm_eval.api.model import LM

    class Harness(LM):
        def generate_until(self, requests: list[Any]) -> list[str]:
            with model.progress.bar("answers", len(requests)) as bar:
                return [_advance(bar, model.answer(*r.args)) for r in requests]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            with model.progress.bar("likelihoods", len(requests)) as bar:
                return [_advance(bar, model.likelihood(*r.args)) for r in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            with model.progress.bar("texts", len(requests)) as bar:
                return [_advance(bar, model.rolling(*r.args)) for r in requests]

        @property
        def tokenizer_name(self) -> str:
            return str(model.loaded.path).replace("/", "__")

        def chat_template(self, chat_template: bool | str = False) -> str:
            return str(model.loaded.tokenizer.chat_template or "")

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(model.loaded.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            ))  # fmt: skip

    return Harness()


def _advance(bar: Any, value: Any) -> Any:
    bar.advance()
    return value


def check_tasks(settings: HarnessSettings) -> Any:
    """The harness' task manager, once every task asked for exists and can be answered from stored states.

    Raises:
        RecipeError: unknown tasks, or likelihood tasks without ``likelihood=decode``.
        DataError: a task's data set cannot be had.
    """
    manager, found = _find_tasks(settings)
    kinds = {name: str(task.get_config("output_type")) for name, task in found.items()}
    likelihood = sorted(name for name, kind in kinds.items() if kind != "generate_until")
    if likelihood and settings.likelihood == "refuse":
        raise RecipeError(
            f"{', '.join(likelihood)} scores given text ({kinds[likelihood[0]]}): that is a prefill, which never reads "
            "a quantised state, so the figure would be the FP32 model's; choose a generation task, or say "
            "likelihood=decode to read the continuations token by token"
        )
    return manager


def _find_tasks(settings: HarnessSettings) -> tuple[Any, dict[str, Any]]:
    """Task manager and tasks by name; the harness' own thousands are indexed only where ``include`` has not all."""
    from lm_eval.tasks import TaskManager, get_task_dict

    failure: Exception | None = None
    for own in (False, True) if settings.include else (True,):
        try:
            manager = TaskManager(include_path=settings.include, include_defaults=own)
            return manager, dict(_flat(get_task_dict(list(settings.tasks), manager)))
        except (KeyError, ValueError, FileNotFoundError) as error:
            failure = error
        except Exception as error:  # the data set of a known task: hubs and loaders fail in dozens of ways
            raise DataError(
                f"the data of tasks {list(settings.tasks)} cannot be loaded ({_first_line(error)}); without a network "
                "give a task over local files with include=DIR, or fill the datasets cache first"
            ) from None
    raise RecipeError(
        f"tasks {list(settings.tasks)} cannot be loaded by lm-eval ({_first_line(failure)}); lm-eval ls tasks lists "
        "its own, include=DIR adds a directory of task files"
    )


def _first_line(error: Exception | None) -> str:
    """What kind of failure it was, without the pages that follow."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _flat(tasks: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, task in tasks.items():
        if isinstance(task, dict):
            yield from _flat(task)
        elif task is not None:
            yield str(name), task


def run_tasks(
    settings: HarnessSettings, manager: Any, loaded: LoadedModel, variants: Sequence[Variant], progress: Progress
) -> list[dict[str, Any]]:
    """One row a variant, task and metric: ``variant, task, metric, value, stderr, samples, mean_tokens, capped``."""
    import lm_eval

    rows: list[dict[str, Any]] = []
    if loaded.tokenizer is None:
        raise BackendError("the checkpoint has no tokenizer; the harness' tasks are text")
    for variant in variants:
        model = StateModel(loaded, None if variant.exact else variant, settings.max_tokens, progress)
        progress.say(f"{variant.name}: {', '.join(settings.tasks)}")
        with told("the tasks", lambda model=model: demands.tasks(settings, loaded, model.tokens)):  # type: ignore[misc]
            found = lm_eval.simple_evaluate(
                model=harness_model(model), tasks=list(settings.tasks), num_fewshot=settings.num_fewshot,
                limit=settings.limit, task_manager=manager, apply_chat_template=settings.chat, bootstrap_iters=0,
                log_samples=False, random_seed=settings.seed, numpy_random_seed=settings.seed,
                torch_random_seed=settings.seed, fewshot_random_seed=settings.seed,
            )  # fmt: skip
        rows += _rows(variant, model, found or {})
    return rows


def _rows(variant: Variant, model: StateModel, found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    mean = sum(model.lengths) / len(model.lengths) if model.lengths else None
    for task, figures in found.get("results", {}).items():
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in figures.items():
            metric, _, rest = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not rest:
                continue
            error = figures.get(f"{metric}_stderr,{rest}")
            rows.append({
                "variant": variant.name, "bits_per_value": variant.bits_per_value, "window": variant.window.length,
                "task": task, "metric": name, "value": float(value),
                "stderr": float(error) if isinstance(error, int | float) and error == error else None,
                "samples": samples, "mean_tokens": mean, "capped": model.capped, "path": variant.path,
            })  # fmt: skip
    return rows
