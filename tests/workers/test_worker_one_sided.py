"""Hand-overs that read the source's pool in place: what was read is used only if the source, asked after the read, still held it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from one_sided import OneSidedHub, OneSidedTransport
from worker_harness import (
    WAIT_S,
    HeldRunner,
    LateClock,
    Pair,
    RouterDouble,
    expected,
    make_runner,
    one_sided_transports,
    prompt_of,
    read_to_end,
    routed,
    started,
    until,
)

from kv_transfer.lease import Lease
from kv_transfer.transport import ChunkInfo
from prefill_worker.hand_over import HandOvers
from prefill_worker.service import KvService
from twostep.errors import Unavailable
from twostep.rpc.v1 import kv_pb2

pytestmark = pytest.mark.usefixtures("patient_paths")
PROMPT = prompt_of(40)


@dataclass
class World:
    pair: Pair
    router: RouterDouble
    hub: OneSidedHub
    transports: dict[str, OneSidedTransport] = field(default_factory=dict)
    ticket: kv_pb2.Ticket = field(default_factory=kv_pb2.Ticket)

    @property
    def source(self) -> HandOvers:
        return self.pair.hand_overs

    @property
    def reader(self) -> OneSidedTransport:
        return self.transports["decode"]

    async def free_source_blocks(self) -> int:
        stats = (await self.pair.both())[0]
        return stats.num_free_blocks + stats.num_cached_blocks

    async def begin(self, name: str = "r", max_tokens: int = 4) -> Any:
        """Run's call, after the decode worker was attached."""
        call, self.ticket = await self.router.begin(name, PROMPT, max_tokens)
        return call

    @property
    def lease(self) -> Lease:
        """The one begun last."""
        return self.pair.lease_of(self.ticket)

    async def failed(self, name: str = "r") -> Any:
        """Waits for the failure and returns it; nothing may have been committed before."""
        event = await asyncio.wait_for(self.router.inbox(name).get(), WAIT_S)
        assert event.WhichOneof("event") == "failed", event
        return event.failed


@asynccontextmanager
async def world(redis_url: str, **options: Any) -> AsyncIterator[World]:
    hub, transports = OneSidedHub(), dict[str, OneSidedTransport]()
    make = one_sided_transports(hub, transports)
    async with started(redis_url, make_transports=make, **options) as pair, routed(pair) as router:
        yield World(pair, router, hub, transports)


class Gate:
    """Holds up the reader's last chunk, counted by the chunk's order of arrival."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, chunk: ChunkInfo) -> None:
        self.reached.set()
        await self.open.wait()


async def test_blocks_stay_until_the_reader_has_asked(redis_url: str) -> None:
    async with world(redis_url) as w:
        all_blocks = await w.free_source_blocks()
        gate = w.reader.after_write = Gate()
        call = await w.begin()
        await asyncio.wait_for(gate.reached.wait(), WAIT_S)
        await until(lambda: w.lease.num_chunks is not None)
        stats = (await w.pair.both())[0]
        # All is published, and all of it is still owned: ten blocks of four tokens.
        assert (stats.num_held, stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks) == (1, 10)
        gate.open.set()
        assert [event.WhichOneof("event") for event in await read_to_end(call)] == ["first_token", "done"]
        await w.pair.settled()
        assert await w.free_source_blocks() == all_blocks


@pytest.mark.parametrize("moment", ["before_read", "after_write"])
async def test_a_lease_that_expires_in_mid_read_commits_nothing(redis_url: str, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The reader is held up before its read, and then reads what others wrote there; or after it, and then holds what was right once."""
    clock = LateClock()
    monkeypatch.setattr("prefill_worker.hand_over.time", clock)
    async with world(redis_url, prefill_runner=make_runner(num_blocks=24)) as w:
        gate = Gate()
        setattr(w.reader, moment, gate)
        call = await w.begin()
        await asyncio.wait_for(gate.reached.wait(), WAIT_S)
        clock.late_s = 1000.0
        await until(lambda: len(w.source) == 0)
        # Its blocks are given out again, and hold another prompt's KV.
        setattr(w.reader, moment, _pass)
        others = [prompt_of(80, seed=7), prompt_of(80, seed=8)]
        for number, prompt in enumerate(others):
            (await w.router.generate(f"other{number}", prompt, 3)).check(prompt, 3)
        gate.open.set()
        failed = await w.failed()
        assert failed.retryable
        assert failed.code == ("DATA_LOSS" if moment == "before_read" else "UNAVAILABLE"), failed
        call.cancel()
        await w.pair.settled()
        stats = (await w.pair.both())[1].transports[0]
        reason = "data_loss" if moment == "before_read" else "unavailable"
        assert dict(stats.failures) == {reason: 1}
        assert dict(stats.retries) == ({"data_loss": stats.retries["data_loss"]} if moment == "before_read" else {})
        (await w.router.generate("r", PROMPT, 4, attempt=2)).check(PROMPT, 4)


async def _pass(chunk: ChunkInfo) -> None:
    """Nothing is held up any more."""


