"""Servers of every kind that docs/redis.md names: real processes."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import redis.asyncio
from test_worker_registration import registration
from worker_harness import SECRET, WAIT_S

from router.access.sources import RedisKeys
from router.batches.service import BatchLease
from router.request.targets import Targets
from router.status.scaling_watch import ScalingWatch
from router.waiting.demand_meter import DemandMeter
from router.waiting.quota_share import QuotaShare
from router.workers.prefix_index import PrefixIndex, WorkerLife
from router.workers.registry import Deployment, Registry
from twostep import __version__
from twostep.autoscaler.collect import ObservationCollector
from twostep.autoscaler.fleet import Fleet
from twostep.autoscaler.leadership import Leadership
from twostep.cluster.connection import connect, wait_for_redis
from twostep.cluster.epochs import first_epoch
from twostep.cluster.records import WORKERS_KEY
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.shared_connection import SharedConnection
from twostep.cluster.signed import DECISIONS, DEMAND, RECORDS, Signer
from twostep.errors import SetupError
from twostep.keys.api_keys import make_key
from twostep.keys.secret import DeploymentSecret
from twostep.local.ports import free_ports
from twostep.local.redis_server import server_binary
from twostep.request_class import RequestClass

pytestmark = pytest.mark.system
Start = Callable[..., int]
_ACL = re.search(r"```\n(user .*)\n```", (Path(__file__).parents[2] / "docs/redis.md").read_text())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with these options, and returns its port."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*options: str, port: int = 0) -> int:
        port = port or free_ports(1)[0]
        directory = tmp_path / str(port)
        directory.mkdir(exist_ok=True)
        argv = [str(server_binary()), *options, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        running.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        give_up = time.monotonic() + WAIT_S
        with redis.Redis(port=port) as client:
            while True:
                try:
                    client.ping()
                except redis.AuthenticationError:
                    return port
                except redis.RedisError:
                    assert time.monotonic() < give_up, "the server did not start"
                    time.sleep(0.02)
                else:
                    return port

    yield begin
    for process in running:
        process.kill()
        process.wait()


def deployment() -> Deployment:
    return Deployment(model_fingerprint="fake", secret_check="x", signer=Signer(SECRET, RECORDS), hash_unit=8)


async def serves(url: str) -> None:
    """A worker registers there and a router finds it."""
    client = connect(url)
    worker = registration(url, epoch=await first_epoch(url), version=__version__)
    await wait_for_redis(client, WAIT_S)
    await worker.start()
    registry = Registry(client, deployment())
    await registry.exchange()
    assert [record.worker_id for record in registry.workers] == ["w"]
    await worker.close()
    await client.aclose()


async def test_the_user_that_the_docs_name_can_do_all_there_is_to_do(start: Start, tmp_path: Path) -> None:
    assert _ACL is not None
    (tmp_path / "users").write_text(f"user default on >root ~* &* +@all\n{_ACL[1].replace('PASSWORD', 'pass/word')}\n")
    port = start("--aclfile", str(tmp_path / "users"))
    url = f"redis://twostep:pass%2Fword@127.0.0.1:{port}/0"
    client, clock = connect(url), SharedClock()
    await serves(url)
    worker = registration(url, version=__version__)
    await worker.start()
    await client.sadd(WORKERS_KEY, "gone")
    registry = Registry(client, deployment())
    await registry.exchange()
    assert await client.smismember(WORKERS_KEY, ["w", "gone"]) == [1, 0]
    index = PrefixIndex(SharedConnection(client), DeploymentSecret(b"secret"), 8, timeout_s=WAIT_S)
    await index.open()
    await index.lookup({WorkerLife("w", 7): [b"a" * 16]}, {WorkerLife("w", 7)})
    await index.close()
    meter = DemandMeter(client, "r", Signer(SECRET, DEMAND), Targets(), lambda: 0, clock=clock)
    await meter.exchange()
    share = QuotaShare(client, "r", lambda _: None, clock)
    share.charge(RequestClass.STANDARD, "t", 5)
    await share.exchange()
    assert (meter.connected, share.connected) == (True, True)
    keys = RedisKeys(client, SECRET)
    key = make_key()[1]
    await keys.put(key)
    assert [each.id for each in await keys.read() or ()] == [key.id]
    assert await keys.remove(key.id)
    lease = Leadership(client, "a", Signer(SECRET, DECISIONS), ttl_s=60.0)
    assert await lease.renew()
    assert await lease.renew()
    collector = ObservationCollector(client, Fleet("", {"prefill": 1.0, "decode": 1.0}), SECRET, span_s=60.0, look_again_s=0.0)
    look = await collector.look()
    assert len(look.records) == 1
    await ScalingWatch(client, Signer(SECRET, DECISIONS)).exchange()
    await lease.release()
    batch = BatchLease(client, "b", "r")
    assert await batch.take()
    await batch.renew()
    await batch.release()
    await worker.close()
    await client.aclose()
    async with redis.asyncio.Redis(port=port, username="default", password="root") as root:
        assert [entry["object"] for entry in await root.acl_log()] == [], "nothing was refused"
        await root.set("another's", "x")
    stranger = connect(url)
    for refused in (stranger.get("another's"), stranger.flushall(), stranger.config_get("*"), stranger.keys("*")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            await refused
    await stranger.aclose()
    with pytest.raises(SetupError):
        await first_epoch(f"redis://twostep:wrong@127.0.0.1:{port}/0", timeout_s=0.0)


@asynccontextmanager
async def over(port: int, context: ssl.SSLContext | None = None, *, delay_s: float = 0.0) -> AsyncIterator[int]:
    """A port where what is said comes to the server and back: through TLS, or late."""
    tasks: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await asyncio.sleep(delay_s)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server, from_us = await asyncio.open_connection("127.0.0.1", port)
        for each in (copy(reader, from_us), copy(to_server, writer)):
            tasks.add(asyncio.create_task(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*tasks)


async def test_tls_with_an_authority_of_one_s_own(start: Start, self_signed: tuple[Path, Path]) -> None:
    cert, key = self_signed
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with over(start(), context) as port:
        await serves(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}")
        with pytest.raises(SetupError):
            await first_epoch(f"rediss://127.0.0.1:{port}/0", timeout_s=0.0)


async def test_a_redis_of_seven_tenths_of_a_second_a_round_trip_is_one(start: Start) -> None:
    """No worker was ever found there."""
    async with over(start(), delay_s=0.35) as port:
        url = f"redis://127.0.0.1:{port}/0"
        worker, client = registration(url, version=__version__), connect(url)
        registry = Registry(client, deployment())
        await worker.start()
        await registry.exchange()
        assert [record.worker_id for record in registry.workers] == ["w"]
        await worker.close()
        await client.aclose()


async def test_a_cluster_is_refused_at_the_start_with_what_to_do(start: Start) -> None:
    port = start("--cluster-enabled", "yes")
    url = f"redis://127.0.0.1:{port}/0"
    client = connect(url)
    for asked in (wait_for_redis(client, 0.0), first_epoch(url, timeout_s=0.0)):
        with pytest.raises(SetupError, match=r"Redis Cluster.*cluster mode off"):
            await asked
    await client.aclose()


async def test_a_master_that_becomes_a_replica_is_looked_up_again(start: Start) -> None:
    """As where a managed service's name leads to the new master, and the old one still answers."""
    port = start()
    client = connect(f"redis://127.0.0.1:{port}/0")
    connected = (await client.info("stats"))["total_connections_received"]
    await client.replicaof("127.0.0.1", 1)
    for _ in range(2):
        with pytest.raises(redis.exceptions.ConnectionError):
            await client.set("twostep:v1:x", "1")
    assert (await client.info("stats"))["total_connections_received"] == connected + 2
    # In the middle of a pipeline too.
    with pytest.raises(redis.exceptions.ConnectionError):
        await client.pipeline(transaction=False).get("a").set("b", "1").get("c").execute()
    await client.replicaof("NO", "ONE")
    assert await client.pipeline(transaction=False).set("b", "1").get("b").execute() == [True, b"1"]
    await client.aclose()


