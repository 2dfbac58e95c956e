"""An engine's process that has begun, and waits for its configuration: it is started before the rest of its edge is imported, because it
has most to import and load itself (twostep/worker/remote_engine.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from twostep.process.ending import oom_kills


@dataclass(frozen=True, slots=True)
class EngineChild:
    """`socket`: this process's end of the link. `oom_kills_before`: of the machine, when it began."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    oom_kills_before: int | None

    @classmethod
    def start(cls, module: str) -> EngineChild:
        """Starts `python -P -m module`. The kernel kills it when the calling thread ends."""
        ours, theirs = socket.socketpair()
        killed = oom_kills()
        with theirs:
            arguments = (str(theirs.fileno()), str(os.getpid()))
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        return cls(process, ours, killed)
