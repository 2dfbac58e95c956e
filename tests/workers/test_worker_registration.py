"""What a worker says of itself in Redis, and what happens when Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from worker_harness import BLOCK, SECRET, WAIT_S, RedisServer, expected, prompt_of, routed, started, until

from twostep.cluster.records import LayoutRecord, WorkerRecord, host_prefix_key, prefix_key, worker_key
from twostep.cluster.registration import Registration
from twostep.engine.types import PrefixDelta
from twostep.errors import SetupError
from twostep.prefix import derive_key, prefix_hashes

pytestmark = pytest.mark.usefixtures("patient_redis", "quick_beats")


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 0.05)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    connection = redis.asyncio.Redis.from_url(url)
    yield connection
    await connection.aclose()


async def record_of(connection: redis.asyncio.Redis, worker_id: str) -> WorkerRecord | None:
    text = await connection.get(worker_key(worker_id))
    return None if text is None else WorkerRecord.from_json(text)


class Pretended:
    """A worker's record and prefixes, without a worker."""

    def __init__(self) -> None:
        self.num_beats = 0
        self.added: list[bytes] = []
        self.removed: list[bytes] = []
        self.host_added: list[bytes] = []
        self.host_removed: list[bytes] = []

    def describe(self) -> WorkerRecord:
        """Once for every heartbeat, whether or not anybody hears it."""
        self.num_beats += 1
        layout = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=4)
        return WorkerRecord(
            worker_id="pretended",
            role="prefill",
            address="127.0.0.1:1",
            epoch=7,
            model="m",
            layout=layout,
            hash_unit=8,
            secret_check="x",
            num_blocks=1,
            max_num_seqs=1,
            max_model_len=8,
        )

    def take_delta(self) -> PrefixDelta:
        delta = PrefixDelta(added=self.added, removed=self.removed, host_added=self.host_added, host_removed=self.host_removed)
        self.added, self.removed, self.host_added, self.host_removed = [], [], [], []
        return delta

    def registration(self, url: str, timeout_s: float = 1.0) -> Registration:
        return Registration(url, secret=SECRET, describe=self.describe, take_delta=self.take_delta, connect_timeout_s=timeout_s)


async def prefixes(connection: redis.asyncio.Redis, key: str = prefix_key("pretended", 7)) -> set[bytes]:
    members: set[bytes] = await connection.smembers(key)
    return members


async def eventually(connection: redis.asyncio.Redis, wanted: set[bytes], key: str = prefix_key("pretended", 7)) -> None:
    async def there() -> bool:
        return await prefixes(connection, key) == wanted

    await until(there, wanted)


async def test_a_worker_says_who_it_is_and_leaves_when_it_stops(redis_url: str) -> None:
    async with client(redis_url) as connection:
        async with started(redis_url) as pair:
            for worker, role in ((pair.prefill_worker, "prefill"), (pair.decode_worker, "decode")):
                record = await record_of(connection, worker.worker_id)
                assert record is not None
                assert (record.role, record.address, record.epoch, record.ready) == (role, worker.address, worker.epoch, True)
                assert record.transports == ("local",)
                assert 0 < await connection.pttl(worker_key(worker.worker_id)) <= 1000 * (WAIT_S + 30), "longer where Redis is slow"
        for worker_id in ("prefill-1", "decode-1"):
            assert await record_of(connection, worker_id) is None
            assert not await connection.sismember("twostep:v1:workers", worker_id)


async def test_computed_prefixes_are_announced_under_the_routers_hashes(redis_url: str) -> None:
    async with client(redis_url) as connection, started(redis_url) as pair, routed(pair) as router:
        prompt = prompt_of(5 * BLOCK)
        await router.generate("r", prompt, 2)
        hash_key = derive_key(SECRET, tenant="t", salt="", model_fingerprint="fake", dtype="float32")
        wanted = set(prefix_hashes(hash_key, prompt, 2 * BLOCK))
        for worker in (pair.prefill_worker, pair.decode_worker):
            key = prefix_key(worker.worker_id, worker.epoch)

            async def announced(key: str = key) -> bool:
                return wanted <= await prefixes(connection, key)

            await until(announced, wanted)
            assert 0 < await connection.ttl(key) <= 30


