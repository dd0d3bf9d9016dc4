"""What is fuzzed: the files of each loader, how they are damaged, and what a loader may do with them.

A target's `load` must give a sound result or raise a StepQuantError; `check` holds results against the sound original
and against the documented invariants, written down here a second time.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from stepquant.accounting import packable
from stepquant.artifact import EVALUATION, RECIPE, TABLES, new_artifact, read_tables
from stepquant.config import compose_recipe
from stepquant.kernel_files import KernelFiles, read_kernels
from stepquant.models.layerwise import PROGRESS_FILE, load_progress
from stepquant.passes.cache import FACTS, TENSORS
from stepquant.plan import PLAN_JSON, PLAN_TENSORS, LayoutPlan, load_plan
from stepquant.report import results, sections, serving
from stepquant.report.evidence import read_evidence
from stepquant.run_record import RUN_JSON, read_run, run_table
from stepquant.runtime.load import load_rank_plan
from stepquant.summary import plan_summary
from tests.fuzz.corpus import KEY, Corpus
from tests.fuzz.forge import KERNEL_PLAN, Forged, forge_json, forge_plan, forge_recipe, forge_source, forge_tables
from tests.fuzz.mutate import mutate_bytes, mutate_header, stand_in


@dataclass
class Target:
    """One loader.

    Attributes:
        place: directory of its files; files: those that are damaged, by name relative to it.
        load: reads the directory; check: says what is wrong with a result, "" for nothing.
        forgers: mutations that know the format and keep the hashes right.
        share: of all cases.
        silent: the loader returns None instead of raising; deletes: it also removes what is damaged.
    """

    name: str
    place: Path
    files: tuple[str, ...]
    load: Callable[[], Any]
    check: Callable[[Any], str]
    share: float
    forgers: tuple[Callable[[dict[str, bytes], Random], Forged], ...] = ()
    silent: bool = False
    deletes: bool = False
    sound: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sound = {name: (self.place / name).read_bytes() for name in self.files}


def plan_wrong(plan: LayoutPlan) -> str:
    """A documented invariant of a plan that does not hold."""
    g = plan.geometry
    shape = (len(g.layers), g.num_heads, g.key_dim)
    for name, dtype in (("bits", torch.uint8), ("w", torch.float32), ("permutation", torch.int16)):
        tensor = getattr(plan, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, geometry {shape}"
    bits, order = plan.bits.long(), plan.permutation.long()
    menu = {16, 32} if plan.codec.kind == "float" else {2, 3, 4, 5, 6, 8, 16}
    if not set(bits.flatten().tolist()) <= menu:
        return "bits outside the menu"
    if not math.isfinite(float(plan.w.double().sum())) or float(plan.w.min()) <= 0:
        return "w not finite and positive"
    if float(plan.w.double().log().mean(-1).abs().max()) > 1e-3:
        return "geometric mean of w is not 1 in a head"
    for row in order.flatten(0, 1).tolist():
        if sorted(row) != list(range(g.key_dim)):
            return "permutation is none"
    stored = bits.gather(-1, order)
    runs = (stored[..., 1:] != stored[..., :-1]).sum(-1) + 1
    kinds = torch.tensor([[len(set(h)) for h in layer] for layer in bits.tolist()])
    if bool((runs != kinds).any()):
        return "equal precisions are not contiguous in storage"
    if plan.codec.codebook == "head" and bool((bits != bits[..., :1]).any()):
        return "rows of a head differ under the head codebook"
    if plan.window.length not in (1, 2, 4, 8, 16) or plan.window.dtype not in ("fp16", "bf16", "int8", "fp32"):
        return f"window {plan.window}"
    if plan.granularity not in (1, 8, 16) or not 1 <= len(plan.name) <= 200:
        return "granularity or name"
    numbers = [g.num_heads, g.num_key_heads, g.key_dim, g.value_dim, g.conv_bytes, g.kv_bytes_per_token, g.num_layers]
    if min(numbers[:4]) < 1 or min(numbers) < 0 or list(g.layers) != sorted(set(g.layers)) or g.layers[0] < 0:
        return f"geometry {g}"
    if g.num_layers and g.layers[-1] >= g.num_layers:
        return f"layer {g.layers[-1]} of {g.num_layers}"
    if g.num_heads % g.num_key_heads or not math.isfinite(g.beta_max) or g.beta_max <= 0:
        return f"geometry {g}"
    json.dumps([plan.budget, plan.predicted, plan.settings, plan.provenance], allow_nan=False)
    return ""


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[n].dtype and x.shape == b[n].shape and torch.equal(x, b[n]) for n, x in a.items()
    )


def fine(result: Any) -> str:
    """Nothing more can be said of a result."""
    return ""


def targets(corpus: Corpus) -> list[Target]:
    """All loaders over the corpus."""
    found: list[Target] = []
    null = Console(file=io.StringIO())
    for name, place in corpus.artifacts.items():
        plan = corpus.plans[name]
        kernels = tuple(f"kernels/{p.name}" for p in sorted((place / "kernels").iterdir()))
        sound_tables, sound_kernels = read_tables(place), read_kernels(place, plan).data

        def check_plan(result: LayoutPlan, plan: LayoutPlan = plan) -> str:
            wrong = plan_wrong(result)
            if not wrong and result.hash != plan.hash and packable(result):
                wrong = "kernels of another plan were taken"
            return wrong

        def load_all(place: Path = place, plan: LayoutPlan = plan) -> LayoutPlan:
            found = load_plan(place)
            if found.to_json() != plan.to_json():
                plan_summary(found)
                if wrong := plan_wrong(found):
                    raise AssertionError(wrong)
                if packable(found):
                    load_rank_plan(place)
            return found

        def check_tables(result: Any, sound: Any = sound_tables) -> str:
            made, base = result
            if not isinstance(base, dict):
                return "base is no dictionary"
            for one, (key, product) in made.items():
                if not isinstance(key, str) or not isinstance(product.facts, dict):
                    return f"{one}: key or facts"
                if any(t.is_floating_point() and not bool(t.isfinite().all()) for t in product.tensors.values()):
                    return f"{one}: not finite"
            return ""

        def check_rank(result: Any, plan: LayoutPlan = plan, place: Path = place, kernels: Any = kernels) -> str:
            if not (place / KERNEL_PLAN).is_file():
                return "" if result.kernel_hash is None else "kernel_hash"
            told = json.loads((place / KERNEL_PLAN).read_bytes()).get("source_sha256")
            return "" if result.kernel_hash == told and result.plan.hash == plan.hash else "kernel_hash"

        def check_figures(result: KernelFiles, sound: Any = sound_kernels) -> str:
            """Whatever follows from the plan is as it was; reports of a compile may be others, and times with them."""
            kept = [{k: v for k, v in entry.items() if k not in ("targets", "predicted_us")}
                    for data in (result.data, sound) for entry in data["variants"]]  # fmt: skip
            half = len(kept) // 2
            return "" if kept[:half] == kept[half:] and result.data["spec"] == sound["spec"] else "figures were edited"

        def run(place: Path = place, plan: LayoutPlan = plan) -> Any:
            record = read_run(place, plan.hash)
            if record is not None:
                null.print(run_table(record))
            return record

        def keep_evaluation(place: Path = place, plan: LayoutPlan = plan) -> None:
            with contextlib.suppress(KeyboardInterrupt), new_artifact(place, plan.hash):
                raise KeyboardInterrupt  # looked at what to keep; nothing is replaced

        def report(place: Path = place) -> Any:
            evidence = read_evidence(place)
            results.kernels(evidence), results.measured(evidence, {})
            return evidence

        def page(place: Path = place) -> Any:
            evidence = report(place)
            drawn: dict[str, Any] = {}
            for part in (sections.lives, sections.by_layer, sections.budget_curve, sections.precisions):
                part(evidence, drawn)
            serving.storage(evidence, drawn), serving.capacity(evidence, drawn)
            return evidence

        found += [
            Target(f"plan {name}", place, (PLAN_JSON, PLAN_TENSORS), load_all, check_plan, 0.2, (forge_plan,)),
            Target(f"tables {name}", place, (TABLES,), lambda p=place: read_tables(p), check_tables, 0.09,
                   (forge_tables,)),
            Target(f"kernels {name}", place, kernels, lambda p=place: load_rank_plan(p), check_rank, 0.06,
                   (forge_json(KERNEL_PLAN), forge_source)),
            Target(f"kernels shown {name}", place, kernels, lambda p=place, m=plan: read_kernels(p, m), check_figures,
                   0.04, (forge_json(KERNEL_PLAN), forge_source)),
            Target(f"run.json {name}", place, (RUN_JSON,), run, fine, 0.04, (forge_json(RUN_JSON),), True),
            Target(f"evaluation.json {name}", place, (EVALUATION,), keep_evaluation, fine, 0.02,
                   (forge_json(EVALUATION),), True),
            Target(f"report {name}", place, (EVALUATION, KERNEL_PLAN), report, fine, 0.02,
                   (forge_json(EVALUATION), forge_json(KERNEL_PLAN)), True),
            Target(f"report of tables {name}", place, (TABLES,), page, fine, 0.005, (forge_tables,), True),
        ]  # fmt: skip
    cache = corpus.cache

    def spilled() -> Any:
        product = cache.load("spilled", KEY)
        return None if product is None else {n: product[n] for n in corpus.spilled}

    def check_plain(product: Any) -> str:
        same = product is None or (equal(product.tensors, corpus.plain.tensors) and product.facts == corpus.plain.facts)
        return "" if same else "a damaged entry was taken"

    def check_spilled(result: Any) -> str:
        return "" if result is None or equal(result, corpus.spilled) else "a damaged entry was taken"

    def check_partial(result: Any) -> str:
        return "" if result is None or equal(result, corpus.partial) else "damaged accumulators were taken"

    def check_progress(result: Any) -> str:
        if result is None:
            return ""
        same = result.next_layer == corpus.reached.next_layer and equal(result.state, corpus.reached.state)
        same = same and isinstance(result.output, tuple) and len(result.output) == 2 and result.output[1] is None
        return "" if same and torch.equal(result.output[0], corpus.reached.output[0]) else "damaged progress was taken"

    found += [
        Target("cache entry", cache.path("plain", KEY), (FACTS, TENSORS), lambda: cache.load("plain", KEY), check_plain,
               0.05, (forge_json(FACTS),), True, True),
        Target("spilled cache entry", cache.path("spilled", KEY), (FACTS, "0.safetensors", "1.safetensors"), spilled,
               check_spilled, 0.04, (forge_json(FACTS),), True, True),
        Target("interrupted trace", cache.path("partial", KEY), (TENSORS,), lambda: cache.load_partial(KEY),
               check_partial, 0.03, (), True, True),
        Target("interrupted layers", corpus.progress, (PROGRESS_FILE,), lambda: load_progress(corpus.progress, KEY),
               check_progress, 0.03, (), True),
    ]  # fmt: skip
    for place, name in ((corpus.recipes, "mine.yaml"), (corpus.artifacts["heads"], RECIPE)):

        def compose(path: Path = place / name) -> Any:
            return compose_recipe(str(path)).to_dict()

        found.append(Target(f"recipe {name}", place, (name,), compose, fine, 0.001, (forge_recipe,)))
    return found


def damage(target: Target, corpus: Corpus, random: Random) -> tuple[list[str], str, tuple[Any, ...]]:
    """Damage files of a target on disk: names, what was done, and the JSON place that the message should name."""
    roll = random.random()
    name = random.choice(target.files)
    path = target.place / name
    if roll < 0.04:
        outside = corpus.root.parent / "outside" / path.name
        outside.write_bytes(target.sound[name])
        return [name], f"{name}: {stand_in(path, outside, random)}", ()
    if target.forgers and roll < 0.55:
        forged = random.choice(target.forgers)(target.sound, random)
        for one, data in forged.files.items():
            (target.place / one).write_bytes(data)
        return list(forged.files), f"{', '.join(forged.files)}: {forged.label}", forged.place
    data = target.sound[name]
    if name.endswith(".safetensors") and roll < 0.8:
        data, label = mutate_header(data, random)
    elif roll < 0.83:
        other = random.choice(list(target.sound.values()))
        data, label = other, "another file's content"
    else:
        data, label = mutate_bytes(data, random)
    path.write_bytes(data)
    return [name], f"{name}: {label}", ()
