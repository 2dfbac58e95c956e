"""Tests of values that owners keep in Redis: whose they are, how long they live, and what budgets do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostep.cluster.kept_values import MAX_NAMES, VALUE_BYTES, KeptValues, TooLarge
from twostep.cluster.shared_connection import SharedConnection

PREFIX = "twostep:v1:test"
MUCH = 1 << 30


@pytest.fixture
async def shared(redis_client: redis.asyncio.Redis) -> AsyncIterator[SharedConnection]:
    connection = SharedConnection(redis_client)
    yield connection
    await connection.close()


def kept(shared: SharedConnection, *, ttl_s: float = 3600.0, total_bytes: int = MUCH, owner_share: float = 1.0) -> KeptValues:
    return KeptValues(shared, PREFIX, ttl_s=ttl_s, total_bytes=total_bytes, owner_share=owner_share)


async def values_of(values: KeptValues, owner: str, *names: str) -> list[bytes | None]:
    return await values.recall(owner, names, most_bytes=MUCH, renew=False)


async def counted(client: redis.asyncio.Redis) -> int:
    return sum(int(each) for each in (await client.hgetall(f"{PREFIX}:bytes")).values())


async def test_a_value_is_its_owners(shared: SharedConnection) -> None:
    values = kept(shared)
    assert await values.keep("ann", "one", b"\x00\xff1")
    assert await values.keep("bob", "one", b"2")
    assert await values_of(values, "ann", "one", "two") == [b"\x00\xff1", None]
    assert await values_of(values, "bob", "one") == [b"2"]
    assert await values.forget("ann", ["two"]) == 0
    assert await values.forget("ann") == 1
    assert (await values_of(values, "ann", "one"), await values_of(values, "bob", "one")) == ([None], [b"2"])


async def test_values_expire_with_their_owner_and_are_renewed(shared: SharedConnection, redis_client: redis.asyncio.Redis) -> None:
    values = kept(shared)
    await values.keep("ann", "one", b"1")
    assert all(3_500_000 < each <= 3_660_000 for each in await lives(redis_client))
    longer = kept(shared, ttl_s=7200.0)
    await longer.recall("ann", ["one"], most_bytes=MUCH, renew=False)
    assert await redis_client.pttl(f"{PREFIX}:value:ann:one") <= 3_600_000
    await longer.recall("ann", ["one"], most_bytes=MUCH, renew=True)
    assert all(each > 7_000_000 for each in await lives(redis_client))
    assert await counted(redis_client) == VALUE_BYTES + 1


async def lives(client: redis.asyncio.Redis) -> list[int]:
    return [await client.pttl(f"{PREFIX}:{key}") for key in ("value:ann:one", "index:ann", "bytes")]


async def test_what_has_expired_counts_no_more(shared: SharedConnection, redis_client: redis.asyncio.Redis) -> None:
    values = kept(shared, total_bytes=2 * VALUE_BYTES)
    await redis_client.hset(f"{PREFIX}:index:ann", "old", f"1000 {MUCH}")
    await redis_client.hset(f"{PREFIX}:bytes", "1", str(MUCH))
    assert await values.keep("ann", "new", b"1")
    assert await counted(redis_client) == VALUE_BYTES + 1
    assert await redis_client.hkeys(f"{PREFIX}:index:ann") in ([b"new"], ["new"])


async def test_too_much_at_once(shared: SharedConnection) -> None:
    values = kept(shared)
    await values.keep("ann", "one", b"x" * 100)
    await values.keep("ann", "two", b"x" * 100)
    with pytest.raises(TooLarge) as raised:
        await values.recall("ann", ["one", "two"], most_bytes=150, renew=True)
    assert raised.value.num_bytes == 200


async def test_names_are_bounded(shared: SharedConnection, redis_client: redis.asyncio.Redis) -> None:
    values = kept(shared)
    for i in range(MAX_NAMES + 3):
        assert await values.keep("ann", f"{i}", b"")
    assert await redis_client.hlen(f"{PREFIX}:index:ann") == MAX_NAMES


async def test_half_of_what_redis_may_have(shared: SharedConnection, redis_client: redis.asyncio.Redis) -> None:
    values = kept(shared)
    before = (await redis_client.config_get("maxmemory"))["maxmemory"]
    try:
        for maxmemory, most in ((0, MUCH), (100 << 20, 50 << 20), (8 << 30, MUCH)):
            await redis_client.config_set("maxmemory", maxmemory)
            await values.look()
            assert values.total_bytes == most
    finally:
        await redis_client.config_set("maxmemory", before)


class Model:
    """The model: for each owner the names by age, with their sizes."""

    def __init__(self, owner_bytes: int, total_bytes: int) -> None:
        self.owner_bytes, self.total_bytes = owner_bytes, total_bytes
        self.kept: dict[str, dict[str, int]] = {}

    def total(self) -> int:
        return sum(size + VALUE_BYTES for owner in self.kept.values() for size in owner.values())

    def keep(self, owner: str, name: str, size: int) -> bool:
        mine = self.kept.setdefault(owner, {})
        if size + VALUE_BYTES > min(self.owner_bytes, self.total_bytes):
            return False
        mine.pop(name, None)
        elsewhere, after = self.total() - sum(each + VALUE_BYTES for each in mine.values()), dict(mine)
        while True:
            of_owner = sum(each + VALUE_BYTES for each in after.values()) + size + VALUE_BYTES
            if of_owner <= self.owner_bytes and elsewhere + of_owner <= self.total_bytes:
                self.kept[owner] = {**after, name: size}
                return True
            if not after:
                return False
            del after[next(iter(after))]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["keep", "recall", "forget"]), st.sampled_from("ab"), st.sampled_from("wxyz"), st.integers(0, 3000)),
    max_size=20,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
async def test_budgets_hold_whatever_is_kept(shared: SharedConnection, redis_client: redis.asyncio.Redis, actions: list[Any]) -> None:
    """A new value takes the place of its owner's oldest, and of nobody else's. Each step is later than the one before by Redis' clock."""
    owner_bytes, total_bytes = 5000, 8000
    values, model = kept(shared, total_bytes=total_bytes, owner_share=owner_bytes / total_bytes), Model(owner_bytes, total_bytes)
    for owner in "ab":
        await values.forget(owner)
    for verb, owner, name, size in actions:
        await tick(redis_client)
        if verb == "keep":
            assert await values.keep(owner, name, b"x" * size) == model.keep(owner, name, size)
        elif verb == "forget":
            assert await values.forget(owner, [name]) == (model.kept.setdefault(owner, {}).pop(name, None) is not None)
        else:
            await values.recall(owner, [name], most_bytes=MUCH, renew=True)
            mine = model.kept.setdefault(owner, {})
            if name in mine:
                mine[name] = mine.pop(name)
        for each in "ab":
            found = await values_of(values, each, *"wxyz")
            assert {key: len(value) for key, value in zip("wxyz", found, strict=True) if value is not None} == model.kept.get(each, {})
        assert await counted(redis_client) == model.total() <= total_bytes


async def tick(client: redis.asyncio.Redis) -> None:
    """Returns in another millisecond of Redis' clock."""
    now = await client.time()
    while (later := await client.time())[0] == now[0] and later[1] // 1000 == now[1] // 1000:
        pass
