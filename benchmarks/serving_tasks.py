"""What one SGLang engine is asked in the serving check; `serving.py` starts one process an engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serving_steps import RUNS, WARM_UPS, figures, read_segments, run_figures

VOCABULARY = 320
BATCHES = tuple(int(x) for x in os.environ.get("SERVING_BATCHES", "32,64,128,256,512").split(","))  # the paper's
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def texts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` runs of `length` byte ids of the standard library's sources."""
    import sysconfig

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng, found = random.Random(seed), []
    while len(found) < count:
        data = rng.choice(files).read_bytes()
        if len(data) > length + 1:
            start = rng.randrange(len(data) - length)
            found.append(list(data[start : start + length]))
    return found


def mixed_prompts(count: int = 16) -> list[list[int]]:
    """Prompts of 40 to 490 tokens: shorter, as long as and longer than a prefill chunk."""
    return [p[: 40 + 30 * i] for i, p in enumerate(texts(count, 500))]


def distribution(entries: Sequence[Any]) -> np.ndarray:
    """Log probabilities `[T, V]` of SGLang's (logprob, id, text) lists over the whole vocabulary."""
    found = np.full((len(entries), VOCABULARY), -60.0, np.float32)
    for t, entry in enumerate(entries):
        for logprob, token, _ in entry or ():
            found[t, token] = logprob
    return found


def decode(engine: Any, out: Path, tokens: int = 96) -> dict[str, Any]:
    """Greedy continuations with every logit, twice in a batch and three one by one."""
    prompts = mixed_prompts()
    sampling = {**GREEDY, "max_new_tokens": tokens}
    answers = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=VOCABULARY
    )
    outputs = [a["output_ids"] for a in answers]
    logits = np.stack([distribution(a["meta_info"]["output_top_logprobs"]) for a in answers])
    np.savez_compressed(out.with_suffix(".npz"), outputs=np.array(outputs), logits=logits.astype(np.float16))
    again = [a["output_ids"] for a in engine.generate(input_ids=prompts, sampling_params=sampling)]
    single = [engine.generate(input_ids=p, sampling_params=sampling)["output_ids"] for p in prompts[:3]]
    return {
        "outputs": outputs[:2], "same_twice": sum(x == y for x, y in zip(outputs, again, strict=True)),
        "same_alone": [x == y for x, y in zip(single, outputs, strict=False)], "prompts": len(prompts),
        "finite": bool(np.isfinite(logits).all()),
    }  # fmt: skip


def score(engine: Any, decoded: Path) -> dict[str, Any]:
    """The engine's own distributions at another engine's tokens (teacher-forced): agreement and KL in nats."""
    data = np.load(decoded)
    prompts, outputs = mixed_prompts(), data["outputs"]
    answers = engine.generate(
        input_ids=[p + o.tolist() for p, o in zip(prompts, outputs, strict=True)],
        sampling_params={**GREEDY, "max_new_tokens": 1}, return_logprob=True, top_logprobs_num=VOCABULARY,
        logprob_start_len=0,
    )  # fmt: skip
    agree, kl = [], []
    for prompt, output, logits, answer in zip(prompts, outputs, data["logits"], answers, strict=True):
        lists = answer["meta_info"]["input_top_logprobs"]
        own = distribution(lists[len(prompt) : len(prompt) + len(output)])
        other = logits.astype(np.float32)
        agree.append(own.argmax(-1) == output)
        kl.append((np.exp(own) * (own - other)).sum(-1))
    return {
        "agreement": float(np.mean(agree)), "kl": float(np.mean(kl)), "kl_last_32": float(np.stack(kl)[:, -32:].mean()),
        "tokens": int(np.size(agree)),
    }  # fmt: skip


def prefixes(engine: Any, cached: bool, chunk: int = 256) -> dict[str, Any]:
    """Eight requests that share their first `chunk` tokens, one at a time; with the cache the prefix is sent first."""
    shared = texts(1, chunk, seed=7)[0]
    if cached:
        engine.generate(input_ids=shared, sampling_params={**GREEDY, "max_new_tokens": 1})
    outputs, hits = [], []
    for suffix in texts(8, 70, seed=8):
        answer = engine.generate(input_ids=shared + suffix, sampling_params={**GREEDY, "max_new_tokens": 48})
        outputs.append(answer["output_ids"])
        hits.append(answer["meta_info"].get("cached_tokens"))
    return {"outputs": outputs, "cached_tokens": hits}


