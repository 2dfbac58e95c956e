"""The places where keys are kept: a file, and Redis."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
import redis.asyncio
from router_fakes import SECRET

from router.access.sources import KEYS, SIGNATURES, VERSION, FileKeys, RedisKeys
from twostep.cluster.signed import API_KEYS, Signer
from twostep.errors import InvalidRequest
from twostep.keys.api_key_file import put_in_file, read_file, remove_from_file
from twostep.keys.api_keys import BadKey, Key, make_key


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is given up after a second; here it is this process that may stand still for longer."""
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", 60.0)


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
        with pytest.raises(TimeoutError, match="another process"):
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


async def test_more_keys_than_are_known_are_complained_of(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.access.sources.MAX_KEYS", 2)
    source = RedisKeys(redis_client, SECRET)
    for _ in range(3):
        await source.put(make_key()[1])
    assert len(await source.read() or ()) == 2
    assert "and 2 of them are known here" in caplog.text


async def test_keys_that_redis_lost_are_written_back(redis_client: redis.asyncio.Redis) -> None:
    source, key = RedisKeys(redis_client, SECRET), make_key()[1]
    await source.put(key)
    assert await source.read() == [key]
    await redis_client.flushall()
    assert await source.read() is None, "those known go on"
    assert await source.read() == [key]
    assert await RedisKeys(redis_client, SECRET).read() == [key]
