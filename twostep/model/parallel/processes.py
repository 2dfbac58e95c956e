"""The processes of the ranks other than 0: started, watched and ended from one thread, which they do not outlive."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from twostep.errors import SetupError
from twostep.model.parallel.channel import Hello, pack, socket_pair
from twostep.process.ending import how_it_ended

_WATCH_S = 0.1
_START_S = 60.0


class RankProcesses:
    def __init__(self, hellos: Sequence[Hello], step_file: int, block_file: int, watch: Callable[[str], None], *, timeout_s: float) -> None:
        """Starts one process for each. `watch` is called ten times a second with what is wrong with them, empty if nothing is; after
        `kill` or `end` it is not called any more. A message that a rank does not take within `timeout_s` raises TimeoutError."""
        self._watch = watch
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started = threading.Event()
        self._ending = threading.Event()
        self._steps, self._blocks, inherited = [], [], []
        reading, self._life_line = os.pipe()
        for hello in hellos:
            pairs = socket_pair(), socket_pair()
            for ours, _ in pairs:
                ours.settimeout(timeout_s)
            self._steps.append(pairs[0][0])
            self._blocks.append(pairs[1][0])
            inherited.append((pairs[0][1], pairs[1][1]))
            pairs[0][0].send(pack(hello))
        # The kernel kills a rank when the thread that started it ends, so that one must last.
        self._thread = threading.Thread(target=self._run, args=(reading, step_file, block_file, inherited), name="ranks", daemon=True)
        self._thread.start()
        started = self._started.wait(_START_S)
        os.close(reading)
        for channel in (channel for pair in inherited for channel in pair):
            channel.close()
        if not started or len(self._processes) < len(hellos):
            self.end(0.0)
            raise SetupError(f"{sys.executable} could not be started for the tensor-parallel ranks; see the log above")

    def send_all(self, command: object) -> None:
        """Sends every rank a command. One that is gone is found by `watch`."""
        message = pack(command)
        for channel in self._steps:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                channel.send(message)

    def blocks(self, rank: int) -> socket.socket:
        return self._blocks[rank - 1]

    def kill(self) -> None:
        """At once."""
        self._ending.set()
        for process in self._processes:
            process.kill()

    def end(self, timeout_s: float) -> None:
        """Waits for the processes to end, and kills those that do not within `timeout_s`. Idempotent."""
        self._ending.set()
        give_up = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._life_line >= 0:
            os.close(self._life_line)
            self._life_line = -1
        for channel in (*self._steps, *self._blocks):
            channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, life_line: int, step_file: int, block_file: int, inherited: Sequence[tuple[socket.socket, socket.socket]]) -> None:
        try:
            for steps, blocks in inherited:
                files = (life_line, steps.fileno(), blocks.fileno(), step_file, block_file)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "twostep.model.runner.parallel_rank", *map(str, files)],
                        stdin=subprocess.DEVNULL,
                        pass_fds=files,
                    )
                )
        finally:
            self._started.set()
        while not self._ending.wait(_WATCH_S):
            self._watch(next(filter(None, map(_end_of, range(1, len(self._processes) + 1), self._processes)), ""))
        while any(process.poll() is None for process in self._processes):
            time.sleep(_WATCH_S)


def _end_of(rank: int, process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    if code is None:
        return ""
    return f"tensor-parallel rank {rank} {how_it_ended(code)}; its log may say more: restart the worker"
