"""Shares what API keys have used, told to and heard from the other routers through Redis, so that their limits hold over all replicas.

twostep:v1:api-usage:minute:{window}   hash: [router, key, "requests" | "tokens"] as JSON -> used on that router in those ten seconds
twostep:v1:api-usage:day:{hour}        the same tokens by the hour, kept for a day

How: twostep/cluster/exchange.py. Whatever becomes of any clock, no key gets another day before the first is over. What is given between two
exchanges is not known to the others: n routers may give a key up to n times what is left for it, all within half a second, and take it
off what they give next. Without Redis each counts for itself. A router that starts reads the day's hours, so that a restart gives nobody
another day.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

from redis.asyncio import Redis

from router.access.account import DAY_HOURS, HOUR_S
from twostep.cluster.exchange import Entry, RedisExchange, SharedTotals, UsageLedger, Use
from twostep.cluster.shared_clock import SharedClock

WINDOW_S = 10
# Hours change slowly; what a minute's limit needs to know does not.
_DAY_SYNC_S = 5.0


def key_ledger(writer: str) -> UsageLedger:
    """Counts by a key's id and "requests" or "tokens"."""
    return UsageLedger(writer, _entry)


def _entry(key_id: str, kind: str) -> Entry:
    if kind not in ("requests", "tokens"):
        raise ValueError(kind)
    return str(key_id), kind


class UsageShare(RedisExchange):
    """`on_minute` and `on_day` get what the others have used, each as soon as it is known. While Redis does not answer, limits are this
    router's own."""

    every_s = 0.5
    lost = "what API keys use cannot be shared (%s): their limits hold on this router alone"
    found = "what API keys use is shared again"

    def __init__(
        self, redis: Redis, router_id: str, clock: SharedClock, *, on_minute: Callable[[Use], None], on_day: Callable[[Use], None]
    ) -> None:
        # A router that restarts under its name is another writer: its old totals are not begun again.
        writer = f"{router_id}:{secrets.token_hex(4)}"
        self._redis = redis
        self._minute = SharedTotals(key_ledger(writer), "twostep:v1:api-usage:minute:", clock, window_s=WINDOW_S, num_windows=2)
        self._day = SharedTotals(key_ledger(writer), "twostep:v1:api-usage:day:", clock, window_s=HOUR_S, num_windows=DAY_HOURS + 1)
        self._on_minute, self._on_day = on_minute, on_day
        self._day_due = 0.0

    def used(self, key_id: str, kind: str, amount: int) -> None:
        """Counts what was used on this router. Returns at once."""
        self._minute.count((key_id, kind), amount)
        if kind == "tokens":
            self._day.count((key_id, kind), amount)

    def recall(self, key_ids: Collection[str]) -> None:
        """Tells again all that is known of those keys' use, here too: of keys that this router hears of only now, or again."""
        for use in self._minute.all_of(key_ids):
            self._on_minute(use)
        for use in self._day.all_of(key_ids):
            self._on_day(use)

    async def exchange(self, *, whole: bool = False) -> None:
        """Writes this router's totals and reads the others', once; never raises for what Redis does or holds. `whole`: also the hours,
        whose turn it may not be."""
        if whole:
            self._day_due = 0.0
        await super().exchange()
        if not self.connected:
            # Where the minute failed the hours were not tried, so that they do not know that they missed anything.
            self._minute.read_all = self._day.read_all = True

    async def _exchange(self) -> None:
        for use in await self._minute.exchange(self._redis):
            self._on_minute(use)
        if time.monotonic() >= self._day_due:
            for use in await self._day.exchange(self._redis):
                self._on_day(use)
            self._day_due = time.monotonic() + _DAY_SYNC_S
