"""How much a key has used, and whether there is more for it: pure, every instant is an argument.

Limits of a minute are buckets that hold a minute's worth and fill evenly: GCRA, the generic cell rate algorithm (ITU-T I.371, annex A),
whose whole state is one instant, the one at which the bucket will be full again. So in any time of T seconds a key gets at most
limit * (1 + T / 60). Tokens of answers are known only afterwards and are taken in any case: the bucket goes into debt, and nothing is given
until that is paid. Tokens of a day add up to the limit at most in any 24 hours; debts aside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE_S = 60.0
HOUR_S = 3600
DAY_HOURS = 24
DAY_S = 86_400.0
STEP_S = 600.0


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
    """What was used in the last 24 hours, in steps of ten minutes. Times are seconds of a clock that is never set."""

    __slots__ = ("_steps", "amount")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self._steps: dict[int, float] = {}

    def used(self, now: float) -> float:
        """In the 24 hours until now, and at most ten minutes before them."""
        over = math.floor((now - DAY_S) / STEP_S)
        if any(step < over for step in self._steps):
            self._steps = {step: used for step, used in self._steps.items() if step >= over}
        return sum(self._steps.values())

    def take(self, taken: float, at: float) -> None:
        """A negative amount goes back, and is taken off what was used last until then: nothing is owed to anybody for it later."""
        step = math.floor(at / STEP_S)
        if taken >= 0:
            self._steps[step] = self._steps.get(step, 0.0) + taken
            return
        for each in sorted((each for each in self._steps if each <= step), reverse=True):
            back = min(-taken, self._steps[each])
            self._steps[each] -= back
            taken += back
            if taken >= 0:
                return

    def left(self, now: float) -> float:
        return self.amount - self.used(now)

    def wait_s(self, wanted: float, now: float) -> float:
        """Until enough of it is a day ago, 0: now. Infinite for more than a day's worth."""
        if wanted > self.amount:
            return math.inf
        left, then = self.left(now), now
        for step in sorted(self._steps):
            if left >= wanted:
                break
            left += self._steps[step]
            then = (step + 1) * STEP_S + DAY_S
        return max(0.0, then - now)


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
