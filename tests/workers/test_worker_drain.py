"""Starting, stopping, failing: what a worker's callers see, and that nothing is left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from worker_harness import (
    SECRET,
    WAIT_S,
    Answer,
    HeldRunner,
    Pair,
    RedisServer,
    RouterDouble,
    decode_edge,
    expected,
    make_model,
    make_runner,
    prefill_edge,
    prompt_of,
    read_to_end,
    routed,
    started,
    worker_config,
)

from kv_transfer.local.transport import LocalHub
from twostep.cluster.records import WORKERS_KEY, WorkerRecord, worker_key
from twostep.errors import SetupError
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import decode_pb2, prefill_pb2
from twostep.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("patient_redis")


async def health(address: str, service: str) -> int:
    async with open_channel(address) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)).status


async def decoding(router: RouterDouble) -> None:
    """Returns at the first token of the decode worker, whoever's."""
    give_up = time.monotonic() + WAIT_S
    while not any(event.HasField("token") for message in router.messages for event in message.events):
        assert time.monotonic() < give_up, "nothing was decoded"
        await asyncio.sleep(0.01)


async def begin_to_stop(worker: Worker, drain_timeout_s: float) -> asyncio.Task[None]:
    """Returns when it refuses new work."""
    stopping = asyncio.create_task(worker.stop(drain_timeout_s))
    while not worker.record().draining:  # noqa: ASYNC110  it says so once, at once
        await asyncio.sleep(0)
    return stopping


async def decode_held(router: RouterDouble, runner: HeldRunner, num_tokens: int) -> asyncio.Task[Answer]:
    """Of a request that is being decoded, and will not end before the runner is let go."""
    runner.allow(3)
    running = asyncio.create_task(router.generate("r", prompt_of(40), num_tokens))
    await decoding(router)
    return running


async def test_a_drain_lets_requests_finish_and_refuses_new_ones(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        running = await decode_held(router, runner, 200)
        stopping = [await begin_to_stop(worker, WAIT_S) for worker in (pair.prefill_worker, pair.decode_worker)]
        for method, request, refused in (
            (pair.decode.Reserve, decode_pb2.ReserveRequest(router_id="x", **router._request("n", prompt_of(4), 2)), "UNAVAILABLE"),
            (pair.prefill.Run, prefill_pb2.PrefillRequest(**router._request("n", prompt_of(4), 2)), "UNAVAILABLE|CANCELLED"),
        ):
            call: Any = method(request, timeout=WAIT_S)  # type: ignore[operator]
            # The prefill worker has handed everything over and may be at its end: gRPC cancels what comes then, and routers take either for
            # a worker that is gone (router/serving/attempt.py).
            with pytest.raises(grpc.aio.AioRpcError, match=refused):
                await (call.read() if hasattr(call, "read") else call)
        runner.let_go()
        answer = await running
        assert answer.tokens == expected(prompt_of(40), 200)
        await asyncio.wait_for(asyncio.gather(*stopping), WAIT_S)
        # The stream ended by itself, in order.
        assert await router._call.code() is grpc.StatusCode.OK


async def test_its_record_says_that_it_drains_until_nothing_runs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 0.05)
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        name = pair.prefill_worker.worker_id
        running = await decode_held(router, runner, 200)
        key = worker_key(pair.decode_worker.worker_id)

        async def told() -> WorkerRecord:
            """Of a worker that drains."""
            give_up = time.monotonic() + WAIT_S
            while (text := await client.get(key)) is None or not (record := WorkerRecord.from_json(text)).draining:
                assert time.monotonic() < give_up, "it never said so"
                await asyncio.sleep(0.01)
            return record

        client = redis.asyncio.Redis.from_url(redis_url)
        try:
            stopping = await begin_to_stop(pair.decode_worker, 2 * WAIT_S)
            assert not (await told()).ready
            # Its heart beats on: the record comes back whatever happens to it.
            await client.delete(key)
            assert not (await told()).ready
            runner.let_go()
            assert (await running).tokens == expected(prompt_of(40), 200)
            await stopping
            assert await client.exists(key) == 0
            # Others may be there that were killed in an earlier test.
            members = await client.smembers(WORKERS_KEY)
            assert name.encode() in members
            assert pair.decode_worker.worker_id.encode() not in members
        finally:
            await client.aclose()


