"""However a request ends, at whatever phase, both sides are free afterwards: blocks, leases, objects, sequences."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest
from worker_harness import (
    BLOCK,
    SECRET,
    WAIT_S,
    Answer,
    HeldRunner,
    LateClock,
    Pair,
    RouterDouble,
    expected,
    prompt_of,
    read_to_end,
    routed,
    started,
)

from decode_worker.sequences import SequencesConfig
from kv_transfer.ticket import Ticket
from prefill_worker.publisher import HandOver
from prefill_worker.service import KvService
from twostep.errors import DataLoss
from twostep.rpc.call_signing import CallSigner, introduced
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2

PROMPT = prompt_of(60)
COMMITTED = kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED
ABORTED = kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED
PROGRESS = kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS


@dataclass
class Held:
    """Two workers that take only the steps that they may. Prefill takes 8 of them for the prompt."""

    pair: Pair
    router: RouterDouble
    prefill: HeldRunner
    decode: HeldRunner

    def let_go(self) -> None:
        self.prefill.let_go()
        self.decode.let_go()


@asynccontextmanager
async def held_pair(redis_url: str, **options: Any) -> AsyncIterator[Held]:
    prefill, decode = HeldRunner(), HeldRunner()
    prefill_options = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "chunk_bytes": 1} | options.pop("prefill_options", {})
    async with (
        started(redis_url, prefill_runner=prefill, decode_runner=decode, prefill_options=prefill_options, **options) as pair,
        routed(pair) as router,
    ):
        yield Held(pair, router, prefill, decode)


async def begin(router: RouterDouble, request_id: str = "r") -> tuple[Any, kv_pb2.Ticket]:
    """Reserved, accepted, attached."""
    await router.reserve(request_id, PROMPT, 200)
    call = router.run(request_id, PROMPT, 200)
    ticket = (await call.read()).accepted.ticket
    await router.attach(request_id, ticket)
    return call, ticket


async def until_event(router: RouterDouble, kind: str, request_id: str = "r") -> decode_pb2.DecodeEvent:
    while True:
        event = await asyncio.wait_for(router.inbox(request_id).get(), WAIT_S)
        if event.WhichOneof("event") == kind:
            return event


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < give_up, "it did not happen"
        await asyncio.sleep(0.01)


async def acknowledge(pair: Pair, ticket: kv_pb2.Ticket, outcome: kv_pb2.AcknowledgeRequest.Outcome.ValueType) -> str:
    response = await pair.kv.Acknowledge(kv_pb2.AcknowledgeRequest(ticket=ticket, outcome=outcome), timeout=WAIT_S)
    return kv_pb2.LeaseState.Name(response.state)


@pytest.mark.parametrize("phase", ["reserved", "queued", "prefilling", "first token", "decoding"])
async def test_a_cancel_frees_both_sides(redis_url: str, phase: str) -> None:
    async with held_pair(redis_url) as h:
        if phase == "reserved":
            await h.router.reserve("r", PROMPT, 200)
            assert await h.router.cancel("r")
        else:
            ahead = h.router.run("ahead", prompt_of(60, seed=50), 5) if phase == "queued" else None
            if ahead is not None:
                assert (await ahead.read()).WhichOneof("event") == "accepted"
            call, _ = await begin(h.router)
            if phase == "prefilling":
                h.prefill.allow(2)
                await until(lambda: _published(h.pair))
            elif phase in ("first token", "decoding"):
                h.prefill.let_go()
                assert (await call.read()).WhichOneof("event") == "first_token"
            if phase == "decoding":
                h.decode.allow(3)
                await until_event(h.router, "token")
            assert await h.router.cancel("r")
            call.cancel()
            if ahead is not None:
                ahead.cancel()
        assert not await h.router.cancel("r")
        h.let_go()
        await h.pair.settled()
        await h.router.hears_no_more_of("r")
        await h.pair.settled()


async def _published(pair: Pair) -> bool:
    return (await pair.both())[0].transports[0].num_objects > 0


async def test_the_end_of_run_alone_fails_the_decode_side_retryably(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, _ = await begin(h.router)
        call.cancel()
        failed = (await until_event(h.router, "failed")).failed
        assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        h.let_go()
        await h.pair.settled()


async def test_a_decode_cancel_alone_ends_run_with_aborted(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, _ = await begin(h.router)
        h.prefill.let_go()
        assert (await call.read()).WhichOneof("event") == "first_token"
        await h.router.cancel("r")
        done = (await call.read()).done
        assert done.state in (kv_pb2.LEASE_STATE_ABORTED, kv_pb2.LEASE_STATE_RELEASED)
        h.let_go()
        await h.pair.settled()


async def test_a_deadline_frees_everything(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        # A short one may pass before the call has got there.
        for attempt, timeout_s in enumerate((0.2, 2.0, 20.0), 1):
            request = prefill_pb2.PrefillRequest(**h.router._request("r", PROMPT, 20, attempt=attempt))
            call = h.pair.prefill.Run(request, timeout=timeout_s)
            events: list[str | None] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_into(events, call)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if events:
                assert events == ["accepted"]
                break
        else:
            pytest.fail("no call was accepted within its time")
        h.let_go()
        await h.pair.settled()


async def _read_into(events: list[str | None], call: Any) -> None:
    while True:
        events.append((await call.read()).WhichOneof("event"))


async def test_a_lease_nobody_attaches_to_expires(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the decode worker died."""
    clock = LateClock()
    monkeypatch.setattr("prefill_worker.hand_over.time", clock)
    async with held_pair(redis_url, prefill_options={"lease_ttl": 30.0}) as h:
        h.let_go()
        call = h.router.run("r", PROMPT, 20)
        assert (await call.read()).WhichOneof("event") == "accepted"
        assert (await call.read()).WhichOneof("event") == "first_token"
        clock.late_s = 31.0
        assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
        await h.pair.settled()


