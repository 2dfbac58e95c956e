"""Runs one command and outlives nobody: the small process between `twostep up` and each process it starts.

    python -I -S guardian.py

Its standard input is a pipe from the supervisor. The first line is a JSON list: the file to write the command's process id into, then the
command. (Not in its own arguments: who looks for a process by its command finds the command only.) After it, `T` passes SIGTERM on, `K`
kills, and the pipe's end, which comes with the supervisor's
death however it dies, means SIGTERM, some seconds, then SIGKILL. Whatever the command leaves behind (daemons of Ray, say) becomes the
guardian's child and is ended before the guardian exits, with the command's own exit status. If the guardian itself is killed, the kernel
kills the command. Standard library only: run by path, before any package is looked for.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ORPHAN_GRACE_S = 5.0
SWEEP_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent(parent: int) -> None:
    """In the child, before the command: nothing else runs there, the guardian has one thread."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    # Only for own children that are not reaped yet, whose ids cannot have been given to others.
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _reap(command: int) -> int | None:
    """Collects whoever has ended; the command's exit status once it has."""
    status: int | None = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            status = os.waitstatus_to_exitcode(wait_status)


def _sweep() -> None:
    """Ends what the command left behind: SIGTERM, then SIGKILL."""
    deadline = time.monotonic() + SWEEP_GRACE_S
    for pid in _children():
        _signal(pid, signal.SIGTERM)
    while left := _children():
        if time.monotonic() >= deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
        _reap(-1)
        time.sleep(0.01)


def main(pid_file: str, argv: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    me = os.getpid()

    def prepare() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent(me)

    try:
        command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=prepare).pid  # safe: there is one thread
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201  # the log
        return 127
    Path(pid_file).write_text(str(command), encoding="ascii")

    watched = [0, wake_read]
    kill_at: float | None = None
    while True:
        timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        readable, _, _ = select.select(watched, [], [], timeout)
        status = None
        if wake_read in readable:
            os.read(wake_read, 4096)
            status = _reap(command)
        if status is not None:
            _sweep()
            return status if status >= 0 else 128 - status
        if 0 in readable:
            orders = os.read(0, 64)
            if b"K" in orders:
                _signal(command, signal.SIGKILL)
            elif b"T" in orders:
                _signal(command, signal.SIGTERM)
            if not orders:
                watched.remove(0)
                _signal(command, signal.SIGTERM)
                kill_at = time.monotonic() + ORPHAN_GRACE_S
        if kill_at is not None and time.monotonic() >= kill_at:
            _signal(command, signal.SIGKILL)
            kill_at = None


def read_order() -> list[str]:
    """The first line, byte by byte: what comes after it is for the loop."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    order: list[str] = json.loads(line)
    return order


if __name__ == "__main__":
    first, *rest = read_order()
    sys.exit(main(first, rest))
