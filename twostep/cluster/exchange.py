"""Exchanges totals between processes through Redis, beside the requests and never on their way.

    RedisExchange   one exchange, repeated; without Redis everything goes on by what is known, and the log says so once
    SharedTotals    what each process counts by windows of time, shared with the others:

    {prefix}{window}    hash: [writer, *entry] as JSON -> counted by that writer in that window

Each writes its own fields as totals, never as increments: an exchange that broke may be repeated as it is. It reads all of them, and what
has grown since the last time is news. Windows are named by the clock that all share; how long ago something was counted, each measures by
its own, whatever becomes of any clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import EXCHANGE_S
from twostep.cluster.hashes import hashes_in, read_hashes
from twostep.cluster.shared_clock import SharedClock

log = logging.getLogger(__name__)

_TIMEOUT_S = EXCHANGE_S
# No process counts more in a window: a field that says so is damaged.
_MAX_TOTAL = 1 << 50
# Of one writer in one window.
_MAX_OWN = 1 << 17

Entry = tuple[Any, ...]


class RedisExchange:
    """Exchanges every `every_s` until cancelled. A subclass says what. `lost` and `found` are logged when Redis goes and when it is back;
    empty: another exchange says so."""

    every_s = 1.0
    lost = found = ""
    connected = True  # False while Redis does not answer

    async def run(self) -> None:
        while True:
            await self.exchange()
            end_if_cancelled()
            await asyncio.sleep(self.every_s)

    async def exchange(self) -> None:
        """Exchanges once; never raises for what Redis does."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._exchange()
        except (RedisError, OSError, TimeoutError) as error:
            if self.connected and self.lost:
                log.warning(self.lost, str(error) or type(error).__name__)
            self.connected = False
            return
        if not self.connected and self.found:
            log.warning(self.found)
        self.connected = True

    async def _exchange(self) -> None:
        """Raises RedisError, OSError."""
        raise NotImplementedError


class Use(NamedTuple):
    """`age_s`: that it was so long ago at least."""

    window: int
    entry: Entry
    amount: int
    age_s: float = 0.0


class _Heard(NamedTuple):
    """A field as it was read. An `entry` of None: it is this writer's own, or makes no sense."""

    value: bytes
    entry: Entry | None
    total: int


class UsageLedger:
    """Pure: this writer's totals by window, and how much of the others' has been heard. `read_entry` makes an entry of a field's values;
    it raises ValueError or TypeError."""

    def __init__(self, writer: str, read_entry: Callable[..., Entry], *, max_own: int = _MAX_OWN) -> None:
        self._writer, self._read_entry, self.max_own = writer, read_entry, max_own
        self._own: dict[int, Counter[Entry]] = {}
        self._unsent: dict[int, set[Entry]] = {}
        self._heard: dict[int, dict[bytes, _Heard]] = {}

    def count(self, entry: Entry, amount: int, window: int) -> None:
        own = self._own.setdefault(window, Counter())
        if entry in own or len(own) < self.max_own:
            own[entry] += amount
            self._unsent.setdefault(window, set()).add(entry)

    def forget(self, window: int) -> None:
        """Drops a window that is not read any more."""
        for book in (self._own, self._unsent, self._heard):
            book.pop(window, None)

    def field(self, entry: Entry) -> str:
        """Returns what this writer's totals of it are called."""
        return json.dumps([self._writer, *entry])

    def unsent(self) -> Mapping[int, Mapping[Entry, int]]:
        """Returns totals that have changed since they were last written."""
        return {window: {entry: self._own[window][entry] for entry in entries} for window, entries in self._unsent.items() if entries}

    def mark_sent(self, totals: Mapping[int, Mapping[Entry, int]]) -> None:
        """Notes that those have arrived."""
        for window, fields in totals.items():
            unsent = self._unsent.get(window, set())
            unsent -= {entry for entry, total in fields.items() if self._own[window][entry] == total}

    def hear(self, window: int, fields: Mapping[bytes, bytes]) -> list[Use]:
        """Returns what others have counted since the last time. Fields that make no sense are passed over. Most are as they were: those
        cost a comparison, and a name is parsed once."""
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

    def all_of(self, firsts: Collection[Any]) -> list[Use]:
        """Returns what is known, on all processes, of entries that begin with one of these."""
        own = [Use(window, entry, total) for window, totals in self._own.items() for entry, total in totals.items()]
        heard = [Use(window, h.entry, h.total) for window, fields in self._heard.items() for h in fields.values() if h.entry is not None]
        return [use for use in own + heard if use.amount and use.entry[0] in firsts]

    def _entry(self, field: bytes) -> Entry | None:
        try:
            writer, *values = json.loads(field)
            return None if writer == self._writer else self._read_entry(*values)
        except (ValueError, TypeError, RecursionError):
            return None