async def test_a_decode_worker_that_dies_while_watching_lets_the_lease_expire(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended, watch_of = LateClock(), asyncio.Event(), KvService.Watch

    async def watched(self: KvService, request: Any, context: Any) -> AsyncIterator[kv_pb2.WatchEvent]:
        try:
            async for event in watch_of(self, request, context):
                yield event
        finally:
            ended.set()

    monkeypatch.setattr("prefill_worker.hand_over.time", clock)
    monkeypatch.setattr(KvService, "Watch", watched)
    async with held_pair(redis_url, prefill_options={"lease_ttl": 30.0}) as h:
        call = h.router.run("r", PROMPT, 20)
        ticket = (await call.read()).accepted.ticket
        watch: Any = h.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket))
        assert (await watch.read()).WhichOneof("event") == "manifest"
        watch.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)
        h.let_go()
        assert (await call.read()).WhichOneof("event") == "first_token"

        async def all_published() -> bool:
            return h.pair.lease_of(ticket).num_chunks is not None

        await until(all_published)
        clock.late_s = 31.0
        assert (await asyncio.wait_for(call.read(), WAIT_S)).done.state == kv_pb2.LEASE_STATE_EXPIRED
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await h.pair.kv.Watch(kv_pb2.WatchRequest(ticket=ticket)).read()
        await h.pair.settled()


