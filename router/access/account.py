"""Who calls, and one API key's account: what was used of its limits, here and on other routers, and what is left.

Limits of a minute are buckets that hold a minute's worth and fill evenly: GCRA, the generic cell rate algorithm (ITU-T I.371, annex A),
whose whole state is one instant, the one at which the bucket will be full again. So in any time of T seconds a key gets at most
limit * (1 + T / 60). Tokens of answers are known only afterwards and are taken in any case: the bucket goes into debt, and nothing is given
until that is paid. Tokens of a day add up to the limit at most in any 24 hours; debts aside.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from router.request.targets import Reason, Refused
from twostep.errors import InvalidRequest, PermissionDenied, TwostepError
from twostep.keys.api_keys import Key
from twostep.request_class import RequestClass
from twostep.rpc.v1 import inference_pb2

MINUTE_S = 60.0
HOUR_S = 3600
DAY_HOURS = 24
DAY_S = 86_400.0
STEP_S = 600.0


class Bucket:
    """`amount`: what it holds, and what flows in again each minute; 0: there is no limit. Times are seconds of any one clock."""

    __slots__ = ("_full_at", "amount")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self._full_at = -math.inf

    def left(self, now: float) -> float:
        """Returns what it would give now; below 0: what is owed."""
        return self.amount - max(0.0, self._full_at - now) * self.amount / MINUTE_S

    def wait_s(self, wanted: float, now: float) -> float:
        """Returns the seconds until it gives so much, 0: now. Infinite for more than it ever holds."""
        if wanted > self.amount:
            return math.inf
        return max(0.0, max(self._full_at, now) + (wanted - self.amount) * MINUTE_S / self.amount - now)

    def take(self, taken: float, now: float) -> None:
        """Returns whether there is so much or not. A negative amount goes back; it never holds more than `amount`."""
        if self.amount:
            self._full_at = max(self._full_at, now) + taken * MINUTE_S / self.amount

    def resized(self, amount: int, now: float) -> Bucket:
        """Returns one of another size, with as much taken out of it and not yet flown in again."""
        other = Bucket(amount)
        other.take(self.amount - self.left(now), now)
        return other


class Day:
    """Counts what was used in the last 24 hours, in steps of ten minutes. Times are seconds of a clock that is never set."""

    __slots__ = ("_steps", "amount")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self._steps: dict[int, float] = {}

    def used(self, now: float) -> float:
        """Returns what was used in the 24 hours until now, and at most ten minutes before them."""
        over = math.floor((now - DAY_S) / STEP_S)
        if any(step < over for step in self._steps):
            self._steps = {step: used for step, used in self._steps.items() if step >= over}
        return sum(self._steps.values())

    def take(self, taken: float, at: float) -> None:
        """Counts an amount as used. A negative one goes back, and is taken off what was used last until then: nothing is owed to anybody
        for it later."""
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
        """Returns the seconds until enough of what was used is a day ago, 0: now. Infinite for more than a day's worth."""
        if wanted > self.amount:
            return math.inf
        left, then = self.left(now), now
        for step in sorted(self._steps):
            if left >= wanted:
                break
            left += self._steps[step]
            then = (step + 1) * STEP_S + DAY_S
        return max(0.0, then - now)


def duration(seconds: float) -> str:
    """Writes seconds as OpenAI's x-ratelimit-reset headers write it: 12ms, 1.5s, 6m0s, 2h0m0s."""
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


# Of calls that are in each other's way: their ends are not known.
_CONCURRENCY_RETRY_S = 1.0

OnUse = Callable[[str, str, int], None]


@dataclass(slots=True)
class Spending:
    """Holds what one answer costs: its tokens, and whether a worker has taken the prompt, as whoever serves it says."""

    num_output: int = 0
    placed: bool = False


