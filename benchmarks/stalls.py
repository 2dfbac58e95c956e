"""What a long prompt does to those who are being answered: gaps between their tokens, with a prefill worker and aggregated, side by side.

    python benchmarks/stalls.py                                  SmolLM2-135M, three alternating runs
    python benchmarks/stalls.py --aggregated-tokens 64           with a smaller step budget for the aggregated system too

`twostep up` on this machine's CPU. Its workers are pinned to a core and have one thread each: one prefill and one decode worker against two
workers that do everything, on the same two cores; router, Redis, Ray and this client share the first of them. Eight streams decode; now and
then a long prompt comes in, whose answer is read to its end. A gap (between two messages of a stream, as the client sees them) counts as
struck if any of that took place in it, and as calm otherwise: both are of the same streams. What is reported of each run is the 99th
percentile of the struck gaps over that of the calm ones; and of all runs, the worst.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from twostep import AsyncClient

_ROOT = Path(__file__).resolve().parents[1]
_WORKERS = ("prefill_worker", "decode_worker")
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One system. `step_tokens` None: the default budget of a step."""

    name: str
    prefill: int
    decode: int
    step_tokens: int | None = None


@dataclass
class Run:
    """Gaps in seconds."""

    calm: list[float] = field(default_factory=list)
    struck: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return percentile(self.struck, 99) / percentile(self.calm, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def main() -> int:
    args = _parse()
    # The helper that starts a system for tests starts it here.
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "system")]
    from running import running  # noqa: PLC0415

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("two cores are needed: one for each worker")
        return 2
    setups = [Setup(name="1 prefill + 1 decode", prefill=1, decode=1), Setup(name="aggregated, 2 workers", prefill=0, decode=2)]
    for budget in args.aggregated_tokens:
        setups.append(Setup(name=f"aggregated, steps of {budget}", prefill=0, decode=2, step_tokens=budget))
    os.sched_setaffinity(0, {cores[0]})
    print(f"load average {os.getloadavg()[0]:.1f} before; cores {cores[0]} and {cores[1]}")
    runs: dict[str, list[Run]] = {setup.name: [] for setup in setups}
    for number in range(args.runs):
        for setup in setups:
            with tempfile.TemporaryDirectory(prefix="stalls-") as scratch:
                flags = ["--cpu-threads", "1", "--device", "cpu"]
                flags += ["--max-num-batched-tokens", str(setup.step_tokens)] if setup.step_tokens else []
                with running(
                    args.model, Path(scratch), prefill=setup.prefill, decode=setup.decode, local_prefill=True, extra=tuple(flags)
                ) as system:
                    _pin(system.process.pid, cores)
                    run = asyncio.run(_measure(args, system.target))
            runs[setup.name].append(run)
            print(f"run {number + 1}  {setup.name:<24} {_describe(run)}", flush=True)
    _print(runs)
    if args.output:
        figures = {
            name: [{"ratio": r.ratio, "calm_s": r.calm, "struck_s": r.struck, "ttft_s": r.ttft_s} for r in of] for name, of in runs.items()
        }
        args.output.write_text(json.dumps(figures))
    return 0


def _pin(root: int, cores: Sequence[int]) -> None:
    """The workers with all their threads and helpers, to a core each; everything else to the first core."""
    family = psutil.Process(root).children(recursive=True)
    places = {root: cores[0]} | {process.pid: cores[0] for process in family}
    workers = [(w, next((m for m in _WORKERS if m in w.cmdline()), "")) for w in family]
    # Prefill workers first, so that a prefill worker shares its core with the router; a guardian's command line names the worker too.
    found = sorted(
        {process.pid: module for process, module in workers if module}.items(), key=lambda item: (_WORKERS.index(item[1]), item[0])
    )
    ports: dict[str, int] = {}
    for pid, _ in found:
        words = psutil.Process(pid).cmdline()
        port = words[words.index("--port") + 1]
        core = cores[ports.setdefault(port, len(ports)) % len(cores)]
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            places[process.pid] = core
    for pid, core in places.items():
        try:
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})
        except (psutil.Error, ProcessLookupError):
            continue


