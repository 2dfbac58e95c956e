"""Bodies of requests on their way in: how slowly they may come, and how much of them is held.

A body has a time of its own, by its size, and must bring something in every interval: a client that sends a byte now and then is cut. What
is read but not yet parsed has a bound in all. At this bound, as at that of connections, whichever body comes in slowest makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.http.connections import HttpConnection
from router.http.errors import HttpError

# A body has this long to come, and its size at this rate besides.
_BODY_S = 30.0
_MIN_BYTES_PER_S = 32 << 10
# And it brings so much in each interval. TCP mends a loss or two within one.
_INTERVAL_S = 10.0
_MIN_BYTES_PER_INTERVAL = 16 << 10
# How often bodies are looked at.
_LOOK_S = 1.0
# Of bodies that are read and not parsed yet, all together; one caller's are half of that at most.
_MAX_HELD_BYTES = 512 << 20
# Whose body is smaller makes no room that is worth it.
_WORTH_BYTES = 256 << 10
# What came besides a body, as the frames of its chunks, is a tenth of it at most, and this: a chunk costs about as much as a kilobyte,
# whatever is in it.
_SPARE_BYTES = 512 << 10
_FULL = "the router holds as many bytes of bodies as it may; repeat later, or send shorter ones"


@dataclass(slots=True, eq=False)
class _Body:
    """`pace`: bytes a second of late, the last second counting half. None: it was not looked at yet."""

    request: web.Request
    caller: str
    seconds: float
    until: float
    # When and where the interval began.
    interval_s: float
    interval_bytes: int
    looked_bytes: int
    received: int
    pace: float | None = None
    held: int = 0

    @property
    def num_bytes(self) -> int:
        return self.request.content.total_bytes

    @property
    def spare_bytes(self) -> int:
        """That came over its connection and are none of its own."""
        return _received(self.request) - self.received - self.num_bytes

    @property
    def coming(self) -> bool:
        content = self.request.content
        return not content.is_eof() and content.exception() is None and self.request.transport is not None

    def cut(self, error: HttpError) -> None:
        """Raises the error in its reader, now or when it reads."""
        self.request.content.set_exception(error)


_BODY: web.RequestKey[_Body] = web.RequestKey("body", _Body)


class Bodies:
    """Watches the bodies of one server. `clock`: seconds; `max_held_bytes`: see read()."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_held_bytes: int = _MAX_HELD_BYTES) -> None:
        self._clock = clock
        self._max_held_bytes = max_held_bytes
        self._bodies: dict[_Body, None] = {}
        # As the last look found them; what came later is too young to be judged.
        self._slowest_first: deque[_Body] = deque()
        self._held: Counter[str] = Counter()
        self._held_in_all = 0

    @contextmanager
    def arriving(self, request: web.Request, *, caller: str, most: int) -> Iterator[None]:
        """Gives a context around all that may read the body of a request; `most`: bytes that it may have. Raises HttpError 415."""
        if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise HttpError(415, "bodies are taken as they are; send it without a Content-Encoding")
        if not request.body_exists or request.content.is_eof():
            yield
            return
        size = request.content_length if request.content_length is not None else most
        seconds = _BODY_S + min(size, most) / _MIN_BYTES_PER_S
        now, come = self._clock(), request.content.total_bytes
        body = request[_BODY] = _Body(request, caller, seconds, now + seconds, now, come, come, _received(request) - come)
        self._bodies[body] = None
        try:
            yield
        finally:
            self._free(body)
            del self._bodies[body], request[_BODY]

    async def read(self, request: web.Request) -> bytes:
        """Returns a whole body, which is held until free(), or the end of arriving(). Raises HttpError 408, 413, 503."""
        most = request.client_max_size
        if request.content_length is not None and request.content_length > most:
            raise web.HTTPRequestEntityTooLarge(most, request.content_length)
        pieces = bytearray()
        while piece := await request.content.readany():
            pieces += piece
            if len(pieces) > most:
                raise web.HTTPRequestEntityTooLarge(most, len(pieces))
            self._hold(request, len(piece))
        return bytes(pieces)

    def free(self, request: web.Request) -> None:
        """Counts it as no longer kept."""
        body = request.get(_BODY)
        if body is not None:
            self._free(body)

    def look(self) -> None:
        """Cuts what is too slow, and sees who is slowest."""
        now = self._clock()
        found: list[tuple[float, int, _Body]] = []
        for i, body in enumerate(self._bodies):
            transport, num_bytes = body.request.transport, body.num_bytes
            came, body.looked_bytes = num_bytes - body.looked_bytes, num_bytes
            if not body.coming or transport is None:
                continue
            if body.spare_bytes > _SPARE_BYTES + num_bytes // 10:
                body.cut(HttpError(400, "the request's body comes in chunks of a few bytes; send it in larger ones"))
            elif not transport.is_reading():
                # It waits for the router, not the router for it.
                body.interval_s, body.interval_bytes = now, num_bytes
            elif now >= body.until:
                body.cut(HttpError(408, f"the request's body did not come within {body.seconds:.0f} s; send it faster"))
            elif now - body.interval_s >= _INTERVAL_S and num_bytes - body.interval_bytes < _MIN_BYTES_PER_INTERVAL:
                few = f"the request's body brought fewer than {_MIN_BYTES_PER_INTERVAL} bytes in {_INTERVAL_S:g} s; send it faster"
                body.cut(HttpError(408, few))
            else:
                if now - body.interval_s >= _INTERVAL_S:
                    body.interval_s, body.interval_bytes = now, num_bytes
                body.pace = came if body.pace is None else (body.pace + came) / 2
                found.append((body.pace, i, body))
        self._slowest_first = deque(body for _, _, body in sorted(found, key=itemgetter(0, 1)))

    def cut_slowest(self, error: HttpError) -> RequestHandler | None:
        """Tells the error to the reader of the body that comes in slowest. Returns its connection; None: none has been coming for long
        enough to be judged."""
        while self._slowest_first:
            body = self._slowest_first.popleft()
            if body.coming and body in self._bodies:
                body.cut(error)
                self._free(body)
                return body.request.protocol
        return None

    async def run(self) -> None:
        """Watches over arriving bodies until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def _hold(self, request: web.Request, num_bytes: int) -> None:
        """Raises HttpError 503."""
        body = request.get(_BODY)
        if body is None:
            return  # it was there at once, and so is small
        full = HttpError(503, _FULL, code="too_many_bodies", retry_after_s=1.0)
        if self._held[body.caller] + num_bytes > self._max_held_bytes // 2:
            raise full
        while self._held_in_all + num_bytes > self._max_held_bytes:
            worth = (each for each in self._slowest_first if each.held >= _WORTH_BYTES and each.coming and each is not body)
            slowest = next(worth, None)
            if slowest is None:
                raise full
            slowest.cut(full)
            self._free(slowest)
        body.held += num_bytes
        self._held[body.caller] += num_bytes
        self._held_in_all += num_bytes

    def _free(self, body: _Body) -> None:
        self._held_in_all -= body.held
        self._held[body.caller] -= body.held
        if not self._held[body.caller]:
            del self._held[body.caller]
        body.held = 0


def _received(request: web.Request) -> int:
    assert isinstance(request.protocol, HttpConnection), "see Connections"
    return request.protocol.received


BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)


async def json_body(request: web.Request) -> bytes:
    """Reads a whole body that is JSON, as its header must say. Raises HttpError 415, and as Bodies.read() does."""
    if request.content_type != "application/json":
        raise HttpError(415, f"the body is {request.content_type}; send JSON, with the header content-type: application/json")
    return await request.app[BODIES].read(request)
