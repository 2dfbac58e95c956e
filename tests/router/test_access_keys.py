"""Keys as records, where they are kept, and who may ask with which."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio
from hypothesis import example, given
from hypothesis import strategies as st
from router_fakes import SECRET, RedisServer, until

from router.access.account import Account
from router.access.control import Access
from router.access.share import UsageShare
from router.access.sources import KEYS, SIGNATURES, VERSION, FileKeys, RedisKeys
from router.request.targets import Refused
from twostep.cluster.exchange import Use
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import API_KEYS, Signer
from twostep.errors import InvalidRequest, NotFound, SetupError, Unauthenticated, Unavailable
from twostep.keys.api_key_file import put_in_file, read_file, remove_from_file
from twostep.keys.api_keys import BadKey, Key, KeyTable, Limits, hash_of, make_key, system_key
from twostep.keys.secret import DeploymentSecret
from twostep.request_class import RequestClass


@pytest.fixture
def stopped_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing flows into the accounts' buckets, and what was used stays in a window that routers read. Before what is made with them."""
    monkeypatch.setattr("router.access.control.Account", partial(Account, monotonic=lambda: 0.0))
    monkeypatch.setattr("router.access.share.WINDOW_S", 600)


def test_a_record_survives_its_line() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=2, tokens_per_day=3, max_concurrent=4)
    for options in (
        {},
        {"name": "Ann's ü", "tenant": "acme", "limits": limits, "expires": 4e9},
        {"most_urgent": RequestClass.BATCH, "speaks_for_tenants": True, "disabled": True},
    ):
        told, key = make_key(**options)
        line = key.to_json()
        assert "\n" not in line
        assert Key.from_json(line) == key
        assert told.removeprefix("ts-") not in line
        assert key.hash not in json.dumps(key.to_dict()) + repr(key)
        assert key.whose == (options.get("tenant") or key.id)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": ""}, "id"),
        ({"id": "a b"}, "id"),
        ({"hash": "A" * 64}, "hash"),
        ({"tokens_per_minut": 5}, "no such field"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"tokens_per_minute": True}, "tokens_per_minute"),
        ({"most_urgent": "now"}, "most_urgent"),
        ({"expires": "tomorrow"}, "expires"),
        ({"expires": -1}, "expires"),
        ({"disabled": "no"}, "disabled"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"name": "x" * 129}, "name"),
    ],
)
def test_a_record_that_says_something_else_is_refused(change: dict[str, object], complaint: str) -> None:
    record = json.loads(make_key()[1].to_json()) | change
    with pytest.raises(BadKey, match=complaint):
        Key.from_json(json.dumps(record))


@given(
    st.datetimes(timezones=st.none() | st.timezones())
    | st.floats()
    | st.sampled_from([0, 253_402_300_799, 253_402_300_799.5, 253_402_300_800])
)
@example(datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))))
@example(datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=-14))))
def test_an_expiry_that_is_taken_can_be_read_again(expires: datetime | float) -> None:
    record = json.loads(make_key()[1].to_json())
    try:
        key = Key.from_dict(record | {"expires": expires.isoformat() if isinstance(expires, datetime) else expires})
    except BadKey:
        return
    assert int(Key.from_json(key.to_json()).expires) == int(key.expires)


@given(st.binary(max_size=60))
def test_whatever_is_no_record_is_refused_as_such(data: bytes) -> None:
    with pytest.raises(BadKey):
        Key.from_json(data)


def test_a_table_finds_keys_by_what_their_holders_say() -> None:
    made = [make_key() for _ in range(5)]
    assert all(told.startswith("ts-") and len(told) == 46 for told, _ in made)
    table = KeyTable(key for _, key in made)
    for told, key in made:
        assert table.find(told) == key
        assert [table.find(wrong) for wrong in (told + "x", key.hash, key.id, "x" * 100_000)] == [None] * 4
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "plain SHA-256"


