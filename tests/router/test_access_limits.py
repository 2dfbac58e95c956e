"""The arithmetic of limits: no server, no clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.account import DAY_S, MINUTE_S, STEP_S, Account, Bucket, Day, Identity, duration
from router.access.share import key_ledger
from router.request.targets import Refused
from twostep.cluster.exchange import Use
from twostep.errors import InvalidRequest, PermissionDenied
from twostep.keys.api_keys import Key, Limits, make_key
from twostep.request_class import RequestClass

# Requests: seconds after the one before, and how much is asked for.
Asked = list[tuple[float, int]]
asked = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 40)), max_size=60)


class SimpleBucket:
    """The textbook's: a level that is brought up to date before every look."""

    def __init__(self, amount: int) -> None:
        self.amount, self.level, self.at = amount, float(amount), 0.0

    def advance(self, now: float) -> None:
        self.level = min(self.amount, self.level + (now - self.at) * self.amount / MINUTE_S)
        self.at = now


@given(st.integers(1, 100), asked, st.floats(0, 1e9))
def test_a_bucket_is_the_textbooks(amount: int, asked: Asked, start: float) -> None:
    bucket, simple, now = Bucket(amount), SimpleBucket(amount), start
    simple.at = start
    for pause, wanted in asked:
        now += pause
        simple.advance(now)
        assert bucket.left(now) == pytest.approx(simple.level, abs=1e-3)
        if abs(simple.level - wanted) < 1e-3:
            continue  # a matter of rounding
        assert (bucket.wait_s(wanted, now) == 0) == (simple.level >= wanted)
        if simple.level >= wanted:
            bucket.take(wanted, now)
            simple.level -= wanted


@given(st.integers(1, 1000), st.integers(0, 5000), st.integers(1, 1000), st.floats(0, 1e6))
def test_the_wait_is_as_long_as_it_must_be(amount: int, taken: int, wanted: int, now: float) -> None:
    bucket = Bucket(amount)
    bucket.take(taken, now)
    wait = bucket.wait_s(wanted, now)
    if wanted > amount:
        assert math.isinf(wait)
        return
    assert bucket.left(now + wait) >= wanted - 1e-3
    if wait > 1e-3:
        assert bucket.left(now + wait * 0.99) < wanted


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 3000), st.floats(0, 200))
def test_a_resized_bucket_remembers_what_was_taken(amount: int, other: int, taken: int, later: float) -> None:
    bucket = Bucket(amount)
    bucket.take(taken, 0.0)
    resized = bucket.resized(other, later)
    assert other - resized.left(later) == pytest.approx(amount - bucket.left(later), abs=1e-6)


def test_what_goes_back_is_there_again_and_nobodys_credit() -> None:
    bucket = Bucket(60)
    bucket.take(50, 0.0)
    bucket.take(-50, 1.0)
    assert (bucket.left(1.0), bucket.left(100.0)) == (60, 60)
    day = Day(100)
    day.take(60, 0.0)
    day.take(30, 5000.0)
    day.take(-50, 6000.0)
    assert day.used(6000.0) == 40
    assert day.used(DAY_S + STEP_S) == 0, "what is left is of the first"
    day.take(-50, DAY_S + 6000.0)
    assert day.left(DAY_S + 6000.0) == 100


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30 * 3600), st.integers(1, 30), st.integers(0, 10)), max_size=50))
def test_no_twenty_four_hours_get_more_than_a_day(amount: int, asked: list[tuple[float, int, int]]) -> None:
    day, given, now = Day(amount), [], 123_456.0
    for pause, wanted, back in asked:
        now += pause
        wait = day.wait_s(wanted, now)
        if wait == 0:
            day.take(wanted, now)
            day.take(-min(back, wanted), now)
            given.append((now, wanted - min(back, wanted)))
        elif not math.isinf(wait):
            assert sum(n for when, n in given if now - DAY_S - STEP_S <= when) + wanted > amount, "only for what was used"
            assert day.left(now + wait - 1.0) < wanted
            assert day.left(now + wait) >= wanted
            now += wait
    for begin, _ in given:
        assert sum(n for when, n in given if begin <= when < begin + DAY_S) <= amount


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0s"), (0.0121, "13ms"), (0.9995, "1s"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"), (7200, "2h0m0s")],
)
def test_durations_look_like_openais(seconds: float, told: str) -> None:
    assert duration(seconds) == told


# ---- accounts ---------------------------------------------------------------------------------------------------------------


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def account(**limits: int) -> tuple[Account, Clock]:
    clock = Clock()
    return Account(make_key(limits=Limits(**limits))[1], monotonic=clock), clock


def test_prompts_are_taken_first_and_answers_at_the_end() -> None:
    spender, clock = account(tokens_per_minute=100)
    with spender.spending(60) as spending:
        assert spender.usage()["tokens_this_minute"] == 60
        with pytest.raises(Refused, match="tokens_per_minute") as refused, spender.spending(50):
            pass
        assert refused.value.retry_after_s == pytest.approx(6.0)
        spending.placed, spending.num_output = True, 70
    assert spender.usage()["tokens_this_minute"] == 130, "an answer is paid for even if there was not enough"
    assert spender.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 18.6001
    with spender.spending(1):
        pass


