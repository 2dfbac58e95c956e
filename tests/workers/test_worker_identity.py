"""A worker's id is one process' at a time, its epochs are Redis', and it shows that it lives where Redis does not say so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_harness import BLOCK, SECRET, WAIT_S, RedisServer, expected, prompt_of, routed, started, until

from router.workers.registry import Deployment, Registry, Vouching
from twostep.cluster.connection import connect
from twostep.cluster.epochs import EPOCH_KEY, MAX_EPOCH, first_epoch, next_epoch
from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerRecord, claim_key, prefix_key, worker_key
from twostep.cluster.registration import Registration
from twostep.cluster.signed import RECORDS, Signer
from twostep.engine.types import PrefixDelta
from twostep.errors import SetupError, Unauthenticated
from twostep.prefix import secret_check
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
_NOTHING = PrefixDelta(added=(), removed=(), host_added=(), host_removed=())


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


def registration(url: str, **record: Any) -> Registration:
    described = replace(_RECORD, **record)
    return Registration(url, secret=SECRET, describe=lambda: described, take_delta=lambda: _NOTHING)


async def registered(store: redis.asyncio.Redis) -> tuple[str, int] | None:
    text = await store.get(worker_key("w"))
    if text is None:
        return None
    record = WorkerRecord.from_json(Signer(SECRET, RECORDS).read_object(text))
    return record.address, record.epoch


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
    told = [replace(_RECORD, epoch=9)]
    worker = Registration(redis_url, secret=SECRET, describe=lambda: told[0], take_delta=lambda: _NOTHING)
    await worker.start()
    told[0] = _RECORD
    await worker.announce()
    assert await registered(store) == ("127.0.0.1:1", 9)
    told[0] = replace(_RECORD, epoch=10)
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


async def test_a_worker_s_own_clock_has_no_say(redis_url: str, store: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for hours in (0, 1, -1, 0):
        true = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: true() + 3600 * hours)  # noqa: B023
            patch.setattr(time, "time_ns", lambda: int((true() + 3600 * hours) * 1e9))  # noqa: B023
            epochs.append(await first_epoch(redis_url))
    assert epochs == sorted(set(epochs))
    assert epochs[-1] - epochs[0] < 3_000_000_000, "none of them is an hour ahead"


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
    for other in (Signer(SECRET, "another purpose"), Signer(b"another secret", RECORDS)):
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


async def _memory_full(store: redis.asyncio.Redis) -> None:
    await store.config_set("maxmemory", "1")


async def _replica(store: redis.asyncio.Redis) -> None:
    await store.replicaof("127.0.0.1", 1)


async def _too_few_replicas(store: redis.asyncio.Redis) -> None:
    """Refuses as a full disk does: with an error for every write."""
    await store.config_set("min-replicas-to-write", "1")


@pytest.mark.system
@pytest.mark.parametrize("refuse_writes", [_memory_full, _replica, _too_few_replicas])
async def test_workers_whose_heartbeats_redis_refuses_stay_and_who_dies_leaves(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, refuse_writes: Callable[[redis.asyncio.Redis], Awaitable[None]]
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
        await refuse_writes(store)

        async def expired() -> bool:
            return not await store.exists(*map(worker_key, both))

        await until(expired)
        assert await after(60.0) == both
        assert registry.connected
        await pair.prefill_worker.server.drain(0.0)
        assert await after(5.0) == both[:1], "a worker that is gone refuses connections"
        for name, value in {"maxmemory": "0", "min-replicas-to-write": "0"}.items():
            await store.config_set(name, value)
        await store.replicaof("NO", "ONE")
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
        assert not await Vouching(b"another deployment's", lambda _: None, open_to).lives(true)


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
