"""How processes end: with the one that started them; and if a signal ended one, what that most likely means and what to do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_OUT_OF_MEMORY = "the machine or the container ran out of memory: give it more, start fewer workers, or lower --kv-cache-memory-bytes"
_HINTS = {
    # SIGSEGV is a bug of a native library, whose version or device decides.
    signal.SIGSEGV: "a native library failed (PyTorch, Ray, a driver); its log may say which. Take the versions of deploy/constraints.txt",
    signal.SIGBUS: "memory that is shared by files could not be had, most likely because /dev/shm is full: make it larger (docker run "
    "--shm-size, a memory-backed emptyDir in Kubernetes) or end what fills it",
    signal.SIGILL: "this CPU lacks an instruction that a native library was built for: take builds for this machine, or another machine",
    signal.SIGABRT: "a native library gave up, and its log says why",
    signal.SIGXCPU: "its limit of CPU time was reached (ulimit -t)",
    signal.SIGXFSZ: "its limit of file size was reached (ulimit -f)",
}


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, also if nothing of Python can run here any more. Ends it at
    once where `parent` is not its parent any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def oom_kills(proc: Path = Path("/proc")) -> int | None:
    """How many processes the kernel has killed on this machine because memory ran out, in all containers; None: it does not tell."""
    try:
        lines = (proc / "vmstat").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return None


def how_it_ended(status: int | None, *, oom_kills_before: int | None = None, proc: Path = Path("/proc")) -> str:
    """`status` as subprocess tells it (-9) or a shell (137); None: nobody knows. `oom_kills_before`: oom_kills() while it ran, which tells
    the kernel's kill from anybody else's."""
    if status is None:
        return "ended, nobody knows how"
    number = -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"exited with status {status}"
    which = signal.Signals(number)
    said = f"was ended by {which.name} (signal {number})"
    if which is signal.SIGKILL:
        return f"{said}: {_why_killed(oom_kills_before, oom_kills(proc))}"
    return f"{said}: {_HINTS[which]}" if which in _HINTS else said


def _why_killed(before: int | None, now: int | None) -> str:
    if before is None or now is None:
        return f"most likely by the kernel, because {_OUT_OF_MEMORY}"
    if now > before:
        return f"the kernel kills for want of memory, and did so just now: {_OUT_OF_MEMORY}"
    return "somebody or something killed it on purpose, since the kernel has killed nothing for want of memory"
