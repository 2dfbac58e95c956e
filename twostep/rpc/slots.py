"""Who has the places of a server's calls, and whose messages are being read.

    half-open    its message is not here: it waits for its turn to be read     64 KiB at most, the window of its stream
                                       or it is being read                     the largest message at most
    running      its message is here, and the handler has it

A half-open call has its place for as long as nobody else wants it: a server that is full ends the oldest one of whoever has the most of
them. So neither calls that never send a message nor messages that never end keep anybody out, and what they hold in memory is bounded,
for each caller and altogether. A caller is a key, a process of the deployment, or, where nobody says who calls, a connection.

An answer of one message gRPC keeps until its client has room for it, or the connection ends, and offers no way to take it back. So what
is kept is counted, too, and an answer that would be too much is not given (Unread).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from twostep.errors import ResourceExhausted, TwostepError

# Of the event loop, until what gRPC's core has for it has reached its tasks.
_TURNS = 3
_FULL = "this server has as many calls as it may; repeat later, or ask another one"
_UNREAD_OF_CALLER_BYTES = 64 << 20
_UNREAD_OF_ALL_BYTES = 1 << 30
# Smaller answers are no burden: they are always given.
_SMALL_BYTES = 64 << 10
_TOO_SLOW = "the call's message had not come when others needed its place; send it at once, or over fewer calls at a time"


class Call(Protocol):
    def end(self, error: TwostepError) -> None:
        """Ends it with that error, soon. It gives its place back by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBounds:
    """How many messages are read at a time. Those that are here take a millisecond; the bounds are for those that come slowly, of 16 MiB
    perhaps. Whoever has waited `patience_s` for a place among all that are read takes one that has been read for as long, of the caller
    with the most; and among its own caller's, after `own_patience_s`."""

    of_caller: int = 8
    of_all: int = 64
    patience_s: float = 0.25
    own_patience_s: float = 5.0


@dataclass(slots=True)
class _Caller:
    half_open: dict[Slot, None] = field(default_factory=dict)
    reading: dict[Slot, float] = field(default_factory=dict)
    num_running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Slots:
    """The places of one server, or of some of its services. Not for more than one event loop."""

    def __init__(self, limit: int, bounds: ReadBounds, *, all_give_way: bool = False) -> None:
        """`all_give_way`: so do calls that run, where nobody knows who calls."""
        self._bounds = bounds
        self._limit = limit
        # What one caller's running calls leave to others.
        self._of_caller = limit - limit // 8
        self._all_give_way = all_give_way
        self._callers: dict[str, _Caller] = {}
        self._reading: dict[Slot, float] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num = 0

    @property
    def num_taken(self) -> int:
        return self._num

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def take(self, call: Call, caller: str) -> Slot:
        """Raises ResourceExhausted: all places have calls that run."""
        found = self._callers.get(caller)
        if found is not None and found.num_running >= self._of_caller:
            raise ResourceExhausted(_FULL)
        if self._num >= self._limit:
            most = max(self._callers.values(), key=lambda each: len(each.half_open), default=None)
            if most is None or not most.half_open:
                raise ResourceExhausted(_FULL)
            next(iter(most.half_open)).give_way()
        found = self._callers.setdefault(caller, _Caller())
        place = Slot(self, call, caller, found)
        found.half_open[place] = None
        self._num += 1
        return place

    # ---- for Slot ----------------------------------------------------------------------------------------------------------

    async def _turn(self, place: Slot) -> None:
        bounds, caller = self._bounds, place.of
        # First among its caller's: of these so many at most wait with everybody else's.
        await _enter(place, caller.reading, bounds.of_caller, caller.waiting, bounds.own_patience_s)
        await _enter(place, self._reading, bounds.of_all, self._waiting, bounds.patience_s)

    def _read(self, place: Slot) -> None:
        if place in place.of.reading:
            del place.of.reading[place]
            _wake(place.of.waiting)
        if place in self._reading:
            del self._reading[place]
            _wake(self._waiting)

    def _run(self, place: Slot) -> None:
        self._read(place)
        if not self._all_give_way:
            del place.of.half_open[place]
            place.of.num_running += 1

    def _free(self, place: Slot) -> None:
        self._read(place)
        if place in place.of.half_open:
            del place.of.half_open[place]
        else:
            place.of.num_running -= 1
        self._num -= 1
        if not place.of.half_open and not place.of.num_running:
            self._callers.pop(place.caller, None)


class Slot:
    """Holds the place of one call. free() gives it back, once and at once."""

    __slots__ = ("_call", "_freed", "_slots", "caller", "of")

    def __init__(self, slots: Slots, call: Call, caller: str, of: _Caller) -> None:
        self._slots = slots
        self._call = call
        self.caller = caller
        self.of = of
        self._freed = False

    async def turn(self) -> None:
        """Returns when its message may be read."""
        await self._slots._turn(self)

    def running(self) -> None:
        if not self._freed:
            self._slots._run(self)

    def give_way(self) -> None:
        self.free()
        self._call.end(ResourceExhausted(_TOO_SLOW))

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._slots._free(self)


async def _enter(place: Slot, reading: dict[Slot, float], limit: int, waiting: deque[asyncio.Future[None]], patience_s: float) -> None:
    """Returns when `place` is one of `limit` in `reading`."""
    loop = asyncio.get_running_loop()
    while len(reading) >= limit:
        try:
            async with asyncio.timeout(patience_s):
                await _wait(waiting)
        except TimeoutError:
            # An event loop that stood still has messages that came meanwhile: they are no slow ones.
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            slow = [each for each, since in reading.items() if since <= loop.time() - patience_s]
            if slow and len(reading) >= limit:
                max(slow, key=lambda each: len(each.of.reading)).give_way()
    reading[place] = loop.time()


async def _wait(waiting: deque[asyncio.Future[None]]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(future)
    try:
        await future
    except BaseException:
        if future.done() and not future.cancelled():
            # Woken and ended at once: the turn is the next one's.
            _wake(waiting)
        elif future in waiting:
            waiting.remove(future)
        raise


def _wake(waiting: deque[asyncio.Future[None]]) -> None:
    while waiting:
        future = waiting.popleft()
        if not future.done():
            future.set_result(None)
            return


class Unread:
    def __init__(self, *, of_caller: int = _UNREAD_OF_CALLER_BYTES, of_all: int = _UNREAD_OF_ALL_BYTES) -> None:
        self._of_caller = of_caller
        self._of_all = of_all
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def add(self, caller: str, num_bytes: int) -> None:
        """Raises ResourceExhausted. A single answer of a caller, however large, is given."""
        held = self._held[caller]
        if num_bytes > _SMALL_BYTES and held and (held + num_bytes > self._of_caller or self.num_bytes + num_bytes > self._of_all):
            raise ResourceExhausted(f"answers of {held} bytes were not read yet; read them, or ask for less at a time")
        self._held[caller] += num_bytes
        self.num_bytes += num_bytes

    def remove(self, caller: str, num_bytes: int) -> None:
        self._held[caller] -= num_bytes
        self.num_bytes -= num_bytes
        if self._held[caller] <= 0:
            del self._held[caller]