async def test_a_watch_renews_a_lease_that_is_queued_longer_than_its_ttl(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wait_change = LateClock(frozen=True), HandOver.wait_change

    async def soon(self: HandOver, timeout_s: float | None = None) -> None:
        await wait_change(self, None if timeout_s is None else 0.02)

    monkeypatch.setattr("prefill_worker.hand_over.time", clock)
    monkeypatch.setattr(HandOver, "wait_change", soon)
    async with held_pair(redis_url, prefill_options={"lease_ttl": 10.0}) as h:
        ahead = h.router.run("ahead", prompt_of(60, seed=50), 2)
        assert (await ahead.read()).WhichOneof("event") == "accepted"
        call, ticket = await begin(h.router)

        async def renewed() -> bool:
            return h.pair.lease_of(ticket).deadline >= clock.monotonic() + 10.0

        for _ in range(5):
            await until(renewed)
            clock.late_s += 8.0
        # One that nobody watches does end.
        with pytest.raises(grpc.aio.AioRpcError, match="no progress"):
            await ahead.read()
        await until(renewed)
        h.let_go()
        answer = Answer()
        await h.router.collect("r", answer)
        assert answer.tokens == expected(PROMPT, 200)[1:]
        call.cancel()
        await h.pair.settled()


async def test_a_reservation_nobody_attaches_to_is_dropped(redis_url: str) -> None:
    limits = SequencesConfig(reservation_lease_s=0.3)
    async with started(redis_url, limits=limits) as pair, routed(pair) as router:
        assert (await router.reserve("r", PROMPT, 20)).lease_s == pytest.approx(0.3)
        failed = (await until_event(router, "failed")).failed
        assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        await pair.settled()
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await router.attach("r", kv_pb2.Ticket(request_id="r", attempt=1))


async def test_orphans_of_a_router_that_is_gone_are_dropped_after_the_lease(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock()
    monkeypatch.setattr("decode_worker.sequences.time", clock)
    async with held_pair(redis_url, limits=SequencesConfig(router_lease_s=100.0)) as h:
        call, _ = await begin(h.router)
        h.prefill.let_go()
        h.decode.allow(2)
        await until_event(h.router, "token")
        await h.router.close()
        h.decode.allow(3)

        async def goes_on() -> bool:
            stats = (await h.pair.both())[1]
            assert stats.num_sequences == 1, "within the lease they go on"
            return stats.num_streams == 0 and stats.steps == 6

        await until(goes_on)
        call.cancel()
        # It takes no step meanwhile: it cannot come to its own end.
        clock.late_s = 101.0
        await until(lambda: _no_sequences(h.pair))
        h.let_go()
        await h.pair.settled()


async def _no_sequences(pair: Pair) -> bool:
    return (await pair.both())[1].num_sequences == 0


async def test_another_stream_of_the_router_takes_over_and_gets_what_is_buffered(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        _call, _ = await begin(h.router)
        h.prefill.let_go()
        h.decode.allow(5)
        before = [(await until_event(h.router, "token")).token.position for _ in range(5)]
        assert before == [1, 2, 3, 4, 5]
        old = h.router._call
        # What came on the old stream and did not get to be used comes on the new one too.
        again = RouterDouble(h.pair, h.router.router_id)
        await again.open(at("r", 3, committed=True))
        assert h.router._reader is not None
        await asyncio.wait([h.router._reader])
        assert await old.code() is grpc.StatusCode.CANCELLED
        assert "took over" in await old.details()
        h.let_go()
        answer = Answer()
        await again.collect("r", answer)
        assert answer.positions == list(range(3, 200))
        await again.close()
        await h.pair.settled()


async def test_tokens_before_the_stream_is_up_are_kept(redis_url: str) -> None:
    async with started(redis_url, limits=SequencesConfig(router_lease_s=10 * WAIT_S)) as pair:
        router = RouterDouble(pair)
        call, ticket = await _reserve_run(router)
        await router.attach("r", ticket)
        await until(lambda: _released(pair))
        await router.open(at("r", 1))
        answer = Answer()
        await router.collect("r", answer)
        assert answer.positions == list(range(1, 20))
        call.cancel()
        await router.close()
        await pair.settled()


def at(request_id: str, next_position: int, *, committed: bool = False, reserving: bool = False) -> decode_pb2.StreamPosition:
    return decode_pb2.StreamPosition(
        request_id=request_id, attempt=1, next_position=next_position, committed=committed, reserving=reserving
    )


async def _reserve_run(router: RouterDouble) -> tuple[Any, kv_pb2.Ticket]:
    await router.reserve("r", PROMPT, 20)
    call = router.run("r", PROMPT, 20)
    return call, (await call.read()).accepted.ticket


async def _released(pair: Pair) -> bool:
    stats = await pair.both()
    return stats[0].num_leases == 0 and stats[1].num_sequences == 0


async def test_a_router_that_does_not_read_is_cut_loses_nothing_and_others_go_on(redis_url: str) -> None:
    """A process that stood still for a second has hundreds of answers under way: they are not begun again for that."""
    # More than the other router's answer has, however late its stream is served. Histories stay for who comes back.
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
        calls = []
        for i in range(8):
            prompt = prompt_of(60, seed=20 + i)
            await slow.reserve(f"s{i}", prompt, 400, logprobs=20)
            call = slow.run(f"s{i}", prompt, 400, logprobs=20)
            await slow.attach(f"s{i}", (await call.read()).accepted.ticket)
            calls.append(call)
        # The first of them is not cut before the last one is there.
        runner.let_go()
        answer = await good.generate("g", prompt_of(30, seed=9), 100)
        assert answer.tokens == expected(prompt_of(30, seed=9), 100)
        await until(lambda: _released(pair))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(stream)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Its sequences have gone on meanwhile, and when it comes back it gets what it has not seen.
        await slow.open(*(at(f"s{i}", 1) for i in range(8)))
        for i in range(8):
            missed = Answer()
            await slow.collect(f"s{i}", missed)
            assert missed.failed is None
            assert missed.positions == list(range(1, 400))
            assert missed.tokens == expected(prompt_of(60, seed=20 + i), 400)[1:]
        await slow.close()
        await pair.settled()


async def test_repeated_calls_change_nothing(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call, ticket = await begin(h.router)
        await h.router.attach("r", ticket)
        assert await acknowledge(h.pair, ticket, PROGRESS) in ("LEASE_STATE_RESERVED", "LEASE_STATE_PUBLISHING")
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await acknowledge(h.pair, ticket, COMMITTED)  # nothing is complete yet
        h.let_go()
        answer = Answer()
        await h.router.collect("r", answer)
        events = [await call.read() for _ in range(2)]
        assert [e.WhichOneof("event") for e in events] == ["first_token", "done"]
        for outcome in (COMMITTED, ABORTED, PROGRESS, COMMITTED):
            assert await acknowledge(h.pair, ticket, outcome) == "LEASE_STATE_RELEASED"
        assert answer.positions == list(range(1, 200))
        assert not await h.router.cancel("r")
        await h.pair.settled()


async def test_an_aborted_lease_stays_aborted(redis_url: str) -> None:
    async with held_pair(redis_url) as h:
        call = h.router.run("r", PROMPT, 20)
        ticket = (await call.read()).accepted.ticket
        assert await acknowledge(h.pair, ticket, ABORTED) == "LEASE_STATE_ABORTED"
        h.let_go()
        await h.pair.settled()
        assert await acknowledge(h.pair, ticket, COMMITTED) == "LEASE_STATE_ABORTED"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tickets_that_do_not_verify(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await router.reserve("r", PROMPT, 20)
        call = router.run("r", PROMPT, 20)
        ticket = (await call.read()).accepted.ticket
        forged = kv_pb2.Ticket()
        forged.CopyFrom(ticket)
        forged.expires_unix_ms += 1
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await router.attach("r", forged)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await pair.kv.Watch(kv_pb2.WatchRequest(ticket=forged)).read()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await acknowledge(pair, forged, ABORTED)
        good = Ticket.from_proto(ticket)
        old = _signed(good, SECRET, epoch=good.epoch - 1)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE") as caught:
            await pair.kv.Watch(kv_pb2.WatchRequest(ticket=old)).read()
        assert "epoch" in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await router.attach("r", _signed(good, SECRET, request_id="other"))
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await router.attach("r", _signed(good, SECRET, tenant="another"))
        other = _signed(good, SECRET, layout="0" * 32)
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION"):
            await pair.kv.Watch(kv_pb2.WatchRequest(ticket=other)).read()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await router.attach("r", _signed(good, SECRET, expires_unix_ms=1))
        # An old epoch that does get attached ends in a retryable failure: the worker has restarted.
        await router.attach("r", old)
        failed = (await until_event(router, "failed")).failed
        assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        call.cancel()
        await pair.settled()


def _signed(ticket: Ticket, secret: bytes, **changes: Any) -> kv_pb2.Ticket:
    return replace(ticket, **changes).signed(secret).to_proto()


async def test_incompatible_layouts_are_refused_and_not_worth_repeating(redis_url: str) -> None:
    async with started(redis_url, decode_fingerprint="another model") as pair, routed(pair) as router:
        await router.reserve("r", PROMPT, 20)
        call = router.run("r", PROMPT, 20)
        await router.attach("r", (await call.read()).accepted.ticket)
        failed = (await until_event(router, "failed")).failed
        assert (failed.code, failed.retryable) == ("FAILED_PRECONDITION", False)
        assert "another model" in failed.message
        call.cancel()
        await pair.settled()


async def test_a_prefill_that_skips_blocks_decode_does_not_hold_is_not_decoded_from(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        await router.reserve("r", PROMPT, 20)
        call = router.run("r", PROMPT, 20, cached=4 * BLOCK)
        await router.attach("r", (await call.read()).accepted.ticket)
        failed = (await until_event(router, "failed")).failed
        # Another attempt reserves anew, and skips what is there then.
        assert (failed.code, failed.retryable) == ("DATA_LOSS", True)
        call.cancel()
        await pair.settled()


@pytest.mark.parametrize(("num_losses", "ends_well"), [(1, True), (2, False)])
async def test_a_damaged_chunk_is_fetched_again_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, num_losses: int, ends_well: bool
) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        transport = pair.decode_edge.transports.get("local")
        assert transport is not None
        fetch, losses = transport.fetch, [DataLoss("damaged")] * num_losses

        async def lossy(*args: Any, **options: Any) -> None:
            if losses:
                raise losses.pop()
            await fetch(*args, **options)

        monkeypatch.setattr(transport, "fetch", lossy)
        if ends_well:
            assert (await router.generate("r", prompt_of(10), 4)).tokens == expected(prompt_of(10), 4)
        else:
            answer = await router.generate("r", prompt_of(10), 4)
            assert answer.failed is not None
            assert (answer.failed.code, answer.failed.retryable) == ("DATA_LOSS", True)
            assert answer.done is not None
            assert answer.done.state == kv_pb2.LEASE_STATE_ABORTED
        await pair.settled()


async def test_a_late_fetch_never_writes_into_blocks_of_others(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel returns only once the fetch that was writing has ended; until then its blocks are nobody else's."""
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
        call, _ = await begin(router)
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
        await pair.settled()
