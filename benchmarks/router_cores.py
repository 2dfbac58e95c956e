"""Which core each process of a benchmark gets, what it used of it, and what the machine itself gives when many of them are busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# No more processes than these do any good: a fake worker's step and a load client's message cost far less than a router's.
_MAX_WORKER_PROCESSES = 8


@dataclass(frozen=True, kw_only=True)
class CorePlan:
    """`routers[i]` is the core of router i, `workers[i]` that of the i-th process of fake workers, `clients[i]` that of router i's client
    (some may have the same one). `rest`: Redis and whoever controls it all. `alone`: up to so many routers, each has a physical core to
    itself."""

    routers: tuple[int, ...]
    workers: tuple[int, ...]
    clients: tuple[int, ...]
    rest: int
    alone: int


def plan_cores(groups: Sequence[Sequence[int]], num_routers: int) -> CorePlan:
    """`groups`: the usable cores, those that are hardware threads of one physical core together.

    Routers get physical cores of their own as long as half of all are left for the others; what is left goes to Redis and the control, then
    to workers and clients, one to two. Second threads of a core are taken last, those beside routers last of all: by more routers, if there
    is no other place for these. Raises ValueError: no core, or no router."""
    if not groups or not all(groups) or num_routers < 1:
        raise ValueError("there must be a core and a router")
    first = [group[0] for group in groups]
    num_own = min(num_routers, max(1, len(first) // 2))
    own, beside = first[:num_own], [core for group in groups[:num_own] for core in group[1:]]
    helpers = first[num_own:] + [core for group in groups[num_own:] for core in group[1:]]
    if len(helpers) < 3:
        helpers, beside = [*helpers, *beside] or own, []
    seats = own if num_own == num_routers else own + beside
    # Redis and the control sleep nearly always while it is measured, but not between; with few cores they share the last one.
    rest, pool = helpers[-1], helpers[:-1] if len(helpers) > 2 else helpers
    num_workers = min(_MAX_WORKER_PROCESSES, max(1, len(pool) // 3))
    for_clients = pool[num_workers:] or pool
    return CorePlan(
        routers=tuple(seats[i % len(seats)] for i in range(num_routers)),
        workers=tuple(pool[:num_workers]),
        clients=tuple(for_clients[i % len(for_clients)] for i in range(num_routers)),
        rest=rest,
        alone=sum(not set(helpers).intersection(group) for group in groups[:num_own]),
    )


def core_groups(cores: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """The cores by physical core. Where the machine does not tell (some virtual ones), each is its own."""
    usable = sorted(cores)
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in usable:
        try:
            told = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
            key = tuple(parse_cores(told))
        except (OSError, ValueError):
            key = (core,)
        groups.setdefault(key, []).append(core)
    return list(groups.values())


def parse_cores(text: str) -> list[int]:
    """`0-2,8` as the kernel writes it. Raises ValueError."""
    cores: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def cpu_s(pid: int) -> float:
    """User and system time of a live process so far, all its threads, to a hundredth of a second."""
    # The command's name may hold anything, a bracket too; utime and stime are the 14th and 15th field of all.
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS


# ---- the machine by itself ------------------------------------------------------------------------------------------------------------


def _spin(core: int, start: float, seconds: float) -> int:
    """Interpreted code and system calls, about as a router mixes them. Returns how many rounds of it there were."""
    os.sched_setaffinity(0, {core})
    reader, writer = os.pipe()
    while time.monotonic() < start:
        pass
    rounds, until, table = 0, start + seconds, dict.fromkeys(range(64), 0)
    while time.monotonic() < until:
        for i in range(64):
            table[i] += i
        os.write(writer, b"x")
        os.read(reader, 1)
        rounds += 1
    return rounds


def machine_alone(cores: Sequence[int], counts: Sequence[int], seconds: float = 1.0) -> Mapping[int, float]:
    """Busy processes that share nothing, `n` of them on the first `n` of `cores`: work done in all, as a multiple of one's. What it falls
    short of n is the machine's: clocks that fall as cores get busy, hardware threads of one core that it does not tell of, other guests."""
    done: dict[int, int] = {}
    for count in dict.fromkeys((1, *counts)):
        # Starting an interpreter takes a fraction of a second; all are to begin at once.
        start = time.monotonic() + 0.5 + 0.05 * count
        argv = (sys.executable, "-P", __file__, str(start), str(seconds))
        spinners = [subprocess.Popen([*argv, str(core)], stdout=subprocess.PIPE) for core in cores[:count]]
        done[count] = sum(int(spinner.communicate()[0]) for spinner in spinners)
    return {count: done[count] / done[1] for count in counts}


if __name__ == "__main__":
    print(_spin(int(sys.argv[3]), float(sys.argv[1]), float(sys.argv[2])))
