"""One run of the model over the calibration text, watched by every observer whose product is missing.

Nothing of a trace is kept: each layer's q, k, v, gates and betas go to the observers and are dropped. After every
batch the accumulators are saved, so that an interrupted run resumes at the batch it had reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.passes.context import Context
from stepquant.passes.protocol import Observation, ObserverPass, Product
from stepquant.small_operations import small_operations


def run_observers(context: Context, passes: Sequence[ObserverPass], key: str) -> dict[str, Product]:
    """Run the model once for all `passes`.

    Args:
        key: identifies the run for resuming (hash of everything the products depend on).

    Returns:
        Products by pass name.
    """
    observations = {p.name: p.start(context) for p in passes}
    segments, batch = context.data.segments, context.recipe.data.batch
    done = _restore(context, observations, key)
    starts = list(range(0, segments.shape[0], batch))
    with small_operations(context.device), context.progress.bar("trace", len(starts), done) as bar:
        for index in range(done, len(starts)):
            rows = range(starts[index], min(starts[index] + batch, segments.shape[0]))
            watch_batch(context, segments[rows.start : rows.stop], rows, list(observations.values()))
            bar.advance()
            if index + 1 < len(starts):
                _save(context, observations, key, index + 1)
    products = {name: observation.finish() for name, observation in observations.items()}
    return products


def watch_batch(context: Context, tokens: torch.Tensor, rows: range, observations: Sequence[Observation]) -> None:
    """One batch of segments `[B, T]` through the model, every layer's trace shown to the observations.

    Observations with `runs_model` (they need gradients, or few segments) run the model themselves, once more.
    """
    plain = [o for o in observations if not getattr(o, "runs_model", False)]
    tokens = tokens.to(context.model.device)

    def observer(layer: int, trace: DeltaTrace) -> None:
        for observation in plain:
            observation.observe(layer, trace, rows)

    if plain:
        with torch.no_grad(), capture_delta_rule(context.model, observer, context.delta_rule):
            context.model.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    for observation in observations:
        if getattr(observation, "runs_model", False):
            observation.run_model(tokens, rows)  # type: ignore[attr-defined]


def _save(context: Context, observations: dict[str, Observation], key: str, done: int) -> None:
    state = {f"{name}/{item}": tensor for name, o in observations.items() for item, tensor in o.state().items()}
    context.cache.store_partial(key, {**state, "done": torch.tensor(done)})


def _restore(context: Context, observations: dict[str, Observation], key: str) -> int:
    saved = context.cache.load_partial(key)
    if saved is None:
        return 0
    for name, observation in observations.items():
        observation.restore({k.partition("/")[2]: v for k, v in saved.items() if k.startswith(f"{name}/")})
    done = int(saved["done"])
    context.progress.say(f"resuming the trace after {done} batches")
    return done
