"""How long an evaluation takes: a compiled plan and seven other variants on held-out text, nothing from the cache.

python -m benchmarks.evaluation_speed build/tiny_gdn_6bit build/tiny_kda_6bit              # 8 streams
python -m benchmarks.evaluation_speed build/tiny_gdn_6bit build/tiny_kda_6bit --streams 64 # on a GPU
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from stepquant.evaluation.run import evaluate
from stepquant.evaluation.settings import EvaluateSettings
from stepquant.files import write_json
from stepquant.plan import load_plan
from stepquant.recipe_sections import CacheSettings, ModelSettings

AGAINST = ("int8", "int6", "int4", "qmamba6", "spatial6", "bf16", "nvfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", help="artifacts of the built-in models")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--path", choices=("simulated", "packed"), default="simulated")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for plan in args.plans:
        path = f"builtin:tiny_{load_plan(plan).geometry.family}"
        with tempfile.TemporaryDirectory() as cache:
            settings = EvaluateSettings(plan=plan, against=AGAINST, streams=args.streams, path=args.path,
                                        model=ModelSettings(path=path), cache=CacheSettings(dir=cache))  # fmt: skip
            start = time.perf_counter()
            found = evaluate(settings, quiet=True)
            seconds = time.perf_counter() - start
        tokens = settings.prefill + settings.decode
        print(
            f"{path}: {len(found)} variants, {args.streams} streams of {tokens:,} tokens: {seconds:.1f} s", flush=True
        )
        rows.append({"model": path, "seconds": seconds, "kl": {r["variant"]: r["kl_all"] for r in found}})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    total = sum(row["seconds"] for row in rows)
    print(f"{device}: {total:.1f} s in all")
    if args.out:
        write_json(args.out, {"device": device, "torch": torch.__version__, "streams": args.streams, "rows": rows})


if __name__ == "__main__":
    main()
