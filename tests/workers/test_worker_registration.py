"""Tests of what a worker says of itself in Redis, and that nobody says it in its place: one id, one process; epochs; signatures; a Redis
that is away or takes no writes; tenants' prompts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from bare_deployment import RedisServer
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import BLOCK, SECRET, WAIT_S, expected, prompt_of, routed, started, until

from router.workers.registry import Deployment, Registry, Vouching
from twostep.cluster.connection import connect
from twostep.cluster.epochs import EPOCH_KEY, MAX_EPOCH, first_epoch, next_epoch
from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerRecord, claim_key, host_prefix_key, prefix_key, worker_key
from twostep.cluster.registration import Registration
from twostep.cluster.signed import RECORDS, Signer
from twostep.engine.types import PrefixDelta
from twostep.errors import SetupError, Unauthenticated
from twostep.keys.secret import DeploymentSecret, secret_check
from twostep.prefix import derive_key, prefix_hashes
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel

_LAYOUT = LayoutRecord(model_fingerprint="fake", dtype="float32", block_size=4, num_layers=1, num_kv_heads=1, head_dim=4)
_RECORD = WorkerRecord(
    worker_id="w",
    role="prefill",
    address="127.0.0.1:1",
    epoch=7,
    model="m",
    layout=_LAYOUT,
    hash_unit=8,
    secret_check="x",
    num_blocks=1,
    max_num_seqs=1,
    max_model_len=8,
)
POOL, HOST = prefix_key("w", 7), host_prefix_key("w", 7)
quick = pytest.mark.usefixtures("patient_redis", "quick_beats")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.flushall()
    await client.aclose()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come when a test announces."""
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 1e6)


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 0.05)


class Pretended:
    """A worker's record and prefixes, without a worker."""

    def __init__(self, record: WorkerRecord = _RECORD) -> None:
        self.record = record
        self.num_beats = 0
        self.delta: dict[str, list[bytes]] = {}

    def describe(self) -> WorkerRecord:
        """Once for every heartbeat, whether or not anybody hears it."""
        self.num_beats += 1
        return self.record

    def take_delta(self) -> PrefixDelta:
        delta, self.delta = self.delta, {}
        return PrefixDelta(**dict.fromkeys(("added", "removed", "host_added", "host_removed"), ()) | delta)

    def registration(self, url: str, timeout_s: float = 1.0) -> Registration:
        return Registration(url, secret=SECRET, describe=self.describe, take_delta=self.take_delta, connect_timeout_s=timeout_s)


def registration(url: str, **record: Any) -> Registration:
    described = replace(_RECORD, **record)
    return Registration(url, secret=SECRET, describe=lambda: described, take_delta=Pretended().take_delta)


async def record_of(store: redis.asyncio.Redis, worker_id: str = "w") -> WorkerRecord | None:
    text = await store.get(worker_key(worker_id))
    return None if text is None else WorkerRecord.from_json(Signer(SECRET, RECORDS).read_object(text))


async def registered(store: redis.asyncio.Redis) -> tuple[str, int] | None:
    record = await record_of(store)
    return None if record is None else (record.address, record.epoch)


async def eventually(store: redis.asyncio.Redis, *wanted: bytes, key: str = POOL) -> None:
    async def there() -> bool:
        return bool(await store.smembers(key) == set(wanted))

    await until(there, wanted)


# ---- what it says -----------------------------------------------------------------------------------------------------------