async def test_sentinels_name_the_master_and_the_next_one(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    with redis.Redis(port=second) as replica:
        replica.replicaof("127.0.0.1", first)
        (port,) = free_ports(1)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor tw 127.0.0.1 {first} 1\nsentinel down-after-milliseconds tw 1000\nsentinel failover-timeout tw 5000\n"
        )
        start(str(config), "--sentinel", port=port)
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/tw/0"
        await serves(url)
        client = connect(url)
        await client.set("twostep:v1:x", "1")
        with redis.Redis(port=port) as sentinel:
            give_up = time.monotonic() + WAIT_S
            while True:
                assert time.monotonic() < give_up, "the sentinel did not take the replica for one"
                try:
                    sentinel.execute_command("SENTINEL", "FAILOVER", "tw")
                    break
                except redis.ResponseError:
                    await asyncio.sleep(0.1)
        while replica.info("replication")["role"] != "master":
            assert time.monotonic() < give_up, "there was no failover"
            await asyncio.sleep(0.1)
        while True:
            assert time.monotonic() < give_up, "nothing can be written"
            try:
                await client.set("twostep:v1:y", "2")
            except redis.exceptions.RedisError:
                await asyncio.sleep(0.1)
                continue
            if replica.get("twostep:v1:y") == b"2":
                break
        await client.aclose()
        await serves(url)


async def test_a_redis_that_evicts_whatever_it_likes_is_filled_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 1e6)
    port = start("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru", "--maxmemory-samples", "64")
    url = f"redis://127.0.0.1:{port}/0"
    client = connect(url)
    epoch = await first_epoch(url)
    worker = registration(url, epoch=epoch, version=__version__)
    await worker.start()
    registry = Registry(client, deployment())
    await registry.exchange()
    # Redis knows how old a key is by the second, and drops any of those that are as old.
    batches = iter(range(200))
    while await client.exists(WORKERS_KEY, "twostep:v1:worker:w", "twostep:v1:claim:w", "twostep:v1:epoch"):
        batch = next(batches)
        pipeline = client.pipeline(transaction=False)
        for number in range(1000):
            pipeline.set(f"other{batch}-{number}", "x" * 1000)
        await pipeline.execute()
    assert (await client.info("stats"))["evicted_keys"] > 0
    await registry.exchange()
    assert len(registry.workers) == 1
    await worker.announce()
    registry = Registry(client, deployment())
    await registry.exchange()
    assert [replace(record, beat=0).epoch for record in registry.workers] == [epoch]
    assert await first_epoch(url) > epoch
    await worker.close()
    await client.aclose()
