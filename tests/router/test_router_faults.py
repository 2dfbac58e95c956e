"""Workers that refuse, fail, vanish and freeze; clients that leave; a Redis that goes and comes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from router_fakes import Cluster, FakeWorker, Hook, Reply, Script, after, refuse, until

from router.serving.attempt import Attempt
from router.serving.dispatch import Dispatcher
from router.waiting.queues import WorkerQueue
from twostep.rpc.v1 import decode_pb2, inference_pb2_grpc

FULL = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free blocks")


async def failure(cluster: Cluster, timeout: float = 60.0, **sampling: Any) -> tuple[str, str]:
    """Status and message of a request that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(timeout=timeout, **sampling)
    return caught.value.code().name, caught.value.details() or ""


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def attempts(reply: Reply) -> int:
    assert reply.end is not None
    return reply.end.attempts


# ---- refusals ------------------------------------------------------------------------------------------------------------


async def test_a_full_decode_worker_is_passed_over_before_any_prefill(cluster: Cluster) -> None:
    prefill = await cluster.prefill()
    decodes = [await cluster.decode(f"d{i}", cached_at_watch=False) for i in range(3)]
    for decode in decodes[:2]:
        decode.max_held = 0
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=5)
    assert reply.token_ids == cluster.expected(5)
    assert attempts(reply) == 1
    assert len(prefill.requests) == 1
    assert reply.end is not None
    assert reply.end.transfer.decode_worker == "d2"
    # A clear no needs no cancel.
    assert decodes[0].cancels == decodes[1].cancels == []


async def test_a_full_prefill_worker_is_passed_over_and_the_reservation_given_back(cluster: Cluster) -> None:
    prefills = [await cluster.prefill(f"p{i}") for i in range(2)]
    decode = await cluster.decode()
    for prefill in prefills:
        prefill.cached_tokens = 0
    async with cluster.serving():
        for _ in range(4):
            for prefill in prefills:
                prefill.hooks.clear()
            prefills[0].hooks.append(FULL)
            assert (await cluster.ask(max_tokens=3)).token_ids == cluster.expected(3)
        await cluster.all_free()
    refused = sum(len(p.requests) for p in prefills) - 4
    assert len(decode.requests) == 4 + refused
    assert len(decode.cancels) == refused


async def test_room_given_back_wakes_the_next_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.WorkerQueue", lambda *args, **options: WorkerQueue(*args, **options, retry_s=1000.0))
    await cluster.prefill()
    decode = await cluster.decode()
    decode.max_held = 1
    # It is full for longer than until the first token.
    decode.script = Script(step_s=0.02, once=False)
    async with cluster.serving():
        # None of them would end by trying again after a time.
        await asyncio.wait_for(asyncio.gather(*(cluster.ask(max_tokens=3) for _ in range(6))), 30.0)


@pytest.mark.parametrize(
    ("role", "bound"), [("decode", "router.serving.attempt._UNARY_TIMEOUT_S"), ("prefill", "router.serving.attempt.ACCEPT_TIMEOUT_S")]
)
async def test_a_worker_that_never_answers_is_passed_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str, bound: str) -> None:
    monkeypatch.setattr(bound, 0.3)
    prefills = [await cluster.prefill(f"p{i}") for i in range(2)]
    decodes = [await cluster.decode(f"d{i}") for i in range(2)]
    workers: Sequence[FakeWorker] = decodes if role == "decode" else prefills
    asked: list[FakeWorker] = []

    def hang_if_first(worker: FakeWorker) -> Hook:
        async def hook(_request: Any, _context: Any) -> None:
            asked.append(worker)
            if worker is asked[0]:
                await asyncio.sleep(600)
            # This one may be late on a busy machine.
            monkeypatch.setattr(bound, 10.0)

        return hook

    for worker in workers:
        worker.hooks.extend([hang_if_first(worker)] * 1000)
    async with cluster.serving(no_worker_grace=1000.0):
        reply = await cluster.ask(max_tokens=5)
        await cluster.all_free()
    assert (reply.token_ids, attempts(reply)) == (cluster.expected(5), 1)
    hanging, other = asked[0], asked[-1]
    assert other is not hanging
    assert reply.end is not None
    transfer = reply.end.transfer
    assert (transfer.decode_worker if role == "decode" else transfer.prefill_worker) == other.record.worker_id
    # It may have what it was asked for all the same.
    refused = (hanging.requests[0].request_id, hanging.requests[0].attempt)
    assert any(refused in decode.cancels for decode in decodes)


