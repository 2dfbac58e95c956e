"""How much memory a process has; how much more this one may take: what the machine has left, and what each bound of its container leaves
(cgroups 1 and 2)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Free:
    """`where`: whose bound it is, for messages."""

    num_bytes: int
    where: str


def free_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> Free:
    """The least of all bounds. Files that the kernel keeps in memory only as long as there is room count as free."""
    return min([Free(_free_of_machine(proc), "this machine"), *_free_in_cgroups(proc, cgroup)])


def check_memory(what: dict[str, int], advice: str, *, free: Free | None = None) -> None:
    """`what` is taken, bytes by name. Raises SetupError with each of them, what there is, and `advice`, if it is more than is free."""
    free = free or free_memory()
    asked = sum(what.values())
    if asked <= free.num_bytes:
        return
    parts = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in what.items() if num_bytes)
    raise SetupError(f"{gib(asked)} of memory are asked for ({parts}), and {free.where} has {gib(free.num_bytes)} left; {advice}")


def resident_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """Returns what a process has of the machine's memory; 0: it is gone, or this system does not tell."""
    try:
        return int((proc / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def return_freed_memory() -> None:
    """Gives the machine back what this process has freed and its C library keeps for later, where that is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def _free_of_machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return kib << 10


def _free_in_cgroups(proc: Path, cgroup: Path) -> Iterator[Free]:
    """Yields the free memory of this process's own group and of each above it, as far as they can be seen: a container often sees its own
    as the root."""
    for directory in _own_directories(proc, cgroup):
        # Version 2, then 1. There is no bound ("max", or a number beyond any memory), or no such file: nothing is said.
        for bound, used, inactive in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                most = int((directory / bound).read_text(encoding="ascii"))
                taken = int((directory / used).read_text(encoding="ascii"))
                stat = dict(line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines())
                yield Free(max(0, most - taken + int(stat.get(inactive, 0))), f"this container ({bound} of {directory})")
            except (OSError, ValueError):
                continue


def _own_directories(proc: Path, cgroup: Path) -> Iterator[Path]:
    roots = {"": cgroup, "memory": cgroup / "memory"}
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    yield from roots.values()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in {"", "memory"} & set(controllers.split(",")):
            own = roots[name] / path.lstrip("/")
            while own != roots[name] and roots[name] in own.parents:
                yield own
                own = own.parent