# ---- who may --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def access(tmp_path: Path, redis_client: redis.asyncio.Redis) -> Access:
    (tmp_path / "keys").touch()
    return Access(FileKeys(tmp_path / "keys"), secret=SECRET, redis=redis_client, router_id="r")


async def test_who_may_and_who_may_not(access: Access) -> None:
    await access.start()
    told, key = make_key(tenant="acme")
    await access.put(key)
    for authorization in (f"Bearer {told}", f"bearer  {told} "):
        assert access.identify(authorization, "somebody else").tenant == "acme"
    for authorization in (None, "", "Bearer", "Bearer ", f"Basic {told}", told, f"Bearer {told}x", f"Bearer {key.id}", "Bearer \udcff"):
        with pytest.raises(Unauthenticated) as refused:
            access.identify(authorization)
        assert told not in refused.value.message
    own = make_key()
    await access.put(own[1])
    assert access.identify(f"Bearer {own[0]}").tenant == own[1].id, "a tenant of its own"
    assert access.identity_of(key.id).tenant == "acme"
    await access.remove(key.id)
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {told}")
    with pytest.raises(Unauthenticated):
        access.identity_of(key.id)
    with pytest.raises(NotFound):
        await access.remove(key.id)


async def test_what_a_key_says_of_itself_counts(access: Access) -> None:
    await access.start()
    for options, why in (({"disabled": True}, "disabled"), ({"expires": time.time() - 1}, "expired")):
        told, key = make_key(**options)
        await access.put(key)
        with pytest.raises(Unauthenticated, match=why):
            access.identify(f"Bearer {told}")
    told, key = make_key(tenant="gateway", speaks_for_tenants=True, expires=time.time() + 1000)
    await access.put(key)
    assert access.identify(f"Bearer {told}", "acme").tenant == "acme"
    nobody = access.identify(f"Bearer {told}")
    assert (nobody.tenant, nobody.fallback) == (None, "gateway")
    assert access.identify(f"Bearer {system_key(SECRET)}").account is None, "the deployment's own has no limits"
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {system_key(DeploymentSecret(b'another secret, as long'))}")


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


