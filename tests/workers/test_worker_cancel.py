"""However a request ends, at whatever phase, both sides are free afterwards: blocks, leases, objects, sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from worker_harness import (
    BLOCK,
    PROMPT,
    SECRET,
    WAIT_S,
    Held,
    HeldRunner,
    LateClock,
    Pair,
    RouterDouble,
    engine_of,
    expected,
    held_pair,
    prompt_of,
    read_to_end,
    refused,
    routed,
    started,
    until,
)

from decode_worker.sequences import SequencesConfig
from kv_transfer.ticket import Ticket
from prefill_worker.publisher import HandOver
from prefill_worker.service import KvService
from twostep.errors import DataLoss, InvalidRequest
from twostep.rpc.call_signing import CallSigner, introduced
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, kv_pb2

COMMITTED = kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED
ABORTED = kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED
PROGRESS = kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS
Code = grpc.StatusCode


def late(monkeypatch: pytest.MonkeyPatch, module: str, *, frozen: bool = False) -> LateClock:
    clock = LateClock(frozen=frozen)
    monkeypatch.setattr(f"{module}.time", clock)
    return clock


async def acknowledge(pair: Pair, ticket: kv_pb2.Ticket, outcome: kv_pb2.AcknowledgeRequest.Outcome.ValueType) -> int:
    response = await pair.kv.Acknowledge(kv_pb2.AcknowledgeRequest(ticket=ticket, outcome=outcome), timeout=WAIT_S)
    return response.state


async def watched(pair: Pair, ticket: kv_pb2.Ticket) -> Any:
    return await pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket)).read()


async def num_sequences(pair: Pair) -> int:
    return (await pair.both())[1].num_sequences


async def gone(pair: Pair) -> bool:
    stats = await pair.both()
    return stats[0].num_leases == 0 and stats[1].num_sequences == 0


def at(request_id: str, next_position: int, *, committed: bool = False) -> decode_pb2.StreamPosition:
    return decode_pb2.StreamPosition(request_id=request_id, attempt=1, next_position=next_position, committed=committed)


# ---- cancelled, or out of time -----------------------------------------------------------------------------------------------


async def reach(h: Held, phase: str) -> list[Any]:
    """Request r is in this phase; returns calls to be cancelled beside it."""
    pair, router = h.pair, h.router
    if phase == "reserved":
        await router.reserve("r", PROMPT, 200)
        return []
    if phase.startswith("here"):
        if phase == "here, waiting":
            h.decode.allow(8)
            await router.reserve("ahead", PROMPT, 300, prefill_here=True)
            await router.event("first_token", "ahead")
        await router.reserve("r", PROMPT, 300, prefill_here=True)
        if phase == "here, prefilling":
            h.decode.allow(2)
            await h.until_steps(2)
        elif phase == "here, decoding":
            h.decode.allow(10)
            await router.event("token")
        return []
    ahead = [router.run("ahead", prompt_of(60, seed=50), 5)] if phase == "queued" else []
    for each in ahead:
        assert (await each.read()).WhichOneof("event") == "accepted"
    call, _ = await router.begin()
    if phase == "prefilling":
        h.prefill.allow(2)

        async def published() -> bool:
            return (await pair.both())[0].transports[0].num_objects > 0

        await until(published)
    elif phase in ("first token", "decoding"):
        h.prefill.let_go()
        assert (await call.read()).WhichOneof("event") == "first_token"
    if phase == "decoding":
        h.decode.allow(3)
        await router.event("token")
    return [call, *ahead]


HANDED_OVER = ["reserved", "queued", "prefilling", "first token", "decoding"]
HERE = ["here, waiting", "here, prefilling", "here, decoding"]


@pytest.mark.parametrize("phase", HANDED_OVER + HERE)
async def test_a_cancel_frees_both_sides(redis_url: str, phase: str) -> None:
    async with held_pair(redis_url, decode_options={"max_num_seqs": 1} if phase == "here, waiting" else {}) as h:
        calls = await reach(h, phase)
        assert await h.router.cancel("r")
        assert not await h.router.cancel("r")
        for call in calls:
            call.cancel()
        await h.router.cancel("ahead")
        # A decoding sequence is freed when the step that is under way has ended, and not at its own end.
        h.decode.allow(2)
        await until(lambda: not h.pair.decode_worker.engine.stats().num_running)
        h.let_go()
        await h.pair.settled()
        await h.router.hears_no_more_of("r")


@pytest.mark.parametrize("phase", ["decoding", "here, prefilling", "here, decoding"])
async def test_without_its_router_it_ends_with_the_router_s_lease(redis_url: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = late(monkeypatch, "decode_worker.sequences")
    async with held_pair(redis_url, limits=SequencesConfig(router_lease_s=100.0)) as h:
        calls = await reach(h, phase)
        await h.router.close()
        steps = (await h.pair.both())[1].steps
        h.decode.allow(3)
        await h.until_steps(steps + 3)
        assert await num_sequences(h.pair) == 1, "within the lease they go on"
        for call in calls:
            call.cancel()
        # It takes no step meanwhile: it cannot come to its own end.
        clock.late_s = 101.0

        async def ended() -> bool:
            return await num_sequences(h.pair) == 0

        await until(ended)


@pytest.mark.parametrize("phase", ["first token", "here, prefilling", "here, decoding"])
async def test_a_failed_step_fails_it_retryably_and_the_worker_goes_on(redis_url: str, phase: str) -> None:
    async with held_pair(redis_url) as h:
        await reach(h, phase)
        h.decode.failures = 1
        h.let_go()
        assert await h.router.failure() == ("UNAVAILABLE", True)
        await h.pair.settled()
        (await h.router.generate_here("after", PROMPT, 5)).check(PROMPT, 5)
        (await h.router.generate("after that", prompt_of(41), 4)).check(prompt_of(41), 4)


async def test_the_end_of_run_alone_fails_the_decode_side_retryably(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, _ = await h.router.begin()
        call.cancel()
        assert await h.router.failure() == ("UNAVAILABLE", True)


async def test_a_decode_cancel_alone_ends_run_with_aborted(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, _ = await h.router.begin()
        h.prefill.let_go()
        assert (await call.read()).WhichOneof("event") == "first_token"
        await h.router.cancel("r")
        assert (await call.read()).done.state in (kv_pb2.LEASE_STATE_ABORTED, kv_pb2.LEASE_STATE_RELEASED)


# ---- leases ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("died_watching", [False, True])
async def test_a_lease_whose_decode_worker_died_expires(redis_url: str, monkeypatch: pytest.MonkeyPatch, died_watching: bool) -> None:
    clock, ended, watch_of = late(monkeypatch, "prefill_worker.hand_over"), asyncio.Event(), KvService.Watch

    async def watch(self: KvService, request: Any, context: Any) -> AsyncIterator[kv_pb2.WatchEvent]:
        try:
            async for event in watch_of(self, request, context):
                yield event
        finally:
            ended.set()

    monkeypatch.setattr(KvService, "Watch", watch)
    async with held_pair(redis_url, prefill_options={"lease_ttl": 30.0}) as h:
        call = h.router.run("r", PROMPT, 20)
        ticket = (await call.read()).accepted.ticket
        if died_watching:
            watching: Any = h.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket))
            assert (await watching.read()).WhichOneof("event") == "manifest"
            watching.cancel()
            await asyncio.wait_for(ended.wait(), WAIT_S)
        h.let_go()
        assert (await call.read()).WhichOneof("event") == "first_token"
        if died_watching:
            await until(lambda: h.pair.lease_of(ticket).num_chunks is not None)
        clock.late_s = 31.0
        assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
        await refused(watched(h.pair, ticket), Code.UNAVAILABLE)


async def test_a_watch_renews_a_lease_that_is_queued_longer_than_its_ttl(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wait_change = late(monkeypatch, "prefill_worker.hand_over", frozen=True), HandOver.wait_change

    async def soon(self: HandOver, timeout_s: float | None = None) -> None:
        await wait_change(self, None if timeout_s is None else 0.02)

    monkeypatch.setattr(HandOver, "wait_change", soon)
    async with held_pair(redis_url, prefill_options={"lease_ttl": 10.0}) as h:
        ahead = h.router.run("ahead", prompt_of(60, seed=50), 2)
        assert (await ahead.read()).WhichOneof("event") == "accepted"
        call, ticket = await h.router.begin()

        def renewed() -> bool:
            return h.pair.lease_of(ticket).deadline >= clock.monotonic() + 10.0

        for _ in range(3):
            await until(renewed)
            clock.late_s += 8.0
        # One without a watch does end.
        await refused(ahead.read(), Code.UNAVAILABLE)
        await until(renewed)
        h.let_go()
        (await h.router.rest()).check(PROMPT, 200, first=1)
        call.cancel()


async def test_a_reservation_without_a_ticket_ends_and_a_waiting_prompt_does_not(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = late(monkeypatch, "decode_worker.sequences")
    async with held_pair(redis_url, decode_options={"max_num_seqs": 2}, limits=SequencesConfig(reservation_lease_s=100)) as h:
        await h.router.reserve("ahead", PROMPT, 100, prefill_here=True)
        assert (await h.pair.both())[1].oldest_lease_s == 0, "no hand-over is under way"
        assert (await h.router.reserve("reserved", prompt_of(8, seed=4), 5)).lease_s == 100
        await h.router.reserve("r", PROMPT, 5, prefill_here=True)
        clock.late_s = 101.0
        assert await h.router.failure("reserved") == ("UNAVAILABLE", True)
        await refused(h.router.attach("reserved", kv_pb2.Ticket(request_id="reserved", attempt=1)), Code.NOT_FOUND)
        # It has waited for as long, and goes on.
        h.let_go()
        (await h.router.rest()).check(PROMPT, 5)


async def test_repeated_calls_change_nothing(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, ticket = await h.router.begin()
        await h.router.attach("r", ticket)
        assert await acknowledge(h.pair, ticket, PROGRESS) in (kv_pb2.LEASE_STATE_RESERVED, kv_pb2.LEASE_STATE_PUBLISHING)
        await refused(acknowledge(h.pair, ticket, COMMITTED), Code.INVALID_ARGUMENT)  # nothing is complete yet
        h.let_go()
        (await h.router.rest()).check(PROMPT, 200, first=1)
        assert [event.WhichOneof("event") for event in await read_to_end(call)] == ["first_token", "done"]
        for outcome in (COMMITTED, ABORTED, PROGRESS, COMMITTED):
            assert await acknowledge(h.pair, ticket, outcome) == kv_pb2.LEASE_STATE_RELEASED
        assert not await h.router.cancel("r")


async def test_tickets_that_do_not_verify(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await router.reserve("r", PROMPT, 20)
        call = router.run("r", PROMPT, 20)
        good = Ticket.from_proto((await call.read()).accepted.ticket)

        def changed(**changes: Any) -> kv_pb2.Ticket:
            return replace(good, **changes).signed(SECRET).to_proto()

        forged = replace(good, expires_unix_ms=good.expires_unix_ms + 1).to_proto()
        old = changed(epoch=good.epoch - 1)
        for asked, code in (
            (router.attach("r", forged), Code.UNAUTHENTICATED),
            (watched(pair, forged), Code.UNAUTHENTICATED),
            (acknowledge(pair, forged, ABORTED), Code.UNAUTHENTICATED),
            (watched(pair, old), Code.UNAVAILABLE),
            (acknowledge(pair, old, ABORTED), Code.UNAVAILABLE),
            (watched(pair, changed(layout="0" * 32)), Code.FAILED_PRECONDITION),
            (router.attach("r", changed(request_id="other")), Code.INVALID_ARGUMENT),
            (router.attach("r", changed(tenant="another")), Code.UNAUTHENTICATED),
            (router.attach("r", changed(expires_unix_ms=1)), Code.UNAVAILABLE),
        ):
            await refused(asked, code)
        # An old epoch that does get attached ends in a retryable failure: the worker has restarted.
        await router.attach("r", old)
        assert await router.failure() == ("UNAVAILABLE", True)
        call.cancel()


# ---- streams that break ------------------------------------------------------------------------------------------------------


async def test_another_stream_of_the_router_takes_over_and_gets_what_is_buffered(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        await h.router.begin()
        h.prefill.let_go()
        h.decode.allow(5)
        assert [(await h.router.event("token")).token.position for _ in range(5)] == [1, 2, 3, 4, 5]
        # Tokens that came on the old stream and were not used come on the new one too.
        again = RouterDouble(h.pair, h.router.router_id)
        await again.open(at("r", 3, committed=True))
        assert await h.router.ended() is Code.CANCELLED
        h.let_go()
        (await again.rest()).check(PROMPT, 200, first=3)
        await again.close()


async def test_a_router_that_does_not_read_is_cut_loses_nothing_and_others_go_on(redis_url: str) -> None:
    """A process that stood still for a second has hundreds of answers under way: they are not begun again for that."""
    # More than the other router's answer has, however late its stream is served. Histories stay for a router that comes back.
    limits = SequencesConfig(max_buffered_events=200, router_lease_s=10 * WAIT_S)
    runner = HeldRunner(num_blocks=2048)
    async with (
        started(redis_url, limits=limits, decode_runner=runner) as pair,
        routed(pair, "good") as good,
        grpc.aio.insecure_channel(pair.decode_worker.address, options=[("grpc.http2.bdp_probe", 0)]) as unsigned,
    ):
        channel = await introduced(unsigned, CallSigner(SECRET, "slow"))
        # Its stream is open and never read: once gRPC's own window of 64 KiB is full, events pile up. logprobs make them large.
        slow = RouterDouble(pair, "slow")
        stream = decode_pb2_grpc.DecodeStub(channel).Stream(decode_pb2.StreamRequest(router_id="slow"))
        await stream.initial_metadata()
        prompts = {f"s{i}": prompt_of(60, seed=20 + i) for i in range(8)}
        for name, prompt in prompts.items():
            await slow.reserve(name, prompt, 400, logprobs=20)
            call = slow.run(name, prompt, 400, logprobs=20)
            await slow.attach(name, (await call.read()).accepted.ticket)
        # The first of them is not cut before the last one is there.
        runner.let_go()
        (await good.generate("g", prompt_of(30, seed=9), 100)).check(prompt_of(30, seed=9), 100)
        await until(lambda: gone(pair))
        await refused(read_to_end(stream), Code.RESOURCE_EXHAUSTED)
        # Its sequences have gone on meanwhile, and when it comes back it gets what it has not seen.
        await slow.open(*(at(name, 1) for name in prompts))
        for name, prompt in prompts.items():
            (await slow.rest(name)).check(prompt, 400, first=1)
        await slow.close()
        await pair.settled()


# ---- hand-overs that cannot be -------------------------------------------------------------------------------------------------


async def test_a_prefill_that_skips_blocks_decode_does_not_hold_is_not_decoded_from(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        # One of a version that goes by Run alone.
        watched = pair.hand_overs.watched
        monkeypatch.setattr(pair.hand_overs, "watched", lambda *given, num_cached_tokens: watched(*given))
        call, _ = await router.begin(cached=4 * BLOCK)
        # Another attempt reserves anew, and skips what is there then.
        assert await router.failure() == ("DATA_LOSS", True)
        call.cancel()


async def test_kv_that_the_engine_does_not_take_ends_on_both_sides(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("nothing is left to decode")

    async with started(redis_url) as pair, routed(pair) as router:
        monkeypatch.setattr(engine_of(pair.decode_worker), "commit", refuse)
        call, _ = await router.begin()
        assert await router.failure() == ("INVALID_ARGUMENT", False)
        assert (await read_to_end(call))[-1].done.state == kv_pb2.LEASE_STATE_RELEASED


@pytest.mark.parametrize(("num_losses", "ends_well"), [(1, True), (2, False)])
async def test_a_damaged_chunk_is_fetched_again_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, num_losses: int, ends_well: bool
) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        transport = pair.decode_edge.transports.get("local")
        assert transport is not None
        fetch, losses = transport.fetch, [DataLoss("damaged")] * num_losses

        async def lossy(*args: Any, **options: Any) -> float:
            if losses:
                raise losses.pop()
            return await fetch(*args, **options)

        monkeypatch.setattr(transport, "fetch", lossy)
        answer = await router.generate("r", prompt_of(10), 4)
        if ends_well:
            assert answer.tokens == expected(prompt_of(10), 4)
        else:
            assert answer.failed is not None
            assert (answer.failed.code, answer.failed.retryable) == ("DATA_LOSS", True)
            assert answer.done is not None
            assert answer.done.state == kv_pb2.LEASE_STATE_ABORTED


async def test_a_late_fetch_never_writes_into_blocks_of_others(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel returns only once the fetch that was writing has ended; until then its blocks are given to no other."""
    async with started(redis_url) as pair, routed(pair) as router:
        transport = pair.decode_edge.transports.get("local")
        assert transport is not None
        fetch = transport.fetch
        entered, cancelled, may_end, ended = (asyncio.Event() for _ in range(4))

        async def stubborn(*args: Any, **options: Any) -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                await may_end.wait()  # as a thread that must finish its copy
                await fetch(*args, **options)
                ended.set()
                raise

        monkeypatch.setattr(transport, "fetch", stubborn)
        call, _ = await router.begin()
        await asyncio.wait_for(entered.wait(), WAIT_S)
        reserved = (await pair.both())[1]
        cancel = asyncio.create_task(router.cancel("r"))
        await asyncio.wait_for(cancelled.wait(), WAIT_S)
        still = (await pair.both())[1]
        assert (still.num_free_blocks, still.num_sequences) == (reserved.num_free_blocks, 1)
        assert not cancel.done()
        may_end.set()
        assert await cancel
        assert ended.is_set()
        call.cancel()
