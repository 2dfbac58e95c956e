"""A KV agent, or a source, that does not answer any more: how its worker finds out, and what a false alarm costs. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kv_pairs import SOON_S, in_s, make_store, wait_until

from kv_transfer.ray import agent_session
from kv_transfer.ray.agent_session import AgentSession
from kv_transfer.ray.child import Child
from kv_transfer.ray.patience import Patience
from kv_transfer.ray.ring import SharedMemory
from kv_transfer.ray.transport import RayTransport
from twostep.errors import Unavailable
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc

SOURCE, OTHER = "kv:p:1:1", "kv:p:2:1"
# Which any source has.
FREE_CHUNK = 7


class Agent(kv_pb2_grpc.KvAgentServicer):
    """What an actor answers; each gate that is closed holds up what goes through it, as a stopped process, store or source would."""

    def __init__(self) -> None:
        self.answers, self.store = asyncio.Event(), asyncio.Event()
        self.sources = {SOURCE: asyncio.Event(), OTHER: asyncio.Event()}
        for gate in (self.answers, self.store, *self.sources.values()):
            gate.set()
        self.num_store_trials = self.num_given_up = 0

    async def Status(self, request: kv_pb2.AgentStatusRequest, context: Any) -> kv_pb2.AgentStatusResponse:
        await self.answers.wait()
        self.num_store_trials += request.try_store
        if request.try_store:
            await self.store.wait()
        return kv_pb2.AgentStatusResponse()

    async def Put(self, request: kv_pb2.AgentPutRequest, context: Any) -> kv_pb2.AgentPutResponse:
        await self.answers.wait()
        await self.store.wait()
        return kv_pb2.AgentPutResponse()

    async def Fetch(self, request: kv_pb2.AgentFetchRequest, context: Any) -> kv_pb2.AgentFetchResponse:
        await self.answers.wait()
        try:
            async with asyncio.timeout(request.timeout_s):
                if request.chunk != FREE_CHUNK:
                    await self.sources[request.endpoint].wait()
        except TimeoutError:
            self.num_given_up += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it did not answer in time")
        return kv_pb2.AgentFetchResponse()


@asynccontextmanager
async def served(agent: Agent, directory: Path, *, ray_address: str) -> AsyncIterator[AgentSession]:
    server = grpc.aio.server()
    kv_pb2_grpc.add_KvAgentServicer_to_server(agent, server)
    server.add_insecure_port(f"unix:{directory / 'agent.sock'}")
    await server.start()
    ring = SharedMemory.create(directory, 65536)
    ring.unlink()
    session = AgentSession("kv:w:1:1", ring, directory / "agent.sock", await Child.start(["cat"]), ray_address)
    watching = asyncio.create_task(session.wait_lost())
    try:
        yield session
        assert not watching.done(), "it was kept"
    finally:
        watching.cancel()
        await session.close()
        await server.stop(None)


@pytest.fixture
async def head() -> AsyncIterator[str]:
    """Where Ray's head listens."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_POLL_S": 0.01, "_PIECE_S": 0.02, "_SILENT_S": 0.1, "_STALLED_S": 0.3}.items():
        monkeypatch.setattr(agent_session, name, seconds)


async def soon(call: Any) -> Any:
    return await asyncio.wait_for(call, SOON_S)


@pytest.mark.parametrize("stopped", [lambda agent: agent.answers, lambda agent: agent.store], ids=["agent", "store"])
async def test_who_waits_for_a_silent_agent_is_freed_and_the_agent_is_kept(
    short_dir: Path, head: str, stopped: Callable[[Agent], asyncio.Event]
) -> None:
    agent = Agent()
    async with served(agent, short_dir, ray_address=head) as session:
        stopped(agent).clear()
        slot = await session.take_slot(4096, deadline=in_s(SOON_S))
        put = asyncio.create_task(session.put("lease", 0, slot, ttl_s=1))
        with pytest.raises(Unavailable):
            await soon(session.unless_silent(put))
        assert session.silence
        assert not put.done(), "the slot is still the agent's"
        # It was a false alarm.
        stopped(agent).set()
        await soon(put)
        await wait_until(lambda: not session.silence)
        await soon(session.unless_silent(asyncio.create_task(session.put("lease", 1, slot, ttl_s=1))))


async def test_the_store_is_tried_only_while_somebody_waits(short_dir: Path, head: str) -> None:
    agent = Agent()
    async with served(agent, short_dir, ray_address=head) as session:
        for _ in range(20):
            await session.status()
        assert agent.num_store_trials == 0
        agent.sources[SOURCE].clear()
        slot = await session.take_slot(4096, deadline=in_s(SOON_S))
        fetch = asyncio.create_task(session.fetch(SOURCE, "lease", 0, slot, deadline=in_s(SOON_S)))
        await wait_until(lambda: agent.num_store_trials > 0)
        agent.sources[SOURCE].set()
        await soon(asyncio.wait([fetch]))