# ---- nobody there --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_worker_a_request_fails_within_the_grace_and_says_what_is_missing(cluster: Cluster, role: str) -> None:
    if role == "prefill":
        await cluster.decode()
    else:
        await cluster.prefill()
    async with cluster.serving(no_worker_grace=1.0):
        started = time.monotonic()
        results = await asyncio.gather(*(failure(cluster, timeout=120) for _ in range(60)))
        assert 0.9 < time.monotonic() - started < 40, "the grace is everybody's own, not one after the other"
    assert all(code == "UNAVAILABLE" and f"no {role} worker is available" in message for code, message in results)


class Clock:
    """The time module's clock, put forward by `ahead_s`."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


async def test_the_grace_begins_when_the_workers_go_not_when_the_request_was_queued(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, absences = Clock(), list[float]()
    absent_for_s = Dispatcher._absent_for_s

    def told(dispatcher: Dispatcher) -> float:
        absences.append(absent_for_s(dispatcher))
        return absences[-1]

    monkeypatch.setattr("router.serving.dispatch.time", clock)
    monkeypatch.setattr(Dispatcher, "_absent_for_s", told)
    async with cluster.paired(no_worker_grace=1000.0) as (_, decode):
        decode.max_held = 0
        task = asyncio.create_task(cluster.ask(max_tokens=5))
        await until(lambda: cluster.router.worker_queue.num_queued == 1, "it waits for room")
        clock.ahead_s += 2000.0  # longer in the queue than the grace
        asked = len(decode.requests)
        await until(lambda: len(decode.requests) > asked + 1, "it asks again")
        assert not absences
        await decode.die()
        await until(lambda: bool(absences), "there is nobody to ask")
        clock.ahead_s += 500.0
        await until(lambda: absences[-1] >= 500.0, "there has been nobody for long")
        assert not task.done()
        decode.max_held = 8
        await cluster.revive(decode)
        assert (await task).token_ids == cluster.expected(5)
        await cluster.all_free()


# ---- lost on the way -----------------------------------------------------------------------------------------------------


async def test_a_prefill_lost_before_the_fetch_is_repeated_with_the_first_token_behind_the_prompt(cluster: Cluster) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    seen = asyncio.Event()
    decode.script = Script(fail_before_commit=True, fail_after=seen)
    async with cluster.serving():
        reply = Reply()
        async for response in cluster.stub.Generate(cluster.request(max_tokens=8), timeout=30):
            reply.add(response)
            seen.set()
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(8)
    assert attempts(reply) == 2
    first, second = prefill.requests
    assert list(second.token_ids) == [*first.token_ids, *cluster.expected(1)]
    assert second.num_prompt_tokens == first.num_prompt_tokens == len(first.token_ids)
    assert second.sampling == first.sampling, "seed and bounds stay"


async def test_a_first_token_that_ends_the_request_may_come_after_the_end_of_its_lease(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serving.attempt._SOURCE_SPREADS_S", 60.0)
    prefill, decode = await cluster.prefill(), await cluster.decode()
    computed, told = asyncio.Event(), asyncio.Event()
    decode.script = Script(fail_before_commit=True, fail_after=computed, fail_code="ABORTED")
    on_event = Attempt.on_event

    def watched(attempt: Attempt, event: decode_pb2.DecodeEvent) -> None:
        on_event(attempt, event)
        if event.HasField("failed"):
            told.set()

    async def overtaken(_request: Any, _context: Any) -> None:
        computed.set()
        await told.wait()

    monkeypatch.setattr(Attempt, "on_event", watched)
    prefill.before_first.append(overtaken)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=1)
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(1)
    assert attempts(reply) == len(prefill.requests) == 1


@pytest.mark.parametrize("arrived", [False, True], ids=["ticket lost", "answer lost"])
async def test_a_ticket_whose_connection_breaks_is_handed_over_again(cluster: Cluster, arrived: bool) -> None:
    _, decode = await cluster.prefill(), await cluster.decode()
    decode.script = Script(step_s=0.05)
    # The answer to a repeated Attach: the sequence it speaks of may have run to its end meanwhile.
    again = refuse(grpc.StatusCode.NOT_FOUND, "no such reservation")

    async def cut(request: Any, context: Any) -> None:
        if arrived:
            decode.attach_hooks.append(again)
            decode.begin((request.request_id, request.attempt))
        decode.break_stream()
        # A router that has learnt of both within a tenth of a second takes it for the connection.
        stream = next(iter(cluster.router.pool.decode.values())).stream
        await until(lambda: not stream.open or stream.num_opened > 1, "it has noticed")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    decode.attach_hooks.append(cut)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=12)
        assert reply.token_ids == cluster.expected(12)
        assert attempts(reply) == 1
        assert len(decode.attaches) == 1
        assert not decode.attach_hooks, "it was handed over twice"
        await cluster.all_free()


# Behaviours of a decode worker, each with its attempts, on a pair and on the decode worker alone.
SCRIPTS = {
    "tokens come twice": (Script(repeat=True), 1),
    "tokens come in another order": (Script(swap=True), 1),
    "both": (Script(swap=True, repeat=True), 1),
    "it fails before the first token": (Script(fail_before_commit=True), 2),
    "it fails later": (Script(fail_at=4), 2),
    "the stream breaks": (Script(break_stream_at=5), 1),
    "the stream breaks and it has lost the sequence": (Script(break_stream_at=5, forget_at_break=True), 2),
}


@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
@pytest.mark.parametrize("what", SCRIPTS)
async def test_whatever_a_decode_worker_does_each_token_comes_once_in_order(cluster: Cluster, what: str, alone: bool) -> None:
    if not alone:
        await cluster.prefill()
    decode = await cluster.decode(local=alone)
    script, num_attempts = SCRIPTS[what]
    decode.script = dataclasses.replace(script)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=31, ignore_eos=True)
        await cluster.all_free()
    assert (reply.token_ids, attempts(reply)) == (cluster.expected(31), num_attempts)
    if script.break_stream_at:
        first, again = decode.positions
        assert first == []
        assert [(p.attempt, p.next_position, p.committed, p.reserving) for p in again] == [(1, 5, True, False)]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND])
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_that_gives_up_what_it_accepted_is_asked_again(cluster: Cluster, monkeypatch: Any, role: str, code: Any) -> None:
    """The decode worker refuses the ticket, or the prefill worker ends its call after the first token while the decode worker is silent."""
    monkeypatch.setattr("router.serving.attempt._VERDICT_TIMEOUT_S", 0.2)
    prefill, decode = await cluster.prefill(), await cluster.decode()
    (decode.attach_hooks if role == "decode" else prefill.after_first).append(refuse(code, "it is gone"))
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=12)
        await cluster.all_free()
    assert (reply.token_ids, attempts(reply), len(prefill.requests)) == (cluster.expected(12), 2, 2)


@pytest.mark.parametrize("fail_at", [1, 4])
async def test_a_failure_that_overtakes_the_first_token_is_tried_again_from_the_start(cluster: Cluster, fail_at: int) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    decode.script = Script(fail_at=fail_at, fail_in_order=False)

    async def first_token_stays(request: Any, _context: Any) -> None:
        # The decode worker has the KV and goes on; the router never hears of this token.
        hand_over = cluster.exchange.of((request.request_id, request.attempt))
        hand_over.first.set_result(cluster.exchange.token(0, request.sampling))
        await asyncio.sleep(600)

    prefill.before_first.append(first_token_stays)
    async with cluster.serving():
        reply = await cluster.ask(max_tokens=8)
        await cluster.all_free()
    assert (reply.token_ids, attempts(reply)) == (cluster.expected(8), 2)
    first, second = prefill.requests
    assert list(second.token_ids) == list(first.token_ids), "tokens behind a missing one are none"
    assert prefill.cancelled == [(first.request_id, first.attempt)]


async def test_a_request_is_given_up_after_three_attempts_with_the_last_reason(cluster: Cluster) -> None:
    async with cluster.paired() as (prefill, decode):
        decode.script = Script(fail_before_commit=True, once=False)
        code, message = await failure(cluster, max_tokens=8)
        await cluster.all_free()
    assert code == "UNAVAILABLE"
    assert "3 attempts" in message
    assert "scripted" in message
    assert len(prefill.requests) == 3


@pytest.mark.parametrize("committed", [True, False])
async def test_the_worker_that_is_to_blame_is_avoided_if_there_is_another(cluster: Cluster, committed: bool) -> None:
    """Before the commit a failure is the source's, after it the decode worker's own."""
    prefills = [await cluster.prefill(f"p{i}") for i in range(2)]
    decodes = [await cluster.decode(f"d{i}") for i in range(2)]
    async with cluster.serving():
        for i in range(8):
            for decode in decodes:
                decode.script = Script(fail_at=3, fail_before_commit=not committed)
            for worker in (*prefills, *decodes):
                worker.requests.clear()
            request = cluster.request(max_tokens=6)
            request.request_id = f"r{i}"
            reply = await cluster.ask(request)
            assert reply.token_ids == cluster.expected(6)
            used = decodes if committed else prefills
            assert all(worker.requests for worker in used), "the second attempt went to the other one"
        await cluster.all_free()


async def test_a_token_that_never_comes_begins_the_attempt_again(cluster: Cluster, monkeypatch: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    decode.script = Script(skip=4, hold_at=1)
    begin = decode.script.go_on

    async def patient_again(_request: Any, _context: Any) -> None:
        monkeypatch.setattr("router.serving.attempt._MAX_EARLY_S", 60.0)

    # Not of what overtakes a first token.
    prefill.hooks.extend([after(0), patient_again])
    async with cluster.serving():
        reply = Reply()
        async for response in cluster.stub.Generate(cluster.request(max_tokens=8), timeout=60):
            reply.add(response)
            if not begin.is_set():
                monkeypatch.setattr("router.serving.attempt._MAX_EARLY_S", 0.1)
                begin.set()
        await cluster.all_free()
    assert (reply.token_ids, attempts(reply)) == (cluster.expected(8), 2)


async def test_the_end_does_not_wait_for_prefill_figures_for_long(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serving.attempt._DONE_TIMEOUT_S", 0.3)
    async with cluster.paired() as (prefill, _):
        prefill.never_done = True
        started = time.monotonic()
        reply = await cluster.ask(max_tokens=5)
        assert time.monotonic() - started > 0.29
        await cluster.all_free()
    assert reply.token_ids == cluster.expected(5)
    assert reply.end is not None
    assert reply.end.transfer.transport == "local"
    assert reply.end.phases.publish_s == 0.0
    assert len(prefill.cancelled) == 1


async def test_a_frozen_worker_is_noticed_by_its_silence(cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.workers.pool._SILENT_S", 0.5)
    await cluster.prefill()
    frozen, other = await cluster.decode("d0"), await cluster.decode("d1")
    freezes = asyncio.Event()
    for worker in (frozen, other):
        worker.script = Script(hold_at=10, go_on=freezes)
    async with cluster.serving():
        call = cluster.stub.Generate(cluster.request(max_tokens=40), timeout=60)
        reply = Reply()
        async for response in call:
            reply.add(response)
            if len(reply.token_ids) >= 5 and not freezes.is_set():
                freezes.set()
                (frozen if frozen.held else other).freeze()
    assert reply.token_ids == cluster.expected(40)
    assert attempts(reply) == 2


async def test_a_draining_worker_gets_nothing_new_but_ends_what_it_has(cluster: Cluster) -> None:
    await cluster.prefill()
    first, second = await cluster.decode("d0"), await cluster.decode("d1")
    drained = asyncio.Event()
    for worker in (first, second):
        worker.script = Script(hold_at=30, go_on=drained, once=False)
    async with cluster.serving():
        task = asyncio.create_task(cluster.ask(max_tokens=60))
        await until(lambda: bool(cluster.held()), "it is served")
        draining, other = (first, second) if first.held else (second, first)
        draining.record = dataclasses.replace(draining.record, draining=True)
        await cluster.seen()
        num_before = len(draining.requests)
        await asyncio.gather(*(cluster.ask(max_tokens=2) for _ in range(5)))
        assert len(draining.requests) == num_before
        assert len(other.requests) >= 5
        drained.set()
        reply = await task
        assert (reply.token_ids, attempts(reply)) == (cluster.expected(60), 1)


# ---- clients that leave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["reserving", "accepting", "before first", "decoding", "out of time"])
@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
async def test_a_client_that_leaves_frees_both_sides(cluster: Cluster, when: str, alone: bool) -> None:
    """It cancels, or its own deadline does."""
    if alone and when in ("accepting", "before first"):
        return
    prefill = None if alone else await cluster.prefill()
    decode = await cluster.decode(local=alone)
    decode.script = Script(hold_at=10, once=False)
    if when == "reserving":
        decode.hooks.append(after(600))
    elif prefill is not None and when == "accepting":
        prefill.hooks.append(after(600))
    elif prefill is not None and when == "before first":
        prefill.before_first.append(after(600))
    reached = {
        "reserving": lambda: decode.requests,
        "accepting": lambda: prefill is not None and prefill.requests,
        "before first": lambda: prefill is not None and prefill.held,
    }.get(when, lambda: decode.held and (prefill is None or (prefill.requests and not prefill.held)))
    async with cluster.serving():
        call = cluster.stub.Generate(cluster.request(max_tokens=1000), timeout=1.0 if when == "out of time" else 60.0)
        await until(lambda: bool(reached()) or call.done(), "it is under way")
        if when != "out of time":
            call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await read_to_end(call)
        await cluster.all_free()
        await until(lambda: cluster.router.admission.num_inflight == 0, "its place is free")
        attempt = (decode.requests[0].request_id, decode.requests[0].attempt)
        await until(lambda: attempt in decode.cancels, "decode is told")
        begun_by_chance = when in ("reserving", "accepting", "out of time")
        assert prefill is None or len(prefill.cancelled) == (when == "before first") or begun_by_chance
        links = (*cluster.router.pool.prefill.values(), *cluster.router.pool.decode.values())
        await until(lambda: not any(link.users or link.queued_tokens for link in links), "the router has nothing there any more")
        # Nothing of it stands in anybody's way.
        decode.script = Script()
        assert (await cluster.ask(max_tokens=3)).token_ids == cluster.expected(3)


@contextlib.asynccontextmanager
async def narrow(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceAsyncStub]:
    """A client whose connection holds next to nothing for it: with logprobs, a few hundred tokens fill it."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.grpc_port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def test_a_client_that_does_not_read_is_cut_and_its_neighbours_are_not_held_up(cluster: Cluster) -> None:
    async with cluster.paired(max_buffered_tokens=200) as (_, decode), narrow(cluster) as stub:
        decode.script = Script(tokens_per_step=50, step_s=0.001, once=False)
        slow = stub.Generate(cluster.request(max_tokens=2000, logprobs=20), timeout=60)
        await slow.read()
        replies = await asyncio.gather(*(cluster.ask(max_tokens=200) for _ in range(3)))
        assert all(r.token_ids == cluster.expected(200) for r in replies)
        await cluster.all_free()
        await until(lambda: cluster.router.admission.num_inflight == 0, "its place is free")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(slow)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "behind" in (caught.value.details() or "")
    assert len(decode.cancels) == 1