async def _measure(args: argparse.Namespace, target: str) -> Run:
    rng = random.Random(time.time_ns())

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    run = Run()
    async with AsyncClient(target, max_retries=0) as client:

        async def prompt(num_tokens: int) -> None:
            begun = time.perf_counter()
            answer = client.generate(token_ids=tokens(num_tokens), max_tokens=8, temperature=0.0, ignore_eos=True, timeout=_TIMEOUT_S)
            first = 0.0
            async for _ in answer:
                first = first or time.perf_counter() - begun
            run.ttft_s.append(first)
            run.ways.append((await answer.result()).transfer.transport)

        # Threads, channels and transports are warm, and the workers' step curves known.
        for _ in range(2):
            await prompt(args.prompt_tokens)
            await asyncio.sleep(1.5)
        run.ttft_s.clear()
        run.ways.clear()

        arrivals: list[list[float]] = [[] for _ in range(args.streams)]

        async def stream(number: int) -> None:
            answer = client.generate(token_ids=tokens(16), max_tokens=4000, temperature=0.0, ignore_eos=True, timeout=_TIMEOUT_S)
            async for _ in answer:
                arrivals[number].append(time.perf_counter())

        streams = [asyncio.create_task(stream(n)) for n in range(args.streams)]
        strikes: list[tuple[float, float]] = []
        try:
            while min(len(times) for times in arrivals) < 20:
                await asyncio.sleep(0.1)
                for task in streams:
                    if task.done():
                        task.result()
            begun = time.perf_counter()
            for _ in range(args.prompts):
                await asyncio.sleep(args.calm_s)
                struck = time.perf_counter()
                await prompt(args.prompt_tokens)
                strikes.append((struck, time.perf_counter()))
            await asyncio.sleep(args.calm_s)
            ended = time.perf_counter()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    for times in arrivals:
        for before, after in itertools.pairwise(times):
            if begun <= before and after <= ended:
                hit = any(before < end and after > start for start, end in strikes)
                (run.struck if hit else run.calm).append(after - before)
    return run


def _describe(run: Run) -> str:
    figures = (1e3 * percentile(values, p) for values in (run.calm, run.struck) for p in (50, 99, 100))
    calm50, calm99, calm_max, struck50, struck99, struck_max = figures
    way = "handed over" if set(run.ways) <= {"ray"} else "computed there" if set(run.ways) == {"none"} else "both ways"
    return (
        f"calm p50 {calm50:6.1f} p99 {calm99:6.1f} max {calm_max:6.1f} ms ({len(run.calm)})   "
        f"struck p50 {struck50:6.1f} p99 {struck99:6.1f} max {struck_max:6.1f} ms ({len(run.struck)})   "
        f"p99 x {run.ratio:5.2f}   long prompt's TTFT {1e3 * statistics.median(run.ttft_s):6.0f} ms, {way}"
    )


def _print(runs: dict[str, list[Run]]) -> None:
    """A table: medians of the runs, and the worst of them."""
    columns = ("system", "calm p99", "struck p99", "ratio, median", "ratio, worst", "longest gap", "TTFT of the long prompt")
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, of in runs.items():
        calm, struck = (statistics.median(percentile(gaps, 99) for gaps in side) for side in ([r.calm for r in of], [r.struck for r in of]))
        ratios = [run.ratio for run in of]
        longest, ttft = max(max(r.struck) for r in of), statistics.median(t for r in of for t in r.ttft_s)
        cells = [name, f"{1e3 * calm:.1f} ms", f"{1e3 * struck:.1f} ms", f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"]
        print("| " + " | ".join([*cells, f"{1e3 * longest:.0f} ms", f"{1e3 * ttft:.0f} ms"]) + " |")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a model directory, or a known name")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=3, help="long prompts in each run")
    parser.add_argument("--prompt-tokens", type=int, default=1536)
    parser.add_argument("--calm-s", type=float, default=4.0, help="seconds before each long prompt, and after the last")
    parser.add_argument("--aggregated-tokens", type=int, nargs="*", default=[], help="further step budgets for the aggregated system")
    parser.add_argument("--output", type=Path, help="all gaps, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