async def test_health_follows_the_drain(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        health_address = f"127.0.0.1:{pair.decode_worker.server.health_port}"
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await health(health_address, s) for s in ("liveness", "readiness")] == [serving, serving]
        running = await decode_held(router, runner, 200)
        stopping = await begin_to_stop(pair.decode_worker, WAIT_S)
        assert [await health(health_address, s) for s in ("liveness", "readiness")] == [serving, not_serving]
        runner.let_go()
        assert (await running).tokens == expected(prompt_of(40), 200)
        await stopping


async def test_what_does_not_finish_in_time_is_failed_retryably(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        running = await decode_held(router, runner, 400)
        stopping = asyncio.create_task(pair.decode_worker.stop(0.1))
        answer = await running
        assert answer.failed is not None
        assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)
        runner.let_go()
        await asyncio.wait_for(stopping, WAIT_S)
        engine = pair.decode_worker.engine
        engine.check_integrity()
        assert engine.stats().num_running == 0


async def test_a_prefill_worker_that_stops_ends_run_with_unavailable(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, prefill_runner=runner, prefill_options={"max_num_batched_tokens": 8, "max_num_seqs": 8}) as pair:
        async with routed(pair) as router:
            call = router.run("r", prompt_of(80), 5)
            assert (await call.read()).WhichOneof("event") == "accepted"
            stopping = asyncio.create_task(pair.prefill_worker.stop(0.1))
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call.read()
            runner.let_go()
            await asyncio.wait_for(stopping, WAIT_S)
        pair.prefill_worker.engine.check_integrity()


async def test_one_failed_step_ends_its_sequences_and_the_worker_goes_on(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner) as pair, routed(pair) as router:
        running = await decode_held(router, runner, 300)
        runner.failures = 1
        runner.let_go()
        answer = await running
        assert answer.failed is not None
        assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)
        assert "on fire" in answer.failed.message
        assert (await router.generate("s", prompt_of(41), 4)).tokens == expected(prompt_of(41), 4)
        await pair.settled()


async def test_an_engine_that_keeps_failing_is_not_alive_and_tells_everybody(redis_url: str) -> None:
    runner = HeldRunner()
    runner.let_go()
    runner.failures = 1 << 30
    async with started(redis_url, prefill_runner=runner) as pair, routed(pair) as router:
        for i in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await read_to_end(router.run(f"r{i}", prompt_of(10), 3))
        await asyncio.wait_for(pair.prefill_worker.engine_failed.wait(), WAIT_S)
        address = f"127.0.0.1:{pair.prefill_worker.server.health_port}"
        for service in ("liveness", "readiness"):
            assert await health(address, service) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="failed; use another worker"):
            await read_to_end(router.run("n", prompt_of(10), 3))
        await pair.settled()


async def test_a_full_queue_is_resource_exhausted(redis_url: str) -> None:
    runner = HeldRunner()
    options = {"max_waiting": 1, "max_num_batched_tokens": 4, "max_num_seqs": 4}
    async with started(redis_url, prefill_runner=runner, prefill_options=options) as pair, routed(pair) as router:
        calls = [router.run(f"r{i}", prompt_of(40, seed=i), 5) for i in range(4)]
        codes = await asyncio.gather(*(_outcome(call) for call in calls))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        for call in calls:
            call.cancel()
        runner.let_go()
        await pair.settled()


