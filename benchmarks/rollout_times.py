"""The calibration's hottest loop on the CPU, two checkouts side by side: ``python -m benchmarks.rollout_times OTHER``.

    git worktree add /tmp/other COMMIT
    python -m benchmarks.rollout_times /tmp/other

Times one codec roundtrip of a layer (8 heads of 128 x 128) at single precisions, and one layer's rollout over 256
random tokens at all of them, in processes that take turns; the least processor seconds of all turns stand, so that what
else the machine does changes little. Says too whether both checkouts' costs are the same to the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "rollout_times_cpu.json"
HEADS, K, V, TOKENS, WINDOW = 8, 128, 128, 256, 8
BITS = (2, 4, 6, 8, 16)


def least(run: Callable[[], Any], turns: int) -> float:
    """Least processor milliseconds of `turns` runs, after one that warms up."""
    run()
    found = []
    for _ in range(turns):
        began = time.process_time()
        run()
        found.append(1e3 * (time.process_time() - began))
    return min(found)


def times() -> tuple[dict[str, float], str]:
    """Milliseconds by name, and a hash of the costs that the rollouts found."""
    import torch

    from stepquant.codec.registry import make_codec
    from stepquant.codec.spec import CodecSpec
    from stepquant.passes.rollout import rollout
    from stepquant.small_operations import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    q, k = (torch.nn.functional.normalize(random(TOKENS, HEADS, K), dim=-1) for _ in range(2))
    v, beta, sensitivity = random(TOKENS, HEADS, V), random(TOKENS, HEADS).sigmoid(), random(TOKENS, HEADS).square()
    w, state, digest = torch.ones(HEADS, K), random(HEADS, K, V), hashlib.sha256()
    found: dict[str, float] = {}
    for family, codebook, gates in (("GDN", "head", (HEADS,)), ("KDA", "shared", (HEADS, K))):
        spec = CodecSpec("dual_axis", codebook, 1, sample=16)  # type: ignore[arg-type]
        gate = -torch.nn.functional.softplus(random(TOKENS, *gates) - 3)
        for bits in BITS:
            codec = make_codec(torch.full((HEADS, K), bits, dtype=torch.uint8), w, spec, V)
            found[f"{family} codec, {bits} bits"] = least(lambda codec=codec: codec.roundtrip(state), 60)
        given = (q * K**-0.5, k, v, gate, beta, sensitivity, w, spec, BITS, WINDOW)
        found[f"{family} rollout"] = least(lambda given=given: rollout(*given), 3)
        for costs in rollout(*given)[:2]:
            digest.update(costs.contiguous().numpy().tobytes())
    return found, digest.hexdigest()


def measure(source: Path) -> tuple[dict[str, float], str]:
    """`times` of the checkout `source`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--here", str(source)]
    run = subprocess.run(command, cwd="/", env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found, digest = json.loads(run.stdout.splitlines()[-1])
    return found, digest


def main() -> int:
    """Take turns, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="another checkout, the one before a change")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(times()))
        return 0
    turns = [(measure(args.other), measure(ROOT)) for _ in range(args.turns)]
    before, now = ({name: min(turn[side][0][name] for turn in turns) for name in turns[0][side][0]} for side in (0, 1))
    same = len({digest for turn in turns for _, digest in turn}) == 1
    print("| ms | before | now | ratio |\n|---|---|---|---|")
    for name, value in now.items():
        print(f"| {name} | {before[name]:.2f} | {value:.2f} | {value / before[name]:.2f} |")
    print(f"\ncosts {'are the same to the bit' if same else 'differ'}")
    from stepquant.files import write_json
    from stepquant.run_record import machine

    rounded = {n: {key: round(x, 3) for key, x in part.items()} for n, part in (("before", before), ("now", now))}
    write_json(RESULTS, {**rounded, "same_costs": same, "turns": args.turns, "machine": machine()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
