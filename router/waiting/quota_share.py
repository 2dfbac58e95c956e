"""Routers exchange through Redis what tenants are given, so that shares hold over all replicas.

twostep:v1:usage:{window}    hash: [router, class, tenant] as JSON -> tokens charged by that router in that window of ten seconds

Each router writes its own fields as totals, never as increments: an exchange that broke may be repeated as it is. It reads all of them, and
what has grown since the last time is what others have given. One pipelined round trip twice a second, beside the requests and never on
their way. Without Redis each router is fair by what it knows itself; what it gives meanwhile is told later if its window is still read.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import EXCHANGE_S
from twostep.cluster.hashes import hashes_in, read_hashes
from twostep.cluster.shared_clock import SharedClock
from twostep.request_class import RequestClass

log = logging.getLogger(__name__)

WINDOW_S = 10
_SYNC_S = 0.5
_TIMEOUT_S = EXCHANGE_S
# Windows that are still written and read: clocks differ, and corrections come late.
_NUM_WINDOWS = 2
_TTL_S = 3 * WINDOW_S
# Of one router in one window.
_MAX_FIELDS = 512
# Tokens that no router gives in a window: a field that says more is damaged.
_MAX_TOTAL = 1 << 40

Share = tuple[RequestClass, str]


def usage_key(window: int) -> str:
    return f"twostep:v1:usage:{window}"


class UsageBook:
    """Pure: this router's totals by window, and how much of the others' has been heard already."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._own: dict[int, Counter[str]] = {}
        # By window and field: as it was read, and what that says. None: nothing that is heard.
        self._heard: dict[int, dict[bytes, tuple[bytes, Share, int] | None]] = {}

    def charge(self, share: Share, num_tokens: int, window: int) -> None:
        own = self._own.setdefault(window, Counter())
        field = json.dumps([self._router_id, int(share[0]), share[1]])
        if field in own or len(own) < _MAX_FIELDS:
            own[field] += num_tokens

    def windows(self, window: int) -> list[int]:
        """Those to exchange now; forgets older ones."""
        current = list(range(window - _NUM_WINDOWS + 1, window + 1))
        for book in (self._own, self._heard):
            for old in [known for known in book if known < current[0]]:
                del book[old]
        return current

    def own(self, window: int) -> Mapping[str, int]:
        return self._own.get(window, Counter())

    def hear(self, window: int, fields: Mapping[bytes, bytes]) -> Counter[Share]:
        """Returns what others have charged since the last time. Fields that make no sense are passed over.

        Every router reads every other's fields twice a second, most of them as they were: those cost a comparison, and a name is parsed
        once."""
        heard, news = self._heard.setdefault(window, {}), Counter[Share]()
        for field, value in fields.items():
            if field not in heard:
                share = self._share(field)
                heard[field] = None if share is None else (b"", share, 0)
            before = heard[field]
            if before is None or before[0] == value:
                continue
            try:
                total = int(value)
            except ValueError:
                continue
            if abs(total) <= _MAX_TOTAL:
                news[before[1]] += total - before[2]
                heard[field] = (value, before[1], total)
        return news

    def _share(self, field: bytes) -> Share | None:
        """Returns whose tokens another router counts there. None: it is this router's own, or makes no sense."""
        try:
            router_id, number, tenant = json.loads(field)
            return None if router_id == self._router_id else (RequestClass(number), str(tenant))
        except (ValueError, TypeError, RecursionError):
            return None


class QuotaShare:
    """`on_news` gets what the others have given since it was called last."""

    def __init__(self, redis: Redis, router_id: str, on_news: Callable[[Mapping[Share, int]], None], clock: SharedClock) -> None:
        self._redis = redis
        self._clock = clock
        self._book = UsageBook(router_id)
        self._on_news = on_news
        self._connected = True

    @property
    def connected(self) -> bool:
        """False while Redis does not answer."""
        return self._connected

    def charge(self, request_class: RequestClass, tenant: str, num_tokens: int) -> None:
        """Counts tokens of any request, at any time; returns at once."""
        self._book.charge((request_class, tenant), num_tokens, self._window())

    async def run(self) -> None:
        """Exchanges until cancelled."""
        while True:
            await self.exchange()
            end_if_cancelled()
            await asyncio.sleep(_SYNC_S)

    async def exchange(self) -> None:
        """Exchanges once; never raises for what Redis does or holds."""
        windows = self._book.windows(self._window())
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        writes = [window for window in windows if self._book.own(window)]
        for window in writes:
            totals: Mapping[Any, Any] = self._book.own(window)
            pipeline.hset(usage_key(window), mapping=totals)
            pipeline.expire(usage_key(window), _TTL_S)
        read_hashes(pipeline, [usage_key(window) for window in windows])
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                time, *replies = await pipeline.execute()
        except (RedisError, OSError, TimeoutError) as error:
            if self._connected:
                self._connected = False
                log.warning(
                    "what tenants use cannot be shared (%s): this router is fair by what it serves itself",
                    str(error) or type(error).__name__,
                )
            return
        if not self._connected:
            self._connected = True
            log.warning("what tenants use is shared again")
        self._clock.told(time)
        news = Counter[Share]()
        for window, fields in zip(windows, hashes_in(replies[-1]), strict=True):
            news.update(self._book.hear(window, fields))
        if news:
            self._on_news(news)

    def _window(self) -> int:
        return int(self._clock.unix() // WINDOW_S)
