"""Shares what API keys have used, told to and heard from the other routers through Redis, so that their limits hold over all replicas.

twostep:v1:api-usage:minute:{window}   hash: [router, key, "requests" | "tokens"] as JSON -> used on that router in those ten seconds
twostep:v1:api-usage:day:{hour}        the same tokens by the hour, kept for a day

Windows are named by the clock that all routers share (twostep/cluster/shared_clock.py). How long ago something was used,
each router measures by its own: whatever becomes of any clock, no key gets another day before the first is over.

As router/waiting/quota_share.py has it: each writes its own fields as totals, so that an exchange that broke may be repeated, and what
has grown in the others' since the last time is what they have given. Beside the requests, never on their way. What is given between two
exchanges is not known to the others: n routers may give a key up to n times what is left for it, all within half a second, and take it
off what they give next. Without Redis each counts for itself. A router that starts reads the day's hours, so that a restart gives nobody
another day.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.access.account import DAY_HOURS, HOUR_S
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import EXCHANGE_S
from twostep.cluster.shared_clock import SharedClock

log = logging.getLogger(__name__)

WINDOW_S = 10
_SYNC_S = 0.5
# Hours change slowly; what a minute's limit needs to know does not.
_DAY_SYNC_S = 5.0
_TIMEOUT_S = EXCHANGE_S
# A damaged field that says more is passed over.
_MAX_TOTAL = 1 << 50

# A key's id and "requests" or "tokens".
Entry = tuple[str, str]


class Use(NamedTuple):
    """`age_s`: that it was so long ago at least."""

    window: int
    entry: Entry
    amount: int
    age_s: float = 0.0


class _Heard(NamedTuple):
    """A field as it was read. An `entry` of None: it is this router's own, or makes no sense."""

    value: bytes
    entry: Entry | None
    total: int


class UsageLedger:
    """Pure: this router's totals by window, and how much of the others' has been heard."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._own: dict[int, Counter[Entry]] = {}
        self._untold: dict[int, set[Entry]] = {}
        self._heard: dict[int, dict[bytes, _Heard]] = {}

    def count(self, entry: Entry, amount: int, window: int) -> None:
        self._own.setdefault(window, Counter())[entry] += amount
        self._untold.setdefault(window, set()).add(entry)

    def forget(self, window: int) -> None:
        """Drops a window that is not read any more."""
        for book in (self._own, self._untold, self._heard):
            book.pop(window, None)

    def field(self, entry: Entry) -> str:
        """Returns what this router's totals of it are called."""
        return json.dumps([self._writer, *entry])

    def untold(self) -> Mapping[int, Mapping[Entry, int]]:
        """Returns totals that have changed since they were last written."""
        return {window: {entry: self._own[window][entry] for entry in entries} for window, entries in self._untold.items() if entries}

    def told(self, totals: Mapping[int, Mapping[Entry, int]]) -> None:
        """Notes that those have arrived."""
        for window, fields in totals.items():
            untold = self._untold.get(window, set())
            untold -= {entry for entry, total in fields.items() if self._own[window][entry] == total}

    def hear(self, window: int, fields: Mapping[bytes, bytes]) -> list[Use]:
        """Returns what others have used since the last time. Fields that make no sense are passed over. Most are as they were: those cost a
        comparison, and a name is parsed once."""
        heard, news = self._heard.setdefault(window, {}), []
        for field, value in fields.items():
            before = heard.get(field)
            if before is None:
                before = heard[field] = _Heard(b"", self._entry(field), 0)
            if before.entry is None or before.value == value:
                continue
            try:
                total = int(value)
            except ValueError:
                continue
            if abs(total) > _MAX_TOTAL:
                continue
            heard[field] = _Heard(value, before.entry, total)
            if total != before.total:
                news.append(Use(window, before.entry, total - before.total))
        return news

    def all_of(self, key_ids: Collection[str]) -> list[Use]:
        """Returns what is known of those keys' use, on all routers."""
        own = ((window, entry, total) for window, totals in self._own.items() for entry, total in totals.items())
        heard = ((window, each.entry, each.total) for window, fields in self._heard.items() for each in fields.values())
        return [Use(window, entry, total) for window, entry, total in chain(own, heard) if entry and entry[0] in key_ids and total]

    def _entry(self, field: bytes) -> Entry | None:
        try:
            writer, key_id, kind = json.loads(field)
        except (ValueError, TypeError, RecursionError):
            return None
        return None if writer == self._writer or kind not in ("requests", "tokens") else (str(key_id), kind)