def test_a_prompt_that_no_worker_saw_costs_nothing() -> None:
    spender, _ = account(tokens_per_minute=100, tokens_per_day=1000)
    with pytest.raises(ZeroDivisionError), spender.spending(90):
        raise ZeroDivisionError
    assert not any(spender.usage().values())
    for limits in ({"tokens_per_minute": 100}, {"tokens_per_day": 100}):
        # A request that a limit never has room for is not worth repeating.
        with pytest.raises(InvalidRequest), account(**limits)[0].spending(101):
            pass


def test_requests_and_calls_at_once_are_bounded() -> None:
    spender, clock = account(requests_per_minute=3, max_concurrent=1)
    with spender.calling(), pytest.raises(Refused), spender.calling():
        pass
    for _ in range(2):
        with spender.calling():
            pass
    with pytest.raises(Refused, match="requests_per_minute") as refused, spender.calling():
        pass
    assert refused.value.retry_after_s == pytest.approx(20.0)
    assert spender.headers() == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 20.0
    with spender.calling():
        pass


def test_new_limits_do_not_forget_what_was_used() -> None:
    spender, _ = account(tokens_per_minute=100)
    with spender.spending(80) as spending:
        spending.placed = True
    changed = Key(id=spender.key.id, hash=spender.key.hash, limits=Limits(tokens_per_minute=200, tokens_per_day=150))
    spender.change(changed)
    assert spender.headers()["x-ratelimit-remaining-tokens"] == "120"
    assert spender.headers()["x-ratelimit-remaining-tokens-day"] == "70"


def test_further_answers_to_a_prompt_do_not_pay_for_it() -> None:
    spender, _ = account(tokens_per_minute=100)
    identity = Identity(tenant="a", account=spender)
    for each in (identity, identity.again(), identity.again().again()):
        with each.spending(40) as spending:
            spending.placed, spending.num_output = True, 5
    assert spender.usage()["tokens_this_minute"] == 55


def test_keys_have_a_most_urgent_class() -> None:
    identity = Identity(account=Account(make_key(most_urgent=RequestClass.STANDARD)[1]))
    identity.check_class(RequestClass.BATCH)
    identity.check_class(RequestClass.STANDARD)
    with pytest.raises(PermissionDenied, match="standard"):
        identity.check_class(RequestClass.INTERACTIVE)


# ---- shared by replicas ------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["a", "b"]), st.sampled_from(["requests", "tokens"]), st.integers(-5, 50), st.booleans()
        ),
        max_size=40,
    )
)
def test_every_ledger_hears_what_the_others_counted_once(steps: list[tuple[int, str, str, int, bool]]) -> None:
    """Over a store that loses the answer to every exchange whose flag says so."""
    ledgers = [key_ledger(f"router{i}") for i in range(3)]
    store: dict[bytes, bytes] = {}
    heard: list[list[Use]] = [[], [], []]
    counted: list[tuple[int, str, str, int]] = []

    def exchange(i: int, *, lost: bool) -> None:
        totals = ledgers[i].unsent()
        for fields in totals.values():
            store.update({ledgers[i].field(entry).encode(): str(total).encode() for entry, total in fields.items()})
        if not lost:
            ledgers[i].mark_sent(totals)
            heard[i].extend(ledgers[i].hear(7, store))

    for i, key, kind, amount, lost in steps:
        ledgers[i].count((key, kind), amount, 7)
        counted.append((i, key, kind, amount))
        exchange(i, lost=lost)
    for i in (0, 1, 2, 0, 1, 2):
        exchange(i, lost=False)
    for i in range(3):
        for entry in {(key, kind) for _, key, kind, _ in counted}:
            elsewhere = sum(amount for who, *whose, amount in counted if who != i and tuple(whose) == entry)
            assert sum(use.amount for use in heard[i] if use.entry == entry) == elsewhere
            everywhere = sum(amount for _, *whose, amount in counted if tuple(whose) == entry)
            assert sum(use.amount for use in ledgers[i].all_of({entry[0]}) if use.entry == entry) == everywhere
        assert not ledgers[i].unsent()


def test_a_damaged_store_is_passed_over() -> None:
    fields = {b"": b"1", b"[]": b"1", b'["x","k","tokens"]': b"many", b'["x","k","spoons"]': b"1", b'["y","k","tokens"]': b"9" * 40}
    ledger = key_ledger("me")
    assert ledger.hear(1, {**fields, b'["z","k","tokens"]': b"3"}) == [Use(1, ("k", "tokens"), 3)]
    assert ledger.hear(1, {**fields, b'["x","k","tokens"]': b"2"}) == [Use(1, ("k", "tokens"), 2)], "what is mended counts"
    ledger.count(("k", "tokens"), 1, 5)
    ledger.forget(5)
    assert not ledger.unsent()
