"""Starting, stopping, failing: what a worker's callers see, and that nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
import redis.asyncio
from bare_deployment import RedisServer
from worker_harness import (
    PROMPT,
    WAIT_S,
    Answer,
    Held,
    edges_of_both_roles,
    engine_of,
    health,
    held_pair,
    make_model,
    make_runner,
    make_worker,
    prompt_of,
    read_to_end,
    refused,
    routed,
    started,
    until,
    worker_config,
)

from kv_transfer.local.transport import LocalHub
from twostep.cluster.records import WORKERS_KEY, WorkerRecord, worker_key
from twostep.errors import SetupError
from twostep.rpc.v1 import decode_pb2, prefill_pb2
from twostep.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("patient_redis")
Code = grpc.StatusCode


async def begin_to_stop(worker: Worker, drain_timeout_s: float) -> asyncio.Task[None]:
    """Returns when it refuses new work."""
    stopping = asyncio.create_task(worker.stop(drain_timeout_s))
    while not worker.record().draining:  # noqa: ASYNC110  it says so once, at once
        await asyncio.sleep(0)
    return stopping


async def decoding(h: Held, num_tokens: int = 200, *, here: bool = False) -> asyncio.Task[Answer]:
    """A request that is being decoded, and will not end before the runner is let go."""
    h.prefill.let_go()
    h.decode.allow(10 if here else 3)
    running = asyncio.create_task((h.router.generate_here if here else h.router.generate)("r", PROMPT, num_tokens))
    await until(lambda: any(event.HasField("token") for message in h.router.messages for event in message.events))
    return running


@pytest.mark.parametrize("here", [False, True])
async def test_a_drain_lets_requests_finish_and_refuses_new_ones(redis_url: str, here: bool) -> None:
    async with held_pair(redis_url) as h:
        assert await health(h.pair.decode_worker) == (True, True)
        running = await decoding(h, here=here)
        stopping = [await begin_to_stop(worker, WAIT_S) for worker in (h.pair.prefill_worker, h.pair.decode_worker)]
        assert await health(h.pair.decode_worker) == (True, False)
        reserve = decode_pb2.ReserveRequest(router_id="x", **h.router.request("n", prompt_of(4), 2))
        await refused(h.pair.decode.Reserve(reserve, timeout=WAIT_S), Code.UNAVAILABLE)
        # The prefill worker has handed everything over and may be at its end: gRPC cancels what comes then, and routers take either for
        # a worker that is gone (router/serving/attempt.py).
        run = h.pair.prefill.Run(prefill_pb2.PrefillRequest(**h.router.request("n", prompt_of(4), 2)), timeout=WAIT_S)
        await refused(run.read(), Code.UNAVAILABLE, Code.CANCELLED)
        h.let_go()
        (await running).check(PROMPT, 200)
        await asyncio.wait_for(asyncio.gather(*stopping), WAIT_S)
        assert await h.router.ended() is Code.OK, "the stream ended by itself, in order"


@pytest.mark.parametrize("here", [False, True])
async def test_what_does_not_finish_in_time_is_failed_retryably(redis_url: str, here: bool) -> None:
    async with held_pair(redis_url) as h:
        running = await decoding(h, 400, here=here)
        stopping = asyncio.create_task(h.pair.decode_worker.stop(0.1))
        answer = await running
        assert answer.failed is not None
        assert (answer.failed.code, answer.failed.retryable) == ("UNAVAILABLE", True)
        h.let_go()
        await asyncio.wait_for(stopping, WAIT_S)
        engine = engine_of(h.pair.decode_worker)
        engine.check_integrity()
        assert engine.stats().num_running == 0


async def test_its_record_says_that_it_drains_until_nothing_runs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.registration.HEARTBEAT_S", 0.05)
    async with held_pair(redis_url) as h, redis.asyncio.Redis.from_url(redis_url) as client:
        running = await decoding(h)
        key = worker_key(h.pair.decode_worker.worker_id)

        async def drains() -> bool:
            text = await client.get(key)
            record = None if text is None else WorkerRecord.from_json(text)
            return record is not None and record.draining and not record.ready

        stopping = await begin_to_stop(h.pair.decode_worker, 2 * WAIT_S)
        await until(drains)
        # Its heart beats on: the record comes back whatever happens to it.
        await client.delete(key)
        await until(drains)
        h.let_go()
        (await running).check(PROMPT, 200)
        await stopping
        assert await client.exists(key) == 0
        # Others may be there that were killed in an earlier test.
        names = [worker.worker_id for worker in (h.pair.prefill_worker, h.pair.decode_worker)]
        assert await client.smismember(WORKERS_KEY, names) == [1, 0]


async def test_a_prefill_worker_that_stops_ends_run_with_unavailable(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call = h.router.run("r", prompt_of(80), 5)
        assert (await call.read()).WhichOneof("event") == "accepted"
        stopping = asyncio.create_task(h.pair.prefill_worker.stop(0.1))
        await refused(call.read(), Code.UNAVAILABLE)
        h.let_go()
        await asyncio.wait_for(stopping, WAIT_S)
        engine_of(h.pair.prefill_worker).check_integrity()


async def test_an_engine_that_keeps_failing_is_not_alive_and_every_caller_hears_it(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        h.let_go()
        h.prefill.failures = 1 << 30
        for i in range(3):
            await refused(read_to_end(h.router.run(f"r{i}", prompt_of(10), 3)), Code.UNAVAILABLE)
        await asyncio.wait_for(h.pair.prefill_worker.engine_failed.wait(), WAIT_S)
        assert await health(h.pair.prefill_worker) == (False, False)
        await refused(read_to_end(h.router.run("n", prompt_of(10), 3)), Code.UNAVAILABLE)


# ---- refusals ------------------------------------------------------------------------------------------------------------------


async def test_no_transport_is_unavailable_before_any_compute(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        with monkeypatch.context() as patch:
            patch.setattr("kv_transfer.local.transport.LocalTransport.ready", False)
            await refused(read_to_end(router.run("r", prompt_of(10), 3)), Code.UNAVAILABLE)
            assert pair.prefill_worker.record().transports == ()
            assert (await pair.both())[0].steps == 0
        (await router.generate("s", prompt_of(10), 3)).check(prompt_of(10), 3)


async def test_bad_requests_are_invalid_on_both_workers_and_say_what_is_wrong(redis_url: str) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": [], "num_prompt_tokens": 1}, "token_ids"),
        ({"token_ids": [5, 100_000], "num_prompt_tokens": 2}, "vocabulary"),
        ({"token_ids": list(range(600)), "num_prompt_tokens": 600}, "context"),
        ({"num_prompt_tokens": 0}, "prompt"),
        ({"num_prompt_tokens": 99}, "prompt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 500}, "request_id"),
        ({"attempt": 0}, "attempt"),
    ]
    async with started(redis_url) as pair, routed(pair) as router:
        requests = [(router.request("r", prompt_of(10), 3) | change, name) for change, name in changes]
        for field in ("max_tokens", "seed", "top_p", "ignore_eos"):
            request = router.request("r", prompt_of(10), 3)
            request["sampling"].ClearField(field)
            requests.append((request, field))
        for request, name in requests:
            by_decode = pair.decode.Reserve(decode_pb2.ReserveRequest(router_id="x", **request), timeout=WAIT_S)
            assert name in await refused(by_decode, Code.INVALID_ARGUMENT)
            by_prefill = read_to_end(pair.prefill.Run(prefill_pb2.PrefillRequest(**request), timeout=WAIT_S))
            assert name in await refused(by_prefill, Code.INVALID_ARGUMENT)


async def test_no_room_is_resource_exhausted_and_too_much_is_invalid(redis_url: str) -> None:
    async with started(redis_url, decode_runner=make_runner(num_blocks=16)) as pair, routed(pair) as router:
        await router.reserve("a", prompt_of(36), 20)
        await refused(router.reserve("b", prompt_of(28, seed=2), 20), Code.RESOURCE_EXHAUSTED)
        await refused(router.reserve("c", prompt_of(20, seed=3), 400), Code.INVALID_ARGUMENT)
        await refused(router.reserve("a", prompt_of(36), 20), Code.INVALID_ARGUMENT)  # a duplicate
        assert await router.cancel("a")
        await router.reserve("b", prompt_of(28, seed=2), 20)
        await router.cancel("b")


async def test_a_worker_that_cannot_start_leaves_nothing_behind(redis_url: str, own_redis: RedisServer) -> None:
    before = _threads_of(["engine", "kv-local"])
    hub = LocalHub()
    taken = make_worker(worker_config("prefill", redis_url), make_model(make_runner()), edges_of_both_roles(hub), 1)
    await taken.start()
    port = taken.server.port
    again = make_worker(worker_config("decode", redis_url, grpc_port=port), make_model(make_runner()), edges_of_both_roles(LocalHub()), 2)
    with pytest.raises(SetupError, match="--grpc-port"):
        await again.start()
    own_redis.kill()
    lost = make_worker(worker_config("decode", own_redis.url), make_model(make_runner()), edges_of_both_roles(hub), 3)
    lost._registration._connect_timeout_s = 0.2  # or it would wait for as long as a Redis may take to come up
    with pytest.raises(SetupError, match="--redis-url"):
        await lost.start()
    await taken.stop(0.1)
    assert not taken.edge.transports.ready, "the worker that stops closes them"
    assert not _threads_of(["engine", "kv-local"]) - before


def _threads_of(prefixes: Sequence[str]) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(tuple(prefixes))}


async def test_a_stream_of_reservations_ends_with_the_worker_in_order(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        stream = h.pair.decode.Reservations()
        assert not (await stream.read()).number, "calls are taken"
        for number in (1, 2):
            request = h.router.request(f"r{number}", PROMPT, 4) | {"router_id": h.router.router_id}
            await stream.write(decode_pb2.ReservationCall(number=number, reserve=decode_pb2.ReserveRequest(**request)))
            answer = await stream.read()
            assert (answer.number, answer.reserved.epoch) == (number, h.pair.decode_worker.epoch)
        await stream.write(decode_pb2.ReservationCall(number=1, cancel=decode_pb2.CancelRequest(request_id="r1", attempt=1)))
        await until(lambda: h.pair.decode_worker.engine.stats().num_reserved == 1, "what nobody waits for is held")
        stopping = await begin_to_stop(h.pair.decode_worker, WAIT_S)
        late = decode_pb2.ReserveRequest(router_id=h.router.router_id, **h.router.request("r3", PROMPT, 4))
        await stream.write(decode_pb2.ReservationCall(number=3, reserve=late))
        assert (await stream.read()).refused.code == "UNAVAILABLE"
        await h.router.cancel("r2")
        await asyncio.wait_for(stopping, WAIT_S)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is Code.OK
