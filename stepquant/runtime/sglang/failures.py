"""Requests whose state is not finite are ended with an error; nothing of them reaches other requests.

What is not finite in a state makes every logit of its request NaN, on every tensor-parallel rank alike. So the logits
are what is looked at: one value a request, on the device, before the sampler (which would fail for the whole batch on
such a row). The flags come to the host with the step's tokens, no wait of their own, and the scheduler's own code ends
the request: it answers with finish reason abort and status 500, and its prefix does not go into the cache.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from stepquant.runtime.copies import quiet_rows
from stepquant.runtime.sglang.state import current

logger = logging.getLogger(__name__)
FLAGS = "stepquant_failed"  # attribute of a step's logits output: bool [B] on the host, whole when its tokens are
MESSAGE = (
    "the logits of this request were not finite: its recurrent state or a layer after it overflowed. It was ended and "
    "its slot will be cleared; other requests are not affected. If a repeated request ends so too, compare with FP32 "
    "states (without the plan)"
)


def sample(original: Callable[..., Any], self: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
    """`Sampler.forward`: rows of requests that failed are flagged, and sampled from zeros."""
    logits = logits_output.next_token_logits
    if logits is not None:
        setattr(logits_output, FLAGS, quiet_rows(logits).to("cpu", non_blocking=True))
    return original(self, logits_output, *args, **kwargs)


def decoded(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """`process_batch_result_decode`: requests that failed are ended by SGLang's own code."""
    end_failed(batch, result)
    return original(self, batch, result)


def prefilled(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """`process_batch_result_prefill`, as `decoded`; a prompt that comes in chunks ends with its last one."""
    end_failed(batch, result)
    return original(self, batch, result)


def end_failed(batch: Any, result: Any) -> None:
    """Mark the requests of a step's flags to be finished with an error and kept out of the prefix cache."""
    flags = getattr(getattr(result, "logits_output", None), FLAGS, None)
    if flags is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif isinstance(result.next_token_ids, Tensor):  # no overlap: the caller's own wait for the tokens, made here
        result.next_token_ids = result.next_token_ids.cpu()
    if not flags.any():
        return
    reasons = importlib.import_module("sglang.srt.managers.schedule_batch")
    ended = []
    for place in flags.nonzero().flatten().tolist():
        req = batch.reqs[place]
        if req.finished() or req.is_retracted:
            continue
        req.to_finish = reasons.FINISH_ABORT(MESSAGE, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        req.skip_radix_cache_insert = True
        ended.append(str(req.rid))
    report = current().report
    report["failed_requests"] = report.get("failed_requests", 0) + len(ended)
    if ended:
        logger.error(f"stepquant: ended {', '.join(ended[:8])}{' and others' if len(ended) > 8 else ''}: {MESSAGE}")


def poison(result: Any, failed: Tensor, starts: Tensor) -> Any:
    """Outputs of a prefill with NaN for the requests `failed` bool `[n]`, so that their logits say so.

    Args:
        result: what SGLang's extend kernel returned, outputs `[1, T, H, V]` alone or first.
        starts: int `[n + 1]`, where each request begins.
    """
    out = result[0] if isinstance(result, tuple) else result
    places = torch.arange(out.shape[1], device=out.device)
    owner = torch.bucketize(places, starts[1:].to(places.dtype), right=True).clamp(max=len(failed) - 1)
    out += torch.where(failed, torch.nan, 0.0).to(out.dtype)[owner][None, :, None, None]
    return result
