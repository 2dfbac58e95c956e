"""Real worker processes on a fake model, KV through a real Ray, and a router that speaks to them by hand.

Processes and Ray take seconds to start, so the tests share them, and stand in the order of their lives: workers before there is a Ray, then
with it; one more that dies; the drain of the first two."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_ray import LocalRay
from worker_harness import BLOCK, SECRET, WAIT_S, RouterDouble, expected, prompt_of, until

from twostep.cluster.records import WorkerRecord, worker_key
from twostep.errors import TwostepError
from twostep.local.ports import free_ports
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import decode_pb2_grpc, kv_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.ray
DRAIN_S = 30.0
# Long beside a pause of this machine, and short to wait for.
SHORT_LEASE_S = 6.0


class Process:
    """One worker process and its log."""

    def __init__(self, role: str, *, name: str = "", directory: Path, redis_url: str, ray: LocalRay, flags: Sequence[str] = ()) -> None:
        name = name or role
        port, health_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.log = directory / f"{name}.log"
        (directory / "secret").write_bytes(SECRET)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", f"{role}_worker", "--runner", "fake", "--worker-id", name, "--port", str(port)),
                    *("--health-port", str(health_port), "--redis-url", redis_url, "--ray-address", ray.address),
                    *("--secret-file", str(directory / "secret"), "--block-size", str(BLOCK), "--drain-timeout", str(DRAIN_S)),
                    *("--chunk-bytes", "4096", *flags),
                ],
                env=os.environ | ray.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def answers(self) -> None:
        async def answering() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                async with channel_to_worker(self.address, SECRET, caller="test"):
                    return True
            except TwostepError:
                return False

        await until(answering, self.log)

    async def ready(self) -> None:
        async with open_channel(self.address) as channel:

            async def serving() -> bool:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=10)
                except grpc.aio.AioRpcError:
                    return False
                return bool(check.status == health_pb2.HealthCheckResponse.SERVING)

            await until(serving, self.log)

    async def exit_code(self) -> int:
        """A process that hangs in its drain ends by itself before that, and its log says where it hung."""
        return await asyncio.to_thread(self.process.wait, DRAIN_S + 60.0)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Pair:
    prefill: Process
    decode: Process

    def kill(self) -> None:
        self.prefill.kill()
        self.decode.kill()


class Stubs:
    """As worker_harness.Pair, as far as RouterDouble needs it."""

    def __init__(self, to_prefill: grpc.aio.Channel, to_decode: grpc.aio.Channel) -> None:
        self.prefill: Any = prefill_pb2_grpc.PrefillStub(to_prefill)
        self.decode: Any = decode_pb2_grpc.DecodeStub(to_decode)
        self.workers: list[Any] = [worker_pb2_grpc.WorkerStub(channel) for channel in (to_prefill, to_decode)]

    async def stats(self, index: int) -> worker_pb2.WorkerStats:
        stats: worker_pb2.WorkerStats = await self.workers[index].Stats(worker_pb2.WorkerStatsRequest(check_integrity=True), timeout=WAIT_S)
        return stats


async def until_free(stubs: Stubs, index: int) -> None:
    stats = worker_pb2.WorkerStats()

    async def free() -> bool:
        stats.CopyFrom(await stubs.stats(index))
        assert not stats.integrity_error
        held = [stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held, stats.num_leases, stats.num_sequences]
        held += [transport.num_objects for transport in stats.transports]
        return not any(held) and stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks

    await until(free, stats)


async def until_store_empty(ray: LocalRay) -> None:
    usage = await asyncio.to_thread(ray.store_usage, empty_within_s=WAIT_S)
    assert usage.num_objects == 0, usage


@asynccontextmanager
async def stubs_of(prefill: Process, decode: Process) -> AsyncIterator[Stubs]:
    for process in (prefill, decode):
        await process.answers()
    async with (
        channel_to_worker(prefill.address, SECRET, caller="test") as to_prefill,
        channel_to_worker(decode.address, SECRET, caller="test") as to_decode,
    ):
        yield Stubs(to_prefill, to_decode)


@asynccontextmanager
async def routing(stubs: Stubs, router_id: str) -> AsyncIterator[RouterDouble]:
    router = RouterDouble(stubs, router_id)  # type: ignore[arg-type]
    await router.open()
    try:
        yield router
    finally:
        await router.close()


@pytest.fixture(scope="module")
def ray() -> Iterator[LocalRay]:
    """One that starts later; nobody else gets its port until then."""
    ray = LocalRay()
    try:
        ray.head.prepare()
        yield ray
    finally:
        ray.stop()


@pytest.fixture(scope="module")
def port_of_ray(ray: LocalRay) -> Iterator[socket.socket]:
    """Bound, and nobody listens, until it is closed."""
    with socket.socket() as held:
        held.bind((ray.head.node_ip, ray.head.port))
        yield held


@pytest.fixture(scope="module")
def pair(ray: LocalRay, port_of_ray: socket.socket, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Started while there is no Ray."""
    start = partial(Process, directory=tmp_path_factory.mktemp("pair"), redis_url=redis_url, ray=ray)
    flags = "--transport-timeout", "0.5", "--kv-transfer", "ray"
    pair = Pair(
        start("prefill", flags=("--fake-step-ms", "2", "--lease-ttl", str(SHORT_LEASE_S), *flags)),
        start("decode", flags=("--fake-step-ms", "5", *flags)),
    )
    yield pair
    pair.kill()