async def test_prefixes_in_host_memory_are_announced_apart(redis_url: str) -> None:
    worker = Pretended()
    registration = worker.registration(redis_url)
    key = host_prefix_key("pretended", 7)
    worker.added, worker.host_added = [b"a"], [b"a", b"b"]
    await registration.start()
    async with client(redis_url) as connection:
        try:
            assert (await prefixes(connection), await prefixes(connection, key)) == ({b"a"}, {b"a", b"b"})
            assert 0 < await connection.ttl(key) <= 30
            worker.removed, worker.host_removed = [b"a"], [b"b"]
            await eventually(connection, set())
            await eventually(connection, {b"a"}, key=key)
            await connection.delete(key)
            await eventually(connection, {b"a"}, key=key)
        finally:
            await registration.close()
        assert not await connection.exists(key)


async def test_deltas_wipes_and_restarts(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    worker = Pretended()
    registration = worker.registration(own_redis.url)
    worker.added = [b"a", b"b"]
    await registration.start()
    try:
        async with client(own_redis.url) as connection:
            assert await prefixes(connection) == {b"a", b"b"}
            worker.added, worker.removed = [b"c"], [b"a"]
            await eventually(connection, {b"b", b"c"})
            await connection.flushall()
            await eventually(connection, {b"b", b"c"})
            assert await record_of(connection, "pretended") is not None
        own_redis.stop()
        worker.added = [b"d"]  # announced nowhere, and not lost
        await until(lambda: not registration.connected)
        beats = worker.num_beats
        await until(lambda: worker.num_beats > beats + 2)
        assert not registration.connected
        assert sum("Redis is away" in line for line in caplog.messages) == 1
        own_redis.start()
        async with client(own_redis.url) as connection:
            await eventually(connection, {b"b", b"c", b"d"})
        await until(lambda: registration.connected)
    finally:
        await registration.close()
    async with client(own_redis.url) as connection:
        assert await connection.keys("*") == []


async def test_the_announced_set_is_bounded_and_keeps_the_latest(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.MAX_PREFIXES_PER_WORKER", 3)
    worker = Pretended()
    registration = worker.registration(redis_url)
    worker.added = [b"%d" % i for i in range(5)]
    await registration.start()
    async with client(redis_url) as connection:
        assert await prefixes(connection) == {b"2", b"3", b"4"}
        worker.added, worker.removed = [b"9"], [b"0", b"4"]  # 0 was never announced
        await eventually(connection, {b"2", b"3", b"9"})
    await registration.close()


async def test_no_redis_at_start_says_what_to_do(unused_tcp_port_of_nobody: int) -> None:
    registration = Pretended().registration(f"redis://:secret@127.0.0.1:{unused_tcp_port_of_nobody}/0", timeout_s=0.3)
    with pytest.raises(SetupError, match="--redis-url") as caught:
        await registration.start()
    assert "secret" not in caught.value.message


@pytest.fixture
def unused_tcp_port_of_nobody(own_redis: RedisServer) -> int:
    own_redis.stop()
    return own_redis.port


async def test_a_bad_url_says_what_to_do() -> None:
    with pytest.raises(SetupError, match="--redis-url"):
        Pretended().registration("http://nowhere")


async def test_redis_at_start_may_come_late(own_redis: RedisServer) -> None:
    own_redis.stop()
    worker = Pretended()
    registration = worker.registration(own_redis.url, timeout_s=WAIT_S)
    starting = asyncio.create_task(registration.start())
    await until(lambda: worker.num_beats > 1)
    assert not starting.done()
    own_redis.start()
    await asyncio.wait_for(starting, WAIT_S)
    await registration.close()


async def test_serving_goes_on_without_redis(own_redis: RedisServer) -> None:
    async with started(own_redis.url) as pair, routed(pair) as router:
        own_redis.stop()
        await until(lambda: not any(worker._registration.connected for worker in (pair.prefill_worker, pair.decode_worker)))
        answer = await router.generate("r", prompt_of(30), 5)
        assert answer.tokens == expected(prompt_of(30), 5)
        own_redis.start()
        async with client(own_redis.url) as connection:
            await until(lambda: record_of(connection, "decode-1"))
        await pair.settled()


async def test_a_stop_that_the_redis_client_takes_for_a_lost_connection_is_still_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended()
    registration = Registration(redis_url, secret=SECRET, describe=pretended.describe, take_delta=pretended.take_delta)
    await registration.start()
    beating = asyncio.Event()

    async def lost() -> None:
        beating.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise redis.exceptions.ConnectionError("closed") from None

    monkeypatch.setattr(registration, "_beat", lost)
    await asyncio.wait_for(beating.wait(), WAIT_S)
    await asyncio.wait_for(registration.close(), WAIT_S)
    async with client(redis_url) as connection:
        assert await record_of(connection, "pretended") is None