@quick
async def test_a_worker_says_who_it_is_and_what_it_holds_and_leaves_when_it_stops(redis_url: str, store: redis.asyncio.Redis) -> None:
    prompt = prompt_of(5 * BLOCK)
    # The routers' hashes.
    key = derive_key(SECRET, tenant="t", salt="", model_fingerprint="fake", dtype="float32")
    wanted = set(prefix_hashes(key, prompt, 2 * BLOCK))
    async with started(redis_url) as pair, routed(pair) as router:
        await router.generate("r", prompt, 2)
        for worker, role in ((pair.prefill_worker, "prefill"), (pair.decode_worker, "decode")):
            record = await record_of(store, worker.worker_id)
            assert record is not None
            assert (record.role, record.address, record.epoch, record.ready) == (role, worker.address, worker.epoch, True)
            assert record.transports == ("local",)
            assert 0 < await store.pttl(worker_key(worker.worker_id)) <= 1000 * (WAIT_S + 30), "longer where Redis is slow"
            announced = prefix_key(worker.worker_id, worker.epoch)

            async def there(announced: str = announced) -> bool:
                return wanted <= await store.smembers(announced)

            await until(there, wanted)
            assert 0 < await store.ttl(announced) <= 30
    for worker_id in ("prefill-1", "decode-1"):
        assert await record_of(store, worker_id) is None
        assert not await store.sismember(WORKERS_KEY, worker_id)


@quick
async def test_prefixes_in_host_memory_are_announced_apart(redis_url: str, store: redis.asyncio.Redis) -> None:
    worker = Pretended()
    worker.delta = {"added": [b"a"], "host_added": [b"a", b"b"]}
    registration = worker.registration(redis_url)
    await registration.start()
    try:
        assert (await store.smembers(POOL), await store.smembers(HOST)) == ({b"a"}, {b"a", b"b"})
        assert 0 < await store.ttl(HOST) <= 30
        worker.delta = {"removed": [b"a"], "host_removed": [b"b"]}
        await eventually(store)
        await eventually(store, b"a", key=HOST)
        await store.delete(HOST)
        await eventually(store, b"a", key=HOST)
    finally:
        await registration.close()
    assert not await store.exists(HOST)


@pytest.mark.usefixtures("by_hand")
async def test_a_new_epoch_announces_what_was_held_and_what_comes_after(redis_url: str, store: redis.asyncio.Redis) -> None:
    worker = Pretended()
    worker.delta = {"added": [b"a", b"b"], "host_added": [b"c"]}
    registration = worker.registration(redis_url)
    await registration.start()
    worker.record = replace(_RECORD, role="decode", epoch=8)
    worker.delta = {"added": [b"d"], "removed": [b"a"], "host_added": [b"a"], "host_removed": [b"c"]}
    await registration.announce()
    assert not await store.exists(POOL, HOST)
    assert await store.smembers(prefix_key("w", 8)) == {b"b", b"d"}
    assert await store.smembers(host_prefix_key("w", 8)) == {b"a"}
    await registration.close()
    # Once it is closed, nothing brings it back.
    await registration.announce()
    assert await store.keys("*") == []


