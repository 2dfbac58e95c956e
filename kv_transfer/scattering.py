"""Measures how much of a fetch went into putting blocks in place: transports that copy twice mark it, their callers sum it up.

    the caller of a fetch                        the transport, in the same task
    with ScatterClock() as clock:
        await transport.fetch(...)      ──▶      with scattering():
    clock.seconds                                    ... verify, slot -> pool ...

Transports that pull straight into the pool have no such part: 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType

_running: ContextVar[ScatterClock | None] = ContextVar("scatter_clock", default=None)


class ScatterClock:
    """Runs while the current task is in `scattering`. Not to be used by two tasks at once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._token: Token[ScatterClock | None] | None = None

    def __enter__(self) -> ScatterClock:
        self._token = _running.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._token is not None, "entered first"
        _running.reset(self._token)


@contextmanager
def scattering() -> Iterator[None]:
    """Around the part of a fetch that verifies and writes the blocks."""
    clock = _running.get()
    started = time.monotonic()
    try:
        yield
    finally:
        if clock is not None:
            clock.seconds += time.monotonic() - started


def scattered(seconds: float) -> None:
    """The same, measured elsewhere: by a transport whose own thread does it."""
    clock = _running.get()
    if clock is not None:
        clock.seconds += seconds
