"""What tenants use, shared between routers through a real Redis."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import Cluster, RedisServer, until

from router.server import Router
from router.waiting.quota_share import WINDOW_S, QuotaShare, Share, UsageBook, usage_key
from twostep.cluster.connection import connect
from twostep.cluster.shared_clock import SharedClock
from twostep.request_class import RequestClass

STANDARD, BATCH = RequestClass.STANDARD, RequestClass.BATCH

Make = Callable[[str], tuple[QuotaShare, "Counter[Share]"]]


class Windows(SharedClock):
    """Shows the time of a window that tests choose, whatever Redis says."""

    def __init__(self) -> None:
        super().__init__()
        self.window: int | None = None

    def unix(self) -> float:
        return super().unix() if self.window is None else float(self.window * WINDOW_S)


@pytest.fixture
async def make(redis_server: RedisServer, clock: Windows) -> AsyncIterator[Make]:
    """A router's share by name, and what it has heard."""
    clients: list[redis.asyncio.Redis] = []

    def made(router_id: str) -> tuple[QuotaShare, Counter[Share]]:
        clients.append(connect(redis_server.url))
        heard: Counter[Share] = Counter()

        def on_news(tokens: Mapping[Share, int]) -> None:
            for share, count in tokens.items():
                heard[share] += count

        return QuotaShare(clients[-1], router_id, on_news, clock), heard

    yield made
    for client in clients:
        await client.aclose()


@pytest.fixture
def clock() -> Windows:
    return Windows()


@pytest.fixture
def window(clock: Windows) -> Windows:
    clock.window = 1000
    return clock


async def test_each_hears_what_the_others_gave_once(make: Make, window: Windows, redis_server: RedisServer) -> None:
    (one, heard_one), (two, heard_two), (three, heard_three) = make("one"), make("two"), make("three")
    one.charge(STANDARD, "alice", 100)
    one.charge(BATCH, "alice", 7)
    two.charge(STANDARD, "alice", 30)
    for _ in range(3):
        for share in (one, two, three):
            await share.exchange()
    assert heard_one == {(STANDARD, "alice"): 30}
    assert heard_two == {(STANDARD, "alice"): 100, (BATCH, "alice"): 7}
    assert heard_three == {(STANDARD, "alice"): 130, (BATCH, "alice"): 7}
    one.charge(STANDARD, "alice", -40)
    window.window += 1
    one.charge(STANDARD, "bob", 5)
    for share in (one, two):
        await share.exchange()
    assert heard_two == {(STANDARD, "alice"): 60, (BATCH, "alice"): 7, (STANDARD, "bob"): 5}, "corrections, and two windows at once"
    client = connect(redis_server.url)
    assert 0 < await client.ttl(usage_key(1000)) <= 30, "nothing stays"
    await client.aclose()


async def test_without_redis_nothing_is_heard_and_nothing_breaks(
    make: Make, window: Windows, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    (one, _), (two, heard) = make("one"), make("two")
    one.charge(STANDARD, "alice", 100)
    redis_server.kill()
    for _ in range(3):
        await one.exchange()
        await two.exchange()
    assert (one.connected, heard) == (False, {})
    assert sum("fair by what it serves itself" in r.getMessage() for r in caplog.records) == 2, "said once by each"
    redis_server.start()
    one.charge(STANDARD, "alice", 11)
    await one.exchange()
    await two.exchange()
    assert one.connected
    assert heard == {(STANDARD, "alice"): 111}, "what was given meanwhile is not lost"


async def test_what_makes_no_sense_is_passed_over(make: Make, window: Windows, redis_server: RedisServer) -> None:
    share, heard = make("one")
    client = connect(redis_server.url)
    fields: dict[Any, Any] = {"nonsense": "1", json.dumps(["x", 9, "a"]): "1", json.dumps(["x", 1, "a"]): "many", b"\xff": "1"}
    # What would be no number any more once it is divided, and what no parser gets to the end of.
    fields |= {json.dumps(["x", 1, "b"]): "9" * 4000, "[" * 200_000: "1"}
    await client.hset(usage_key(1000), mapping={**fields, json.dumps(["x", 1, "a"]) + " ": "5"})
    await share.exchange()
    assert heard == {(STANDARD, "a"): 5}
    await client.delete(usage_key(1000))
    await client.set(usage_key(1000), "a string")
    await share.exchange()
    await client.aclose()


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("ab"), st.integers(-50, 100), st.booleans()), max_size=60))
def test_however_exchanges_interleave_everybody_hears_everything_of_others(plan: list[tuple[str, str, int, bool]]) -> None:
    """Writes are totals: repeating one, or losing its answer, changes nothing."""
    books = {router: UsageBook(router) for router in "xyz"}
    redis: dict[bytes, bytes] = {}
    given_by: dict[str, Counter[Share]] = {router: Counter() for router in "xyz"}
    heard: dict[str, Counter[Share]] = {router: Counter() for router in "xyz"}

    def exchange(router: str, *, answered: bool) -> None:
        redis.update({field.encode(): str(total).encode() for field, total in books[router].own(5).items()})
        if answered:
            for share, count in books[router].hear(5, dict(redis)).items():
                heard[router][share] += count

    for router, tenant, tokens, answered in plan:
        books[router].charge((STANDARD, tenant), tokens, 5)
        given_by[router][STANDARD, tenant] += tokens
        exchange(router, answered=answered)
    for _ in range(2):
        for router in books:
            exchange(router, answered=True)
    for router in books:
        for share in ((STANDARD, "a"), (STANDARD, "b")):
            assert heard[router][share] == sum(given_by[other][share] for other in books if other != router)


def test_a_window_is_bounded_and_old_ones_are_forgotten() -> None:
    book = UsageBook("one")
    for i in range(2000):
        book.charge((STANDARD, f"t{i}"), 1, 5)
    book.charge((STANDARD, "t0"), 9, 5)
    assert len(book.own(5)) == 512
    assert max(book.own(5).values()) == 10
    assert book.windows(6) == [5, 6]
    assert book.own(5)
    book.windows(7)
    assert not book.own(5)


async def test_a_tenants_use_of_one_router_counts_on_another(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving():
        other = Router(cluster.config())
        await other.start()
        heard: Counter[Share] = Counter()
        own: Counter[Share] = Counter()
        monkeypatch.setattr(other.admission, "elsewhere", heard.update)
        monkeypatch.setattr(cluster.router.admission, "elsewhere", own.update)
        try:
            request = cluster.request(max_tokens=5)
            request.tenant = "alice"
            reply = await cluster.ask(request)
            assert reply.end is not None
            used = reply.end.usage.prompt_tokens + 5
            await until(lambda: heard[STANDARD, "alice"] == used, "the other router hears of it, to the token")
            assert not own, "what it gave itself is no news"
        finally:
            await other.drain(0.0)
