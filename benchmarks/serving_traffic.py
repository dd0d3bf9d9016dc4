"""Traffic against a server on loopback: `requests` asks it everything once, `hard` hits it for a while.

`hard` mixes long and short generations, streams that hang up, aborts, prompts that do not fit, prefixes that push each
other out of the cache and long generations that make the scheduler retract, and asks a fixed probe all the while.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from serving_http import Server
from serving_tasks import GREEDY, mixed_prompts, texts

WORKERS = 24
PROBE_TOKENS = 16


def requests(server: Server) -> dict[str, Any]:
    """Everything once: lists, streams, aborts, refusals, figures."""
    prompts = mixed_prompts(8)
    body = {"input_ids": prompts, "sampling_params": {**GREEDY, "max_new_tokens": 48}}
    (status, answers), (_, again) = server.ask("POST", "/generate", body), server.ask("POST", "/generate", body)
    one = {"input_ids": prompts[0], "sampling_params": {**GREEDY, "max_new_tokens": 48}}
    streamed = list(server.stream(one))
    long = {"input_ids": prompts[1], "sampling_params": {**GREEDY, "max_new_tokens": 4000}, "rid": "to-abort"}
    ended = ""
    for number, event in enumerate(server.stream(long)):
        if number == 5:
            server.ask("POST", "/abort_request", {"rid": "to-abort"})
        ended = (event["meta_info"]["finish_reason"] or {}).get("type", ended)
    oversize = server.ask("POST", "/generate", {**one, "input_ids": [7] * 40000})
    info = server.ask("GET", "/server_info")[1]
    metrics = str(server.ask("GET", "/metrics")[1])
    return {
        "status": status, "same_twice": [a["output_ids"] for a in answers] == [a["output_ids"] for a in again],
        "tokens": sum(len(a["output_ids"]) for a in answers),
        "streamed_events": len(streamed), "abort_ended_as": ended,
        "oversize": [oversize[0], str(oversize[1])[:200]],
        "figures": info["internal_states"][0].get("stepquant"),
        "gauges": sorted({x.split("{")[0] for x in metrics.splitlines() if x.startswith("stepquant")}),
        "outputs": [a["output_ids"] for a in answers][:2],
    }  # fmt: skip


def probe_of(server: Server, candidates: int = 12) -> tuple[list[int], float]:
    """Of some prompts the one whose greedy tokens win most clearly, and by how many nats the closest of them wins:
    batches of other sizes round differently, and a near tie would turn on that."""
    best: tuple[list[int], float] = ([], -1.0)
    for prompt in texts(candidates, 120, seed=31):
        body = {
            "input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": PROBE_TOKENS},
            "return_logprob": True, "top_logprobs_num": 2,
        }  # fmt: skip
        answer = server.ask("POST", "/generate", body)[1]
        margin = min(first[0] - second[0] for first, second in answer["meta_info"]["output_top_logprobs"])
        if margin > best[1]:
            best = (prompt, margin)
    return best


class Traffic:
    """Workers that send requests until `end`; counts by kind and outcome.

    Args:
        most: tokens that the KV cache holds. seed: of everything that is drawn.
    """

    def __init__(self, server: Server, most: int, end: float, seed: int = 0) -> None:
        self.server, self.most, self.end, self.seed = server, most, end, seed
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.stems = texts(6, 320, seed=41)

    def run(self) -> None:
        """All workers, to the end."""
        threads = [threading.Thread(target=self._work, args=(i,)) for i in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        kinds: list[Callable[[random.Random, str], str]] = [
            *[self.long] * 3, self.short, *[self.thrash] * 2, self.leave, self.abort, self.oversize
        ]  # fmt: skip
        serial = 0
        while time.time() < self.end:
            serial += 1
            kind = rng.choice(kinds)
            try:
                outcome = kind(rng, f"w{number}-{serial}")
            except Exception as error:
                outcome = "failed"
                self.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])
            self.counts[f"{kind.__name__} {outcome}"] += 1

    def prompt(self, rng: random.Random, most: int = 200) -> list[int]:
        """A shared stem and something of its own."""
        stem = rng.choice(self.stems)[: rng.choice([0, 64, 100, 192, 256, 300])]
        return stem + texts(1, rng.randrange(1, most), seed=rng.randrange(1 << 30))[0]

    def long(self, rng: random.Random, _: str) -> str:
        """A long generation: several of them outgrow the KV cache."""
        new = rng.randrange(100, 500)
        return "whole" if len(self.server.generate(self.prompt(rng), new)) == new else "short"

    def short(self, rng: random.Random, _: str) -> str:
        """A few sampled tokens."""
        new = rng.randrange(1, 9)
        return "whole" if len(self.server.generate(self.prompt(rng), new, temperature=1.0)) == new else "short"

    def thrash(self, rng: random.Random, _: str) -> str:
        """A prefix that nobody shares, for the cache to keep."""
        ids = texts(1, rng.randrange(257, 500), seed=rng.randrange(1 << 30))[0]
        return "whole" if len(self.server.generate(ids, 1)) == 1 else "short"

    def leave(self, rng: random.Random, _: str) -> str:
        """A stream whose client hangs up."""
        body = {"input_ids": self.prompt(rng), "sampling_params": {**GREEDY, "max_new_tokens": 800}}
        events = sum(1 for _ in self.server.stream(body, leave_after=rng.randrange(1, 30)))
        return "left" if events else "nothing came"

    def abort(self, rng: random.Random, name: str) -> str:
        """A stream that is aborted by name, sometimes before its first token."""
        body = {"input_ids": self.prompt(rng), "sampling_params": {**GREEDY, "max_new_tokens": 800}, "rid": name}
        after, reason = rng.randrange(0, 20), None
        timer = threading.Timer(0.02, self.server.ask, ("POST", "/abort_request", {"rid": name}))
        if after == 0:
            timer.start()
        for number, event in enumerate(self.server.stream(body)):
            reason = (event["meta_info"]["finish_reason"] or {}).get("type", reason)
            if number + 1 == after:
                self.server.ask("POST", "/abort_request", {"rid": name})
        return f"ended as {reason}"

    def oversize(self, rng: random.Random, _: str) -> str:
        """A prompt that the KV cache, or the model, cannot hold."""
        size = rng.choice([self.most + 100, 40000])
        body = {"input_ids": [rng.randrange(1, 250)] * size, "sampling_params": {**GREEDY, "max_new_tokens": 4}}
        return str(self.server.ask("POST", "/generate", body)[0])


def hard(server: Server, most: int) -> dict[str, Any]:
    """Traffic for $SERVING_HARD seconds (60) with a probe every 2 s; then idle, for SGLang's own pool check, and the
    probe once more."""
    seconds = float(os.environ.get("SERVING_HARD", "60"))
    prompt, margin = probe_of(server)
    expected, probes, memory = server.generate(prompt, PROBE_TOKENS), Counter[str](), [server.memory()]
    traffic = Traffic(server, most, time.time() + seconds)
    worker = threading.Thread(target=traffic.run)
    worker.start()
    while worker.is_alive():
        try:
            probes["same" if server.generate(prompt, PROBE_TOKENS) == expected else "other tokens"] += 1
        except Exception as error:
            probes[f"failed: {type(error).__name__}: {error}"[:200]] += 1
        memory.append(server.memory())
        server.ask("POST", "/flush_cache")  # refused unless nothing runs
        worker.join(2)
    time.sleep(4)
    health = server.ask("GET", "/health")[0]
    after = server.generate(prompt, PROBE_TOKENS)
    memory.append(server.memory())
    log = server.log.read_text(errors="replace")
    third = len(memory) // 3
    return {
        "seconds": seconds, "counts": dict(sorted(traffic.counts.items())), "requests": sum(traffic.counts.values()),
        "errors": len(traffic.errors), "first_errors": traffic.errors[:5], "probes": dict(probes),
        "probe_margin_nats": round(margin, 3), "probe_same_after": after == expected, "health_after": health,
        "retractions": log.count("#retracted_reqs"), "memory_mib": {"after_a_third": memory[third], "end": memory[-1]},
        "figures": server.ask("GET", "/server_info")[1]["internal_states"][0].get("stepquant"),
    }  # fmt: skip
