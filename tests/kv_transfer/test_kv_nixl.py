"""The nixl transport, beyond the contract (test_kv_contract.py), over a library of this process: when memory is free, what failures leave,
and how endpoints and descriptors are built."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fake_nixl import FakeHandle, FakeLibrary, fake_nixl
from hypothesis import given
from hypothesis import strategies as st
from kv_pairs import SMALL_PULLS, in_s, wait_until

from kv_transfer.nixl.endpoint import NixlEndpoint, laid_out, merge_runs
from kv_transfer.nixl.memory import Landing, NixlMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import DataLoss, ResourceExhausted, SetupError, Unavailable

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
    with fake_nixl(monkeypatch) as library:
        yield library


@asynccontextmanager
async def side(*, seed: int = 0, piece_bytes: int = 4 * BLOCK) -> AsyncIterator[Side]:
    pool = np.random.default_rng(seed).integers(0, 256, (64, BLOCK), np.uint8) if seed else np.zeros((64, BLOCK), np.uint8)
    transport = NixlTransport(
        NixlMemory(torch.from_numpy(pool), arena_bytes=ARENA, probe_bytes=2 * BLOCK, shape=SMALL_PULLS),
        piece_bytes=piece_bytes,
        grace_s=0.05,
    )
    await transport.start()
    try:
        yield Side(transport, pool)
    finally:
        await transport.close()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Side, Side]]:
    async with side(seed=1) as source, side() as reader:
        yield source, reader
        await wait_until(lambda: reader.transport.arena.used_bytes == 0)


async def publish(source: Side, ids: list[int], *, lease: str = "a", index: int = 0, ttl_s: float = 600.0) -> ChunkInfo:
    return await source.transport.publish(lease, index, 0, ids, ttl_s=ttl_s, deadline=in_s(60))


async def fetch(reader: Side, source: Side, chunk: ChunkInfo, ids: list[int], *, within_s: float = 60.0) -> float:
    return await reader.transport.fetch(source.transport.endpoint, "a", chunk, ids, deadline=in_s(within_s))


async def test_chunks_larger_than_the_arena_go_piece_by_piece(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        far, near = np.random.default_rng(5).permutation(64)[:50].tolist(), np.random.default_rng(6).permutation(64)[:50].tolist()
        chunk = await publish(source, far)
        assert chunk.num_bytes > 3 * ARENA
        assert await fetch(reader, source, chunk, near) > 0
        np.testing.assert_array_equal(reader.pool[near], source.pool[far])


async def test_a_probe_that_reads_something_else_is_data_loss(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        endpoint = NixlEndpoint.parse(source.transport.endpoint)
        with pytest.raises(DataLoss):
            await reader.transport.probe(str(replace(endpoint, probe_address=endpoint.pool_address)), deadline=in_s(60))


async def test_a_read_past_its_deadline_cannot_write_into_given_back_blocks(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        library.held.add(source.agent)
        # Nothing else would end it.
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1, 2], within_s=0.2)
        assert reader.transport.arena.quarantined_bytes == 2 * BLOCK
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1, 2])
        reader.pool[:] = 7  # the blocks are somebody else's now
        library.held.clear()
        await wait_until(lambda: reader.transport.arena.used_bytes == 0)
        assert (reader.pool == 7).all()
        await fetch(reader, source, chunk, [1, 2])
        np.testing.assert_array_equal(reader.pool[1:3], source.pool[3:5])


async def test_a_cancelled_fetch_leaves_its_slot_until_the_read_has_ended(library: FakeLibrary) -> None:
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4, 8, 9, 10, 13])
        library.held.add(source.agent)
        task = asyncio.create_task(fetch(reader, source, chunk, [1, 2, 5, 6, 7, 8]))
        await wait_until(lambda: reader.transport.arena.used_bytes == 6 * BLOCK)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reader.transport.arena.quarantined_bytes == 6 * BLOCK
        library.held.clear()
        await wait_until(lambda: reader.transport.arena.used_bytes == 0)
        assert not reader.pool.any()


async def test_a_fetch_that_is_landing_ends_when_nobody_writes_the_blocks(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    landing: set[Landing] = set()
    go_on = threading.Event()

    def done(self: Landing) -> bool:
        landing.add(self)
        return go_on.is_set()

    monkeypatch.setattr(Landing, "done", done)
    async with pair() as (source, reader):
        chunk = await publish(source, [3, 4])
        cancelled = asyncio.create_task(fetch(reader, source, chunk, [1, 2]))
        # Until one is landing when its deadline passes; a busy machine may take longer to get there.
        for within_s in (0.2, 2.0, 20.0):
            late = asyncio.create_task(fetch(reader, source, chunk, [5, 6], within_s=within_s))
            await wait_until(lambda late=late: len(landing) == 2 or late.done())
            if not late.done():
                break
            with pytest.raises(Unavailable):
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
                patch.setattr(Landing, step, lambda self, step=step: {}[step])
                with pytest.raises(KeyError, match=step):
                    await fetch(reader, source, chunk, [1, 2])
        await fetch(reader, source, chunk, [1, 2])
        np.testing.assert_array_equal(reader.pool[1:3], source.pool[3:5])


async def test_one_peer_that_does_not_answer_leaves_room_for_the_others(library: FakeLibrary) -> None:
    async with pair() as (silent, reader), side(seed=2) as lively:
        stuck = await publish(silent, [0, 1, 2, 3])
        library.held.add(silent.agent)
        waiting = [
            asyncio.create_task(fetch(reader, silent, stuck, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3], within_s=0.5)) for n in range(6)
        ]
        await wait_until(lambda: reader.transport.arena.used_bytes == ARENA // 2)
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
        await wait_until(lambda: reader.transport.arena.used_bytes == 6 * BLOCK)
        library.dead.add(source.agent)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(o, Unavailable) for o in outcomes), outcomes
        await wait_until(lambda: known == set())
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
        with pytest.raises(Unavailable):
            await reader.transport.fetch(str(swapped), "a", chunk, [1], deadline=in_s(60))


async def test_closed_sides_refuse_and_close_does_not_wait_for_ever(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.nixl.agent._CLOSE_S", 0.2)
    async with side(seed=1) as source:
        async with side() as reader:
            chunk = await publish(source, [3])
            library.held.add(source.agent)
            task = asyncio.create_task(fetch(reader, source, chunk, [1]))
            await wait_until(lambda: reader.transport.arena.used_bytes > 0)
        with pytest.raises(Unavailable):
            await task
        assert reader.transport.endpoint == ""
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunk, [1])
    library.live_handles = 0  # left to the end of the process, as it must be


@pytest.mark.parametrize("num_done", [0, 1])
async def test_a_library_that_breaks_costs_the_transport_and_no_call_waits(library: FakeLibrary, num_done: int) -> None:
    """Also where it breaks in the round in which another read has ended."""
    async with pair() as (source, reader):
        chunks = [await publish(source, [3 + index], index=index) for index in range(1 + num_done)]
        library.held.add(source.agent)
        tasks = [asyncio.create_task(fetch(reader, source, chunk, [1 + chunk.index])) for chunk in chunks]
        await wait_until(lambda: library.live_handles == len(tasks))
        asked: list[object] = []

        def broken(handle: FakeHandle) -> str:
            asked.append(handle)
            if len(set(map(id, asked))) > num_done:
                raise MemoryError("broken")
            library.copied_late(handle)
            handle.state = "DONE"
            return "DONE"

        library.agents[reader.agent].check_xfer_state = broken
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert [type(each) for each in ended] == [float] * num_done + [Unavailable]
        await wait_until(lambda: not reader.transport.ready)
        with pytest.raises(Unavailable):
            await fetch(reader, source, chunks[0], [1])
    library.live_handles = 0  # kept to the end of the process


def memory_of(*, arena_bytes: int = ARENA) -> NixlMemory:
    return NixlMemory(torch.zeros(2, BLOCK, dtype=torch.uint8), arena_bytes=arena_bytes, probe_bytes=BLOCK)


async def test_what_cannot_start_says_what_to_do(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="--block-size"):
        NixlTransport(memory_of(arena_bytes=BLOCK - 1))
    transport = NixlTransport(memory_of(), backend_params={"refuse": "1"})
    with pytest.raises(SetupError, match="NIXL_LOG_LEVEL"):
        await transport.start()
    assert not transport.ready
    monkeypatch.setitem(__import__("sys").modules, "nixl", None)
    with pytest.raises(SetupError, match=r"twostep\[nixl\]"):
        await NixlTransport(memory_of()).start()


# ---- endpoints and descriptors -------------------------------------------------------------------------------------------------


ENDPOINT = NixlEndpoint(
    agent="twostep-1",
    metadata=b"nixl",
    memory="VRAM",
    device=3,
    pool_address=1 << 46,
    num_blocks=1000,
    block_bytes=4096,
    probe_address=77,
    probe_bytes=16,
)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_runs_are_the_ids_and_no_two_touch(ids: list[int]) -> None:
    first, counts = merge_runs(np.array(ids, np.int64))
    assert [i for f, c in zip(first.tolist(), counts.tolist(), strict=True) for i in range(f, f + c)] == ids
    assert all(f + c != g for f, c, g in zip(first.tolist(), counts.tolist(), first.tolist()[1:], strict=False))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.integers(0, 1 << 40))
def test_near_and_far_pair_up_and_the_near_side_is_dense(ids: list[int], address: int) -> None:
    far = ENDPOINT.of_blocks(ids, slice(0, 4096))
    near = laid_out(address, far[:, 1], 5)
    assert far.dtype == near.dtype == np.uint64
    assert (far[:, 2] == 3).all()
    assert (near[:, 2] == 5).all()
    place = 0
    for (near_at, size, _), (far_at, far_size, _) in zip(near.tolist(), far.tolist(), strict=True):
        assert (near_at, size) == (address + place, far_size)
        count = size // 4096
        assert far_at == (1 << 46) + 4096 * ids[place // 4096]
        assert ids[place // 4096 : place // 4096 + count] == list(range(ids[place // 4096], ids[place // 4096] + count))
        place += size
    assert place == len(ids) * 4096


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(0, 4000), st.integers(1, 96))
def test_a_part_of_each_block(ids: list[int], start: int, size: int) -> None:
    far = ENDPOINT.of_blocks(ids, slice(start, start + size))
    assert far.tolist() == [[(1 << 46) + 4096 * i + start, size, 3] for i in ids]


@given(st.binary(min_size=1, max_size=300), st.integers(0, (1 << 64) - 1))
def test_text_and_back(metadata: bytes, address: int) -> None:
    endpoint = replace(ENDPOINT, metadata=metadata, pool_address=address)
    assert NixlEndpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: "",
        lambda t: "kv:worker:1:1",
        lambda t: t.replace("nixl:1:", "nixl:2:"),
        lambda t: t.replace("VRAM", "TAPE"),
        lambda t: t + "!",
        lambda t: t.replace(":3:", ":-3:"),
        lambda t: t.replace(":3:", ":x:"),
        lambda t: t.replace(":77:", f":{1 << 64}:"),
        lambda t: t.replace("twostep-1", ""),
        lambda t: t[: t.rindex(":") + 1],
        lambda t: t + "A" * (1 << 20),
    ],
)
def test_what_is_no_endpoint_is_unavailable(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(Unavailable):
        NixlEndpoint.parse(damage(str(ENDPOINT)))