@pytest.fixture
async def stubs(ray: LocalRay, port_of_ray: socket.socket, pair: Pair) -> AsyncIterator[Stubs]:
    """Of the first pair, with a Ray, whichever test comes first."""
    port_of_ray.close()
    if not ray.head.ready():
        await asyncio.to_thread(ray.start)
    async with stubs_of(pair.prefill, pair.decode) as stubs:
        await until_joined(pair, stubs)
        yield stubs


async def until_joined(pair: Pair, stubs: Stubs) -> None:
    await pair.prefill.ready()
    await pair.decode.ready()

    async def joined() -> bool:
        # A decode worker that computes prompts is ready without it.
        return (await stubs.stats(1)).transports[0].ready

    await until(joined, pair.decode.log)


async def test_workers_start_before_ray_and_join_it_when_it_comes(
    ray: LocalRay, port_of_ray: socket.socket, pair: Pair, redis_url: str
) -> None:
    async with stubs_of(pair.prefill, pair.decode) as stubs:
        # It registers as soon as it answers calls.
        reason = "no KV transport works (--kv-transfer ray): ray: Ray does not answer at"
        await until(lambda: _says_why_it_is_not_ready(redis_url, reason), pair.prefill.log)
        await pair.decode.ready()
        epochs = [(await stubs.stats(index)).epoch for index in (0, 1)]
        prompt = prompt_of(30)
        async with routing(stubs, "before") as router:
            assert (await router.generate_here("alone", prompt, 5)).tokens == expected(prompt, 5)
            port_of_ray.close()
            await asyncio.to_thread(ray.start)
            await until_joined(pair, stubs)
            assert (await router.generate("moved", prompt, 5)).tokens == expected(prompt, 5)
        assert [(await stubs.stats(index)).epoch for index in (0, 1)] == epochs
        await until(lambda: _says_why_it_is_not_ready(redis_url, ""), pair.prefill.log)


async def _says_why_it_is_not_ready(redis_url: str, reason: str) -> bool:
    """The prefill worker, in Redis; empty: it is ready."""
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        raw = await connection.get(worker_key("prefill"))
    said = None if raw is None else WorkerRecord.from_json(raw).not_ready_reason
    return said is not None and (reason in said if reason else not said)


async def test_requests_through_processes(ray: LocalRay, stubs: Stubs) -> None:
    # No two tests have a prefix in common.
    prompts = [prompt_of(20 + 17 * i, seed=10 + i) for i in range(10)]
    async with routing(stubs, "many") as router:
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected(prompt, 12)
        assert answer.committed is not None
        assert answer.committed.transport == "ray"
        assert answer.committed.blocks_moved == -(-len(prompt) // BLOCK)
    for index in (0, 1):
        await until_free(stubs, index)
    await until_store_empty(ray)


async def test_what_was_published_for_a_worker_that_died_is_free_again(
    ray: LocalRay, stubs: Stubs, pair: Pair, redis_url: str, tmp_path: Path
) -> None:
    """The death of the other side: test_worker_smoke.py."""
    dying = Process("decode", name="dying", directory=tmp_path, redis_url=redis_url, ray=ray)
    try:
        async with stubs_of(pair.prefill, dying) as mixed, routing(mixed, "dying") as router:
            # Decode dies before it attaches: the lease expires, blocks and objects are free.
            await router.reserve("a", prompt_of(400, seed=30), 20)
            call = router.run("a", prompt_of(400, seed=30), 20)
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "first_token"]
            dying.kill()
            assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
    finally:
        dying.kill()
    await until_free(stubs, 0)
    await until_store_empty(ray)


async def test_a_drain_ends_what_runs(stubs: Stubs, pair: Pair, redis_url: str) -> None:
    """The last: no worker is left."""
    prompt = prompt_of(20, seed=40)
    async with routing(stubs, "last") as router:
        running = asyncio.create_task(router.generate("last", prompt, 200))

        async def decoding() -> bool:
            return (await stubs.stats(1)).num_running > 0

        await until(decoding, pair.decode.log)
        for process in (pair.prefill, pair.decode):
            process.process.send_signal(signal.SIGTERM)
        assert (await running).tokens == expected(prompt, 200)
        logs = [process.log.read_text for process in (pair.prefill, pair.decode)]
        assert await asyncio.gather(pair.prefill.exit_code(), pair.decode.exit_code()) == [0, 0], [log() for log in logs]
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        assert not await connection.exists(worker_key("prefill"), worker_key("decode"))
    for log in logs:
        assert "Traceback" not in log()
