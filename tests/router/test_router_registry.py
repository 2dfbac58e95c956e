"""The registry's mirror and the prefix index, against a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_simulation import worker_record
from router_fakes import HASH_UNIT, SECRET, Cluster, RedisServer, signed

from router.request.cleanup import Cleanup
from router.request.job import RequestJob
from router.workers.pool import WorkerPool
from router.workers.prefix_index import CachedPrefix, PrefixIndex, WorkerLife
from router.workers.registry import Deployment, Registry, Witnesses
from twostep import __version__
from twostep.cluster.connection import connect
from twostep.cluster.look import WorkerListing
from twostep.cluster.records import WORKERS_KEY, WorkerLoad, WorkerRecord, prefix_key, worker_key
from twostep.cluster.shared_connection import SharedConnection
from twostep.cluster.signed import RECORDS, Signer
from twostep.keys.secret import DeploymentSecret
from twostep.prefix import derive_key, prefix_hashes
from twostep.rpc.call_signing import CallSigner
from twostep.sampling_params import SamplingParams
from twostep.step_curve import StepCurve

Connect = Callable[[], redis.asyncio.Redis]
_WORKER = worker_record("w", hash_unit=16, version=__version__)
_BARE = Deployment(model_fingerprint="m", secret_check="x", signer=Signer(SECRET, RECORDS), hash_unit=16)


@pytest.fixture
async def connection(redis_server: RedisServer) -> AsyncIterator[Connect]:
    """Makes clients like the router's."""
    made: list[redis.asyncio.Redis] = []

    def make() -> redis.asyncio.Redis:
        made.append(connect(redis_server.url))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


def deployment(cluster: Cluster) -> Deployment:
    record = cluster.template
    return Deployment(
        model_fingerprint=record.layout.model_fingerprint,
        secret_check=record.secret_check,
        signer=Signer(SECRET, RECORDS),
        hash_unit=record.hash_unit,
    )


async def write(client: redis.asyncio.Redis, record: WorkerRecord, name: str | None = None) -> None:
    await client.set(worker_key(name or record.worker_id), signed(record), px=600_000)
    await client.sadd(WORKERS_KEY, name or record.worker_id)


def described(cluster: Cluster, name: str, **options: Any) -> WorkerRecord:
    values: dict[str, Any] = {"worker_id": name, "role": "decode", "address": "127.0.0.1:1", "epoch": 5}
    return dataclasses.replace(cluster.template, **(values | options))


async def test_workers_come_change_and_go(cluster: Cluster) -> None:
    seen: list[int] = []
    now = 100.0
    registry = Registry(cluster.redis, deployment(cluster), on_poll=lambda workers: seen.append(len(workers)), clock=lambda: now)
    await registry.exchange()
    await write(cluster.redis, described(cluster, "d0"))
    await write(cluster.redis, described(cluster, "p0", role="prefill"))
    await registry.exchange()
    assert sorted(w.worker_id for w in registry.workers) == ["d0", "p0"]
    await write(cluster.redis, described(cluster, "d0", draining=True))
    await registry.exchange()
    assert next(w for w in registry.workers if w.worker_id == "d0").draining
    await cluster.redis.delete(worker_key("d0"))
    await registry.exchange()
    assert len(registry.workers) == 2, "kept for a moment: Redis may just have been emptied"
    now = 110.0
    await registry.exchange()
    assert [w.worker_id for w in registry.workers] == ["p0"]
    assert seen == [0, 2, 2, 2, 1]
    await registry.exchange()
    assert await cluster.redis.smembers(WORKERS_KEY) == {b"p0"}, "names of the dead do not pile up"