class Account:
    """One key, and what was used of its limits: here, and by `elsewhere` on other routers. `on_use(key id, "requests" or "tokens", how
    many)` hears of what is used here, also of what is given back. `monotonic` is a clock in seconds that is never set."""

    def __init__(self, key: Key, on_use: OnUse = lambda *_: None, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.key, self._on_use, self._monotonic = key, on_use, monotonic
        self.num_calls = 0
        # Answers under way, and the error that ended each answer that was ended.
        self._answering: dict[asyncio.Task[object], TwostepError | None] = {}
        limits = key.limits
        self._requests, self._tokens = Bucket(limits.requests_per_minute), Bucket(limits.tokens_per_minute)
        # Counted in any case: a limit may come later in the day.
        self._day = Day(limits.tokens_per_day)

    def change(self, key: Key) -> None:
        """Takes other limits, and keeps what was used under the old ones."""
        limits, now = key.limits, self._monotonic()
        self._requests = self._requests.resized(limits.requests_per_minute, now)
        self._tokens = self._tokens.resized(limits.tokens_per_minute, now)
        self._day.amount = limits.tokens_per_day
        self.key = key

    # ---- what is used ----------------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Counts one call as under way until the context ends. Raises Refused."""
        most = self.key.limits.max_concurrent
        if most and self.num_calls >= most:
            raise Refused(
                Reason.QUOTA,
                f"this API key has {self.num_calls} requests under way on this router and may have {most}; wait for one to end, or ask "
                "whoever runs this for a higher max_concurrent",
                retry_after_s=_CONCURRENCY_RETRY_S,
            )
        now = self._monotonic()
        _check({"requests_per_minute": self._requests}, 1, now, "this request")
        self._requests.take(1, now)
        self._on_use(self.key.id, "requests", 1)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Lets `end` end what the present task does within the context. Raises what `end` was given."""
        task = asyncio.current_task()
        assert task is not None, "every answer is given in a task"
        self._answering[task] = None
        try:
            yield
        except asyncio.CancelledError:
            why = self._answering[task]
            if why is None or task.uncancel() > 0:
                raise
            raise why from None
        finally:
            del self._answering[task]

    def end(self, why: TwostepError) -> None:
        """Ends the answers under way, because the key is of no use any more."""
        for task, before in self._answering.items():
            if before is None:
                self._answering[task] = why
                task.cancel()

    @contextmanager
    def spending(self, num_prompt: int) -> Iterator[Spending]:
        """Counts the tokens of one answer, as a context around it. Raises Refused, or InvalidRequest for a prompt that the key's limits
        never have room for. A `num_prompt` of 0: the prompt was paid for with another answer to it, and an answer is refused only if there
        is nothing left at all."""
        self.check_tokens(max(1, num_prompt), f"a prompt of {num_prompt} tokens")
        self.take_tokens(num_prompt)
        spending = Spending()
        try:
            yield spending
        finally:
            self.take_tokens(spending.num_output - (0 if spending.placed else num_prompt))

    def check_tokens(self, wanted: int, what: str) -> None:
        """Raises Refused, InvalidRequest."""
        _check({"tokens_per_minute": self._tokens, "tokens_per_day": self._day}, wanted, self._monotonic(), what)

    def take_tokens(self, num_tokens: int) -> None:
        """Returns whether there are so many or not."""
        if num_tokens:
            self.elsewhere_tokens(num_tokens)
            self.elsewhere_day(num_tokens)
            self._on_use(self.key.id, "tokens", num_tokens)

    def elsewhere_requests(self, num_requests: int) -> None:
        self._requests.take(num_requests, self._monotonic())

    def elsewhere_tokens(self, num_tokens: int) -> None:
        """Takes them off the minute's limit."""
        self._tokens.take(num_tokens, self._monotonic())

    def elsewhere_day(self, num_tokens: int, age_s: float = 0.0) -> None:
        """Takes them off the day's limit, so long ago."""
        self._day.take(num_tokens, self._monotonic() - age_s)

    # ---- what is left ----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Returns what an operator is shown. Of the last minute, it is what has not been refilled yet."""
        now = self._monotonic()
        return {
            "requests_under_way": self.num_calls,
            "requests_this_minute": round(self._requests.amount - self._requests.left(now)),
            "tokens_this_minute": round(self._tokens.amount - self._tokens.left(now)),
            "tokens_this_day": round(self._day.used(now)),
        }

    def headers(self) -> dict[str, str]:
        """Returns OpenAI's x-ratelimit-* headers of those limits that there are, and the same for the day."""
        now = self._monotonic()
        headers: dict[str, str] = {}
        for name, limit in (("requests", self._requests), ("tokens", self._tokens), ("tokens-day", self._day)):
            if limit.amount:
                headers |= {
                    f"x-ratelimit-limit-{name}": str(limit.amount),
                    f"x-ratelimit-remaining-{name}": str(max(0, math.floor(limit.left(now) + 1e-6))),
                    f"x-ratelimit-reset-{name}": duration(limit.wait_s(limit.amount, now)),
                }
        return headers


def _check(limits: Mapping[str, Bucket | Day], wanted: int, now: float, what: str) -> None:
    """Raises what the limit that keeps a request for longest says: Refused, or InvalidRequest where waiting would not help."""
    waits = {name: limit.wait_s(wanted, now) for name, limit in limits.items() if limit.amount}
    short = max(waits, key=lambda name: waits[name], default="")
    # Who waited as long as was said must not be refused for the rounding of it.
    if not short or waits[short] <= 1e-6:
        return
    amount, wait_s = limits[short].amount, waits[short]
    if math.isinf(wait_s):
        raise InvalidRequest(
            f"{what} is more than this API key's {short} of {amount} ever has room for; send less, or ask whoever runs this for more"
        )
    raise Refused(
        Reason.QUOTA,
        f"rate limit reached: this API key's {short} of {amount} have no room for {what} now; try again in {duration(wait_s)}, or ask "
        "whoever runs this for more",
        retry_after_s=wait_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`tenant`: whose share of the system the caller uses. None: the request may say; if it does not, `fallback`. Without
    an `account` nothing is counted and everything is allowed. `prompt_paid`: another answer to the same prompt pays for it. `address`:
    where the call comes from, without its port; empty: from this router itself."""

    tenant: str | None = None
    fallback: str = ""
    account: Account | None = None
    prompt_paid: bool = False
    address: str = ""

    @property
    def caller(self) -> str:
        """Who is to have no more than its part of what the router holds: a key, or an address where no keys are asked for; a tenant's name
        costs nothing there."""
        return self.key_id or self.address

    @property
    def share(self) -> str:
        """Whose turn it is where callers wait for the router itself: a tenant that a key vouches for, else the caller."""
        return self.caller if self.account is None else self.tenant or self.fallback

    @property
    def key_id(self) -> str:
        """Empty: no key was shown, because none is asked for."""
        return "" if self.account is None else self.account.key.id

    def again(self) -> Identity:
        """Returns the same caller, for a further answer to a prompt."""
        return self if self.prompt_paid or self.account is None else replace(self, prompt_paid=True)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Counts one call of a client that costs something as under way, as a context around it, whatever number of answers it asks for.
        Raises Refused."""
        if self.account is None:
            yield
            return
        with self.account.calling():
            yield

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Gives a context around one answer, which ends as soon as the key is disabled, revoked or expired. Raises Unauthenticated."""
        if self.account is None:
            yield
            return
        with self.account.answering():
            yield

    def check_solvent(self) -> None:
        """Raises Refused for a key that has no token left. Called before a prompt is even tokenized."""
        if self.account is not None:
            self.account.check_tokens(1, "any prompt")

    @contextmanager
    def spending(self, num_prompt: int) -> Iterator[Spending]:
        """Counts the tokens of one answer to a prompt of so many tokens, as a context around the answer. Raises Refused, InvalidRequest."""
        if self.account is None:
            yield Spending()
            return
        with self.account.spending(0 if self.prompt_paid else num_prompt) as spending:
            yield spending

    def complete(self, request: inference_pb2.GenerateRequest) -> None:
        """Returns what the key says and the request leaves open."""
        if self.account is not None and not request.request_class and self.account.key.most_urgent is RequestClass.BATCH:
            request.request_class = inference_pb2.REQUEST_CLASS_BATCH

    def check_class(self, wanted: RequestClass) -> None:
        """Raises PermissionDenied."""
        if self.account is None:
            return
        most_urgent = self.account.key.most_urgent
        if wanted < most_urgent:
            raise PermissionDenied(
                f"this API key's requests may be {most_urgent.name.lower()} at best, and this one is {wanted.name.lower()}; ask for less"
            )

    def headers(self) -> dict[str, str]:
        """Tells what is left of the key's limits."""
        return {} if self.account is None else self.account.headers()


NOBODY = Identity()
