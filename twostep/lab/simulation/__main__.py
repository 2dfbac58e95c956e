"""Simulates the autoscaler beside what it replaces, and prints a table in Markdown.

python -P -m twostep.lab.simulation --trace mixed                      the joint policy, seeds 1 to 3
python -P -m twostep.lab.simulation --trace mixed --grid --seeds 11 12 13 --processes 8
python -P -m twostep.lab.simulation --trace loss --peak 24 --who joint joint,spare=0 hpas,prefill=busy:0.5,decode=seats:0.14
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

from twostep.autoscaler.model import PolicyConfig, PoolConfig
from twostep.errors import TwostepError
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.simulation.outcome import ScalingOutcome
from twostep.lab.simulation.pods import PodsConfig
from twostep.lab.simulation.results import (
    OutcomeRow,
    SimulationJob,
    cheapest_as_good,
    lines_of,
    markdown,
    peers,
)
from twostep.lab.simulation.run import Setting, decision_lines, simulate
from twostep.lab.simulation.scalers import contestant, hpa_grid
from twostep.lab.simulation.traces import LoadTrace, requests, trace_names, trace_of
from twostep.lab.simulator.cluster import SimulatedRequest


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    setting = _setting(args)
    for name in args.trace:
        texts = [*args.who, *(hpa_grid() if args.grid else ())]
        jobs = [SimulationJob(trace=name, peak=args.peak, shorten=args.shorten, seed=seed, who=who) for seed in args.seeds for who in texts]
        one = partial(_simulate, setting)
        outcomes = list(map(one, jobs) if args.processes == 1 else ProcessPoolExecutor(args.processes).map(one, jobs))
        outcomes = [one for _, one in sorted(zip(jobs, outcomes, strict=True), key=lambda pair: (texts.index(pair[0].who), pair[0].seed))]
        lines = lines_of(outcomes)
        grid = [line for line in lines if line.name.startswith("HPAs")]
        shown = _chosen(lines, grid, setting.policy.attainment) if args.grid and not args.all else lines
        _say(f"## {name}, {args.peak:g} requests/s at its peak, seeds {', '.join(map(str, args.seeds))}\n\n{markdown(shown)}\n")
        if args.grid:
            _say("\n".join(_verdict(lines[0], grid, setting.policy.attainment)) + "\n")
        if args.decision_log:
            trace, found = _trace(name, args.peak, args.shorten, args.seeds[0])
            args.decision_log.write_text("".join(decision_lines(setting, trace, found, seed=args.seeds[0])), encoding="utf-8")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# ---- comparing ----------------------------------------------------------------------------------------------------------


def _chosen(lines: Sequence[OutcomeRow], grid: Sequence[OutcomeRow], target: float) -> list[OutcomeRow]:
    """Everybody but the HPAs, and those of them that count."""
    rivals = [*peers(grid, target).values(), cheapest_as_good(grid, lines[0])]
    return [line for line in lines if line not in grid or line in rivals]


def _verdict(ours: OutcomeRow, grid: Sequence[OutcomeRow], target: float) -> Iterator[str]:
    rivals: dict[str, OutcomeRow | None] = {**peers(grid, target), "cheapest that keeps as much": cheapest_as_good(grid, ours)}
    for what, line in rivals.items():
        if line is None:
            yield f"- {what}: none of {len(grid)} pairs of HPAs."
        else:
            less = 1 - ours.gpu_hours / line.gpu_hours
            yield (
                f"- {what} of {len(grid)} pairs of HPAs ({line.name.removeprefix('HPAs, ')}): it keeps {line.attainment:.2%}, {ours.name} "
                f"{ours.attainment:.2%} with {less:.1%} fewer GPU-hours."
            )


def _simulate(setting: Setting, job: SimulationJob) -> ScalingOutcome:
    trace, found = _trace(job.trace, job.peak, job.shorten, job.seed)
    return simulate(setting, trace, found, contestant(job.who, setting.policy), seed=job.seed)


@lru_cache(maxsize=1)
def _trace(name: str, peak: float, shorten: float, seed: int) -> tuple[LoadTrace, list[SimulatedRequest]]:
    trace = trace_of(name, peak=peak)
    if shorten != 1:
        trace = trace.shortened(shorten)
    return trace, requests(trace, seed)


# ---- flags --------------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -P -m twostep.lab.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", nargs="+", choices=trace_names(), default=["mixed"])
    parser.add_argument("--peak", type=float, default=120.0, help="requests/s where the trace is highest")
    parser.add_argument("--shorten", type=float, default=1.0, metavar="FACTOR", help="the same trace in so much of its time, as 0.25")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--who", nargs="+", default=["joint"], help="who scales, as in scalers.py; the first is compared with the grid")
    parser.add_argument("--grid", action="store_true", help="every pair of HPAs of the grid as well")
    parser.add_argument("--all", action="store_true", help="show the whole grid, not those that count")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="write down what the joint policy sees and decides, of the first seed"
    )
    parser.add_argument("--preset", default="h200-llama-3.1-8b")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--cold-start", type=float, default=90.0, help="seconds from asking for a pod to a worker that is ready")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that streams have before they are migrated")
    parser.add_argument("--max-workers", type=int, default=32, help="of each role")
    parser.add_argument("--price", type=float, nargs=2, default=[1.0, 1.0], metavar=("PREFILL", "DECODE"), help="of a GPU-hour")
    return parser.parse_args(argv)


def _setting(args: argparse.Namespace) -> Setting:
    pools = [PoolConfig(max_workers=args.max_workers, price_per_gpu_hour=price, cold_start_s=args.cold_start) for price in args.price]
    policy = PolicyConfig(prefill=pools[0], decode=pools[1], ttft_ms=args.ttft_ms, tpot_ms=args.tpot_ms, drain_s=args.drain)
    deployment = machine_of_preset(args.preset).base
    cluster = PodsConfig(deployment=deployment, cold_start_s=args.cold_start, drain_s=args.drain, switch_s=policy.switch_s)
    return Setting(cluster=cluster, policy=policy)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TwostepError as error:
        sys.exit(f"simulation: {error.message}")
