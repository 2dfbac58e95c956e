"""Signals of a server process, and the ends that it comes to by itself.

The first SIGTERM or SIGINT asks for a drain, a second one ends the process. A process that hangs writes every thread's stack to stderr and
exits with status 1, so that its supervisor (`twostep up`, systemd, a container engine) starts it again: after `--hung-after` while it
serves, and 15 s after its drain should be over.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

# Beyond the drain: calls return, helper processes end, threads are joined.
_STOP_S = 15.0
# Looks of a watch in its limit, and the seconds between two of them at most.
_LOOKS = 10
_LOOK_S = 1.0
# Native code that holds the interpreter's lock lets no Python thread look. faulthandler's timer needs no lock, but it counts the time for
# which the process was stopped (SIGSTOP, a debugger), so it gets this multiple of the limit.
_LOCKED = 3.0
# A full log pipe must not keep the process alive.
_LAST_WORD_S = 2.0


def stop_event(drain_timeout_s: float) -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT; the second exits at once with status 130. A process that is still there 15 s after its
    drain's time writes every thread's stack to stderr and exits with status 1. Call once, in the main thread's loop."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            log.warning("second %s: exiting without finishing what runs", number.name)
            # Not sys.exit: a stuck engine thread would keep the process alive.
            os._exit(130)
        log.info("%s: draining", number.name)
        event.set()
        faulthandler.dump_traceback_later(drain_timeout_s + _STOP_S, exit=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return event


class Silence:
    """Measures for how long an event loop has not turned, as a watching thread sees it. Pure: times are arguments."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self.look_s = min(_LOOK_S, limit_s / _LOOKS)
        self._looked = now
        self.seconds = 0.0

    def look(self, now: float, *, turned: bool) -> bool:
        """Returns whether the limit is reached. A late look counts as two at most: the whole process stood still meanwhile."""
        self.seconds = 0.0 if turned else self.seconds + min(now - self._looked, 2 * self.look_s)
        self._looked = now
        return self.seconds >= self._limit_s


async def watch_loop(stop: asyncio.Event, limit_s: float, alive: Callable[[], bool] = lambda: True) -> None:
    """Ends the process with status 1 once its event loop has not turned for `limit_s`, or turned only while `alive` returned False; 0 s:
    never. Runs as a task from when the process is ready, as start-up may take any time, until `stop`."""
    if not limit_s:
        return
    silence = Silence(limit_s, time.monotonic())
    turned, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not (over.wait(silence.look_s) or stop.is_set()):
            has_turned = turned.is_set()
            turned.clear()
            if silence.look(time.monotonic(), turned=has_turned):
                _end(silence.seconds)

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        while not stop.is_set():
            faulthandler.dump_traceback_later(_LOCKED * limit_s, exit=True)
            if alive():
                turned.set()
            await asyncio.sleep(silence.look_s / 2)
    finally:
        over.set()
        # After `stop`, the timer is the drain's.
        if not stop.is_set():
            faulthandler.cancel_dump_traceback_later()


def _end(silent_s: float) -> None:
    threading.Timer(_LAST_WORD_S, os._exit, (1,)).start()
    # Not through logging, whose lock the hung thread may hold.
    os.write(sys.stderr.fileno(), b"this process has made no progress for %.0f s: it ends, to be started again\n" % silent_s)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(1)
