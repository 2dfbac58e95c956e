"""Measures what several routers relay together, each with more to do than it can: of linear, and who else had no time to spare.

    python benchmarks/router_scale.py                                   1 router + 2 workers, 1 + 16, 8 + 16, on a machine with many cores
    python benchmarks/router_scale.py --cells 1x2 2x4 --streams 50 --step-ms 40     a dry run

A cell is its routers and fake workers, half of which are prefill workers, as processes on cores of their own, with a load client for each
router and Redis. Every router has sequences on every decode worker, so that each of their steps comes to each router as a message of its
own. Linear is the first cell's tokens a second for each router. Every token of every answer is checked. `machine` is what processes that
share nothing get done on the routers' cores before and after a cell, of linear: rented cores are not equally fast at all times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from router_rig import CORES, Cores, Pace, busy, rig, tokens_for

from twostep.rpc import event_loop
from twostep.settings.reading import FlagParser

# A process that used so much of its core had none of it to spare.
_BUSY = 0.95
_CONNECTIONS = 8
# Counts rounds over objects that are no longer in the processor's nearest cache, in half a second.
_ROUNDS = """
import time
table, count, end = {i: [i] for i in range(20000)}, 0, time.perf_counter() + 0.5
while time.perf_counter() < end:
    count += sum(table[i * 7919 % 20000][0] & 1 for i in range(2000)) > 0
print(count)
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Tokens a second of all routers, and what each process used of a core."""

    tokens_s: float
    offered_s: float
    routers: Sequence[float]
    workers: Sequence[float]
    clients: Sequence[float]

    def __str__(self) -> str:
        used = ", ".join(
            f"{name} {statistics.mean(shares):.0%} (at most {max(shares):.0%})"
            for name, shares in (("routers", self.routers), ("workers", self.workers), ("clients", self.clients))
        )
        return f"{self.tokens_s:,.0f} of {self.offered_s:,.0f} tokens/s; of a core: {used}; {busy()}"

    @property
    def limits(self) -> str:
        """Says what besides the routers may have been the limit."""
        found = [name for name, shares in (("workers", self.workers), ("clients", self.clients)) if max(shares) >= _BUSY]
        found += ["the offered load"] if statistics.mean(self.routers) < _BUSY else []
        return f"   not the routers alone: {', '.join(found)}" if found else ""


async def measure(num_routers: int, num_workers: int, arguments: argparse.Namespace) -> Seen:
    step_s = arguments.step_ms / 1e3
    pace = Pace(num_prefill=num_workers // 2, num_decode=num_workers - num_workers // 2, step_s=step_s)
    load = {"streams": arguments.streams, "connections": _CONNECTIONS, "num_tokens": tokens_for(arguments.seconds, step_s)}
    async with rig(pace, cores=cores_for(num_routers, num_workers)) as rig_:
        routers = await asyncio.gather(*(rig_.add_router("--port", "-1") for _ in range(num_routers)))
        clients = [await rig_.add_client("router_load.py") for _ in routers]
        watched: list[Callable[[], float]] = [
            *(router.cpu_s for router in routers),
            *(helper.cpu_s for helper in (*rig_.workers, *clients)),
        ]
        loads = [(client, load | {"ports": [router.port]}) for client, router in zip(clients, routers, strict=True)]
        async with rig_.streams(loads) as replies:
            began, before = time.monotonic(), [read() for read in watched]
            await asyncio.sleep(arguments.seconds)
            wall, after = time.monotonic() - began, [read() for read in watched]
        shares = [(end - begin) / wall for begin, end in zip(before, after, strict=True)]
        return Seen(
            tokens_s=sum(reply["tokens"] / reply["wall_s"] for reply in replies),
            offered_s=num_routers * arguments.streams / step_s,
            routers=shares[:num_routers],
            workers=shares[num_routers : -len(clients)],
            clients=shares[-len(clients) :],
        )


def machine_itself(cores: Sequence[int]) -> float:
    """Returns what a process gets done that shares nothing, with one on each of these cores, in rounds a second."""

    def start(core: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _ROUNDS], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )

    return statistics.mean(2 * int(process.communicate()[0]) for process in [start(core) for core in cores])


def cores_for(num_routers: int, num_workers: int) -> Cores:
    """Routers first, then clients, then workers; with too few cores the last two kinds share the last one. Second hardware threads of cores
    are taken last."""
    cores = sorted(CORES, key=lambda core: (_siblings(core).index(core), core))
    if len(cores) < 2 * num_routers + num_workers + 1:
        routers = cores[: min(num_routers, max(1, len(cores) - 1))]
        return Cores(routers=routers, workers=cores[-1:], clients=cores[-1:], rest=cores[-1])
    clients, workers = cores[num_routers : 2 * num_routers], cores[2 * num_routers : 2 * num_routers + num_workers]
    return Cores(routers=cores[:num_routers], workers=workers, clients=clients, rest=cores[2 * num_routers + num_workers])


def _siblings(core: int) -> list[int]:
    """The hardware threads of a core; where the machine does not tell, each is its own."""
    try:
        told = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return [core]
    found: list[int] = []
    for part in told.strip().split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return [sibling for sibling in found if sibling in CORES]


async def main(arguments: argparse.Namespace) -> None:
    cells = {cell: (int(cell.split("x")[0]), int(cell.split("x")[1])) for cell in arguments.cells}
    seen: dict[str, list[Seen]] = {cell: [] for cell in cells}
    machine: dict[str, list[float]] = {cell: [] for cell in cells}
    for _ in range(arguments.rounds):
        for cell, (num_routers, num_workers) in cells.items():
            routers = cores_for(num_routers, num_workers).routers
            machine[cell].append(machine_itself(routers))
            async with asyncio.timeout(arguments.deadline):
                seen[cell].append(await measure(num_routers, num_workers, arguments))
            machine[cell].append(machine_itself(routers))
            print(f"{cell}: {seen[cell][-1]}", flush=True)
    first = statistics.median(each.tokens_s for each in seen[arguments.cells[0]]) / cells[arguments.cells[0]][0]
    print(f"{'routers':>8}{'workers':>9}{'tokens/s':>11}{'a router':>10}{'of linear':>11}{'machine':>9}")
    for cell, (num_routers, num_workers) in cells.items():
        rate = statistics.median(each.tokens_s for each in seen[cell])
        linear = rate / num_routers / first
        itself = statistics.mean(machine[cell]) / statistics.mean(machine[arguments.cells[0]])
        print(f"{num_routers:8}{num_workers:9}{rate:11,.0f}{rate / num_routers:10,.0f}{linear:11.3f}{itself:9.3f}{seen[cell][-1].limits}")


if __name__ == "__main__":
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["1x2", "1x16", "8x16"], help="routers x workers")
    parser.add_argument("--streams", type=int, default=500, help="of each router")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--step-ms", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a cell may take")
    event_loop.run(main(parser.parse_args()))
