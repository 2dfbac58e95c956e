"""Keys as records, and the places where they are kept."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import SECRET, RedisServer, until

from router.access.control import Access
from router.access.share import UsageShare, Use
from router.access.sources import KEYS, VERSION, FileKeys, RedisKeys
from router.targets import Refused
from twostep.api_key_file import put_in_file, read_file, remove_from_file
from twostep.api_keys import BadKey, Key, KeyTable, Limits, hash_of, make_key, system_key
from twostep.cluster.registration import connect
from twostep.errors import InvalidRequest, NotFound, SetupError, Unauthenticated
from twostep.request_class import RequestClass

names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=20)
limits = st.builds(
    Limits,
    requests_per_minute=st.integers(0, 10**6),
    tokens_per_minute=st.integers(0, 10**9),
    tokens_per_day=st.integers(0, 10**12),
    max_concurrent=st.integers(0, 1000),
)


@given(names, names, limits, st.sampled_from(list(RequestClass)), st.booleans(), st.integers(0, 4 * 10**9), st.booleans())
def test_a_record_survives_its_line(
    name: str, tenant: str, limits: Limits, most_urgent: RequestClass, gateway: bool, expires: int, disabled: bool
) -> None:
    told, key = make_key(
        name=name,
        tenant=tenant,
        limits=limits,
        most_urgent=most_urgent,
        speaks_for_tenants=gateway,
        expires=float(expires),
        disabled=disabled,
    )
    line = key.to_json()
    assert "\n" not in line
    assert Key.from_json(line) == key
    assert told not in line
    assert told.removeprefix("ts-") not in line
    assert key.hash not in json.dumps(key.to_dict())
    assert key.hash not in repr(key)
    assert key.whose == (tenant or key.id)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": ""}, "id"),
        ({"hash": "abc"}, "hash"),
        ({"hash": "A" * 64}, "hash"),
        ({"tokens_per_minut": 5}, "no such field"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"tokens_per_minute": True}, "tokens_per_minute"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute"),
        ({"most_urgent": "now"}, "most_urgent"),
        ({"expires": "tomorrow"}, "expires"),
        ({"disabled": "no"}, "disabled"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"name": "x" * 129}, "name"),
    ],
)
def test_a_record_that_says_something_else_is_refused(change: dict[str, object], complaint: str) -> None:
    record = json.loads(make_key()[1].to_json()) | change
    with pytest.raises(BadKey, match=complaint):
        Key.from_json(json.dumps(record))


@given(st.binary(max_size=60))
def test_whatever_is_no_record_is_refused_as_such(data: bytes) -> None:
    with pytest.raises(BadKey):
        Key.from_json(data)


def test_keys_are_long_and_never_the_same() -> None:
    made = {make_key()[0] for _ in range(100)}
    assert len(made) == 100
    assert all(told.startswith("ts-") and len(told) == 46 for told in made)


def test_a_table_finds_keys_by_what_their_holders_say() -> None:
    made = [make_key() for _ in range(5)]
    table = KeyTable(key for _, key in made)
    for told, key in made:
        assert table.find(told) == key
        assert table.find(told + "x") is None
        assert table.find(key.hash) is None
        assert table.find(key.id) is None
    assert table.find("x" * 100_000) is None


# ---- a file -----------------------------------------------------------------------------------------------------------------


async def test_a_file_is_read_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = make_key(name="first")[1]
    path.write_text(f"# ours\n\n{first.to_json()}\n")
    source = FileKeys(path)
    assert await source.read() == [first]
    assert await source.read() is None
    second = make_key(name="second")[1]
    await source.put(second)
    assert await source.read() == [first, second]
    await source.put(Key.from_dict({**json.loads(second.to_json()), "disabled": True}))
    assert [key.disabled for key in await source.read() or ()] == [False, True]
    assert await source.remove(first.id)
    assert not await source.remove(first.id)
    assert path.read_text().startswith("# ours\n\n{"), "remarks stay"
    assert sorted(os.listdir(tmp_path)) == [".keys.lock", "keys"], "nothing is left lying about"


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    put_in_file(tmp_path / "keys", make_key()[1])
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


def test_a_broken_file_names_its_line_and_no_secret(tmp_path: Path) -> None:
    told, key = make_key()
    for line in ("{", key.to_json()[:-3], key.to_json(), json.dumps({"id": "x", "hash": told})):
        (tmp_path / "keys").write_text(f"{key.to_json()}\n{line}\n")
        with pytest.raises(BadKey, match="line 2") as error:
            read_file(tmp_path / "keys")
        assert told not in str(error.value)
        assert key.hash not in str(error.value)
    with pytest.raises(InvalidRequest, match="does not exist"):
        remove_from_file(tmp_path / "none", "x")


def test_writers_of_a_file_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    threads = [threading.Thread(target=put_in_file, args=(path, make_key()[1])) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_file(path)) == 20


# ---- Redis ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    made = connect(redis_server.url)
    yield made
    await made.aclose()


async def test_redis_tells_what_has_changed(client: redis.asyncio.Redis) -> None:
    one, other = RedisKeys(client), RedisKeys(client)
    assert await one.read() == []
    key = make_key()[1]
    await other.put(key)
    assert await one.read() == [key]
    assert await one.read() is None
    assert key.hash.encode() in (await client.hgetall(KEYS))[key.id.encode()]
    assert await other.remove(key.id)
    assert not await other.remove(key.id)
    assert await one.read() == []


async def test_a_record_that_redis_damaged_costs_itself_alone(client: redis.asyncio.Redis) -> None:
    source = RedisKeys(client)
    key = make_key()[1]
    await source.put(key)
    await client.hset(KEYS, "broken", "{")
    await client.set(VERSION, "another")
    assert await source.read() == [key]


async def test_keys_that_redis_lost_are_written_back(client: redis.asyncio.Redis) -> None:
    source, key = RedisKeys(client), make_key()[1]
    await source.put(key)
    assert await source.read() == [key]
    await client.flushall()
    assert await source.read() is None, "those known go on"
    assert await source.read() == [key]
    assert await RedisKeys(client).read() == [key]


# ---- who may --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def access(tmp_path: Path, client: redis.asyncio.Redis) -> Access:
    (tmp_path / "keys").touch()
    return Access(FileKeys(tmp_path / "keys"), secret=SECRET, redis=client, router_id="r")


async def test_who_may_and_who_may_not(access: Access) -> None:
    await access.start()
    told, key = make_key(tenant="acme")
    await access.put(key)
    for authorization in (f"Bearer {told}", f"bearer  {told} "):
        assert access.identify(authorization, "somebody else").tenant == "acme"
    for authorization in (None, "", "Bearer", "Bearer ", f"Basic {told}", told, f"Bearer {told}x", f"Bearer {key.id}", "Bearer \udcff"):
        with pytest.raises(Unauthenticated, match="API key") as refused:
            access.identify(authorization)
        assert told not in refused.value.message
    own = make_key()
    await access.put(own[1])
    assert access.identify(f"Bearer {own[0]}").tenant == own[1].id, "a tenant of its own"
    assert access.identity_of(key.id).tenant == "acme"
    await access.remove(key.id)
    with pytest.raises(Unauthenticated, match="revoked"):
        access.identify(f"Bearer {told}")
    with pytest.raises(Unauthenticated, match="revoked"):
        access.identity_of(key.id)
    with pytest.raises(NotFound):
        await access.remove(key.id)


async def test_disabled_and_expired_keys_are_told_so(access: Access) -> None:
    await access.start()
    for options, why in (({"disabled": True}, "disabled"), ({"expires": time.time() - 1}, "expired")):
        told, key = make_key(**options)
        await access.put(key)
        with pytest.raises(Unauthenticated, match=why):
            access.identify(f"Bearer {told}")
    told, key = make_key(expires=time.time() + 1000)
    await access.put(key)
    access.identify(f"Bearer {told}")


async def test_a_gateways_key_speaks_for_tenants(access: Access) -> None:
    await access.start()
    told, key = make_key(tenant="gateway", speaks_for_tenants=True)
    await access.put(key)
    assert access.identify(f"Bearer {told}", "acme").tenant == "acme"
    nobody = access.identify(f"Bearer {told}")
    assert (nobody.tenant, nobody.fallback) == (None, "gateway")


async def test_the_deployments_own_key_has_no_limits(access: Access) -> None:
    await access.start()
    assert access.identify(f"Bearer {system_key(SECRET)}").account is None
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {system_key(b'another secret, as long')}")


async def test_a_file_that_breaks_leaves_the_last_keys(access: Access, tmp_path: Path) -> None:
    told, key = make_key()
    put_in_file(tmp_path / "keys", key)
    await access.start()
    (tmp_path / "keys").write_text("{")
    await access.refresh()
    access.identify(f"Bearer {told}")
    (tmp_path / "keys").unlink()
    await access.refresh()
    access.identify(f"Bearer {told}")
    (tmp_path / "keys").write_text("")
    await access.refresh()
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {told}")


async def test_without_readable_keys_nothing_starts(tmp_path: Path, client: redis.asyncio.Redis) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SetupError, match="twostep keys create"):
            await Access(FileKeys(path), secret=SECRET, redis=client, router_id="r").start()


async def test_without_redis_the_last_keys_go_on(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    told, key = make_key(limits=Limits(tokens_per_minute=100))
    await RedisKeys(client).put(key)
    access = Access(RedisKeys(client), secret=SECRET, redis=client, router_id="r")
    await access.start()
    redis_server.kill()
    await access.refresh()
    identity = access.identify(f"Bearer {told}")
    with identity.spending(90) as spending:
        spending.placed = True
    with pytest.raises(Refused), access.identify(f"Bearer {told}").spending(90):
        pass
    redis_server.start()
    await access.refresh()
    await access.refresh()
    assert await RedisKeys(client).read() == [key], "it has its keys, whatever it kept of them"
    access.identify(f"Bearer {told}")


async def test_changes_are_followed(access: Access, tmp_path: Path) -> None:
    await access.start()
    running = asyncio.create_task(access.run())
    try:
        told, key = make_key()
        put_in_file(tmp_path / "keys", key)
        await until(lambda: bool(access.accounts()), "the key is known")
        access.identify(f"Bearer {told}")
    finally:
        running.cancel()
        await asyncio.wait((running,))


# ---- shared by replicas ------------------------------------------------------------------------------------------------------


async def test_replicas_share_what_keys_use(client: redis.asyncio.Redis, redis_server: RedisServer) -> None:
    source, (_, key) = RedisKeys(client), make_key(limits=Limits(tokens_per_minute=1000, tokens_per_day=5000, requests_per_minute=10))
    await source.put(key)
    routers = [Access(RedisKeys(client), secret=SECRET, redis=client, router_id=f"router{i}") for i in range(2)]
    for router in routers:
        await router.start()
    one, two = (router.account(key.id) for router in routers)
    with one.calling(), one.spending(300) as spending:
        spending.placed, spending.num_output = True, 100
    for router in routers:
        await router._share.exchange(whole=True)
    told = two.usage()
    assert (told["tokens_this_day"], told["requests_this_minute"]) == (400, 1)
    assert 100 <= told["tokens_this_minute"] <= 400
    late = Access(RedisKeys(client), secret=SECRET, redis=client, router_id="router0")
    await late.start()
    assert late.account(key.id).usage()["tokens_this_day"] == 400, "a restart is no new day"


async def test_without_redis_each_counts_for_itself(redis_server: RedisServer, client: redis.asyncio.Redis) -> None:
    heard: list[Use] = []
    one, two = (UsageShare(client, name, on_minute=heard.append, on_day=heard.append) for name in ("one", "two"))
    redis_server.kill()
    one.used("k", "tokens", 5)
    await one.exchange(whole=True)
    assert not one.connected
    redis_server.start()
    await one.exchange(whole=True)
    await two.exchange(whole=True)
    assert one.connected
    assert sorted(use.amount for use in heard) == [5, 5], "of the minute and of the day"


def test_hashes_are_plain_sha256() -> None:
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