async def _outcome(call: Any) -> grpc.StatusCode:
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_no_transport_is_unavailable_before_any_compute(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        transport = pair.prefill_worker.edge._hand_overs.outlets.transports.get("local")  # type: ignore[attr-defined]
        threads, transport._threads = transport._threads, None
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await read_to_end(router.run("r", prompt_of(10), 3))
        assert pair.prefill_worker.record().transports == ()
        assert (await pair.both())[0].steps == 0
        transport._threads = threads
        assert (await router.generate("s", prompt_of(10), 3)).tokens == expected(prompt_of(10), 3)
        await pair.settled()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [5, 100_000]}, "vocabulary"),
        ({"token_ids": list(range(600))}, "context"),
        ({"num_prompt_tokens": 0}, "prompt"),
        ({"num_prompt_tokens": 99}, "prompt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 500}, "request_id"),
        ({"attempt": 0}, "attempt"),
    ],
)
async def test_bad_requests_are_invalid_on_both_workers(redis_url: str, changes: dict[str, Any], message: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        request = router._request("r", prompt_of(10), 3) | changes
        if "token_ids" in changes:
            request["num_prompt_tokens"] = max(1, len(changes["token_ids"]))
        await _both_refuse(pair, request, message)
        await pair.settled()


@pytest.mark.parametrize("field", ["max_tokens", "seed", "top_p", "ignore_eos"])
async def test_a_missing_sampling_field_is_named(redis_url: str, field: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        request = router._request("r", prompt_of(10), 3)
        request["sampling"].ClearField(field)
        await _both_refuse(pair, request, field)


async def _both_refuse(pair: Pair, request: dict[str, Any], message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as by_decode:
        await pair.decode.Reserve(decode_pb2.ReserveRequest(router_id="x", **request), timeout=WAIT_S)
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as by_prefill:
        await read_to_end(pair.prefill.Run(prefill_pb2.PrefillRequest(**request), timeout=WAIT_S))
    for caught in (by_decode, by_prefill):
        assert message in (caught.value.details() or "")


async def test_a_decode_cache_longer_than_the_prompt_is_refused_and_a_part_of_a_block_is_published_whole(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        with pytest.raises(grpc.aio.AioRpcError, match="num_decode_cached_tokens"):
            await read_to_end(router.run("r", prompt_of(10), 3, cached=12))
        await pair.settled()
        await router.reserve("s", prompt_of(10), 3)
        call = router.run("s", prompt_of(10), 3, cached=3)
        await router.attach("s", (await call.read()).accepted.ticket)
        answer = Answer()
        await router.collect("s", answer)
        assert answer.tokens == expected(prompt_of(10), 3)[1:]
        assert answer.committed is not None
        assert answer.committed.blocks_moved == 3
        call.cancel()
        await pair.settled()


async def test_no_room_is_resource_exhausted_and_too_much_is_invalid(redis_url: str) -> None:
    async with started(redis_url, decode_runner=make_runner(num_blocks=16)) as pair, routed(pair) as router:
        await router.reserve("a", prompt_of(36), 20)
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await router.reserve("b", prompt_of(28, seed=2), 20)
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await router.reserve("c", prompt_of(20, seed=3), 400)
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await router.reserve("a", prompt_of(36), 20)  # a duplicate
        assert await router.cancel("a")
        await router.reserve("b", prompt_of(28, seed=2), 20)
        await router.cancel("b")
        await pair.settled()


async def test_a_worker_that_cannot_start_leaves_nothing_behind(redis_url: str, own_redis: RedisServer) -> None:
    before = _threads_of(["engine", "kv-local"])
    hub = LocalHub()
    taken = Worker(worker_config("prefill", redis_url), make_model(make_runner()), SECRET, prefill_edge(hub), 1)
    await taken.start()
    port = taken.server.port
    again = Worker(worker_config("decode", redis_url, port=port), make_model(make_runner()), SECRET, decode_edge(LocalHub()), 2)
    with pytest.raises(SetupError, match=f"{port}.*--port"):
        await again.start()
    own_redis.stop()
    lost = Worker(worker_config("decode", own_redis.url), make_model(make_runner()), SECRET, decode_edge(hub), 3)
    lost._registration._connect_timeout_s = 0.2
    with pytest.raises(SetupError, match="--redis-url"):
        await lost.start()
    await taken.stop(0.1)
    assert not _threads_of(["engine", "kv-local"]) - before


def _threads_of(prefixes: Sequence[str]) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(tuple(prefixes))}