class _Exchange:
    """One ledger and its windows in Redis."""

    def __init__(self, writer: str, prefix: str, clock: SharedClock, *, window_s: int, num_windows: int) -> None:
        self.ledger = UsageLedger(writer)
        self._prefix, self._clock, self._window_s, self._num_windows = prefix, clock, window_s, num_windows
        # When each was the one of its time, or was heard of, by this process's own clock: the shared one may be set to any time and back.
        self._last_seen: dict[int, float] = {}
        # Used while the shared time is not known yet.
        self._undated: Counter[Entry] = Counter()
        # Also windows that were read before.
        self.read_all = True

    def count(self, entry: Entry, amount: int) -> None:
        if not self._clock.known:
            self._undated[entry] += amount
            return
        window = self._window()
        self._last_seen[window] = self._clock.monotonic()
        self.ledger.count(entry, amount, window)

    def all_of(self, key_ids: Collection[str]) -> list[Use]:
        undated = [Use(0, entry, amount) for entry, amount in self._undated.items() if entry[0] in key_ids]
        return undated + self._aged(self.ledger.all_of(key_ids))

    async def run(self, redis: Redis) -> list[Use]:
        """Once. Raises RedisError, OSError, TimeoutError."""
        if not self._clock.known:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._clock.ask(redis)
        for entry, amount in self._undated.items():
            self.count(entry, amount)
        self._undated.clear()
        totals, windows = self.ledger.untold(), self._to_read()
        pipeline = redis.pipeline(transaction=False)
        pipeline.time()
        for window, fields in totals.items():
            pipeline.hset(f"{self._prefix}{window}", mapping={self.ledger.field(entry): str(total) for entry, total in fields.items()})
            pipeline.expire(f"{self._prefix}{window}", (self._num_windows + 1) * self._window_s)
        for window in windows:
            pipeline.hgetall(f"{self._prefix}{window}")
        async with asyncio.timeout(_TIMEOUT_S):
            replies = await pipeline.execute()
        self._clock.told(replies[0])
        self.ledger.told(totals)
        self.read_all = False
        fields_of = zip(windows, replies[1 + 2 * len(totals) :], strict=True)
        return self._aged([use for window, fields in fields_of for use in self.ledger.hear(window, fields)])

    def _to_read(self) -> Sequence[int]:
        """Others write into a window for a little while after it is over; and the shared clock may just have been set."""
        window, now = self._window(), self._clock.monotonic()
        self._last_seen[window] = now
        for old in [each for each, seen in self._last_seen.items() if now - seen > self._num_windows * self._window_s]:
            del self._last_seen[old]
            self.ledger.forget(old)
        if self.read_all:
            # Also of a time to come, if the shared clock was set back.
            return sorted({*range(window - self._num_windows + 1, window + self._num_windows), *self._last_seen})
        recent = [each for each, seen in self._last_seen.items() if now - seen <= self._window_s]
        return sorted({window - 1, window, *recent})

    def _aged(self, uses: Sequence[Use]) -> list[Use]:
        """Dates them by their windows, but for those that were seen here later than that."""
        unix, now = self._clock.unix(), self._clock.monotonic()
        aged = []
        for use in uses:
            age_s = max(0.0, unix - (use.window + 1) * self._window_s)
            aged.append(use._replace(age_s=min(age_s, now - self._last_seen.setdefault(use.window, now - age_s))))
        return aged

    def _window(self) -> int:
        return int(self._clock.unix() // self._window_s)


class UsageShare:
    """`on_minute` and `on_day` get what the others have used, each as soon as it is known."""

    def __init__(
        self, redis: Redis, router_id: str, clock: SharedClock, *, on_minute: Callable[[Use], None], on_day: Callable[[Use], None]
    ) -> None:
        # A router that restarts under its name is another writer: its old totals are not begun again.
        writer = f"{router_id}:{secrets.token_hex(4)}"
        self._redis = redis
        self._minute = _Exchange(writer, "twostep:v1:api-usage:minute:", clock, window_s=WINDOW_S, num_windows=2)
        self._day = _Exchange(writer, "twostep:v1:api-usage:day:", clock, window_s=HOUR_S, num_windows=DAY_HOURS + 1)
        self._on_minute, self._on_day = on_minute, on_day
        # False while Redis does not answer: limits are this router's own.
        self.connected = True
        self._day_due = 0.0

    def used(self, key_id: str, kind: str, amount: int) -> None:
        """On this router. Returns at once."""
        self._minute.count((key_id, kind), amount)
        if kind == "tokens":
            self._day.count((key_id, kind), amount)

    def recall(self, key_ids: Collection[str]) -> None:
        """Tells again all that is known of those keys' use, here too: of keys that this router hears of only now, or again."""
        for use in self._minute.all_of(key_ids):
            self._on_minute(use)
        for use in self._day.all_of(key_ids):
            self._on_day(use)

    async def run(self) -> None:
        """Exchanges until cancelled."""
        while True:
            await self.exchange()
            end_if_cancelled()
            await asyncio.sleep(_SYNC_S)

    async def exchange(self, *, whole: bool = False) -> None:
        """Once; never raises for what Redis does or holds. `whole`: also the hours, whose turn it may not be."""
        try:
            for use in await self._minute.run(self._redis):
                self._on_minute(use)
            if whole or time.monotonic() >= self._day_due:
                for use in await self._day.run(self._redis):
                    self._on_day(use)
                self._day_due = time.monotonic() + _DAY_SYNC_S
        except (RedisError, OSError, TimeoutError) as error:
            # Who hears nothing for hours has hours to hear of.
            self._minute.read_all = self._day.read_all = True
            if self.connected:
                self.connected = False
                log.warning(
                    "what API keys use cannot be shared (%s): their limits hold on this router alone", str(error) or type(error).__name__
                )
            return
        if not self.connected:
            self.connected = True
            log.warning("what API keys use is shared again")
