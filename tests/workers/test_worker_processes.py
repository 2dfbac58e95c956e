"""Real worker processes on a fake model, KV through a real Ray, and a router that speaks to them by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_ray import LocalRay
from worker_harness import BLOCK, SECRET, WAIT_S, RouterDouble, held_by, prompt_of, until

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

    def __init__(self, role: str, name: str, *flags: str, directory: Path, redis_url: str, ray: LocalRay) -> None:
        port, health_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.log = directory / f"{name}.log"
        (directory / "secret").write_bytes(SECRET.own)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", f"{role}_worker", "--runner", "fake", "--worker-id", name, "--grpc-port", str(port)),
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
    held: dict[str, Any] = {}

    async def free() -> bool:
        held.clear()
        held.update(held_by(await stubs.stats(index)))
        return not held

    await until(free, held)


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


async def until_joined(prefill: Process, decode: Process, stubs: Stubs) -> None:
    await prefill.ready()
    await decode.ready()

    async def joined() -> bool:
        # A decode worker that computes prompts is ready without it.
        return (await stubs.stats(1)).transports[0].ready

    await until(joined, decode.log)


@pytest.fixture
def ray() -> Iterator[LocalRay]:
    """One that a test starts; nobody else gets its port until then."""
    ray = LocalRay()
    try:
        ray.head.prepare()
        yield ray
    finally:
        ray.stop()


@pytest.fixture
def start(ray: LocalRay, redis_url: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(role: str, name: str, *flags: str) -> Process:
        started.append(Process(role, name, *flags, "--kv-transfer", "ray", directory=tmp_path, redis_url=redis_url, ray=ray))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.mark.parametrize("form", [pytest.param("off", marks=pytest.mark.exhaustive), pytest.param("on", marks=pytest.mark.smoke)])
async def test_kv_goes_through_ray_and_a_killed_worker_leaves_nothing(ray: LocalRay, start: Callable[..., Process], form: str) -> None:
    """`form`: whether engines have processes of their own."""
    prefill, decode = (start(role, f"smoke-{role}", "--engine-process", form) for role in ("prefill", "decode"))
    await asyncio.to_thread(ray.start)
    async with stubs_of(prefill, decode) as stubs:
        await until_joined(prefill, decode, stubs)
        async with routing(stubs, "smoke") as router:
            answer = await router.generate("r", prompt_of(90), 12)
            answer.check(prompt_of(90), 12)
            assert answer.committed is not None
            assert (answer.committed.transport, answer.committed.blocks_moved) == ("ray", -(-90 // BLOCK))
            # Prefill dies while decode watches: a retryable failure within seconds, nothing left.
            await router.reserve("b", prompt_of(400), 20)
            ticket = (await router.run("b", prompt_of(400), 20).read()).accepted.ticket
            others = psutil.Process(prefill.process.pid).children(recursive=True)
            assert any("kv_transfer.engine_process" in other.cmdline() for other in others) == (form == "on")
            prefill.kill()
            await router.attach("b", ticket)
            assert await router.failure("b") == ("UNAVAILABLE", True)
        await until_free(stubs, 1)
        _, alive = await asyncio.to_thread(psutil.wait_procs, others, WAIT_S)
        assert not alive, "they outlive the worker that they belong to"


async def test_two_workers_from_a_start_without_ray_to_their_drain(ray: LocalRay, start: Callable[..., Process], redis_url: str) -> None:
    """They join Ray when it comes; what was published for a worker that died is free again; what runs ends before they do."""
    slow = "--transport-timeout", "0.5", "--fake-step-ms"
    with socket.socket() as port_of_ray:
        # Bound, and nobody listens.
        port_of_ray.bind((ray.head.node_ip, ray.head.port))
        # Without decoding what it has computed, it is of no use alone.
        alone = "2", "--lease-ttl", str(SHORT_LEASE_S), "--fixed-roles"
        pair = start("prefill", "prefill", *slow, *alone), start("decode", "decode", *slow, "5")
        dying = start("decode", "dying", *slow, "5")
        async with stubs_of(*pair) as stubs:
            # It registers as soon as it answers calls.
            reason = "no KV transport works (--kv-transfer ray): ray: Ray does not answer at"
            await until(lambda: _says_why_it_is_not_ready(redis_url, reason), pair[0].log)
            await pair[1].ready()
            async with routing(stubs, "alone") as router:
                (await router.generate_here("alone", prompt_of(30), 5)).check(prompt_of(30), 5)
    await asyncio.to_thread(ray.start)
    async with stubs_of(*pair) as stubs, stubs_of(pair[0], dying) as mixed:
        await until_joined(*pair, stubs)
        await until_joined(pair[0], dying, mixed)
        await until(lambda: _says_why_it_is_not_ready(redis_url, ""), pair[0].log)
        # Decode dies before it attaches: the lease expires, blocks and objects are free.
        async with routing(mixed, "dying") as router:
            await router.reserve("a", prompt_of(400, seed=30), 20)
            call = router.run("a", prompt_of(400, seed=30), 20)
            assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "first_token"]
            dying.kill()
            assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
        await until_free(stubs, 0)
        usage = await asyncio.to_thread(ray.store_usage, empty_within_s=WAIT_S)
        assert usage.num_objects == 0, usage
        async with routing(stubs, "last") as router:
            running = asyncio.create_task(router.generate("last", prompt_of(20), 200))

            async def decoding() -> bool:
                return (await stubs.stats(1)).num_running > 0

            await until(decoding, pair[1].log)
            for process in pair:
                process.process.send_signal(signal.SIGTERM)
            (await running).check(prompt_of(20), 200)
            logs = [process.log.read_text for process in pair]
            assert [await process.exit_code() for process in pair] == [0, 0], [log() for log in logs]
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        assert not await connection.exists(worker_key("prefill"), worker_key("decode"))
    for log in logs:
        assert "Traceback" not in log()


async def _says_why_it_is_not_ready(redis_url: str, reason: str) -> bool:
    """The prefill worker, in Redis; empty: it is ready."""
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        raw = await connection.get(worker_key("prefill"))
    said = None if raw is None else WorkerRecord.from_json(raw).not_ready_reason
    return said is not None and (reason in said if reason else not said)
