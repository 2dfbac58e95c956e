"""Signals of a server process: the first SIGTERM or SIGINT asks for a drain, a second one ends the process.

So does a drain that takes too long: a process that hangs where it should end says where, and ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal

log = logging.getLogger(__name__)

# Beyond the drain: calls return, helper processes end, threads are joined.
_STOP_S = 15.0


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
        faulthandler.dump_traceback_later(drain_timeout_s + _STOP_S, exit=True)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return event