async def test_a_transport_is_not_ready_while_its_agent_is_silent(short_dir: Path, head: str) -> None:
    agent = Agent()
    transport = RayTransport(
        make_store(64, fill=True), 64, worker_id="w", epoch=1, ray_address=head, run_dir=short_dir / "run", ring_bytes=8192
    )
    async with served(agent, short_dir, ray_address=head) as session:
        transport._session = session
        assert transport.ready
        agent.answers.clear()
        publishing = asyncio.create_task(transport.publish("lease", 0, 0, [0], ttl_s=60, deadline=in_s(SOON_S)))
        await wait_until(lambda: session.silence or publishing.done())
        session.book.budget_bytes = 1 << 20
        with pytest.raises(Unavailable):
            await soon(transport.publish("lease", 1, 0, [0], ttl_s=60, deadline=in_s(SOON_S)))
        assert not transport.ready
        assert transport.why_not_ready
        agent.answers.set()
        await wait_until(lambda: transport.ready)
        publishing.cancel()
        await asyncio.wait([publishing])


async def test_a_source_from_which_nothing_comes_is_given_up_long_before_the_deadline(short_dir: Path, head: str) -> None:
    agent = Agent()
    async with served(agent, short_dir, ray_address=head) as session:
        agent.sources[SOURCE].clear()
        slot = await session.take_slot(4096, deadline=in_s(SOON_S))
        with pytest.raises(Unavailable, match=SOURCE):
            await soon(session.fetch(SOURCE, "lease", 0, slot, deadline=in_s(1000)))
        # Others serve, and so does this agent.
        await soon(session.fetch(OTHER, "lease", 0, slot, deadline=in_s(SOON_S)))
        assert not session.silence


async def test_a_slow_source_is_waited_for_as_long_as_others_of_its_chunks_come(short_dir: Path, head: str) -> None:
    agent = Agent()
    async with served(agent, short_dir, ray_address=head) as session:
        slot = await session.take_slot(4096, deadline=in_s(SOON_S))
        agent.sources[SOURCE].clear()
        slow = asyncio.create_task(session.fetch(SOURCE, "lease", 0, slot, deadline=in_s(1000)))
        while agent.num_given_up < 3:
            await session.fetch(SOURCE, "lease", FREE_CHUNK, slot, deadline=in_s(SOON_S))
        assert not slow.done()
        agent.sources[SOURCE].set()
        await soon(slow)


async def test_where_neither_source_nor_head_is_reached_it_is_this_side_that_is_cut_off(short_dir: Path) -> None:
    agent, listening = Agent(), await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = listening.sockets[0].getsockname()[:2]
    listening.close()
    await listening.wait_closed()
    async with served(agent, short_dir, ray_address=f"{address[0]}:{address[1]}") as session:
        agent.sources[SOURCE].clear()
        slot = await session.take_slot(4096, deadline=in_s(SOON_S))
        fetch = asyncio.create_task(session.fetch(SOURCE, "lease", 0, slot, deadline=in_s(1000)))
        with pytest.raises(Unavailable):
            await soon(session.unless_silent(fetch))
        await soon(asyncio.wait([fetch]))
        assert session.silence
        # It answers all the time, and is used again once the head is there.
        async with await asyncio.start_server(lambda _, writer: writer.close(), *address):
            await wait_until(lambda: not session.silence)


def test_patience_follows_what_was_seen() -> None:
    patience = Patience(least_s=2.0, most_s=10.0)
    assert patience.of("p", 0.0) == 2.0
    patience.answered("p", 0.1, 0.0)
    assert (patience.of("p", 0.0), patience.num_answers("p"), patience.num_answers("q")) == (2.0, 1, 0)
    patience.answered("p", 3.0, 3.0)
    assert patience.of("p", 3.0) == pytest.approx(6.0)
    assert 2.0 < patience.of("p", 6.0) < 6.0, "what was slow once is forgotten"
    patience.answered("p", 2.0, 6.0)
    assert patience.of("p", 6.0) == pytest.approx(4.0, abs=0.1)
    patience.answered("p", 100.0, 7.0)
    assert patience.of("p", 7.0) == 10.0
    assert patience.of("p", 60.0) == 2.0
    assert patience.of("q", 7.0) == 2.0


def test_patience_remembers_a_bounded_number_of_peers() -> None:
    patience = Patience(least_s=2.0, most_s=10.0)
    for number in range(5000):
        patience.answered(f"p{number}", 9.0, 0.0)
    assert patience.num_answers("p0") == 0
    assert patience.num_answers("p4999") == 1
