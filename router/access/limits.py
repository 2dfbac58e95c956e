"""How much a key has used, and whether there is more for it: pure, every instant is an argument.

Limits of a minute are buckets that hold a minute's worth and fill evenly: GCRA, the generic cell rate algorithm (ITU-T I.371, annex A),
whose whole state is one instant, the one at which the bucket will be full again. So in any time of T seconds a key gets at most
limit * (1 + T / 60). Tokens of answers are known only afterwards and are taken in any case: the bucket goes into debt, and nothing is given
until that is paid. Tokens of a day are counted by the hour, and add up to the limit at most in any 24 of them; debts aside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE_S = 60.0
HOUR_S = 3600
DAY_HOURS = 24


class Bucket:
    """`amount`: what it holds, and what flows in again each minute. Times are seconds of any one clock."""

    __slots__ = ("_full_at", "amount")

    def __init__(self, amount: int) -> None:
        assert amount > 0, "a bucket that holds nothing gives nothing"
        self.amount = amount
        self._full_at = -math.inf

    def left(self, now: float) -> float:
        """What it would give now; below 0: what is owed."""
        return self.amount - max(0.0, self._full_at - now) * self.amount / MINUTE_S

    def wait_s(self, wanted: float, now: float) -> float:
        """Until it gives so much, 0: now. Infinite for more than it ever holds."""
        if wanted > self.amount:
            return math.inf
        return max(0.0, max(self._full_at, now) + (wanted - self.amount) * MINUTE_S / self.amount - now)

    def take(self, taken: float, now: float) -> None:
        """Whether there is so much or not. A negative amount goes back; it never holds more than `amount`."""
        self._full_at = max(self._full_at, now) + taken * MINUTE_S / self.amount

    def full_in_s(self, now: float) -> float:
        return max(0.0, self._full_at - now)

    def resized(self, amount: int, now: float) -> Bucket:
        """Of another size, with as much taken out of it, and not yet flown in again."""
        other = Bucket(amount)
        other.take(self.amount - self.left(now), now)
        return other


class Day:
    """What was used in each hour, as hours since 1970."""

    __slots__ = ("_hours", "amount")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self._hours: dict[int, float] = {}

    def used(self, hour: int) -> float:
        """In this hour and the 23 before it."""
        return sum(used for when, used in self._hours.items() if hour - DAY_HOURS < when <= hour)

    def take(self, taken: float, hour: int) -> None:
        self._hours[hour] = self._hours.get(hour, 0.0) + taken
        over = max(self._hours) - DAY_HOURS
        for old in [when for when in self._hours if when <= over]:
            del self._hours[old]

    def left(self, hour: int) -> float:
        return self.amount - self.used(hour)

    def wait_s(self, wanted: float, now: float) -> float:
        """`now` in Unix seconds. Until enough hours are over, 0: now. Infinite for more than a day's worth."""
        if wanted > self.amount:
            return math.inf
        hour = int(now // HOUR_S)
        for later in range(hour, hour + DAY_HOURS + 1):
            if self.left(later) >= wanted:
                return max(0.0, later * HOUR_S - now)
        raise AssertionError("after a day nothing is counted any more")


@dataclass(frozen=True, slots=True)
class Shortage:
    """`wait_s` infinite: waiting would not help. `limit`: the name of the one that is short, and `amount` how much it is."""

    limit: str
    amount: int
    wait_s: float


def worst(shortages: list[Shortage]) -> Shortage | None:
    """The one that keeps a request for longest; None: nothing does."""
    # Who waited as long as was said must not be refused for the rounding of it.
    short = [each for each in shortages if each.wait_s > 1e-6]
    return max(short, key=lambda each: each.wait_s, default=None)


def duration(seconds: float) -> str:
    """As OpenAI's x-ratelimit-reset headers write it: 12ms, 1.5s, 6m0s, 2h0m0s."""
    if seconds <= 0:
        return "0s"
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole = milliseconds / 1000
    if whole < 60:
        return f"{whole:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(math.ceil(whole), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{rest}s"