def stress(engine: Any, requests: int = 200, seed: int = 3) -> dict[str, Any]:
    """Mixed lengths, shared prefixes, aborts, between two probes; the engine idles for its own pool check."""
    rng = random.Random(seed)
    stems, probe = texts(6, 320, seed=5), texts(1, 200, seed=6)[0]
    sampling = {**GREEDY, "max_new_tokens": 48}
    before = engine.generate(input_ids=probe, sampling_params=sampling)["output_ids"]
    counts = {"finished": 0, "aborted": 0, "failed": 0}

    async def one(i: int) -> None:
        stem = stems[i % 6][: rng.choice([64, 100, 192, 256, 300])]
        ids = stem + texts(1, rng.randrange(1, 200), seed=100 + i)[0]
        await asyncio.sleep(rng.random() * 4)
        stream = await engine.async_generate(
            input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": rng.randrange(4, 400)}, stream=True,
            rid=f"r{i}",
        )  # fmt: skip
        abort_at = rng.randrange(2, 20) if rng.random() < 0.2 else None
        seen = 0
        async for _ in stream:
            seen += 1
            if abort_at is not None and seen == abort_at:
                engine.tokenizer_manager.abort_request(f"r{i}")
                counts["aborted"] += 1
                abort_at = -1
        if abort_at != -1:
            counts["finished"] += 1

    async def everything() -> None:
        done = await asyncio.gather(*(one(i) for i in range(requests)), return_exceptions=True)
        counts["failed"] = sum(isinstance(x, Exception) for x in done)
        counts["error"] = next((repr(x)[:300] for x in done if isinstance(x, Exception)), None)

    t = time.time()
    engine.loop.run_until_complete(everything())
    seconds = time.time() - t
    time.sleep(3)  # idle: SGLang checks its pools and ends the scheduler if a slot or token is missing
    after = engine.generate(input_ids=probe, sampling_params=sampling)["output_ids"]
    return {**counts, "seconds": round(seconds, 1), "probe_unchanged": before == after}


def throughput(engine: Any, steps: Path, batches: Sequence[int] = BATCHES, new: int = 256) -> dict[str, Any]:
    """Decode throughput of a batch of the same prompt of 128 tokens, by the steps that the plugin writes to `steps`."""
    ranks = engine.server_args.tp_size
    found = {}
    for batch in batches:
        prompts, runs = texts(1, 128, seed=9) * batch, []
        for _ in range(WARM_UPS + RUNS):
            before = [len(read_segments(Path(f"{steps}.{rank}"))) for rank in range(ranks)]
            engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": new})
            engine.generate(input_ids=prompts[0], sampling_params={**GREEDY, "max_new_tokens": 1})  # ends the run
            time.sleep(0.1)  # the steps are on their way to the file
            runs.append([
                run_figures(read_segments(Path(f"{steps}.{rank}"))[before[rank] :], batch) for rank in range(ranks)
            ])  # fmt: skip
        found[str(batch)] = figures(runs[WARM_UPS:])
        print(f"RATE {batch} {json.dumps(found[str(batch)])}", flush=True)
    return found


def fill(engine: Any, prompt: int = 64, new: int = 96) -> dict[str, Any]:
    """More requests at once than the server says it runs; how many it did run is in its log (`#running-req`)."""
    cap = int(server_figures(engine)["effective_max_running_requests"])
    asked = cap + 64
    begun = time.time()
    answers = engine.generate(
        input_ids=texts(asked, prompt, seed=11), sampling_params={**GREEDY, "max_new_tokens": new}
    )
    whole = sum(len(a["output_ids"]) == new for a in answers)
    return {"cap": cap, "asked": asked, "whole": whole, "seconds": round(time.time() - begun, 1)}


def broken(engine: Any, length: int = 1111, new: int = 40) -> dict[str, Any]:
    """A request whose state becomes NaN (SERVING_BREAK) beside others: it ends with an error, they do not."""
    others, bad = texts(6, 40, seed=20), texts(1, length, seed=21)[0]  # all others in one chunk of the prefill

    async def together(prompts: Sequence[list[int]], temperature: float) -> list[Any]:
        sampling = {"temperature": temperature, "ignore_eos": True, "max_new_tokens": new}
        calls = [engine.async_generate(input_ids=p, sampling_params=sampling) for p in prompts]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    def ask(prompts: Sequence[list[int]], temperature: float = 0.0) -> list[Any]:
        return engine.loop.run_until_complete(together(prompts, temperature))

    alone, (*rest, error) = ask(others), ask([*others, bad])
    *sampled, failed = ask([*others, bad], 1.0)
    *later, again = ask([*others, bad])
    ids = [[a["output_ids"] for a in x] for x in (alone, rest, later)]
    return {
        "error": f"{type(error).__name__}: {getattr(error, 'detail', error)}"[:400],
        "status": getattr(error, "status_code", None), "ended_when_sampled": isinstance(failed, Exception),
        "others_finished_when_sampled": sum(isinstance(a, dict) for a in sampled),
        "ended_again": isinstance(again, Exception),
        "others_same": sum(x == y for x, y in zip(ids[0], ids[1], strict=True)),
        "others_same_later": sum(x == y for x, y in zip(ids[0], ids[2], strict=True)), "others": len(others),
    }  # fmt: skip


def server_figures(engine: Any) -> dict[str, Any]:
    """What the running server says of itself."""
    info = engine.get_server_info()
    states = info["internal_states"][0]
    names = ("max_total_num_tokens", "max_mamba_cache_size", "mamba_scheduler_strategy", "disable_radix_cache",
             "disable_overlap_schedule", "max_running_requests")  # fmt: skip
    return {
        **{n: info.get(n, states.get(n)) for n in names}, "stepquant": states.get("stepquant"),
        "memory": states.get("memory_usage"),
        "effective_max_running_requests": states.get("effective_max_running_requests_per_dp"),
        "mamba_slots": states.get("max_mamba_cache_size"),
    }  # fmt: skip
