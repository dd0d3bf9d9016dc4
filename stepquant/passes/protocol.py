"""What a pass is: it says which recipe keys and products it reads, and makes one named product.

A product is a dictionary of tensors plus a JSON object of facts. A pass that watches the model run (`Observer`) makes
its product from a stream of traces; all observers that are missing in the cache share one run of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from stepquant.models.capture import DeltaTrace
    from stepquant.passes.context import Context


@dataclass
class Product:
    """What a pass made: tensors and JSON facts."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


Products = Mapping[str, Product]


class Pass(Protocol):
    """One step of the pipeline.

    Attributes:
        name: of the pass and of its product.
        version: raised whenever its result would change for the same inputs, so that old cache entries are not used.
        reads: recipe keys (dotted) that shape the product; they enter its cache key.
        needs: products of earlier passes that it reads; their keys enter its own.
    """

    name: str
    version: int
    reads: tuple[str, ...]
    needs: tuple[str, ...]

    def wanted(self, context: Context) -> bool:
        """Whether this recipe needs the product at all."""
        ...

    def run(self, context: Context, products: Products) -> Product:
        """Make the product."""
        ...


class Observation(Protocol):
    """The running state of one observer over one run of the model."""

    def observe(self, layer: int, trace: DeltaTrace, segments: range) -> None:
        """Take in one layer's trace of a batch of segments; nothing of the trace may be kept.

        Args:
            layer: position among the delta-rule layers.
            trace: `[B, T, H, ...]` tensors.
            segments: indices of the batch's segments among all calibration segments.
        """
        ...

    def state(self) -> dict[str, Tensor]:
        """Accumulators, so that an interrupted run can go on."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put `state`'s accumulators back."""
        ...

    def finish(self) -> Product:
        """The product."""
        ...


@runtime_checkable
class ObserverPass(Protocol):
    """A pass whose product comes from watching the model run."""

    name: str
    version: int
    reads: tuple[str, ...]
    needs: tuple[str, ...]

    def wanted(self, context: Context) -> bool: ...

    def start(self, context: Context, place: Path | None = None) -> Observation:
        """Begin an observation of all calibration segments.

        Args:
            place: directory of the run for what is too large to be kept in memory; None keeps it there.
        """
        ...
