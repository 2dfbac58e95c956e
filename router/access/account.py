"""One API key's account: what was used of its limits, here and on other routers, and what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from router.access.limits import Bucket, Day, Shortage, duration, worst
from router.request.targets import Reason, Refused
from twostep.errors import InvalidRequest
from twostep.keys.api_keys import Key

# Of calls that are in each other's way: their ends are not known.
_CONCURRENCY_RETRY_S = 1.0

OnUse = Callable[[str, str, int], None]


@dataclass(slots=True)
class Spending:
    """Of one answer. Whoever serves it says how many tokens the answer has, and whether a worker has taken the prompt."""

    num_output: int = 0
    placed: bool = False


class Account:
    """One key, and what was used of its limits: here, and by `elsewhere` on other routers. `on_use(key id, "requests" or "tokens", how
    many)` hears of what is used here, also of what is given back. `monotonic` is a clock in seconds that is never set."""

    def __init__(
        self,
        key: Key,
        on_use: OnUse = lambda *_: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.num_calls = 0
        self._on_use = on_use
        self._monotonic = monotonic
        limits = key.limits
        self._requests = Bucket(limits.requests_per_minute) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute) if limits.tokens_per_minute else None
        # Counted in any case: a limit may come later in the day.
        self._day = Day(limits.tokens_per_day)

    def change(self, key: Key) -> None:
        """Other limits, with what was used under the old ones."""
        limits, now = key.limits, self._monotonic()
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)
        self._day.amount = limits.tokens_per_day
        self.key = key

    # ---- what is used ----------------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around one call. Raises Refused."""
        most = self.key.limits.max_concurrent
        if most and self.num_calls >= most:
            raise Refused(
                Reason.QUOTA,
                f"this API key has {self.num_calls} requests under way on this router and may have {most}; wait for one to end, or ask "
                "whoever runs this for a higher max_concurrent",
                retry_after_s=_CONCURRENCY_RETRY_S,
            )
        if self._requests is not None:
            now = self._monotonic()
            _refuse([Shortage("requests_per_minute", self._requests.amount, self._requests.wait_s(1, now))], "this request")
            self._requests.take(1, now)
        self._on_use(self.key.id, "requests", 1)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    @contextmanager
    def spending(self, num_prompt: int) -> Iterator[Spending]:
        """Around one answer. Raises Refused, or InvalidRequest for a prompt that the key's limits never have room for. A `num_prompt` of 0:
        the prompt was paid for with another answer to it, and an answer is refused only if there is nothing left at all."""
        self.check_tokens(max(1, num_prompt), f"a prompt of {num_prompt} tokens")
        self.take_tokens(num_prompt)
        spending = Spending()
        try:
            yield spending
        finally:
            self.take_tokens(spending.num_output - (0 if spending.placed else num_prompt))

    def check_tokens(self, wanted: int, what: str) -> None:
        """Raises Refused, InvalidRequest."""
        now = self._monotonic()
        shortages = []
        if self._tokens is not None:
            shortages.append(Shortage("tokens_per_minute", self._tokens.amount, self._tokens.wait_s(wanted, now)))
        if self._day.amount:
            shortages.append(Shortage("tokens_per_day", self._day.amount, self._day.wait_s(wanted, now)))
        _refuse(shortages, what)

    def take_tokens(self, num_tokens: int) -> None:
        """Whether there are so many or not."""
        if num_tokens:
            self.elsewhere_tokens(num_tokens)
            self.elsewhere_day(num_tokens)
            self._on_use(self.key.id, "tokens", num_tokens)

    def elsewhere_requests(self, num_requests: int) -> None:
        if self._requests is not None:
            self._requests.take(num_requests, self._monotonic())

    def elsewhere_tokens(self, num_tokens: int) -> None:
        """Of the minute's limit."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._monotonic())

    def elsewhere_day(self, num_tokens: int, age_s: float = 0.0) -> None:
        """Of the day's limit, so long ago."""
        self._day.take(num_tokens, self._monotonic() - age_s)

    # ---- what is left ----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """For operators. Of the last minute, what has not flown in again."""
        now = self._monotonic()
        return {
            "requests_under_way": self.num_calls,
            "requests_this_minute": 0 if self._requests is None else round(self._requests.amount - self._requests.left(now)),
            "tokens_this_minute": 0 if self._tokens is None else round(self._tokens.amount - self._tokens.left(now)),
            "tokens_this_day": round(self._day.used(now)),
        }

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* of those limits that there are, and the same for the day."""
        now = self._monotonic()
        told: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told |= _told(name, bucket.amount, bucket.left(now), bucket.full_in_s(now))
        if self._day.amount:
            day = self._day
            told |= _told("tokens-day", day.amount, day.left(now), day.wait_s(day.amount, now))
        return told


def _told(name: str, amount: int, left: float, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(amount),
        f"x-ratelimit-remaining-{name}": str(max(0, math.floor(left + 1e-6))),
        f"x-ratelimit-reset-{name}": duration(reset_s),
    }


def _resized(bucket: Bucket | None, amount: int, now: float) -> Bucket | None:
    if not amount:
        return None
    if bucket is None:
        return Bucket(amount)
    return bucket if bucket.amount == amount else bucket.resized(amount, now)


def _refuse(shortages: list[Shortage], what: str) -> None:
    short = worst(shortages)
    if short is None:
        return
    if math.isinf(short.wait_s):
        raise InvalidRequest(
            f"{what} is more than this API key's {short.limit} of {short.amount} ever has room for; send less, or ask "
            "whoever runs this for more"
        )
    raise Refused(
        Reason.QUOTA,
        f"rate limit reached: this API key's {short.limit} of {short.amount} have no room for {what} now; try again in "
        f"{duration(short.wait_s)}, or ask whoever runs this for more",
        retry_after_s=short.wait_s,
    )
