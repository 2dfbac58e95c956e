"""Routers tell each other what tenants are given, so that shares hold over all replicas (how: twostep/cluster/exchange.py).

twostep:v1:usage:{window}    hash: [router, class, tenant] as JSON -> tokens charged by that router in that window of ten seconds

Without Redis each router is fair by what it knows itself; what it gives meanwhile is told later if its window is still read.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from twostep.cluster.exchange import Entry, RedisExchange, SharedTotals, UsageLedger
from twostep.cluster.shared_clock import SharedClock
from twostep.request_class import RequestClass

WINDOW_S = 10
PREFIX = "twostep:v1:usage:"
# Of one router in one window: tenants are strangers' words.
MAX_FIELDS = 512

Share = tuple[RequestClass, str]


def _share(request_class: int, tenant: object) -> Entry:
    return RequestClass(request_class), str(tenant)


class QuotaShare(RedisExchange):
    """`on_news` gets what the others have given since it was called last."""

    every_s = 0.5
    lost = "what tenants use cannot be shared (%s): this router is fair by what it serves itself"
    found = "what tenants use is shared again"

    def __init__(self, redis: Redis, router_id: str, on_news: Callable[[Mapping[Share, int]], None], clock: SharedClock) -> None:
        super().__init__()
        self._redis = redis
        # A router that restarts under its name is another writer: its old totals are not begun again.
        ledger = UsageLedger(f"{router_id}:{secrets.token_hex(4)}", _share, max_own=MAX_FIELDS)
        self._totals = SharedTotals(ledger, PREFIX, clock, window_s=WINDOW_S, num_windows=2)
        self._on_news = on_news

    def charge(self, request_class: RequestClass, tenant: str, num_tokens: int) -> None:
        """Counts tokens of any request, at any time; returns at once."""
        self._totals.count((request_class, tenant), num_tokens)

    async def _exchange(self) -> None:
        news = Counter[Share]()
        for use in await self._totals.exchange(self._redis):
            news[use.entry] += use.amount
        if news:
            self._on_news(news)