@quick
async def test_deltas_wipes_and_restarts(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    worker = Pretended()
    registration = worker.registration(own_redis.url)
    worker.delta = {"added": [b"a", b"b"]}
    await registration.start()
    async with connect(own_redis.url) as store:
        try:
            assert await store.smembers(POOL) == {b"a", b"b"}
            worker.delta = {"added": [b"c"], "removed": [b"a"]}
            await eventually(store, b"b", b"c")
            await store.flushall()
            await eventually(store, b"b", b"c")
            assert await record_of(store) is not None
            own_redis.kill()
            worker.delta = {"added": [b"d"]}  # announced nowhere, and not lost
            await until(lambda: not registration.connected)
            beats = worker.num_beats
            await until(lambda: worker.num_beats > beats + 2)
            assert not registration.connected
            assert sum("Redis is away" in line for line in caplog.messages) == 1
            own_redis.start()
            await until(lambda: registration.connected)
            await eventually(store, b"b", b"c", b"d")
        finally:
            await registration.close()
        assert await store.keys("*") == []


@quick
async def test_the_announced_set_is_bounded_and_keeps_the_latest(
    redis_url: str, store: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostep.cluster.registration.MAX_PREFIXES_PER_WORKER", 3)
    worker = Pretended()
    worker.delta = {"added": [b"%d" % i for i in range(5)]}
    registration = worker.registration(redis_url)
    await registration.start()
    assert await store.smembers(POOL) == {b"2", b"3", b"4"}
    worker.delta = {"added": [b"9"], "removed": [b"0", b"4"]}  # 0 was never announced
    await eventually(store, b"2", b"3", b"9")
    await registration.close()


async def test_no_redis_at_start_says_what_to_do() -> None:
    nobody = Pretended().registration("redis://:secret@127.0.0.1:1/0", timeout_s=0.3)
    with pytest.raises(SetupError, match="--redis-url") as caught:
        await nobody.start()
    assert "secret" not in caught.value.message
    with pytest.raises(SetupError, match="--redis-url"):
        Pretended().registration("http://nowhere")


@quick
async def test_redis_at_start_may_come_late(own_redis: RedisServer) -> None:
    own_redis.kill()
    worker = Pretended()
    registration = worker.registration(own_redis.url, timeout_s=WAIT_S)
    starting = asyncio.create_task(registration.start())
    await until(lambda: worker.num_beats > 1)
    assert not starting.done()
    own_redis.start()
    await asyncio.wait_for(starting, WAIT_S)
    await registration.close()


@quick
async def test_serving_goes_on_without_redis(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with started(own_redis.url) as pair, routed(pair) as router:
        own_redis.kill()
        # Each of both has missed it.
        await until(lambda: sum("Redis is away" in line for line in caplog.messages) == 2)
        (await router.generate("r", prompt_of(30), 5)).check(prompt_of(30), 5)
        own_redis.start()
        async with connect(own_redis.url) as store:
            await until(lambda: record_of(store, "decode-1"))


@quick
async def test_a_stop_that_the_redis_client_takes_for_a_lost_connection_is_still_one(
    redis_url: str, store: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = Pretended().registration(redis_url)
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
    assert await record_of(store) is None


# ---- one id, one process ----------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.usefixtures("by_hand")
async def test_a_second_worker_of_an_id_that_lives_does_not_start(
    redis_url: str, store: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = registration(redis_url), registration(redis_url, address="127.0.0.1:2", epoch=9)
    await one.start()
    # It lives: its claim lasts for longer than the other one waits.
    for_ms = await store.pttl(claim_key("w"))
    starting = asyncio.create_task(two.start())
    give_up = time.monotonic() + WAIT_S
    while not starting.done():
        assert time.monotonic() < give_up
        await one.announce()
        assert await registered(store) == ("127.0.0.1:1", 7)
        await asyncio.sleep(0.05)
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:1.*--worker-id"):
        await starting
    assert 0 < for_ms <= 5000, "nobody waits for long to hear it"
    await one.close()
    assert await store.keys("*") == [], "who ends takes its claim with it: the next one waits for nothing"


@pytest.mark.usefixtures("by_hand")
async def test_who_listens_where_the_last_life_did_need_not_wait_for_its_claim(redis_url: str, store: redis.asyncio.Redis) -> None:
    killed, again = registration(redis_url), registration(redis_url, epoch=8)
    await killed.start()
    await store.persist(claim_key("w"))
    await again.start()
    assert await registered(store) == ("127.0.0.1:1", 8)
    await killed.announce()
    assert await registered(store) == ("127.0.0.1:1", 8), "it was only taken for dead: it does not take its name back, and back again"
    assert not killed.connected
    await killed.close()
    assert await registered(store) == ("127.0.0.1:1", 8), "and it takes nobody else's name away"
    await again.close()


@pytest.mark.system
@pytest.mark.usefixtures("by_hand")
async def test_a_claim_that_is_over_is_anybody_s(redis_url: str, store: redis.asyncio.Redis) -> None:
    killed, again = registration(redis_url), registration(redis_url, address="127.0.0.1:2", epoch=8)
    await killed.start()
    starting = asyncio.create_task(again.start())
    await asyncio.wait_for(starting, WAIT_S)
    assert await registered(store) == ("127.0.0.1:2", 8)
    for one in (killed, again):
        await one.close()


@pytest.mark.usefixtures("by_hand")
async def test_two_that_meet_after_an_outage_do_not_flap(redis_url: str, store: redis.asyncio.Redis) -> None:
    one, two = registration(redis_url), registration(redis_url, address="127.0.0.1:2", epoch=9)
    await one.start()
    await store.flushall()  # and before its next heartbeat:
    await two.start()
    for _ in range(5):
        for each in (one, two):
            await each.announce()
            assert await registered(store) == ("127.0.0.1:2", 9)
    assert (one.connected, two.connected) == (False, True)
    await two.close()
    await one.announce()
    assert (await registered(store), one.connected) == (("127.0.0.1:1", 7), True), "it is there again as soon as the other one is gone"
    await one.close()


@pytest.mark.usefixtures("by_hand")
async def test_a_late_word_of_an_epoch_that_is_over_is_not_heard(redis_url: str, store: redis.asyncio.Redis) -> None:
    pretended = Pretended(replace(_RECORD, epoch=9))
    worker = pretended.registration(redis_url)
    await worker.start()
    pretended.record = _RECORD
    await worker.announce()
    assert await registered(store) == ("127.0.0.1:1", 9)
    pretended.record = replace(_RECORD, epoch=10)
    for key in (WORKERS_KEY, worker_key("w"), claim_key("w"), prefix_key("w", 10)):
        await store.delete(key)
        await store.hset(key, "of", "another kind")
        await worker.announce()
        await worker.announce()
        assert worker.connected
        assert (await registered(store), await store.sismember(WORKERS_KEY, "w")) == (("127.0.0.1:1", 10), 1), "it writes over junk"
    await worker.close()


# ---- epochs -----------------------------------------------------------------------------------------------------------------


async def test_epochs_grow_whatever_stands_in_redis(redis_url: str, store: redis.asyncio.Redis) -> None:
    before = await next_epoch(store)
    for nonsense in ("", "many", str(1 << 62), "1e300", "-5", "nan", "inf", str(MAX_EPOCH), "0"):
        await store.set(EPOCH_KEY, nonsense)
        epoch = await next_epoch(store)
        assert before < epoch < MAX_EPOCH, nonsense
        before = epoch
    await store.delete(EPOCH_KEY)
    await store.lpush(EPOCH_KEY, "a list")
    assert before < await next_epoch(store) < MAX_EPOCH
    ahead = before + 3_600_000_000
    await store.set(EPOCH_KEY, ahead)
    assert [await next_epoch(store) for _ in range(3)] == [ahead + 1, ahead + 2, ahead + 3], "Redis' clock has gone back by an hour"
    assert await next_epoch(store, after=ahead + 10) == ahead + 11
    assert await first_epoch(redis_url) == ahead + 12


# ---- signatures -------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.integers() | st.text(), min_size=1), st.integers(0, 10_000), st.integers(0, 7))
def test_no_bit_of_what_is_signed_can_be_changed(fields: dict[str, Any], place: int, bit: int) -> None:
    signer, text = Signer(SECRET, RECORDS), json.dumps(fields, separators=(",", ":"))
    signed = signer.sign_object(text).encode()
    assert signer.read_object(signed) == text.encode()
    assert json.loads(signed) == fields | {"mac": json.loads(signed)["mac"]}, "readers of an older version pass the signature over"
    changed = bytearray(signed)
    changed[place % len(changed)] ^= 1 << bit
    for wrong in (bytes(changed), signed[:-1], signed[1:], b"", text.encode()):
        with pytest.raises(Unauthenticated):
            signer.read_object(wrong)
    for other in (Signer(SECRET, "another purpose"), Signer(DeploymentSecret(b"another secret"), RECORDS)):
        with pytest.raises(Unauthenticated):
            other.read_object(signed)


def test_a_value_is_good_in_its_own_place_alone() -> None:
    signer = Signer(SECRET, RECORDS)
    signed = signer.sign_value("[1,2]", "7", "router-1").encode()
    assert signer.read_value(signed, "7", "router-1") == b"[1,2]"
    for where in (("7", "router-2"), ("8", "router-1"), ("7r", "outer-1"), ("router-1", "7"), ()):
        with pytest.raises(Unauthenticated):
            signer.read_value(signed, *where)
    with pytest.raises(Unauthenticated):
        signer.read_value(b"[1,2]", "7", "router-1")


def open_to(record: WorkerRecord) -> grpc.aio.Channel:
    return open_channel(record.address, signature=CallSigner(SECRET, "router").sign(record.worker_id, record.epoch))


# ---- a Redis that takes no writes -------------------------------------------------------------------------------------------


@pytest.mark.system
async def test_workers_whose_heartbeats_redis_refuses_stay_and_who_dies_leaves(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were all dropped after six seconds. Seconds are handed in."""
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_TTL_S", 1.0)
    store, now = connect(own_redis.url), 0.0
    vouching, asked, answered = Vouching(SECRET, lambda _: None, open_to), list[str](), list[str]()

    async def lives(record: WorkerRecord) -> bool:
        asked.append(record.worker_id)
        try:
            return await vouching.lives(record)
        finally:
            answered.append(record.worker_id)

    deployment = Deployment(model_fingerprint="fake", secret_check=secret_check(SECRET), signer=Signer(SECRET, RECORDS), hash_unit=8)
    async with started(own_redis.url) as pair:
        registry = Registry(store, deployment, lives=lives, clock=lambda: now)

        async def after(seconds: float) -> list[str]:
            nonlocal now
            for _ in range(round(2 * seconds)):
                now += 0.5
                await registry.exchange()
                while len(answered) < len(asked):  # noqa: ASYNC110  the test alone looks
                    await asyncio.sleep(0.001)
            return sorted(record.worker_id for record in registry.workers)

        both = [pair.decode_worker.worker_id, pair.prefill_worker.worker_id]
        assert await after(1.0) == both
        assert asked == []
        # Refuses as a full disk does: with an error for every write.
        await store.config_set("min-replicas-to-write", "1")

        async def expired() -> bool:
            return not await store.exists(*map(worker_key, both))

        await until(expired)
        assert await after(60.0) == both
        assert registry.connected
        await pair.prefill_worker.server.drain(0.0)
        assert await after(5.0) == both[:1], "a worker that is gone refuses connections"
        await store.config_set("min-replicas-to-write", "0")
        await until(lambda: store.exists(worker_key(both[0])))
        assert both[0] in await after(1.0)
    await store.aclose()


async def test_who_has_the_address_and_not_the_secret_or_another_life_vouches_for_nobody(redis_url: str) -> None:
    async with started(redis_url) as pair:
        worker = pair.decode_worker
        true = worker.record()
        vouching = Vouching(SECRET, lambda _: None, open_to)
        assert await vouching.lives(true)
        assert not await vouching.lives(replace(true, epoch=true.epoch - 1)), "an earlier life"
        assert not await vouching.lives(replace(true, worker_id="another")), "another worker at its old address"
        assert not await vouching.lives(replace(true, address=pair.prefill_worker.address))
        assert not await vouching.lives(replace(true, address="127.0.0.1:1")), "nobody"
        assert not await Vouching(DeploymentSecret(b"another deployment's"), lambda _: None, open_to).lives(true)


# ---- tenants' prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefix_cache_space": 0.001}])
async def test_a_prompt_that_one_tenant_has_sent_is_computed_anew_for_another(redis_url: str, options: dict[str, Any]) -> None:
    """On either worker, out of its pool or of host memory: how long a prompt takes tells nobody what others have asked."""
    prompt = prompt_of(10 * BLOCK)
    async with started(redis_url, prefill_options=options, decode_options=options) as pair, routed(pair) as router:
        for number, (tenant, is_cached) in enumerate([("a", False), ("a", True), ("b", False), ("b", True), ("a ", False), ("", False)]):
            answer = await router.generate(f"r{number}", prompt, 3, tenant=tenant)
            assert answer.first is not None
            assert answer.tokens == expected(prompt, 3)
            assert (answer.first.cached_tokens > 0, answer.num_decode_cached > 0) == (is_cached, is_cached), tenant
            await pair.settled()
        for number, (tenant, is_cached) in enumerate([("a", True), ("c", False), ("c", True)]):
            answer = await router.generate_here(f"h{number}", prompt, 3, tenant=tenant)
            assert answer.first is not None
            assert (answer.first.cached_tokens > 0) == is_cached, tenant
