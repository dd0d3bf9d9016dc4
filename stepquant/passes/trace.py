"""One run of the model over the calibration text, watched by every observer whose product is missing.

Nothing of a trace is kept: each layer's q, k, v, gates and betas go to the observers and are dropped. The whole model
runs a batch of segments at a time, or (model.loading=layerwise) one decoder layer at a time over all segments. After
every batch or layer the accumulators are saved, so that an interrupted run resumes there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from stepquant.models.capture import DeltaTrace, capture_delta_rule
from stepquant.passes.context import Context
from stepquant.passes.gradients import GradientObservation, LocalProbe, blocks_of, fisher_gradients
from stepquant.passes.progress import Bar
from stepquant.passes.protocol import Observation, ObserverPass, Product
from stepquant.passes.rollout_traces import trace_fields
from stepquant.passes.spill import spilled_bytes
from stepquant.passes.state_samples import sample_fields
from stepquant.small_operations import small_operations

if TYPE_CHECKING:
    from stepquant.models.layerwise import LayerDone


SEGMENTS_DONE = "segments_done"


def run_observers(context: Context, passes: Sequence[ObserverPass], key: str) -> dict[str, Product]:
    """Run the model once for all `passes`.

    Args:
        key: identifies the run for resuming (hash of everything the products depend on).

    Returns:
        Products by pass name.
    """
    place = context.cache.working(key)
    if stale := context.cache.drop_stale():
        context.progress.say(f"deleted what {len(stale)} runs had left that were interrupted over a week ago")
    observations = {p.name: p.start(context, place / p.name if place else None) for p in passes}
    run = _run_layers if context.recipe.model.loading == "layerwise" else _run_batches
    with small_operations(context.device):
        run(context, observations, key)
    return {name: observation.finish() for name, observation in observations.items()}


def trace_bytes(context: Context) -> int:
    """Bytes that a trace writes to the cache: state samples, inputs of rollouts, hidden states between layers."""
    from stepquant.models.checkpoint import read_config
    from stepquant.models.families import text_config

    recipe, geometry = context.recipe, context.geometry
    total = spilled_bytes(geometry.num_delta_layers, sample_fields(recipe, geometry))
    if recipe.temporal.weight == "rollout":
        total += spilled_bytes(geometry.num_delta_layers, trace_fields(recipe, geometry))
    if recipe.model.loading == "layerwise":
        width = int(text_config(read_config(str(recipe.model.path))).get("hidden_size") or 0)
        total += 4 * recipe.data.segments * recipe.data.length * width
    return total


def _run_batches(context: Context, observations: dict[str, Observation], key: str) -> None:
    segments, batch = context.data.segments, context.recipe.data.batch
    total, done = segments.shape[0], _restore(context, observations, key)
    with context.progress.bar("trace", total, done) as bar:
        for start in range(done, total, batch):
            rows = range(start, min(start + batch, total))
            watch_batch(context, segments[rows.start : rows.stop], rows, list(observations.values()))
            bar.advance(len(rows))
            if rows.stop < total:
                state = _accumulators(observations)
                context.cache.store_partial(key, {**state, SEGMENTS_DONE: torch.tensor(rows.stop)})


def watch_batch(context: Context, tokens: torch.Tensor, rows: range, observations: Sequence[Observation]) -> None:
    """One batch of segments `[B, T]` through the model, every layer's trace shown to the observations."""
    tokens = tokens.to(context.model.device)
    with torch.no_grad(), watching(context, observations, lambda: rows):
        context.model.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    for observation in observations:
        if isinstance(observation, GradientObservation) and observation.kind == "gradient":
            for segment in observation.wanted_segments(rows):
                one = segment - rows.start
                fisher_gradients(context, tokens[one : one + 1, : observation.tokens], segment, observation)


@contextlib.contextmanager
def watching(
    context: Context, observations: Sequence[Observation], rows: Callable[[], range],
    running: Callable[[], bool] = lambda: True,
) -> Iterator[None]:  # fmt: skip
    """Show what the model does to the observations while the context is open.

    Args:
        rows: the segments of the batch that is running.
        running: see `LocalProbe`.
    """
    local = [o for o in observations if isinstance(o, GradientObservation) and o.kind == "local"]
    probe = LocalProbe(local, context.recipe.seed, rows, running)

    def observer(layer: int, trace: DeltaTrace) -> None:
        if not probe.busy:
            for observation in observations:
                observation.observe(layer, trace, rows())

    with contextlib.ExitStack() as stack:
        modules = stack.enter_context(capture_delta_rule(context.model, observer, context.delta_rule, probe.edit))
        if local:
            stack.enter_context(probe.attached(modules, blocks_of(context.model.model, modules)))
        yield


def _run_layers(context: Context, observations: dict[str, Observation], key: str) -> None:
    runner, recipe = context.runner, context.recipe
    last = context.geometry.layers[-1]
    fresh = any(getattr(observation, "fresh", False) for observation in observations.values())
    bars: list[Bar] = []

    def restore(state: dict[str, torch.Tensor], layers: int) -> bool:
        if fresh or not _put_back(observations, state):
            return False
        context.progress.say(f"resuming the trace at layer {layers}")
        bars[0].skip(layers)
        return True

    def finished(_done: LayerDone) -> None:
        bars[0].advance()

    with context.progress.bar("trace, layers", last + 1) as bar:
        bars.append(bar)
        with watching(context, list(observations.values()), lambda: runner.rows, lambda: runner.inside):
            runner.run(
                context.data.segments, batch=recipe.data.batch, last_layer=last, on_layer=finished, key=key,
                directory=context.cache.working(key), state=lambda: _accumulators(observations), restore=restore,
            )  # fmt: skip


def _accumulators(observations: dict[str, Observation]) -> dict[str, torch.Tensor]:
    return {f"{name}/{item}": tensor for name, o in observations.items() for item, tensor in o.state().items()}


def _put_back(observations: dict[str, Observation], saved: dict[str, torch.Tensor]) -> bool:
    """Give every observation its accumulators; False (and nothing changed) where some are missing."""
    if any(f"{name}/{item}" not in saved for name, o in observations.items() for item in o.state()):
        return False
    for name, observation in observations.items():
        observation.restore({k.partition("/")[2]: v for k, v in saved.items() if k.startswith(f"{name}/")})
    return True


def _restore(context: Context, observations: dict[str, Observation], key: str) -> int:
    """Segments done by an interrupted run whose accumulators and files are all there; its batches may have been of
    another size."""
    saved = context.cache.load_partial(key)
    if saved is None or any(getattr(observation, "fresh", False) for observation in observations.values()):
        return 0
    if SEGMENTS_DONE not in saved or not _put_back(observations, saved):
        return 0
    done = int(saved[SEGMENTS_DONE])
    context.progress.say(f"resuming the trace after {done} segments")
    return done
