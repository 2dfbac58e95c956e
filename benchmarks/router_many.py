"""Router replicas on a machine with many cores: what n of them relay when each has more to do than it can.

Every router has a core of its own, and so have the processes of fake workers and load clients as far as there are cores (router_cores.py).
The offered load is above what a router relays, so tokens a second are what n routers can do; n times one router's is linear. Before it,
what the machine itself gives: n busy processes that share nothing, on the routers' cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router_cores import core_groups, machine_alone, plan_cores
from router_rig import CORES, Pace, Rig, busy, rig, tokens_for

from twostep.rpc import event_loop

# A process that used so much of its core had no time to spare. CPU times come in hundredths of a second.
_SATURATED = 0.95
_NEAR_LINEAR = 0.95


@dataclass(frozen=True, kw_only=True)
class Round:
    """`tokens_s` of all routers, `offered_s` of what workers were to send. The others are shares of a core, of each process."""

    tokens_s: float
    pieces_s: float
    offered_s: float
    routers: Sequence[float]
    workers: Sequence[float]
    clients: Sequence[float]
    rest: float

    def limits(self, alone: int) -> list[str]:
        """What besides the routers had no time to spare, or was not enough. `alone`: up to so many routers, each had a core to itself."""
        found = [
            f"{name} ({max(shares):.0%} of a core)"
            for name, shares in (("fake workers", self.workers), ("load clients", self.clients), ("Redis and control", [self.rest]))
            if max(shares) >= _SATURATED
        ]
        if len(self.routers) <= alone and statistics.mean(self.routers) < _SATURATED:
            found.append(
                f"the offered load ({self.offered_s:,.0f} tokens/s; routers used {statistics.mean(self.routers):.0%} of their cores)"
            )
        return found


async def measure(rig_: Rig, num: int, arguments: argparse.Namespace) -> Round:
    step_s = arguments.step_ms / 1e3
    routers = rig_.routers[:num]
    clients = list(dict.fromkeys(rig_.clients[:num]))
    watched: list[Callable[[], float]] = [
        *(router.cpu_s for router in routers),
        *(helper.cpu_s for helper in (*rig_.workers, *clients)),
        rig_.redis_cpu_s,
        time.process_time,
    ]
    num_tokens = tokens_for(arguments.seconds, step_s)
    async with rig_.streams(num, streams=arguments.streams, connections=arguments.connections, num_tokens=num_tokens) as replies:
        began, before = time.monotonic(), [read() for read in watched]
        await asyncio.sleep(arguments.seconds)
        wall, after = time.monotonic() - began, [read() for read in watched]
    shares = [(end - begin) / wall for begin, end in zip(before, after, strict=True)]
    num_workers = len(rig_.workers)
    return Round(
        tokens_s=sum(reply["tokens"] / reply["wall_s"] for reply in replies),
        pieces_s=sum(reply["pieces"] / reply["wall_s"] for reply in replies),
        offered_s=num * arguments.streams / step_s,
        routers=shares[:num],
        workers=shares[num : num + num_workers],
        clients=shares[num + num_workers : -2],
        rest=shares[-2] + shares[-1],
    )


def row(num: int, seen: Round) -> str:
    return (
        f"{num} routers: {seen.tokens_s:,.0f} tokens/s ({seen.tokens_s / num:,.0f} each, {seen.tokens_s / seen.pieces_s:.2f} a piece, "
        f"{seen.tokens_s / sum(seen.routers):,.0f} per CPU second); CPU: routers {_span(seen.routers)}, workers {_span(seen.workers)}, "
        f"clients {_span(seen.clients)}, Redis and control {seen.rest:.0%}; {busy()}"
    )


def _span(shares: Sequence[float]) -> str:
    return f"{len(shares)} x {statistics.mean(shares):.0%} (at most {max(shares):.0%})"


def verdict(num: int, rounds: Sequence[Round], base: float, machine: float | None, alone: int) -> str:
    """`base`: tokens a second of one router; `machine`: what `num` busy processes that share nothing did here, in multiples of one."""
    rate = statistics.median(seen.tokens_s for seen in rounds)
    linear = rate / (num * base)
    said = f"{num} routers: median {rate:,.0f} tokens/s, {rate / base:.2f} times one router's, {linear:.1%} of linear"
    if machine is not None:
        said += f" (the machine itself: {machine / num:.1%}; of that {rate / base / machine:.1%})"
    if num > alone:
        said += f"; cores have run out: here {alone} can have a physical core to themselves"
    limits = sorted({limit.partition(" (")[0]: limit for seen in rounds for limit in seen.limits(alone)}.values())
    if limits:
        said += "; not (only) the routers' limit: " + ", ".join(limits)
    elif linear < _NEAR_LINEAR and num <= alone:
        said += "; nothing else was saturated: it is the routers or the machine"
    return said


async def _rounds(arguments: argparse.Namespace, machine: Mapping[int, float]) -> None:
    groups = core_groups(CORES)
    plan = plan_cores(groups, max(arguments.routers))
    print(f"{len(CORES)} cores ({len(groups)} physical): {plan}", flush=True)
    async with rig(Pace(num_decode=arguments.decode, step_s=arguments.step_ms / 1e3), plan=plan) as rig_:
        await asyncio.gather(*(rig_.add_router() for _ in range(max(arguments.routers))))
        results: dict[int, list[Round]] = {num: [] for num in arguments.routers}
        for _ in range(arguments.rounds):
            for num, rounds in results.items():
                rounds.append(await measure(rig_, num, arguments))
                print(row(num, rounds[-1]), flush=True)
    fewest = min(results)
    base = statistics.median(seen.tokens_s for seen in results[fewest]) / fewest
    for num, rounds in results.items():
        print(verdict(num, rounds, base, machine.get(num), plan.alone))


def main(arguments: argparse.Namespace) -> None:
    """`arguments`: those of router_scale.py."""
    machine: Mapping[int, float] = {}
    if not arguments.no_control:
        plan = plan_cores(core_groups(CORES), max(arguments.routers))
        # Beyond that it would say what sharing a core costs.
        machine = machine_alone(plan.routers, [num for num in arguments.routers if num <= plan.alone])
        print("the machine itself: " + ", ".join(f"{n} processes {times:.2f} times one" for n, times in machine.items()), flush=True)
    event_loop.run(_rounds(arguments, machine))