class SharedTotals:
    """A ledger, and `num_windows` of its windows in Redis. Of all writers' fields in one of them `max_fields` are read."""

    def __init__(
        self, ledger: UsageLedger, prefix: str, clock: SharedClock, *, window_s: float, num_windows: int, max_fields: int = 1 << 20
    ) -> None:
        self.ledger = ledger
        self._prefix, self._clock, self._window_s, self._num_windows = prefix, clock, window_s, num_windows
        self._max_fields = max_fields
        # When each was the one of its time, or was heard of, by this process's own clock: the shared one may be set to any time and back.
        self._last_seen: dict[int, float] = {}
        # Used while the shared time is not known yet.
        self._undated: Counter[Entry] = Counter()
        # Who hears nothing for hours has hours to hear of.
        self.read_all = True

    def count(self, entry: Entry, amount: int) -> None:
        """Returns at once."""
        if not self._clock.known:
            if entry in self._undated or len(self._undated) < self.ledger.max_own:
                self._undated[entry] += amount
            return
        window = self._window()
        self._last_seen[window] = self._clock.monotonic()
        self.ledger.count(entry, amount, window)

    def all_of(self, firsts: Collection[Any]) -> list[Use]:
        """Returns what is known, on all processes, of entries that begin with one of these."""
        undated = [Use(0, entry, amount) for entry, amount in self._undated.items() if entry[0] in firsts]
        return undated + self._aged(self.ledger.all_of(firsts))

    async def exchange(self, redis: Redis) -> list[Use]:
        """Returns what is news of the others. Raises RedisError, OSError."""
        if not self._clock.known:
            await self._clock.ask(redis)
        for entry, amount in self._undated.items():
            self.count(entry, amount)
        self._undated.clear()
        read_all, self.read_all = self.read_all, True
        totals, windows = self.ledger.unsent(), self._to_read(read_all=read_all)
        pipeline = redis.pipeline(transaction=False)
        pipeline.time()
        for window, fields in totals.items():
            mapping: Mapping[Any, Any] = {self.ledger.field(entry): str(total) for entry, total in fields.items()}
            pipeline.hset(f"{self._prefix}{window}", mapping=mapping)
            pipeline.expire(f"{self._prefix}{window}", int((self._num_windows + 1) * self._window_s))
        read_hashes(pipeline, [f"{self._prefix}{window}" for window in windows], max_fields=self._max_fields)
        replies = await pipeline.execute()
        self._clock.set(replies[0])
        self.ledger.mark_sent(totals)
        self.read_all = False
        fields_of = zip(windows, hashes_in(replies[-1]), strict=True)
        return self._aged([use for window, fields in fields_of for use in self.ledger.hear(window, fields)])

    def _to_read(self, *, read_all: bool) -> Sequence[int]:
        """Returns the windows to read. Others write into a window for a little while after it is over; and the shared clock may just have
        been set."""
        window, now = self._window(), self._clock.monotonic()
        self._last_seen[window] = now
        for old in [each for each, seen in self._last_seen.items() if now - seen > self._num_windows * self._window_s]:
            del self._last_seen[old]
            self.ledger.forget(old)
        if read_all:
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