async def test_a_client_that_takes_nothing_at_the_end_is_cut_too(cluster: Cluster) -> None:
    async with cluster.paired(max_buffered_tokens=100_000, client_write_timeout=0.3) as (_, decode), narrow(cluster) as stub:
        decode.script = Script(tokens_per_step=50, once=False)
        slow = stub.Generate(cluster.request(max_tokens=2000, logprobs=20), timeout=60)
        await slow.read()
        await until(lambda: cluster.router.admission.num_inflight == 0, "its place is free")
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing"):
            await read_to_end(slow)


# ---- Redis ---------------------------------------------------------------------------------------------------------------


@pytest.mark.system
async def test_a_redis_that_answers_nothing_holds_up_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.cluster.exchange._TIMEOUT_S", 0.3)
    # It is those bounds that end the waiting, not the connections' own.
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", 1000.0)
    async with cluster.paired(prefix_lookup_timeout=0.01):
        router = cluster.router
        looking = (router.registry, router.demand, router.quota_share)
        await until(lambda: all(each.connected for each in looking), "Redis has answered them")
        cluster.redis_server.freeze()
        await until(lambda: not any(each.connected for each in looking), "they have given it up")
        for _ in range(3):
            reply = await cluster.ask(cluster.request("the capital " * 100, max_tokens=3))
            assert reply.token_ids == cluster.expected(3)
        assert not any(each.connected for each in looking)
        assert len(router.registry.workers) == 2
        cluster.redis_server.thaw()
        await until(lambda: all(each.connected for each in looking), "they have found it again")
        assert (await cluster.ask(max_tokens=3)).token_ids == cluster.expected(3)
        await cluster.all_free()