async def test_a_volume_that_hangs_costs_one_thread_and_nobody_their_key(
    access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, key = make_key()
    put_in_file(tmp_path / "keys", key)
    await access.start()
    go_on, asked = threading.Event(), []

    def hangs(path: Path) -> list[Key]:
        asked.append(path)
        assert go_on.wait(120)
        return read_file(path)

    monkeypatch.setattr("router.access.sources.read_file", hangs)
    monkeypatch.setattr("router.access.control._READ_TIMEOUT_S", 0.05)
    other_told, other = make_key()
    put_in_file(tmp_path / "keys", other)
    for _ in range(3):
        await access.refresh()
        access.identify(f"Bearer {told}")
    with pytest.raises(Unavailable):
        await access.remove(key.id)
    await until(lambda: bool(asked), "the thread has begun")
    assert len(asked) == 1
    assert caplog.text.count("cannot be read (no answer in time)") == 1
    go_on.set()
    monkeypatch.setattr("router.access.control._READ_TIMEOUT_S", 60.0)
    await access.refresh()
    access.identify(f"Bearer {other_told}")
    access.identify(f"Bearer {told}")


async def test_a_revoked_key_does_not_come_back_with_a_look_that_began_before(redis_client: redis.asyncio.Redis) -> None:
    class Slow(RedisKeys):
        """Gives the first look's answer late."""

        def __init__(self) -> None:
            super().__init__(redis_client, SECRET)
            self.go_on, self.removed = asyncio.Event(), asyncio.Event()
            self.num_looks = 0

        async def remove(self, key_id: str) -> bool:
            there = await super().remove(key_id)
            self.removed.set()
            return there

        async def read(self) -> Sequence[Key] | None:
            self.num_looks += 1
            first = self.num_looks == 1
            found = [Key.from_json(raw) for raw in (await redis_client.hgetall(KEYS)).values()]
            if first:
                await self.go_on.wait()
            return found

    source = Slow()
    told, key = make_key()
    await source.put(key)
    access = Access(source, secret=SECRET, redis=redis_client, router_id="r")
    looking = asyncio.create_task(access.refresh())
    await until(lambda: source.num_looks == 1, "the look has begun")
    revoking = asyncio.create_task(access.remove(key.id))
    await source.removed.wait()
    source.go_on.set()
    await looking
    await revoking
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {told}")


async def test_without_readable_keys_nothing_starts(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SetupError, match="twostep keys create"):
            await Access(FileKeys(path), secret=SECRET, redis=redis_client, router_id="r").start()


async def test_without_redis_the_last_keys_go_on(redis_server: RedisServer, redis_client: redis.asyncio.Redis) -> None:
    told, key = make_key(limits=Limits(tokens_per_minute=100))
    await RedisKeys(redis_client, SECRET).put(key)
    access = Access(RedisKeys(redis_client, SECRET), secret=SECRET, redis=redis_client, router_id="r")
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
    assert await RedisKeys(redis_client, SECRET).read() == [key], "it has its keys, whatever it kept of them"
    access.identify(f"Bearer {told}")


# ---- shared by replicas ------------------------------------------------------------------------------------------------------


async def test_replicas_share_what_keys_use(
    stopped_minutes: None, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.access.share._DAY_SYNC_S", 0.1)
    key = make_key(limits=Limits(tokens_per_minute=1000, tokens_per_day=5000, requests_per_minute=10))[1]
    await RedisKeys(redis_client, SECRET).put(key)

    async def started(name: str) -> Access:
        made = Access(RedisKeys(redis_client, SECRET), secret=SECRET, redis=redis_client, router_id=name)
        await made.start()
        return made

    routers = [await started(f"router{i}") for i in range(2)]
    one, two = (router.account(key.id) for router in routers)
    with one.calling(), one.spending(300) as spending:
        spending.placed, spending.num_output = True, 100
    running = [asyncio.create_task(router.run()) for router in routers]
    await until(lambda: two.usage()["tokens_this_day"] == two.usage()["tokens_this_minute"] == 400, "the other one knows")
    assert two.usage()["requests_this_minute"] == 1
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    late = await started("router0")
    assert late.account(key.id).usage()["tokens_this_day"] == 400, "a restart is no new day"


async def test_a_key_that_was_away_for_a_moment_has_used_what_it_used(
    stopped_minutes: None, access: Access, redis_client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    """A file that is written in place is empty for a moment; and other routers may have served a key before this one reads of it."""
    limits = Limits(tokens_per_minute=1000, tokens_per_day=5000, requests_per_minute=10)
    both = [make_key(limits=limits)[1] for _ in range(2)]
    put_in_file(tmp_path / "keys", both[0])
    other = UsageShare(redis_client, "other", SharedClock(), on_minute=lambda _: None, on_day=lambda _: None)
    for key in both:
        other.used(key.id, "tokens", 30)
        other.used(key.id, "requests", 3)
    await other.exchange(whole=True)
    await access.start()
    with access.account(both[0].id).calling(), access.account(both[0].id).spending(300) as spending:
        spending.placed = True
    gone: list[str] = []
    access.on_gone = gone.append
    lines = (tmp_path / "keys").read_text()
    (tmp_path / "keys").write_text("")
    await access.refresh()
    assert not access.accounts()
    (tmp_path / "keys").write_text(f"{lines}{both[1].to_json()}\n")
    await access.refresh()
    assert not gone, "what belongs to a key is kept"
    for key, num_tokens, num_requests in ((both[0], 330, 4), (both[1], 30, 3)):
        told = access.account(key.id).usage()
        assert (told["tokens_this_day"], told["tokens_this_minute"]) == (num_tokens, num_tokens)
        assert told["requests_this_minute"] == num_requests


async def test_without_redis_each_counts_for_itself(redis_server: RedisServer, redis_client: redis.asyncio.Redis) -> None:
    heard: list[Use] = []
    one, two = (UsageShare(redis_client, name, SharedClock(), on_minute=heard.append, on_day=heard.append) for name in ("one", "two"))
    redis_server.kill()
    one.used("k", "tokens", 5)
    await one.exchange(whole=True)
    assert not one.connected
    redis_server.start()
    await one.exchange(whole=True)
    await two.exchange(whole=True)
    assert one.connected
    assert sorted(use.amount for use in heard) == [5, 5], "of the minute and of the day"


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
    put_in_file(tmp_path / "new", first)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_broken_file_names_its_line_and_no_secret(tmp_path: Path) -> None:
    told, key = make_key()
    for line in ("{", key.to_json()[:-3], key.to_json(), json.dumps({"id": "x", "hash": told})):
        (tmp_path / "keys").write_text(f"{key.to_json()}\n{line}\n")
        with pytest.raises(BadKey, match="line 2") as error:
            read_file(tmp_path / "keys")
        assert told not in str(error.value)
        assert key.hash not in str(error.value)
    with pytest.raises(InvalidRequest):
        remove_from_file(tmp_path / "none", "x")


def test_writers_of_a_file_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As long as all the others may take on a slow disk.
    monkeypatch.setattr("twostep.keys.api_key_file._LOCK_S", 60.0)
    path = tmp_path / "keys"
    threads = [threading.Thread(target=put_in_file, args=(path, make_key()[1])) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_file(path)) == 20


def test_a_file_that_is_changed_stays_where_and_whose_it_is(tmp_path: Path) -> None:
    """As when root runs `twostep keys` on the file of a router that does not run as root, behind a link."""
    kept = tmp_path / "kept" / "keys"
    kept.parent.mkdir()
    put_in_file(kept, make_key()[1])
    kept.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(kept, 12345, 12346)
    (tmp_path / "keys").symlink_to(kept)
    before = kept.stat()
    put_in_file(tmp_path / "keys", make_key()[1])
    assert (tmp_path / "keys").is_symlink()
    assert len(read_file(kept)) == 2
    after = kept.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert after.st_ino != before.st_ino, "it was replaced whole"


def test_a_writer_that_hangs_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.keys.api_key_file._LOCK_S", 0.05)
    path = tmp_path / "keys"
    put_in_file(path, make_key()[1])
    with (tmp_path / ".keys.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            put_in_file(path, make_key()[1])
    assert len(read_file(path)) == 1
    assert sorted(os.listdir(tmp_path)) == [".keys.lock", "keys"]


# ---- Redis ------------------------------------------------------------------------------------------------------------------


async def test_redis_tells_what_has_changed(redis_client: redis.asyncio.Redis) -> None:
    one, other = RedisKeys(redis_client, SECRET), RedisKeys(redis_client, SECRET)
    assert await one.read() == []
    key = make_key()[1]
    await other.put(key)
    assert await one.read() == [key]
    assert await one.read() is None
    assert key.hash.encode() in (await redis_client.hgetall(KEYS))[key.id.encode()]
    assert await other.remove(key.id)
    assert not await other.remove(key.id)
    assert await one.read() == []


async def test_a_record_that_redis_damaged_costs_itself_alone(redis_client: redis.asyncio.Redis) -> None:
    source = RedisKeys(redis_client, SECRET)
    key = make_key()[1]
    await source.put(key)
    await redis_client.hset(KEYS, "broken", "{")
    await redis_client.hset(SIGNATURES, "broken", Signer(SECRET, API_KEYS).sign_value("{", "broken")[1:])
    await redis_client.set(VERSION, "another")
    assert await source.read() == [key]


async def test_no_more_keys_are_known_than_may_be(redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.access.sources.MAX_KEYS", 2)
    source = RedisKeys(redis_client, SECRET)
    for _ in range(3):
        await source.put(make_key()[1])
    assert len(await source.read() or ()) == 2


async def test_keys_that_redis_lost_are_written_back(redis_client: redis.asyncio.Redis) -> None:
    source, key = RedisKeys(redis_client, SECRET), make_key()[1]
    await source.put(key)
    assert await source.read() == [key]
    await redis_client.flushall()
    assert await source.read() is None, "those known go on"
    assert await source.read() == [key]
    assert await RedisKeys(redis_client, SECRET).read() == [key]


async def test_keys_of_another_secret_open_nothing_until_they_are_adopted(redis_client: redis.asyncio.Redis) -> None:
    unsigned, foreign = make_key()[1], make_key()[1]
    await redis_client.hset(KEYS, unsigned.id, unsigned.to_json())
    assert await RedisKeys(redis_client, SECRET).read() == []
    await RedisKeys(redis_client, DeploymentSecret(b"another secret, as long")).put(foreign)
    assert await RedisKeys(redis_client, SECRET).read() == []
    adopting = RedisKeys(redis_client, SECRET, adopt=True)
    assert await adopting.read() is None
    for source in (adopting, RedisKeys(redis_client, SECRET)):
        assert {key.id for key in await source.read() or ()} == {unsigned.id, foreign.id}


async def test_keys_outlive_the_secret_that_signed_them(redis_client: redis.asyncio.Redis) -> None:
    """Routers of all three states at once, as restarts one by one leave them; and nobody writes without end."""
    old, new = DeploymentSecret(b"the former secret, long enough"), DeploymentSecret(b"the new secret, as long as that")
    before, between, after = (RedisKeys(redis_client, secret) for secret in (old, DeploymentSecret(new.own, old.own), new))
    keys = [make_key()[1] for _ in range(3)]
    for key in keys:
        await before.put(key)
    assert await after.read() == [], "it would have been too early"
    found = await between.read()
    assert sorted(key.id for key in found or ()) == sorted(key.id for key in keys)
    for source in (before, between, after):
        fresh = await source.read()
        assert fresh is None or len(fresh) == 3
    signed = await redis_client.hgetall(SIGNATURES)
    version = await redis_client.get(VERSION)
    assert [await source.read() for source in (before, between, after)] == [None] * 3
    assert (await redis_client.hgetall(SIGNATURES), await redis_client.get(VERSION)) == (signed, version)
    # A router that has only the former one changes a key: the next look of one with both signs that again.
    changed = dataclasses.replace(keys[0], disabled=True)
    await before.put(changed)
    for source in (between, after):
        read = {key.id: key for key in await source.read() or ()}
        assert read[changed.id].disabled
    # Without the former secret the former routers read nothing that is written from now on.
    late = make_key()[1]
    await after.put(late)
    assert late.id not in {key.id for key in await before.read() or ()}


async def test_a_key_that_changes_while_it_is_signed_again_keeps_its_change(redis_client: redis.asyncio.Redis) -> None:
    old, new = DeploymentSecret(b"the former secret, long enough"), DeploymentSecret(b"the new secret, as long as that")
    before, between = RedisKeys(redis_client, old), RedisKeys(redis_client, DeploymentSecret(new.own, old.own))
    key = make_key()[1]
    await before.put(key)
    changed = dataclasses.replace(key, name="changed")

    class Late:
        """Redis for the one that signs again: somebody changes the key just before."""

        def __getattr__(self, name: str) -> Any:
            return getattr(redis_client, name)

        async def eval(self, *arguments: Any) -> Any:
            await before.put(changed)
            return await redis_client.eval(*arguments)

    late = RedisKeys(cast(redis.asyncio.Redis, Late()), DeploymentSecret(new.own, old.own))
    await late.read()
    assert await before.read() == [changed]
    assert await between.read() == [changed]
