"""Simulates the autoscaler beside the HPAs that it replaces, and prints a table in Markdown.

python -P -m twostep.lab.simulation --trace mixed                      the joint policy, seeds 1 to 3
python -P -m twostep.lab.simulation --trace loss --peak 24 --who joint joint,spare=0 hpas,prefill=busy:0.5,decode=pool:0.1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twostep.autoscaler.model import PolicyConfig, PoolConfig
from twostep.errors import InvalidRequest, TwostepError
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.simulation.outcome import ScalingOutcome
from twostep.lab.simulation.run import decision_lines, simulate
from twostep.lab.simulation.scalers import contestant
from twostep.lab.simulation.traces import TRACES, requests
from twostep.settings.reading import FlagParser

_COLUMNS = ("", "kept", "worst seed", "GPU-hours", "reversals per cool-down", "recovery, intervals", "refused")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if not (args.peak > 0 and args.shorten > 0):
        raise InvalidRequest("--peak and --shorten are above 0")
    pool = PoolConfig(max_workers=args.max_workers, cold_start_s=args.cold_start)
    policy = PolicyConfig(prefill=pool, decode=pool, ttft_ms=args.ttft_ms, tpot_ms=args.tpot_ms, drain_s=args.drain)
    refusing = not args.refuse_none
    deployment = replace(machine_of_preset(args.preset).base, both_roles=not args.fixed_roles)
    for name in args.trace:
        trace = TRACES[name].scaled(args.peak).shortened(args.shorten)
        drawn = {seed: requests(trace, seed) for seed in args.seeds}
        _say(f"## {name}, {args.peak:g} requests/s at its peak, seeds {', '.join(map(str, args.seeds))}\n")
        for row in (_COLUMNS, ("---",) * len(_COLUMNS)):
            _say(f"| {' | '.join(row)} |")
        for who in args.who:
            outcomes = [
                simulate(deployment, policy, trace, drawn[seed], contestant(who, policy), seed=seed, refusing=refusing)
                for seed in args.seeds
            ]
            _say(f"| {' | '.join(_cells(outcomes))} |")
        _say("")
        if args.decision_log:
            lines = decision_lines(deployment, policy, trace, drawn[args.seeds[0]], seed=args.seeds[0], refusing=refusing)
            args.decision_log.write_text("".join(lines), encoding="utf-8")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _cells(outcomes: Sequence[ScalingOutcome]) -> tuple[str, ...]:
    """One contestant over all seeds: means, but reversals and recoveries, which are the worst there were."""
    requests = sum(one.num_requests for one in outcomes)
    kept = sum(one.attainment * one.num_requests for one in outcomes) / requests if requests else 1.0
    return (
        outcomes[0].name,
        f"{kept:.2%}",
        f"{min(one.attainment for one in outcomes):.2%}",
        f"{sum(one.gpu_hours for one in outcomes) / len(outcomes):.2f}",
        str(max(one.reversals for one in outcomes)),
        ", ".join(str(intervals) for one in outcomes for intervals in one.recoveries) or "–",
        str(sum(one.refused for one in outcomes)),
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(
        prog="python -P -m twostep.lab.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", nargs="+", choices=list(TRACES), default=["mixed"])
    parser.add_argument("--peak", type=float, default=120.0, help="requests/s where the trace is highest")
    parser.add_argument("--shorten", type=float, default=1.0, metavar="FACTOR", help="the same trace in so much of its time, as 0.25")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--who", nargs="+", default=["joint"], help="who scales, as in scalers.py")
    parser.add_argument(
        "--decision-log", type=Path, metavar="FILE", help="write down what the joint policy sees and decides, of the first seed"
    )
    parser.add_argument("--preset", default="h200-llama-3.1-8b-graphs")
    parser.add_argument("--fixed-roles", action="store_true", help="workers do nothing but their role's work")
    parser.add_argument("--refuse-none", action="store_true", help="routers refuse nobody for its targets, as if requests named none")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--cold-start", type=float, default=90.0, help="seconds from asking for a pod to a worker that is ready")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds that streams have before they are migrated")
    parser.add_argument("--max-workers", type=int, default=32, help="of each role")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TwostepError as error:
        sys.exit(f"simulation: {error.message}")
