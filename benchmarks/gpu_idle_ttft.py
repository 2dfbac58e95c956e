"""Time to the first and to the second token of single requests on an idle system, and where it went.

    PYTHONPATH=$PWD:benchmarks python -P benchmarks/gpu_idle_ttft.py --prefill 1 --decode 1
    PYTHONPATH=$PWD:benchmarks python -P benchmarks/gpu_idle_ttft.py --tiny          on a CPU

`twostep up` with Llama-3.1-8B's shape and random weights; one request after the other, with a pause between. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_goodput import add_shape, system

from twostep import Client
from twostep.settings.reading import FlagParser

PHASES = ("route_s", "queue_s", "prefill_s", "publish_s", "fetch_s", "first_decode_s")


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1, help="decode workers; with --aggregated all workers")
    parser.add_argument("--aggregated", action="store_true")
    add_shape(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2600])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for the log")
    parser.add_argument("up", nargs="*", help="after --: further flags of twostep up")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="ts-") as name:
        out: Path = arguments.out or Path(name)
        out.mkdir(parents=True, exist_ok=True)
        with system(arguments, Path(name), out) as (target, _):
            print(f"{'tokens':>7} {'TTFT':>7} {'least':>7} {'second':>7}  " + " ".join(f"{phase[:-2]:>12}" for phase in PHASES))
            with Client(target) as client:
                for length in arguments.lengths:
                    show(client, length, arguments)


def show(client: Client, length: int, arguments: argparse.Namespace) -> None:
    rng = random.Random(length)
    firsts, seconds = [], []
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for repeat in range(arguments.repeats + 3):
        tokens = [rng.randrange(3, 900) for _ in range(length)]
        time.sleep(0.1)
        started = time.perf_counter()
        answer = client.generate(token_ids=tokens, max_tokens=12, ignore_eos=True, timeout=60)
        arrived = [time.perf_counter() - started for _ in answer]
        if repeat < 3:
            continue
        firsts.append(arrived[0])
        seconds.append(arrived[1] - arrived[0])
        for phase in PHASES:
            phases[phase].append(getattr(answer.result().phases, phase))
    columns = " ".join(f"{1e3 * statistics.median(values):12.2f}" for values in phases.values())
    print(
        f"{length:7d} {1e3 * statistics.median(firsts):7.1f} {1e3 * min(firsts):7.1f} {1e3 * statistics.median(seconds):7.1f}  {columns}",
        flush=True,
    )


if __name__ == "__main__":
    main()
