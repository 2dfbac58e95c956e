"""Real worker processes on a fake model, KV through a real Ray, and a router that speaks to them by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_harness import BLOCK, SECRET, WAIT_S, RouterDouble, expected, prompt_of

from kv_transfer.testing import LocalRay
from twostep.cluster.records import WorkerRecord, worker_key
from twostep.local.ports import free_ports
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import decode_pb2_grpc, kv_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.ray
START_S = 60.0


class Process:
    """One worker process and its log."""

    def __init__(self, role: str, port: int, directory: Path, *flags: str, environment: dict[str, str]) -> None:
        self.address = f"127.0.0.1:{port}"
        self.log = directory / f"{role}.log"
        (directory / "secret").write_bytes(SECRET)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", f"{role}_worker", "--runner", "fake", "--worker-id", role),
                    *("--port", str(port), "--health-port", str(free_ports(1)[0])),
                    *("--secret-file", str(directory / "secret"), "--block-size", str(BLOCK), "--drain-timeout", "10", *flags),
                ],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def ready(self) -> None:
        give_up = time.monotonic() + START_S
        async with open_channel(self.address) as channel:
            while True:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < give_up, self.log.read_text()
                try:
                    check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=2)
                    if check.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass
                await asyncio.sleep(0.1)

    async def exit_code(self, within_s: float = 30.0) -> int:
        """A process that hangs in its drain ends by itself before that, and its log says where it hung."""
        return await asyncio.to_thread(self.process.wait, within_s)

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
        stats: worker_pb2.WorkerStats = await self.workers[index].Stats(worker_pb2.WorkerStatsRequest(check_integrity=True), timeout=10)
        return stats

    async def free(self, index: int) -> bool:
        stats = await self.stats(index)
        assert not stats.integrity_error
        held = [stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held, stats.num_leases, stats.num_sequences]
        held += [transport.num_objects for transport in stats.transports]
        return not any(held) and stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def ray_head() -> Iterator[LocalRay]:
    with LocalRay() as ray:
        yield ray


@asynccontextmanager
async def workers(
    ray: LocalRay, redis_url: str, directory: Path, prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = ()
) -> AsyncIterator[tuple[Process, Process, Stubs]]:
    shared = ("--redis-url", redis_url, "--ray-address", ray.address, "--chunk-bytes", "4096")
    prefill_flags = (*shared, "--lease-ttl", "3", "--fake-step-ms", "2", *prefill_flags)
    prefill = Process("prefill", free_ports(1)[0], directory, *prefill_flags, environment=ray.environment)
    decode = Process("decode", free_ports(1)[0], directory, *shared[:4], "--fake-step-ms", "5", *decode_flags, environment=ray.environment)
    try:
        await asyncio.gather(prefill.ready(), decode.ready())
        async with open_channel(prefill.address) as to_prefill, open_channel(decode.address) as to_decode:
            yield prefill, decode, Stubs(to_prefill, to_decode)
    finally:
        for process in (prefill, decode):
            process.kill()


async def until_free(stubs: Stubs, index: int, within_s: float = WAIT_S) -> None:
    give_up = time.monotonic() + within_s
    while not await stubs.free(index):
        assert time.monotonic() < give_up, await stubs.stats(index)
        await asyncio.sleep(0.05)


async def until_store_empty(ray: LocalRay) -> None:
    usage = await asyncio.to_thread(ray.store_usage, empty_within_s=30.0)
    assert usage.num_objects == 0, usage


async def test_requests_through_processes_then_a_drain(ray_head: LocalRay, redis_url: str, tmp_path: Path) -> None:
    async with workers(ray_head, redis_url, tmp_path) as (prefill, decode, stubs):
        router = RouterDouble(stubs)  # type: ignore[arg-type]
        await router.open()
        prompts = [prompt_of(20 + 17 * i, seed=i) for i in range(10)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected(prompt, 12)
            assert answer.committed is not None
            assert answer.committed.transport == "ray"
            assert answer.committed.blocks_moved == -(-len(prompt) // BLOCK)
        for index in (0, 1):
            await until_free(stubs, index)
        await until_store_empty(ray_head)

        running = asyncio.create_task(router.generate("last", prompts[0], 100))
        await asyncio.sleep(0.3)
        for process in (prefill, decode):
            process.process.send_signal(signal.SIGTERM)
        assert (await running).tokens == expected(prompts[0], 100)
        assert await asyncio.gather(prefill.exit_code(), decode.exit_code()) == [0, 0], prefill.log.read_text() + decode.log.read_text()
        connection = redis.asyncio.Redis.from_url(redis_url)
        assert not await connection.exists(worker_key("prefill"), worker_key("decode"))
        await connection.aclose()
        await router.close()
        for process in (prefill, decode):
            assert "Traceback" not in process.log.read_text()


async def test_what_is_compressed_and_cut_anew_goes_through_processes(ray_head: LocalRay, redis_url: str, tmp_path: Path) -> None:
    flags = ("--kv-wire", "zstd"), ("--block-size", str(2 * BLOCK))
    async with workers(ray_head, redis_url, tmp_path, *flags) as (_, _, stubs):
        router = RouterDouble(stubs)  # type: ignore[arg-type]
        await router.open()
        prompts = [prompt_of(100 + 57 * i, seed=i) for i in range(4)]
        answers = await asyncio.gather(*(router.generate(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected(prompt, 6)
            assert answer.committed is not None
            # A token's KV of the fake model: two vectors of four numbers of 4 bytes.
            assert 0 < answer.committed.bytes < 32 * len(prompt)
        for index in (0, 1):
            await until_free(stubs, index)
        await until_store_empty(ray_head)
        await router.close()


async def test_each_side_survives_the_death_of_the_other(ray_head: LocalRay, redis_url: str, tmp_path: Path) -> None:
    async with workers(ray_head, redis_url, tmp_path) as (prefill, decode, stubs):
        router = RouterDouble(stubs)  # type: ignore[arg-type]
        await router.open()
        # Decode dies before it attaches: the lease expires, blocks and objects are free.
        prompt = prompt_of(400)
        await router.reserve("a", prompt, 20)
        call = router.run("a", prompt, 20)
        assert (await call.read()).WhichOneof("event") == "accepted"
        assert (await call.read()).WhichOneof("event") == "first_token"
        decode.kill()
        assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
        await until_free(stubs, 0)
        await until_store_empty(ray_head)
        await router.close()

        again = Process(
            "decode",
            int(decode.address.rpartition(":")[2]),
            tmp_path,
            "--redis-url",
            redis_url,
            "--ray-address",
            ray_head.address,
            environment=ray_head.environment,
        )
        try:
            await again.ready()
            router = RouterDouble(stubs, "router-2")  # type: ignore[arg-type]
            await router.open()
            # Prefill dies while decode watches: a retryable failure within seconds, nothing left.
            await router.reserve("b", prompt, 20)
            call = router.run("b", prompt_of(400, seed=5), 20)
            ticket = (await call.read()).accepted.ticket
            prefill.kill()
            await router.attach("b", ticket)
            failed = (await asyncio.wait_for(router.inbox("b").get(), WAIT_S)).failed
            assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
            await until_free(stubs, 1)
            await router.close()
        finally:
            again.kill()


async def test_workers_start_before_ray_and_join_it_when_it_comes(ray_head: LocalRay, redis_url: str, tmp_path: Path) -> None:
    """Last of this file: Ray is another one after it."""
    await asyncio.to_thread(ray_head.kill)
    flags = ("--transport-timeout", "0.5", "--kv-transfer", "ray")
    shared = ("--redis-url", redis_url, "--ray-address", ray_head.address, *flags)
    processes = [Process(role, free_ports(1)[0], tmp_path, *shared, environment=ray_head.environment) for role in ("prefill", "decode")]
    prefill, decode = processes
    try:
        await decode.ready()
        async with open_channel(prefill.address) as to_prefill, open_channel(decode.address) as to_decode:
            stubs = Stubs(to_prefill, to_decode)
            router = RouterDouble(stubs)  # type: ignore[arg-type]
            await router.open()
            prompt = prompt_of(30)
            assert (await router.generate_here("alone", prompt, 5)).tokens == expected(prompt, 5)
            epochs = [(await stubs.stats(index)).epoch for index in (0, 1)]
            reason = await _not_ready_reason(redis_url)
            assert "no KV transport works (--kv-transfer ray): ray: Ray does not answer at" in reason
            await asyncio.to_thread(ray_head.start)
            await prefill.ready()
            give_up = time.monotonic() + START_S
            while not (await stubs.stats(1)).transports[0].ready:
                assert time.monotonic() < give_up, decode.log.read_text()
                await asyncio.sleep(0.1)
            assert (await router.generate("moved", prompt, 5)).tokens == expected(prompt, 5)
            assert [(await stubs.stats(index)).epoch for index in (0, 1)] == epochs
            assert await _not_ready_reason(redis_url) == ""
            await router.close()
    finally:
        for process in processes:
            process.kill()


async def _not_ready_reason(redis_url: str) -> str:
    """What the prefill worker says of itself, once it does."""
    give_up = time.monotonic() + START_S
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        while (raw := await connection.get(worker_key("prefill"))) is None:
            assert time.monotonic() < give_up, "the prefill worker does not register"
            await asyncio.sleep(0.1)
    return WorkerRecord.from_json(raw).not_ready_reason
