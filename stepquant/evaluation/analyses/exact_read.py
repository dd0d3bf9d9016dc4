"""What delta feedback does to a quantisation error: the exact-read oracle (appendix B.1).

One rowwise quantisation error is injected at step 256, and the rest of the stream runs without further quantisation.
Natively the error follows E_t = A_t E_{t-1}: the delta rule reads the wrong state and corrects it along each key. The
oracle reads the exact state in the residual, which leaves E_t = D_t E_{t-1}. The figure is the squared output error
summed over heads, streams and later steps, oracle over native: 26.82 (INT6) and 18.65 (INT8) in the paper for Qwen.

The error obeys the recurrence itself with v = 0 (native), and with v = 0 and beta = 0 (oracle), so both are run in the
chunked form at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepquant.codec.baselines import round_rows
from stepquant.codec.chunks import states_every
from stepquant.codec.spec import levels
from stepquant.errors import RecipeError
from stepquant.evaluation.analyses.base import Analysis, AnalysisRun, figure
from stepquant.evaluation.decode import DecodeSettings, decode_layer
from stepquant.models.capture import DeltaTrace

if TYPE_CHECKING:
    from stepquant.evaluation.settings import AnalyseSettings

INJECTED = 256
BITS = (6, 8)
PAPER = {6: 26.82, 8: 18.65}


def check(settings: AnalyseSettings) -> None:
    """Refuse streams that end before the error is injected.

    Raises:
        RecipeError: naming prefill and decode.
    """
    length = settings.prefill + settings.decode
    if length <= INJECTED:
        raise RecipeError(
            f"prefill + decode is {length} tokens; the oracle injects its error after {INJECTED} and needs tokens that "
            f"follow: give decode of more than {INJECTED - settings.prefill}, 1024 for a figure like the paper's"
        )


def analyse(run: AnalysisRun) -> Analysis:
    """Both paths for every head of every layer."""
    length = run.streams.ids.shape[1] - 1
    g = run.plan.geometry
    later = length - INJECTED
    sums = torch.zeros(len(BITS), 2, run.streams.ids.shape[0], later, dtype=torch.float64)
    heads = torch.zeros(len(BITS), 2, g.num_delta_layers, g.num_heads, dtype=torch.float64)
    stream = 0

    def observe(layer: int, trace: DeltaTrace) -> None:
        for index, bits in enumerate(BITS):
            for path, y in enumerate(error_outputs(trace, bits)):
                square = y.double().square().sum(-1).cpu()  # [1, later, H]
                sums[index, path, stream] += square.sum((0, 2))
                heads[index, path, layer] += square.sum((0, 1))

    for stream in range(run.streams.ids.shape[0]):
        run.watch(observe, "oracle", run.streams.ids[stream : stream + 1, :-1])
    ratios = {bits: float(sums[i, 1].sum() / sums[i, 0].sum()) for i, bits in enumerate(BITS)}
    by_stream = {bits: (sums[i, 1].sum(-1) / sums[i, 0].sum(-1)).tolist() for i, bits in enumerate(BITS)}
    by_head = {bits: (heads[i, 1] / heads[i, 0].clamp_min(1e-300)).tolist() for i, bits in enumerate(BITS)}
    numbers: dict[str, Any] = {
        "ratio": {f"int{b}": r for b, r in ratios.items()}, "by_stream": {f"int{b}": r for b, r in by_stream.items()},
        "by_head": {f"int{b}": r for b, r in by_head.items()}, "injected_at": INJECTED, "later_updates": later,
        "paper": {f"int{b}": r for b, r in PAPER.items()},
    }  # fmt: skip
    headline = [
        f"without delta feedback an INT{b} error costs {r:.2f}x the squared output error (paper {PAPER[b]}, Qwen, "
        f"7,936 updates); by stream {min(by_stream[b]):.2f} to {max(by_stream[b]):.2f}"
        for b, r in ratios.items()
    ]
    return Analysis("exact_read", numbers, headline, _figure(sums))


def error_outputs(trace: DeltaTrace, bits: int) -> tuple[Tensor, Tensor]:
    """Output errors `[B, T - 256, H, V]` after one injected error: native, and with exact reads."""
    names = ("q", "k", "v", "log_gate", "beta")
    k, v, gate, beta = (getattr(trace, n)[:, :INJECTED] for n in names[1:])
    state = next(s for done, s in states_every(k, v, gate, beta, INJECTED // 8) if done == INJECTED)
    error = round_rows(state, torch.tensor(float(levels(bits)), device=state.device)) - state
    rest = {n: getattr(trace, n)[:, INJECTED:] for n in names}
    rest["v"] = torch.zeros_like(rest["v"])
    after = replace(trace, **rest, initial_state=error)
    whole = DecodeSettings(after.q.shape[1])
    native = decode_layer(after, None, whole)
    return native, decode_layer(replace(after, beta=torch.zeros_like(after.beta)), None, whole)


def _figure(sums: Tensor) -> Any:
    made = figure("One injected error: native delta feedback against the exact-read oracle",
                  "updates after the injection", "squared output error, all heads (running mean of 64)",
                  yaxis_type="log")  # fmt: skip
    for index, bits in enumerate(BITS):
        for path, name in enumerate(("native", "exact read")):
            curve = sums[index, path].mean(0)
            usable = curve[: curve.numel() // 64 * 64].view(-1, 64).mean(1)
            made.add_scatter(
                x=[64 * (i + 1) for i in range(usable.numel())], y=usable.tolist(), name=f"INT{bits}, {name}"
            )
    return made
