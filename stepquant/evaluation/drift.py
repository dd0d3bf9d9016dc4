"""Drift of a model whose states are stored by a codec, from the model that keeps them in FP32 (appendix B.2).

Variants are compared over the same streams, batch by batch: the reference's features are made once a batch, and every
variant's token figures are kept in the cache under everything they depend on, so that an interrupted evaluation resumes
and a new variant costs only itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stepquant.evaluation import demands
from stepquant.evaluation.forward import Readout, run_variant, served_decoders
from stepquant.evaluation.layer_errors import LayerErrors, relative_errors
from stepquant.evaluation.metrics import TokenFigures, join, summarise
from stepquant.evaluation.streams import Streams
from stepquant.evaluation.variants import Variant
from stepquant.files import hash_json
from stepquant.models.data import data_fingerprint
from stepquant.passes.cache import Cache
from stepquant.passes.out_of_memory import Demand, told
from stepquant.passes.progress import Progress
from stepquant.passes.protocol import Product
from stepquant.small_operations import small_operations

if TYPE_CHECKING:
    from stepquant.models.adapter import LoadedModel

VERSION = 1  # raised whenever the same inputs would give other figures


@dataclass
class VariantResult:
    """Figures of one variant over all streams, and the device that it ran on."""

    variant: Variant
    figures: TokenFigures
    device: torch.device
    layers: list[dict[str, float]] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """The row of ``json=FILE``, with stable names."""
        v = self.variant
        row: dict[str, object] = {
            "variant": v.name, "bits_per_value": v.bits_per_value, "window": v.window.length,
            "window_dtype": v.window.dtype if v.window.length > 1 else None, "path": v.path_on(self.device),
        }  # fmt: skip
        row.update(summarise(self.figures))
        if self.layers:
            row["layers"] = self.layers
        return row


@dataclass
class DriftRun:
    """An evaluation of several variants on the same streams.

    Attributes:
        loaded: the model.
        streams: the text.
        batch: streams in one forward of the model.
        cache: where token figures are kept.
        progress: where to report.
        layer_errors: also measure state and readout errors of every layer (doubles the time).
    """

    loaded: LoadedModel
    streams: Streams
    batch: int = 8
    cache: Cache | None = None
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    layer_errors: bool = False

    def evaluate(self, variants: Sequence[Variant]) -> list[VariantResult]:
        """Token figures of every variant, in the order given."""
        found: dict[tuple[int, int], Product] = {}
        starts = range(0, self.streams.ids.shape[0], self.batch)
        work = []
        for at, start in enumerate(starts):
            for index, variant in enumerate(variants):
                product = self._load(variant, start)
                if product is None:
                    work.append((at, start, index))
                else:
                    found[at, index] = product
        if found and work:
            self.progress.say(f"{len(found)} of {len(found) + len(work)} parts (variant, batch) kept from earlier runs")
        if work:
            with small_operations(self.loaded.device), told("the evaluation", self._demand):
                self._run(variants, work, found)
        return [self._result(v, [found[at, i] for at in range(len(starts))]) for i, v in enumerate(variants)]

    def _run(
        self, variants: Sequence[Variant], work: list[tuple[int, int, int]], found: dict[tuple[int, int], Product]
    ) -> None:
        readout, decoders = Readout(self.loaded), served_decoders(variants, self.loaded.device)
        layers = self.loaded.geometry.num_delta_layers
        batches = len({at for at, _, _ in work})
        reference, held = None, -1
        with self.progress.bar("layers", (len(work) + batches) * layers) as bar:
            for at, start, index in work:
                ids = self._ids(start)
                if held != at:
                    reference, held = run_variant(self.loaded, readout, ids[:, :-1], self.streams.prefill, None,
                                                  advance=bar.advance), at  # fmt: skip
                assert reference is not None
                variant = variants[index]
                errors = LayerErrors() if self.layer_errors and not variant.native else None
                features = run_variant(
                    self.loaded, readout, ids[:, :-1], self.streams.prefill, variant, errors, bar.advance,
                    decoders.get(variant.directory),
                )  # fmt: skip
                figures = readout.compare(reference, features, ids[:, self.streams.prefill + 1 :])
                product = Product({**figures.tensors(), **(errors.tensors() if errors else {})})
                if self.cache is not None:
                    self.cache.store("evaluation", self._key(variant, start), product)
                found[at, index] = product

    def _demand(self) -> Demand:
        return demands.drift(self.loaded, self.batch, self.streams.ids.shape[1])

    def _ids(self, start: int) -> Tensor:
        return self.streams.ids[start : start + self.batch]

    def _key(self, variant: Variant, start: int) -> str:
        dtype = next(self.loaded.model.parameters()).dtype
        return hash_json({
            "version": VERSION, "model": self.loaded.fingerprint, "dtype": str(dtype),
            "device": self.loaded.device.type, "torch": torch.__version__, "variant": variant.key,
            "ids": data_fingerprint(self._ids(start)), "prefill": self.streams.prefill, "layers": self.layer_errors,
        })  # fmt: skip

    def _load(self, variant: Variant, start: int) -> Product | None:
        return None if self.cache is None else self.cache.load("evaluation", self._key(variant, start))

    def _result(self, variant: Variant, products: list[Product]) -> VariantResult:
        figures = join([TokenFigures(p["kl"], p["excess_nll"], p["top1"]) for p in products], 0)
        layers = []
        if all("readout" in p.tensors for p in products):
            layers = relative_errors({n: torch.cat([p[n] for p in products], 2) for n in ("readout", "state")})
        return VariantResult(variant, figures, self.loaded.device, layers)
