"""How much a worker does a second, over the last seconds: what its heartbeats tell of rates."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0
# Heartbeats come once a second, a few more where a role changes: closer ones tell nothing new.
_LEAST_GAP_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Since some moment: prompt tokens looked up in the prefix cache and those found there, KV bytes taken from prefill workers, tokens
    computed."""

    queried_tokens: float = 0
    hit_tokens: float = 0
    fetched_bytes: float = 0
    tokens: float = 0

    def since(self, before: Counts) -> Counts:
        """Returns what was counted since `before`. A number below the one before was reset, and counts from 0."""
        return Counts(
            queried_tokens=_more(before.queried_tokens, self.queried_tokens),
            hit_tokens=_more(before.hit_tokens, self.hit_tokens),
            fetched_bytes=_more(before.fetched_bytes, self.fetched_bytes),
            tokens=_more(before.tokens, self.tokens),
        )

    def plus(self, other: Counts) -> Counts:
        return Counts(
            queried_tokens=self.queried_tokens + other.queried_tokens,
            hit_tokens=self.hit_tokens + other.hit_tokens,
            fetched_bytes=self.fetched_bytes + other.fetched_bytes,
            tokens=self.tokens + other.tokens,
        )

    def per_second(self, seconds: float) -> Counts:
        return Counts(
            queried_tokens=self.queried_tokens / seconds,
            hit_tokens=self.hit_tokens / seconds,
            fetched_bytes=self.fetched_bytes / seconds,
            tokens=self.tokens / seconds,
        )


class RateMeter:
    """observe() with every heartbeat. Instants are seconds of one clock that does not go back."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # Sums that never fall, oldest first: one that is as old as the window, or older, and those since.
        self._seen: deque[tuple[float, Counts]] = deque()
        self._last: Counts | None = None

    def observe(self, counts: Counts, now: float) -> Counts:
        """Returns the counts a second, over the window or as much of it as has passed. Zeros at first."""
        if self._last is None:
            self._last = counts
            self._seen.append((now, Counts()))
            return Counts()
        total = self._seen[-1][1].plus(counts.since(self._last))
        self._last = counts
        if len(self._seen) > 1 and now - self._seen[-2][0] < _LEAST_GAP_S:
            self._seen[-1] = (now, total)
        else:
            self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        since, before = self._seen[0]
        elapsed = now - since
        return total.since(before).per_second(elapsed) if elapsed > 0 else Counts()


def _more(before: float, now: float) -> float:
    return now - before if now >= before else now