@pytest.mark.parametrize("num_lost", [1, 2, 99])
async def test_a_lost_answer_is_asked_for_again(redis_url: str, monkeypatch: pytest.MonkeyPatch, num_lost: int) -> None:
    async with world(redis_url) as w:
        lost = 0
        real = HandOvers.acknowledge

        async def lose(self: HandOvers, ticket: Any, event: Any) -> Any:
            nonlocal lost
            answer = await real(self, ticket, event)
            if type(event).__name__ == "Commit" and lost < num_lost:
                lost += 1
                raise Unavailable("the answer was lost")
            return answer

        monkeypatch.setattr(HandOvers, "acknowledge", lose)
        if num_lost < 3:
            (await w.router.generate("r", PROMPT, 4)).check(PROMPT, 4)
            assert lost == num_lost
        else:
            call = await w.begin()
            failed = await w.failed()
            assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
            assert lost == 3
            call.cancel()


async def cached_on_decode(w: World) -> int:
    """Tokens of the prompt that a newcomer would find there."""
    found = (await w.router.reserve("probe", PROMPT, 4)).num_cached_tokens
    await w.router.cancel("probe")
    return int(found)


def slow_source(monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> tuple[asyncio.Event, asyncio.Event]:
    """A source answers what it is asked last only when the second event is set: as it is, or that a block was `refused`. The first one says
    that it was asked."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    real = KvService.Acknowledge

    async def hold(self: KvService, request: Any, context: Any) -> Any:
        if request.outcome == kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED and not go_on.is_set():
            asked.set()
            await go_on.wait()
            if refused:
                return kv_pb2.AcknowledgeResponse(refusal="a block was reused")
        return await real(self, request, context)

    monkeypatch.setattr(KvService, "Acknowledge", hold)
    return asked, go_on


@pytest.mark.parametrize("refused", [False, True])
async def test_decoding_begins_while_the_source_is_asked_and_nobody_hears_of_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    asked, go_on = slow_source(monkeypatch, refused=refused)
    async with world(redis_url) as w:
        call = await w.begin(max_tokens=3)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        (sequence,) = w.pair.decode_edge.sequences._sequences.values()  # what is withheld shows nowhere
        # To its very end: the two tokens after the first one.
        await until(lambda: len(sequence.withheld) == 2)
        assert w.router.inbox("r").empty()
        assert await cached_on_decode(w) == 0
        go_on.set()
        if refused:
            assert "reused" in (await w.failed()).message
            call.cancel()
        else:
            events = [await asyncio.wait_for(w.router.inbox("r").get(), WAIT_S) for _ in range(3)]
            assert events[0].HasField("committed")
            assert [event.token.token_id for event in events[1:]] == expected(PROMPT, 3)[1:]
        await w.pair.settled()
        if refused:
            assert await cached_on_decode(w) == 0


@pytest.mark.parametrize("refused", [False, True])
async def test_a_row_without_a_token_before_the_source_has_answered_is_the_requests_fault_only_if_the_kv_was_right(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    asked, go_on = slow_source(monkeypatch, refused=refused)
    answer = expected(PROMPT, 3)
    async with world(redis_url, decode_runner=make_runner(broken_token=answer[1])) as w:
        call = await w.begin(max_tokens=9)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        (sequence,) = w.pair.decode_edge.sequences._sequences.values()  # what is withheld shows nowhere
        await until(lambda: sequence.withheld_error is not None)
        assert w.router.inbox("r").empty()
        go_on.set()
        if refused:
            failed = await w.failed()
            assert (failed.code, failed.retryable) == ("UNAVAILABLE", True)
        else:
            events = [await asyncio.wait_for(w.router.inbox("r").get(), WAIT_S) for _ in range(3)]
            assert events[0].HasField("committed")
            assert events[1].token.token_id == answer[1]
            assert (events[2].failed.code, events[2].failed.retryable) == ("OUT_OF_RANGE", False)
        call.cancel()


async def test_what_is_confirmed_while_it_decodes_is_a_cached_prefix(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = slow_source(monkeypatch, refused=False)
    runner = HeldRunner()
    async with world(redis_url, decode_runner=runner) as w:
        call = await w.begin(max_tokens=400)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        # It decodes, and has not come to its end when it is confirmed.
        runner.allow(3)
        assert await cached_on_decode(w) == 0
        go_on.set()
        await w.router.event("committed")
        assert await cached_on_decode(w) == len(PROMPT)
        call.cancel()
        await w.router.cancel("r")


async def test_a_step_that_fails_before_the_source_has_answered_is_not_the_sources_fault(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = slow_source(monkeypatch, refused=False)
    runner = HeldRunner()
    runner.failures = 1
    async with world(redis_url, decode_runner=runner) as w:
        call = await w.begin(max_tokens=4)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        runner.let_go()
        failed = await w.failed()
        # Routers blame the decode worker for it (router/serving/attempt.py).
        assert (failed.code, failed.retryable) == ("INTERNAL", True)
        go_on.set()
        call.cancel()