async def test_who_does_not_belong_here_is_refused_with_a_reason_said_once_and_comes_back_when_it_does(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    layout = cluster.layout
    records: dict[str, tuple[dict[str, Any], str]] = {
        "model": ({"layout": dataclasses.replace(layout, model_fingerprint="another")}, "another model"),
        "secret": ({"secret_check": "x"}, "--secret-file"),
        "unit": ({"hash_unit": 32}, "hash unit"),
        "role": ({"role": "cook"}, "'cook'"),
        "block": ({"layout": dataclasses.replace(layout, block_size=48)}, "block size 48"),
        "empty": ({"num_blocks": 0}, "capacity"),
        # A router must not divide by these, or compare with them.
        "budget": ({"step_tokens": 0}, "step_tokens"),
        "curve": ({"curve": StepCurve(fixed_s=float("nan"), per_row_s=1e-5)}, "fixed_s"),
        "huge": ({"epoch": 10**400}, "not a worker record"),
        "load": ({"load": WorkerLoad(num_queued_tokens="many")}, "num_queued_tokens"),  # type: ignore[arg-type]
        "old": ({"version": "0.1.0"}, "it runs version 0.1.0 and the router 0.3.1, more than one minor version apart; upgrade it"),
        "far": ({"version": "0.5.0"}, "upgrade the router"),
        "odd": ({"version": "main"}, "main"),
    }
    fitting = {"near": "0.2.5", "same": "0.3.0", "next": "0.4.0"}
    for name, fields in [*((name, fields) for name, (fields, _) in records.items()), *((n, {"version": v}) for n, v in fitting.items())]:
        await write(cluster.redis, described(cluster, name, **({"version": "0.3.1"} | fields)))
    await write(cluster.redis, described(cluster, "impostor"), name="somebody")
    unsaid = json.loads(described(cluster, "unsaid").to_json())
    del unsaid["version"]
    for name, text in (("unsaid", json.dumps(unsaid)), ("garbage", '{"worker_id": 3}')):
        await cluster.redis.set(worker_key(name), Signer(SECRET, RECORDS).sign_object(text))
    await cluster.redis.sadd(WORKERS_KEY, "unsaid", "garbage", b"\xff\xfe")
    registry = Registry(cluster.redis, dataclasses.replace(deployment(cluster), version="0.3.1"))
    for _ in range(3):
        await registry.exchange()
    assert sorted(record.worker_id for record in registry.workers) == sorted(fitting)
    expected = {name: words for name, (_, words) in records.items()}
    expected |= {"somebody": "'impostor'", "garbage": "not a worker record", "unsaid": "version 0.1"}
    refused = {refusal.worker_id: refusal for refusal in registry.refusals}
    assert list(refused) == sorted(expected)
    for name, words in expected.items():
        assert words in refused[name].reason
        assert sum(f"worker {name} is refused" in r.getMessage() for r in caplog.records) == 1, name
    assert (refused["unsaid"].role, refused["garbage"].role, refused["garbage"].version) == ("decode", "", "")
    await write(cluster.redis, described(cluster, "old", version="0.2.0", epoch=6))
    await registry.exchange()
    assert "old" not in {refusal.worker_id for refusal in registry.refusals}
    assert "old" in {record.worker_id for record in registry.workers}


async def test_an_older_epoch_never_comes_back(cluster: Cluster) -> None:
    registry = Registry(cluster.redis, deployment(cluster), missing_grace_s=0.0)
    await write(cluster.redis, described(cluster, "d0", epoch=9))
    await registry.exchange()
    await write(cluster.redis, described(cluster, "d0", epoch=8))
    await registry.exchange()
    assert registry.workers == ()
    await write(cluster.redis, described(cluster, "d0", epoch=10))
    await registry.exchange()
    assert [w.epoch for w in registry.workers] == [10]


async def test_a_lost_redis_keeps_the_last_known_workers(cluster: Cluster, redis_server: RedisServer, connection: Connect) -> None:
    registry = Registry(connection(), deployment(cluster), missing_grace_s=0.0)
    await write(cluster.redis, described(cluster, "d0"))
    await registry.exchange()
    redis_server.kill()
    for _ in range(3):
        await registry.exchange()
    assert (registry.connected, len(registry.workers)) == (False, 1)
    redis_server.reset()
    await registry.exchange()
    # Its record is lost; it has some seconds to announce itself again.
    assert (registry.connected, len(registry.workers)) == (True, 1)


# ---- prefix index --------------------------------------------------------------------------------------------------------

A, B, C = WorkerLife("a", 1), WorkerLife("b", 1), WorkerLife("c", 1)


def hashes(num: int) -> list[bytes]:
    return [bytes([i % 256, i // 256]) * 8 for i in range(num)]


async def test_a_new_router_knows_what_the_one_before_it_knew(cluster: Cluster, connection: Connect, monkeypatch: Any) -> None:
    """The index is in Redis alone, and its connections are there before the first request, which would else be too late for its hints."""
    units = hashes(4)
    await cluster.redis.sadd(prefix_key("a", 1), *units)
    before = PrefixIndex(SharedConnection(cluster.redis), SECRET, HASH_UNIT, timeout_s=60.0)
    assert await before.lookup({A: units}) == {A: CachedPrefix(4 * HASH_UNIT)}
    await before.close()
    monkeypatch.setattr("router.workers.prefix_index._CONNECT_S", 60.0)
    index = PrefixIndex(SharedConnection(connection()), SECRET, HASH_UNIT, timeout_s=60.0)
    await index.open()
    connected = (await cluster.redis.info("stats"))["total_connections_received"]
    found = await asyncio.gather(*(index.lookup({A: units}) for _ in range(20)))
    assert found == [{A: CachedPrefix(4 * HASH_UNIT)}] * 20
    assert (await cluster.redis.info("stats"))["total_connections_received"] == connected
    await index.close()


async def test_a_prompt_is_looked_up_under_the_workers_own_keys(cluster: Cluster) -> None:
    worker = await cluster.prefill()
    ids = list(range(10, 10 + 3 * HASH_UNIT))
    pool = WorkerPool(router_id="r", signer=CallSigner(SECRET, "r"), cleanup=Cleanup())
    pool.sync([worker.record])
    index = PrefixIndex(SharedConnection(cluster.redis), SECRET, HASH_UNIT, timeout_s=60.0)

    def job(salt: str, prompt: list[int], tenant: str = "") -> RequestJob:
        sampling, deadline = SamplingParams(max_tokens=1), time.monotonic() + 60
        return RequestJob(request_id="r", prompt=prompt, sampling=sampling, deadline=deadline, cache_salt=salt, tenant=tenant)

    key = derive_key(SECRET, tenant="", salt="s", model_fingerprint=cluster.layout.model_fingerprint, dtype="float32")
    await cluster.announce(worker, prefix_hashes(key, ids, HASH_UNIT))
    life = WorkerLife.of(worker.record)
    assert await index.cached_tokens(job("s", [*ids, 1]), pool.records()) == {life: CachedPrefix(3 * HASH_UNIT)}
    assert await index.cached_tokens(job("s", ids), pool.records()) == {life: CachedPrefix(2 * HASH_UNIT)}, (
        "the last token is computed anyway"
    )
    one_unit = await index.cached_tokens(job("s", ids[: HASH_UNIT + 1]), pool.records())
    assert one_unit == {life: CachedPrefix(HASH_UNIT)}, "the shortest prompt that can have one"
    stateful = dataclasses.replace(worker.record, layout=dataclasses.replace(worker.record.layout, num_state_blocks=5))
    key = derive_key(SECRET, tenant="", salt="t", model_fingerprint=cluster.layout.model_fingerprint, dtype="float32")
    await cluster.announce(worker, prefix_hashes(key, ids, HASH_UNIT)[2:])
    assert await index.cached_tokens(job("t", [*ids, 1]), [worker.record]) == {}
    assert await index.cached_tokens(job("t", [*ids, 1]), [stateful]) == {life: CachedPrefix(3 * HASH_UNIT)}, "where it has a state"
    assert await index.cached_tokens(job("other", [*ids, 1]), pool.records()) == {}
    assert await index.cached_tokens(job("s", [*ids, 1], tenant="another"), pool.records()) == {}, (
        "a tenant's prompts are found by nobody else"
    )
    assert await index.cached_tokens(job("s", [*ids, 1] * 100), pool.records()) == {life: CachedPrefix(3 * HASH_UNIT)}, "hashed in a thread"
    await pool.close()
    await index.close()


async def test_a_shared_prefix_sends_a_request_to_the_workers_that_have_it(cluster: Cluster) -> None:
    prefills = [await cluster.prefill(f"p{i}") for i in range(3)]
    decodes = [await cluster.decode(f"d{i}") for i in range(3)]
    prompt = "the capital of France is Paris and so on " * 40
    ids = cluster.tokenizer.encode(prompt).ids
    key = derive_key(SECRET, tenant="", salt="", model_fingerprint=cluster.layout.model_fingerprint, dtype="float32")
    units = prefix_hashes(key, ids, HASH_UNIT)
    assert len(units) > 3
    await cluster.announce(prefills[2], units)
    await cluster.announce(decodes[1], units)
    async with cluster.serving():
        await cluster.ask(cluster.request(prompt, max_tokens=2))  # the connection to Redis is made here
        for worker in (*prefills, *decodes):
            worker.requests.clear()
        for _ in range(8):
            await cluster.ask(cluster.request(prompt, max_tokens=2))
    assert len(prefills[2].requests) == len(decodes[1].requests) == 8


async def test_a_cancellation_that_the_redis_client_takes_for_a_lost_connection_ends_the_polling(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(cluster.redis, deployment(cluster))
    polling = asyncio.Event()

    async def lost(*_: object) -> WorkerListing:
        polling.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise redis.exceptions.ConnectionError("closed") from None
        raise AssertionError("nobody waits so long")

    monkeypatch.setattr("router.workers.registry.look", lost)
    task = asyncio.create_task(registry.run())
    await polling.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()


# ---- what others write there, and what it does not say any more --------------------------------------------------------------


class Town:
    """A registry whose time is handed in, and who of its workers would answer if it asked them."""

    def __init__(self, cluster: Cluster) -> None:
        self.now = 1000.0
        self.alive: set[WorkerLife] = set()
        self.asked: list[WorkerLife] = []
        self.registry = Registry(cluster.redis, deployment(cluster), lives=self._lives, clock=lambda: self.now)

    async def _lives(self, record: WorkerRecord) -> bool:
        self.asked.append(WorkerLife.of(record))
        return WorkerLife.of(record) in self.alive

    async def after(self, seconds: float) -> dict[str, WorkerRecord]:
        """Returns the workers listed then, if it is polled twice a second."""
        for _ in range(round(2 * seconds) or 1):
            self.now += 0.5 if seconds else 0.0
            await self.registry.exchange()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return {record.worker_id: record for record in self.registry.workers}


async def test_few_workers_are_asked_at_once() -> None:
    asked: list[str] = []

    async def hangs(record: WorkerRecord) -> bool:
        asked.append(record.worker_id)
        await asyncio.Event().wait()
        return True

    witnesses = Witnesses(hangs, lambda: 0.0)
    for i in range(100):
        witnesses.ask(dataclasses.replace(_WORKER, worker_id=f"w{i % 80}"))
    await asyncio.sleep(0)
    assert asked == [f"w{i}" for i in range(64)]
    await witnesses.close()


async def test_only_what_the_deployment_has_signed_is_a_worker(cluster: Cluster) -> None:
    """A record that is copied with another address, or made up with an epoch that bars all others, is nobody's."""
    town, true = Town(cluster), described(cluster, "d0", epoch=7)
    await write(cluster.redis, true)
    assert (await town.after(0))["d0"].address == true.address
    text = signed(true)
    elsewhere = dataclasses.replace(true, address="127.0.0.1:6")
    forged = {
        "another address": text.replace(true.address, elsewhere.address),
        "no signature": elsewhere.to_json(),
        "its signature": elsewhere.to_json()[:-1] + text[-74:],
        "another secret's": signed(dataclasses.replace(elsewhere, epoch=1 << 62), DeploymentSecret(b"another deployment's")),
        "a larger epoch": text.replace('"epoch":7', f'"epoch":{1 << 62}'),
        "a field more": text.replace("{", '{"address":"127.0.0.1:6",', 1),
        "nothing": "{}",
        "only a signature": text[-74:],
    }
    for what, record in forged.items():
        await cluster.redis.set(worker_key("d0"), record)
        await cluster.redis.set(worker_key("d1"), record)
        await cluster.redis.sadd(WORKERS_KEY, "d0", "d1")
        assert await town.after(0) == {"d0": true}, f"{what}: the worker that is known stays, and no other comes"
        assert "signed" in {refusal.worker_id: refusal.reason for refusal in town.registry.refusals}["d1"] or what == "nothing"
    await cluster.redis.set(worker_key("d1"), text)
    await write(cluster.redis, dataclasses.replace(true, epoch=8, address="127.0.0.1:7"))
    found = await town.after(0.5)
    assert {name: (record.epoch, record.address) for name, record in found.items()} == {"d0": (8, "127.0.0.1:7")}


async def test_a_life_that_is_over_comes_back_only_if_it_answers_and_the_newer_one_does_not(cluster: Cluster) -> None:
    town, old, new = Town(cluster), described(cluster, "d0", epoch=5), described(cluster, "d0", epoch=1 << 50)
    await write(cluster.redis, new)
    await town.after(0)
    await write(cluster.redis, old)
    assert (await town.after(1.0))["d0"].epoch == new.epoch
    town.alive = {WorkerLife.of(new), WorkerLife.of(old)}
    assert (await town.after(60.0))["d0"].epoch == new.epoch, "the one that is used stays as long as it answers"
    town.alive = set()
    assert await town.after(20.0) == {}, "an old record that is put back is no worker"
    # Redis has lost its counter, and its clock is behind: the worker that lives now has a smaller epoch than the one before.
    town.alive = {WorkerLife.of(old)}
    assert (await town.after(2.0))["d0"].epoch == old.epoch
    asked = len(town.asked)
    town.alive = set()
    assert (await town.after(60.0))["d0"].epoch == old.epoch, "from then on its record is enough"
    assert len(town.asked) == asked


async def test_a_copy_of_a_heartbeat_keeps_nobody_alive(cluster: Cluster) -> None:
    town = Town(cluster)
    first, second = described(cluster, "d0", beat=1), described(cluster, "d0", beat=2, draining=True)
    await write(cluster.redis, first)
    assert not (await town.after(0.5))["d0"].draining
    await write(cluster.redis, second)
    assert (await town.after(0.5))["d0"].draining
    await write(cluster.redis, first)
    assert (await town.after(1.0))["d0"].draining, "what it said before is not what it says"
    assert await town.after(5.0) == {}
    await write(cluster.redis, described(cluster, "d0", epoch=6, beat=1))
    assert len(await town.after(25.0)) == 1
    assert await town.after(20.0) == {}, "it has said the same for half a minute"


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1e6, 1e6), st.booleans()), max_size=12))
def test_whatever_clocks_do_the_life_that_lives_is_the_one_that_is_used(steps: list[tuple[int, float, bool]]) -> None:
    """A worker restarts again and again, on a Redis whose clock jumps and which may lose all: lives get epochs of any order."""

    async def play() -> None:
        store, now, epoch, wall = dict[str, bytes](), [0.0], 0, 1e9
        alive: set[int] = set()

        async def lives(record: WorkerRecord) -> bool:
            return record.epoch in alive

        class Store:
            async def eval(self, *_: object) -> list[Any]:
                return [[], list(map(str.encode, store)), list(store.values()), 0]

        registry = Registry(Store(), _BARE, lives=lives, clock=lambda: now[0])  # type: ignore[arg-type]
        for _, jump, lost in steps:
            wall += jump
            epoch = int(max(0.0 if lost else epoch + 1, wall * 1e6, 1))
            while epoch in alive:
                epoch += 1
            alive = {epoch}
            record = dataclasses.replace(_WORKER, epoch=epoch)
            store["w"] = _BARE.signer.sign_object(record.to_json()).encode()
            for _ in range(24):
                now[0] += 0.5
                await registry.exchange()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert [each.epoch for each in registry.workers] == [epoch]

    asyncio.run(play())


@pytest.mark.system
async def test_very_many_names_and_a_huge_record_cost_little_and_hide_nobody(cluster: Cluster) -> None:
    town, real = Town(cluster), described(cluster, "d0")
    await write(cluster.redis, described(cluster, "known"))
    await town.after(0)
    await cluster.redis.eval("for i = 1, 50000 do redis.call('SADD', KEYS[1], ARGV[1] .. i) end", 1, WORKERS_KEY, "junk" * 8)
    await cluster.redis.sadd(WORKERS_KEY, b"n" * (4 << 20), "huge", "list")
    await cluster.redis.set(worker_key("huge"), b"{" * (20 << 20))
    await cluster.redis.lpush(worker_key("list"), "x")
    before = (await cluster.redis.info("stats"))["total_net_output_bytes"]
    assert set(await town.after(1.0)) == {"known"}
    assert (await cluster.redis.info("stats"))["total_net_output_bytes"] - before < 1 << 20
    for _ in range(300):
        await town.registry.exchange()
        await write(cluster.redis, real)
        if await cluster.redis.scard(WORKERS_KEY) < 10:
            break
    assert set(await town.after(1.0)) == {"known", "d0"}, "what nobody stands behind is taken out of the set"
    await cluster.redis.delete(WORKERS_KEY)
    await cluster.redis.set(WORKERS_KEY, "no set at all")
    assert set(await town.after(1.0)) == {"known", "d0"}


async def test_a_prefix_set_of_any_other_kind_is_an_empty_one(cluster: Cluster) -> None:
    units = hashes(4)
    await cluster.redis.sadd(prefix_key("a", 1), *units)
    await cluster.redis.set(prefix_key("b", 1), "no set")
    index = PrefixIndex(SharedConnection(cluster.redis), SECRET, HASH_UNIT, timeout_s=60.0)
    for _ in range(2):
        assert await index.lookup({A: units, B: units}) == {A: CachedPrefix(4 * HASH_UNIT)}
    await index.close()
