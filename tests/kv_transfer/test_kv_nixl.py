"""The nixl transport over a fake of the library, on the host: what is read, when memory is free, and what failures leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_nixl import FakeLibrary, fake_nixl
from kv_pairs import wait_for_stats

from kv_transfer.nixl.endpoint import NixlEndpoint
from kv_transfer.nixl.memory import HostLanding, HostMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.scattering import ScatterClock
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest, NotFound, ResourceExhausted, SetupError, Unavailable

BLOCK = 4096
ARENA = 16 * BLOCK


@dataclass(frozen=True, slots=True)
class Side:
    transport: NixlTransport
    pool: np.ndarray

    @property
    def agent(self) -> str:
        return NixlEndpoint.parse(self.transport.endpoint).agent


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    monkeypatch.setattr("kv_transfer.nixl.transport._GRACE_S", 0.05)
    with fake_nixl(monkeypatch) as library:
        yield library


@asynccontextmanager
async def side(*, seed: int = 0, piece_bytes: int = 4 * BLOCK) -> AsyncIterator[Side]:
    pool = np.random.default_rng(seed).integers(0, 256, (64, BLOCK), np.uint8) if seed else np.zeros((64, BLOCK), np.uint8)
    transport = NixlTransport(HostMemory(pool, arena_bytes=ARENA, probe_bytes=2 * BLOCK), piece_bytes=piece_bytes)
    await transport.start()
    try:
        yield Side(transport, pool)
    finally:
        await transport.close()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Side, Side]]:
    async with side(seed=1) as source, side() as reader:
        yield source, reader
        assert await settles(lambda: reader.transport.arena.used_bytes == 0)


async def settles(condition: object, within_s: float = 60.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


async def publish(source: Side, ids: list[int], *, lease: str = "a", index: int = 0, ttl_s: float = 600.0) -> ChunkInfo:
    return await source.transport.publish(lease, index, 0, ids, ttl_s=ttl_s, deadline=time.monotonic() + 60)


async def fetch(reader: Side, source: Side, chunk: ChunkInfo, ids: list[int], *, within_s: float = 60.0) -> None:
    await reader.transport.fetch(source.transport.endpoint, "a", chunk, ids, deadline=time.monotonic() + within_s)


async def test_blocks_arrive_from_where_they_lie(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        rng = np.random.default_rng(3)
        for index, count in enumerate((1, 2, 7, 16)):
            far, near = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
            chunk = await publish(source, far, index=index)
            assert (chunk.source_blocks, chunk.num_bytes) == (tuple(far), count * BLOCK)
            await fetch(reader, source, chunk, near)
            np.testing.assert_array_equal(reader.pool[near], source.pool[far])
        stats = await source.transport.stats()
        assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (1, 4, 26 * BLOCK)
        await source.transport.drop("a")
        assert (await source.transport.stats()).num_leases == 0
        with pytest.raises(NotFound):
            await publish(source, [1])


async def test_a_side_reads_from_itself_and_both_ways(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        await fetch(source, source, chunk, [8, 9])
        np.testing.assert_array_equal(source.pool[8:10], source.pool[3:5])
        back = await publish(reader, [0])
        await fetch(source, reader, back, [3])
        assert not source.pool[3].any()


async def test_reused_source_blocks_are_data_loss(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4, 9, 20, 21, 22])
        for place in ((4, 1000), (22, BLOCK - 1)):
            source.pool[place] ^= 1
            with pytest.raises(DataLoss, match="checksum"):
                await fetch(reader, source, chunk, [1, 2, 3, 4, 5, 6])
            source.pool[place] ^= 1
        source.pool[[3, 4]] = source.pool[[4, 3]]
        with pytest.raises(DataLoss, match="checksum"):
            await fetch(reader, source, chunk, [1, 2, 3, 4, 5, 6])
        source.pool[[3, 4]] = source.pool[[4, 3]]
        await fetch(reader, source, chunk, [1, 2, 3, 4, 5, 6])
        np.testing.assert_array_equal(reader.pool[1:7], source.pool[[3, 4, 9, 20, 21, 22]])


async def test_chunks_larger_than_the_arena_go_piece_by_piece(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        far, near = np.random.default_rng(5).permutation(64)[:50].tolist(), np.random.default_rng(6).permutation(64)[:50].tolist()
        chunk = await publish(source, far)
        assert chunk.num_bytes > 3 * ARENA
        with ScatterClock() as clock:
            await fetch(reader, source, chunk, near)
        assert clock.seconds > 0
        np.testing.assert_array_equal(reader.pool[near], source.pool[far])


async def test_an_empty_chunk_is_fetched_too(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        await fetch(reader, source, await publish(source, []), [])
        assert not reader.pool.any()


async def test_what_does_not_fit_is_refused(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        with pytest.raises(InvalidRequest):
            await fetch(reader, source, chunk, [1])
        with pytest.raises(DataLoss, match="64 blocks"):
            await fetch(reader, source, replace(chunk, source_blocks=(3, 64)), [1, 2])
        with pytest.raises(DataLoss, match="source blocks"):
            await fetch(reader, source, replace(chunk, source_blocks=(3,)), [1, 2])
        other = str(replace(NixlEndpoint.parse(source.transport.endpoint), block_bytes=BLOCK // 2))
        with pytest.raises(InvalidRequest, match="layouts"):
            await reader.transport.fetch(other, "a", chunk, [1, 2], deadline=time.monotonic() + 60)
        assert not reader.pool.any()


async def test_ranges_of_layers(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        for s in (source, reader):
            s.transport._num_layers = 8
        size = BLOCK // 8
        for index, layers in enumerate((LayerRange(0, 1), LayerRange(2, 3), LayerRange(7, 1), LayerRange(0, 8))):
            reader.pool[:] = 0
            chunk = await source.transport.publish("a", index, 0, [5, 6, 1], layers=layers, ttl_s=600, deadline=time.monotonic() + 60)
            assert (chunk.num_bytes, chunk.layers) == (3 * layers.num_layers * size, layers)
            await fetch(reader, source, chunk, [2, 9, 4])
            expected = np.zeros_like(reader.pool)
            columns = slice(layers.first * size, layers.stop * size)
            expected[[2, 9, 4], columns] = source.pool[[5, 6, 1], columns]
            np.testing.assert_array_equal(reader.pool, expected)
        with pytest.raises(InvalidRequest, match="layers"):
            await source.transport.publish("a", 9, 0, [5], layers=LayerRange(7, 2), ttl_s=600, deadline=time.monotonic() + 60)


async def test_probe_reads_the_peers_pattern(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        probe = await reader.transport.probe(source.transport.endpoint, deadline=time.monotonic() + 60)
        assert probe.num_bytes == 2 * BLOCK
        assert probe.seconds > 0
        endpoint = NixlEndpoint.parse(source.transport.endpoint)
        astray = replace(endpoint, probe_address=endpoint.pool_address)
        with pytest.raises(DataLoss, match="probe"):
            await reader.transport.probe(str(astray), deadline=time.monotonic() + 60)


async def test_a_read_past_its_deadline_cannot_write_into_given_back_blocks(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        library.held.add(source.agent)
        # Nothing else would end it.
        with pytest.raises(Unavailable, match="deadline"):
            await fetch(reader, source, chunk, [1, 2], within_s=0.2)
        assert reader.transport.arena.quarantined_bytes == 2 * BLOCK
        with pytest.raises(Unavailable, match="have not ended"):
            await fetch(reader, source, chunk, [1, 2])
        reader.pool[:] = 7  # the blocks are somebody else's now
        library.held.clear()
        assert await settles(lambda: reader.transport.arena.used_bytes == 0)
        assert (reader.pool == 7).all()
        await fetch(reader, source, chunk, [1, 2])
        np.testing.assert_array_equal(reader.pool[1:3], source.pool[3:5])


async def test_a_cancelled_fetch_leaves_its_slot_until_the_read_has_ended(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4, 8, 9, 10, 13])
        library.held.add(source.agent)
        task = asyncio.create_task(fetch(reader, source, chunk, [1, 2, 5, 6, 7, 8]))
        assert await settles(lambda: reader.transport.arena.used_bytes == 6 * BLOCK)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader.transport.arena.quarantined_bytes == 6 * BLOCK
        library.held.clear()
        assert await settles(lambda: reader.transport.arena.used_bytes == 0)
        assert not reader.pool.any()


async def test_a_fetch_that_is_landing_ends_when_nobody_writes_the_blocks(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    landing: set[HostLanding] = set()
    go_on = threading.Event()

    def done(self: HostLanding) -> bool:
        landing.add(self)
        return go_on.is_set()

    monkeypatch.setattr(HostLanding, "done", done)
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        cancelled = asyncio.create_task(fetch(reader, source, chunk, [1, 2]))
        # Until one is landing when its deadline passes; a busy machine may take longer to get there.
        for within_s in (0.2, 2.0, 20.0):
            late = asyncio.create_task(fetch(reader, source, chunk, [5, 6], within_s=within_s))
            assert await settles(lambda late=late: len(landing) == 2 or late.done())
            if not late.done():
                break
            with pytest.raises(Unavailable, match="deadline"):
                await late
        cancelled.cancel()
        await asyncio.sleep(within_s + 0.1)
        cancelled.cancel()
        await asyncio.sleep(0.05)
        assert not cancelled.done()
        assert not late.done()
        assert reader.transport.arena.quarantined_bytes == 0
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await late  # in time for whoever still waits
        np.testing.assert_array_equal(reader.pool[5:7], source.pool[3:5])


async def test_a_landing_that_fails_is_raised_and_the_transport_goes_on(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        for step in ("prepare", "begin", "done"):
            with monkeypatch.context() as patch:
                patch.setattr(HostLanding, step, lambda self, step=step: {}[step])
                with pytest.raises(KeyError, match=step):
                    await fetch(reader, source, chunk, [1, 2])
        await fetch(reader, source, chunk, [1, 2])
        np.testing.assert_array_equal(reader.pool[1:3], source.pool[3:5])


async def test_what_fails_before_its_read_begins_leaves_no_slot_taken(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: HostMemory, offset: int, block_ids: object, part: object) -> HostLanding:
        raise MemoryError("no pinned memory")

    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "landing", no_memory)
            with pytest.raises(MemoryError):
                await fetch(reader, source, chunk, [1, 2])
        assert reader.transport.arena.used_bytes == 0
        endpoint = NixlEndpoint.parse(source.transport.endpoint)
        with pytest.raises(Unavailable, match="damaged"):
            await reader.transport.probe(str(replace(endpoint, probe_address=1 << 70)), deadline=time.monotonic() + 60)
        assert reader.transport.arena.used_bytes == 0


async def test_one_peer_that_does_not_answer_leaves_room_for_the_others(library: FakeLibrary) -> None:
    async with pair() as (silent, reader), side(seed=2) as lively:
        stuck = await publish(silent, [0, 1, 2, 3])
        library.held.add(silent.agent)
        waiting = [
            asyncio.create_task(fetch(reader, silent, stuck, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], within_s=0.5)) for n in range(6)
        ]
        assert await settles(lambda: reader.transport.arena.used_bytes == ARENA // 2)
        chunk = await publish(lively, [9, 10])
        await fetch(reader, lively, chunk, [40, 41])
        np.testing.assert_array_equal(reader.pool[40:42], lively.pool[9:11])
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(o, Unavailable | ResourceExhausted) for o in outcomes), outcomes
        library.held.clear()


async def test_a_dead_peer_is_unavailable_and_forgotten_and_its_successor_is_read(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        await fetch(reader, source, chunk, [1, 2])
        known = library.agents[reader.agent].known
        assert known == {source.agent}
        library.held.add(source.agent)
        tasks = [asyncio.create_task(fetch(reader, source, chunk, [1, 2])) for _ in range(3)]
        assert await settles(lambda: reader.transport.arena.used_bytes == 6 * BLOCK)
        library.dead.add(source.agent)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(o, Unavailable) for o in outcomes), outcomes
        assert await settles(lambda: known == set())
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1, 2])
        async with side(seed=4) as successor:
            chunk = await publish(successor, [5])
            await fetch(reader, successor, chunk, [6])
            np.testing.assert_array_equal(reader.pool[6], successor.pool[5])


async def test_metadata_of_another_agent_is_refused(library: FakeLibrary) -> None:
    async with pair() as (source, reader), side(seed=2) as other:
        chunk = await publish(source, [3])
        swapped = replace(NixlEndpoint.parse(source.transport.endpoint), metadata=NixlEndpoint.parse(other.transport.endpoint).metadata)
        with pytest.raises(Unavailable, match="metadata of"):
            await reader.transport.fetch(str(swapped), "a", chunk, [1], deadline=time.monotonic() + 60)
        for garbage in ("kv:nobody:1:1", ""):
            with pytest.raises(Unavailable):
                await reader.transport.fetch(garbage, "a", chunk, [1], deadline=time.monotonic() + 60)


async def test_leases_expire_and_publish_is_once(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("kv_transfer.in_place.time", SimpleNamespace(monotonic=lambda: now[0]))
    async with pair() as (source, _):
        await publish(source, [3], ttl_s=5.0)
        with pytest.raises(InvalidRequest):
            await publish(source, [4])
        now[0] += 4.9
        source.transport._book.expire()
        assert (await source.transport.stats()).num_objects == 1
        now[0] += 0.1
        await wait_for_stats(source.transport, num_objects=0)


async def test_closed_sides_refuse_and_close_does_not_wait_for_ever(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.nixl.agent._CLOSE_S", 0.2)
    async with side(seed=1) as source:
        async with side() as reader:
            chunk = await publish(source, [3])
            library.held.add(source.agent)
            task = asyncio.create_task(fetch(reader, source, chunk, [1]))
            assert await settles(lambda: reader.transport.arena.used_bytes > 0)
        with pytest.raises(Unavailable, match="closed"):
            await task
        assert reader.transport.endpoint == ""
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1])
    library.live_handles = 0  # left to the end of the process, as it must be


async def test_a_library_that_breaks_costs_the_transport_and_no_call_waits(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3])
        agent = library.agents[reader.agent]
        library.held.add(source.agent)
        task = asyncio.create_task(fetch(reader, source, chunk, [1], within_s=60))
        assert await settles(lambda: reader.transport.arena.used_bytes > 0)

        def broken(handle: object) -> str:
            raise MemoryError("broken")

        agent.check_xfer_state = broken
        with pytest.raises(Unavailable):
            await task
        assert not reader.transport.ready
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1])
    library.live_handles = 0  # kept to the end of the process


async def test_a_library_that_breaks_after_a_read_has_ended_tells_the_others(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        first, second = await publish(source, [3]), await publish(source, [4], index=1)
        agent = library.agents[reader.agent]
        library.held.add(source.agent)
        tasks = [asyncio.create_task(fetch(reader, source, chunk, [1 + chunk.index], within_s=60)) for chunk in (first, second)]
        assert await settles(lambda: library.live_handles == 2)
        asked: list[object] = []

        def broken(handle: object) -> str:
            asked.append(handle)
            if handle is not asked[0]:
                raise MemoryError("broken")
            library.copied_late(handle)
            handle.state = "DONE"
            return "DONE"

        agent.check_xfer_state = broken
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [type(each) for each in ended] == [type(None), Unavailable]
    library.live_handles = 0  # kept to the end of the process


async def test_a_library_that_does_not_start_says_what_to_do(library: FakeLibrary) -> None:
    transport = NixlTransport(
        HostMemory(np.zeros((2, BLOCK), np.uint8), arena_bytes=ARENA, probe_bytes=BLOCK), backend_params={"refuse": "1"}
    )
    with pytest.raises(SetupError, match="NIXL_LOG_LEVEL"):
        await transport.start()
    assert not transport.ready


async def test_an_arena_too_small_for_a_block_is_refused(library: FakeLibrary) -> None:
    with pytest.raises(SetupError, match="block-size"):
        NixlTransport(HostMemory(np.zeros((2, BLOCK), np.uint8), arena_bytes=BLOCK - 1, probe_bytes=BLOCK))


async def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    transport = NixlTransport(HostMemory(np.zeros((2, BLOCK), np.uint8), arena_bytes=ARENA, probe_bytes=BLOCK))
    with pytest.raises(SetupError, match=r"twostep\[nixl\]"):
        await transport.start()
