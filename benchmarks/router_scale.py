"""Whether router replicas cost each other anything.

    python benchmarks/router_scale.py                           CPU time of a token: 100 streams for each of 1, 2, 4 routers, a token
                                                                each every 40 ms
    python benchmarks/router_scale.py --streams 400 --total     400 streams, over 1, 2, 4 routers
    python benchmarks/router_scale.py --many --routers 1 2 4 8 --decode 16
                                                                on a machine with many cores: tokens/s of saturated routers, each on a
                                                                core of its own (router_many.py)

What routers share (Redis, heartbeats, usage of tenants) and repeat (polls, a stream from every decode worker) shows as CPU seconds for each
1,000 tokens. With --total a decode worker's step also comes to n routers in n messages, each with an n-th of the tokens. Routers are spread
over all cores but the last one, which workers, Redis and clients have. Rounds alternate, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import router_many
from router_cores import CorePlan
from router_rig import CORES, LAST_CORE, Pace, Rig, busy, rig, tokens_for

from twostep.rpc import event_loop


async def measure(rig_: Rig, num: int, *, streams: int, seconds: float, step_s: float) -> tuple[float, float]:
    """CPU seconds of these routers for 1,000 tokens, and tokens a second. `streams`: of each."""
    routers = rig_.routers[:num]
    async with rig_.streams(num, streams=streams, connections=8 // num or 1, num_tokens=tokens_for(seconds, step_s)) as replies:
        cpu = sum(router.cpu_s() for router in routers)
        await asyncio.sleep(seconds)
        cpu = sum(router.cpu_s() for router in routers) - cpu
    tokens = sum(reply["tokens"] for reply in replies)
    return 1e3 * cpu / tokens, sum(reply["tokens"] / reply["wall_s"] for reply in replies)


async def main(arguments: argparse.Namespace) -> None:
    most, step_s = max(arguments.routers), arguments.step_ms / 1e3
    cores = tuple(CORES[i % max(1, len(CORES) - 1)] for i in range(most))
    plan = CorePlan(routers=cores, workers=(LAST_CORE,), clients=(LAST_CORE,) * most, rest=LAST_CORE, alone=len(set(cores)))
    async with rig(Pace(num_decode=arguments.decode, step_s=step_s), plan=plan) as rig_:
        for _ in range(most):
            await rig_.add_router()
        results: dict[int, list[float]] = {num: [] for num in arguments.routers}
        for _ in range(arguments.rounds):
            for num, costs in results.items():
                streams = arguments.streams // (num if arguments.total else 1)
                cost, rate = await measure(rig_, num, streams=streams, seconds=arguments.seconds, step_s=step_s)
                costs.append(cost)
                print(f"{num} routers: {cost:.4f} CPU s for 1,000 tokens, at {rate:,.0f} tokens/s, {busy()}", flush=True)
    base = statistics.median(results[arguments.routers[0]])
    for num, costs in results.items():
        median = statistics.median(costs)
        print(
            f"{num} routers: median {median:.4f} CPU s for 1,000 tokens ({min(costs):.4f} to {max(costs):.4f}), "
            f"{median / base - 1:+.1%} of {arguments.routers[0]}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--streams", type=int, help="of each router; without: 100, with --many 500")
    parser.add_argument("--total", action="store_true", help="--streams are those of all routers together")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--step-ms", type=float, help="without: 40, with --many 16")
    parser.add_argument("--rounds", type=int, help="without: 3, with --many 2")
    parser.add_argument("--many", action="store_true", help="saturated routers, each on a core of its own")
    parser.add_argument("--connections", type=int, default=8, help="with --many: those of a router's streams")
    parser.add_argument("--no-control", action="store_true", help="with --many: do not measure the machine itself")
    arguments = parser.parse_args()
    defaults = {"streams": 500, "step_ms": 16.0, "rounds": 2} if arguments.many else {"streams": 100, "step_ms": 40.0, "rounds": 3}
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.many:
        router_many.main(arguments)
    else:
        event_loop.run(main(arguments))
