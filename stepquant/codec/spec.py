"""What codec a plan uses and the numeric constants of its codebooks (design 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

CodecKind = Literal["dual_axis", "rowwise", "nvfp4", "dsq", "damp", "float"]

PIVOT = 16  # the entry of a precision map that marks an FP16 row
MENU = (2, 3, 4, 5, 6, 8)  # integer precisions that the simulated codec takes
PACKED_MENU = (2, 4, 6, 8)  # those that the packers and kernels take
SCALE_MIN, SCALE_MAX = 2.0**-24, 65504.0  # FP16 clamp of every stored scale
MAGNITUDE_FLOOR = 1e-20
TWO_BIT_COVER = 0.67
"""Share of the largest value of two-bit rows that a column scale reaches without refits, where wider rows of the head
share it: those then have finer steps. Above 2/3, so that what lies beyond still rounds to the last level. In a head
without wider rows it would shrink what is stored again and again; there the share is 1."""


@dataclass(frozen=True)
class CodecSpec:
    """Settings of the spatial codec; one field to one behaviour.

    Attributes:
        kind: the codec of whole heads; ``dual_axis`` is the paper's, the others are its baselines.
        codebook: ``head``: integers [-q_b, q_b] of a head with one precision, and for 2 bits the four levels
            -3, -1, 1, 3 with one row factor per `group` value columns (GDN). ``shared``: z = 2^(8-b) q, so that
            rows of different precision share one column vector (KDA, and row-wise maps anywhere).
        refits: weighted least-squares refits of the column scales (design 2.2; 1 in the paper). Without any a first
            scale stays, which reaches every value (`TWO_BIT_COVER`: but for two-bit rows); four-level heads are always
            refitted (`four_refits`).
        group: value columns that share a row factor in a four-level two-bit head.
        sample: columns at the start of each half of a row (of each group in four-level heads) that its row factor is
            the mean over; 0 for all of them.
    """

    kind: CodecKind = "dual_axis"
    codebook: Literal["head", "shared"] = "head"
    refits: int = 1
    group: int = 32
    sample: int = 0


def four_level_fault(value_dim: int, group: int) -> str | None:
    """Why the kernels cannot take two-bit heads (four levels, a row factor for each `group` columns), None if they can.

    Two planes of half the columns each are read at once, so that a group may not cross from one into the other.
    """
    if (value_dim // 2) % group or group & (group - 1):
        return f"two-bit heads need half of {value_dim} columns in groups of {group}"
    return None


def levels(bits: int) -> int:
    """q_b = 2^(b-1) - 1, the largest integer code (equation 3)."""
    return 2 ** (bits - 1) - 1


def max_code(bits: int, spec: CodecSpec) -> int:
    """Largest stored magnitude in units of the code step: q_b, or 3 in the four-level two-bit codebook."""
    return 3 if bits == 2 and spec.codebook == "head" else levels(bits)


def covers(bits: NDArray[Any], refits: int) -> NDArray[np.float32]:
    """Share of a row's largest value that a first column scale reaches, by row of a map `[..., K]`."""
    wider = ((bits > 2) & (bits < PIVOT)).any(-1, keepdims=True)
    narrow = (bits == 2) & wider & (refits == 0)
    return np.where(narrow, TWO_BIT_COVER, 1).astype(np.float32)


def four_refits(refits: int) -> int:
    """Refits of four-level heads: a scale that reaches the largest value spreads the levels over values that hardly
    occur, one that reaches less shrinks or swells what is stored again and again. Fitted levels stay as they are."""
    return max(1, refits)


def code_step(bits: int, spec: CodecSpec) -> int:
    """z = step * q: 1 in the ``head`` codebook, 2^(8-b) in the ``shared`` one."""
    return 2 ** (8 - bits) if spec.codebook == "shared" else 1
