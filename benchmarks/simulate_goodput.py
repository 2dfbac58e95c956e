"""A measured run beside its simulation.

    twostep bench serve ... --rate 30 34 38 42 --save-requests requests.jsonl
    python benchmarks/simulate_goodput.py --dump-workers redis://... > workers.jsonl            while the system runs
    python benchmarks/simulate_goodput.py requests.jsonl --workers workers.jsonl --prefill 3 --decode 1 --slo ttft=500,tpot=10,gap=25

Every rate's requests are simulated as they were sent: when, how long, how much of them cached. Curves come from the workers' own records
(--workers, several files too: of each role, the worker in the middle), a file of curves (--curve) or a preset. What hosts add comes from
the phases that the answers told (--host-time median), from each one's own (own: what is amiss then is not the hosts'), or the preset
(deployment). Prints both sides and the error of the goodput; ends with 1 if the goodput of the highest rate that kept its targets, or the
rate at which 95 % keep them, is off by more than --tolerance, or a bound of that rate contradicts the other side's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from twostep.cluster.records import WorkerRecord
from twostep.errors import TwostepError
from twostep.lab.bench.serve.metrics import Distribution
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.plan.compare import Comparison, HostTime, Side, compare, knee_of
from twostep.lab.plan.deployment import Deployment
from twostep.lab.plan.goodput import SHARE, parse_slo
from twostep.lab.plan.machine import Machine, machine_of, machine_of_workers
from twostep.lab.plan.memory import worker_memory
from twostep.lab.plan.presets import load_preset, read_curves


def main() -> int:
    args = _parse()
    if args.dump_workers:
        from twostep.lab.plan.live import registered_workers  # noqa: PLC0415 - needs redis

        for record in registered_workers(args.dump_workers):
            print(record.to_json())
        return 0
    deployment = _deployment(args)
    targets = parse_slo(args.slo)
    by_rate: dict[float, list[RequestRecord]] = {}
    for path in args.requests:
        for line in path.read_text().splitlines():
            raw = json.loads(line)
            by_rate.setdefault(raw["rate"] or 0.0, []).append(RequestRecord.from_json(raw))
    print(f"{deployment.name}; {targets}; host's time: {args.host_time}")
    compared = [compare(by_rate[rate], deployment, targets, host_time=args.host_time) for rate in sorted(by_rate)]
    for one in compared:
        _show(one)
    return _verdict(compared, args.tolerance)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", nargs="*", type=Path, help="of twostep bench serve --save-requests")
    parser.add_argument(
        "--dump-workers", default="", metavar="URL", help="print the records of the workers registered in this Redis, and end"
    )
    parser.add_argument("--workers", type=Path, nargs="+", help="such records, one a line")
    parser.add_argument("--curve", type=Path, help="JSON of curves, instead of the preset's")
    parser.add_argument("--preset", default="h200-llama-3.1-8b")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--decode", type=int, default=1, help="decode workers, or aggregated ones without --prefill")
    parser.add_argument("--budget", type=int, help="step budget of aggregated workers")
    parser.add_argument("--max-step-ms", type=float, default=0.0, help="bound in time of their mixed steps")
    parser.add_argument("--slo", default="ttft=500,tpot=10,gap=25")
    parser.add_argument("--host-time", type=HostTime, choices=list(HostTime), default=HostTime.MEDIAN)
    parser.add_argument("--hand-over-ms", type=float, help="with --host-time deployment")
    parser.add_argument("--edge-ms", type=float, help="with --host-time deployment")
    parser.add_argument("--no-look-ahead", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.10)
    args = parser.parse_args()
    if not args.requests and not args.dump_workers:
        parser.error("give the file of twostep bench serve --save-requests")
    if args.host_time is not HostTime.DEPLOYMENT and (args.hand_over_ms is not None or args.edge_ms is not None):
        parser.error("--hand-over-ms and --edge-ms go with --host-time deployment; the others take them from the answers' phases")
    return args


def _deployment(args: argparse.Namespace) -> Deployment:
    preset = load_preset(args.preset)
    if args.curve:
        prefill, decode = read_curves(args.curve)
        preset = replace(preset, prefill=prefill, decode=decode, mixed=None)
    if args.hand_over_ms is not None:
        preset = replace(preset, hand_over=replace(preset.hand_over, latency_s=args.hand_over_ms / 1e3))
    if args.edge_ms is not None:
        preset = replace(preset, edge_s=args.edge_ms / 1e3)
    preset = replace(preset, look_ahead=preset.look_ahead and not args.no_look_ahead)
    machine: Machine
    if args.workers:
        lines = [line for path in args.workers for line in path.read_text().splitlines()]
        machine = machine_of_workers(map(WorkerRecord.from_json, lines), preset)
    else:
        assert preset.model is not None, "this preset has no model"
        memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes)
        machine = machine_of(preset, preset.model, memory)
    deployment = machine.base.sized(args.prefill, args.decode)
    decode_spec = replace(deployment.decode, max_step_s=args.max_step_ms / 1e3)
    if args.budget:
        decode_spec = replace(decode_spec, step_tokens=args.budget)
    return replace(deployment, decode=decode_spec)


def _show(one: Comparison) -> None:
    measured, simulated = one.measured.goodput, one.simulated.goodput
    print(
        f"\n{one.rate:.2f} requests/s ({measured.num_requests}): kept {measured.attainment:.1%} measured, {simulated.attainment:.1%} "
        f"simulated; goodput {measured.per_s:.2f} and {simulated.per_s:.2f}/s ({one.error:+.1%}); "
        f"edge {one.deployment.edge_s * 1e3:.1f} ms, hand-over {one.deployment.hand_over.latency_s * 1e3:.1f} ms and its bytes"
    )
    for name, here, there in (
        ("TTFT", one.measured.ttft_s, one.simulated.ttft_s),
        ("TPOT", one.measured.tpot_s, one.simulated.tpot_s),
        ("longest gap", one.measured.longest_gap_s, one.simulated.longest_gap_s),
    ):
        print(f"  {name:<12} p50/p95/p99 ms  {_three(here):>24} measured  {_three(there):>24} simulated")


def _three(values: Distribution) -> str:
    return " / ".join(f"{x * 1e3:.1f}" for x in (values.p50, values.p95, values.p99))


def _verdict(compared: list[Comparison], tolerance: float) -> int:
    errors = []
    kept = [one for one in compared if one.measured.goodput.attainment >= SHARE]
    if kept:
        errors.append(kept[-1].error)
        print(f"\nhighest measured rate that kept its targets: {kept[-1].rate:.2f}/s, simulated goodput there {kept[-1].error:+.1%}")
    measured, simulated = (_bounds([(one.rate, side(one).goodput.attainment) for one in compared]) for side in (_measured, _simulated))
    print(f"rate at which {SHARE:.0%} keep them: {_range(*measured)} measured, {_range(*simulated)} simulated", end="")
    if measured[0] == measured[1] and simulated[0] == simulated[1]:
        errors.append(simulated[0] / measured[0] - 1)
        print(f" ({errors[-1]:+.1%})")
    else:
        # As far as is known: 0 where both may be the same.
        errors.append(max(0.0, simulated[0] / measured[1] - 1) or min(0.0, simulated[1] / measured[0] - 1 if measured[0] else 0.0))
        print(f" (off by {errors[-1]:+.1%} at least)" if errors[-1] else " (no contradiction)")
    return int(max(map(abs, errors)) > tolerance)


def _measured(one: Comparison) -> Side:
    return one.measured


def _simulated(one: Comparison) -> Side:
    return one.simulated


def _bounds(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The least and the highest that the knee may be."""
    knee = knee_of(points)
    if knee is not None:
        return knee, knee
    below = any(kept < SHARE for _, kept in points)
    return (0.0, min(points)[0]) if below else (max(points)[0], math.inf)


def _range(low: float, high: float) -> str:
    return f"{low:.2f}/s" if low == high else f"below {high:.2f}/s" if not low else f"above {low:.2f}/s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TwostepError as error:
        sys.exit(f"simulate_goodput: {error.message}")
