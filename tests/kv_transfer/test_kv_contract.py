"""The contract of kv_transfer.transport, kept alike by the local and the ray transport."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from kv_pairs import SOON_S, TTL_S, MakePair, Pair, in_s, wait_for_stats
from one_sided import ArrayStore

from kv_transfer.checksum import checksum
from kv_transfer.scattering import ScatterClock
from kv_transfer.transport import ChunkInfo, HostFetch, HostPublish
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest, NotFound, ResourceExhausted, TwostepError, Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def publish(
    pair: Pair, lease: str, index: int, blocks: Sequence[int], *, ttl_s: float = TTL_S, within_s: float = SOON_S
) -> ChunkInfo:
    return await pair.prefill.transport.publish(pair.salt + lease, index, 0, blocks, ttl_s=ttl_s, deadline=in_s(within_s))


async def fetch(pair: Pair, lease: str, chunk: ChunkInfo, blocks: Sequence[int], *, within_s: float = SOON_S) -> None:
    await pair.decode.transport.fetch(pair.prefill.transport.endpoint, pair.salt + lease, chunk, blocks, deadline=in_s(within_s))


async def drop(pair: Pair, lease: str) -> None:
    await pair.prefill.transport.drop(pair.salt + lease)


async def unavailable(call: Awaitable[object]) -> bool:
    try:
        await call
    except Unavailable:
        return True
    return False


@pytest.mark.parametrize("block_bytes", [1, 4097, 99_991])
async def test_bytes_arrive_in_order(make_pair: MakePair, block_bytes: int) -> None:
    pair = await make_pair(block_bytes=block_bytes)
    rng = np.random.default_rng(block_bytes)
    for index, count in enumerate((1, 3, 7, 13)):
        source, target = rng.permutation(64)[:count].tolist(), rng.permutation(64)[:count].tolist()
        chunk = await publish(pair, "a", index, source)
        assert (chunk.index, chunk.num_blocks, chunk.num_bytes) == (index, count, count * block_bytes)
        await fetch(pair, "a", chunk, target)
        np.testing.assert_array_equal(pair.decode.store.blocks[target], pair.prefill.store.blocks[source])
    stats = await pair.prefill.transport.stats()
    assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (1, 4, 24 * block_bytes)
    await drop(pair, "a")


async def test_layers_of_blocks_arrive_in_order_and_nothing_else_does(make_pair: MakePair) -> None:
    num_layers, layer_bytes = 7, 4097
    pair = await make_pair(block_bytes=num_layers * layer_bytes, num_layers=num_layers)
    source, target = pair.prefill.store.blocks.reshape(64, num_layers, -1), pair.decode.store.blocks.reshape(64, num_layers, -1)
    rng = np.random.default_rng(layer_bytes)
    wanted = np.zeros_like(target)
    for index, (first, count) in enumerate([(0, 1), (num_layers - 1, 1), (1, 2), (0, num_layers)]):
        ids, places, layers = rng.permutation(64)[:9].tolist(), rng.permutation(64)[:9].tolist(), slice(first, first + count)
        chunk = await pair.prefill.transport.publish(
            pair.salt + "a", index, 0, ids, layers=LayerRange(first, count), ttl_s=TTL_S, deadline=in_s(SOON_S)
        )
        assert (chunk.first_layer, chunk.num_layers, chunk.num_bytes) == (first, count, 9 * count * layer_bytes)
        await fetch(pair, "a", chunk, places)
        wanted[places, layers] = source[ids, layers]
        np.testing.assert_array_equal(target, wanted)
    with pytest.raises(InvalidRequest, match="layers"):
        await pair.prefill.transport.publish(
            pair.salt + "a", 9, 0, [0], layers=LayerRange(1, num_layers), ttl_s=TTL_S, deadline=in_s(SOON_S)
        )
    with pytest.raises(InvalidRequest, match="layers"):
        await fetch(pair, "a", replace(chunk, first_layer=num_layers), places)
    await drop(pair, "a")


async def test_source_blocks_are_free_once_published(make_pair: MakePair) -> None:
    pair = await make_pair()
    before = pair.prefill.store.blocks[:2].copy()
    chunk = await publish(pair, "a", 0, [0, 1])
    pair.prefill.store.blocks[:2] = 0
    await fetch(pair, "a", chunk, [5, 6])
    np.testing.assert_array_equal(pair.decode.store.blocks[5:7], before)
    await drop(pair, "a")


async def test_a_fetch_says_how_long_its_blocks_took_to_be_written(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [1, 2, 3])
    start = time.monotonic()
    with ScatterClock() as clock:
        await fetch(pair, "a", chunk, [4, 5, 6])
    assert 0 < clock.seconds <= time.monotonic() - start
    await drop(pair, "a")


async def test_flipped_bit_is_data_loss_and_nothing_is_written(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [1, 2, 3])
    with pytest.raises(DataLoss, match="checksum"):
        await fetch(pair, "a", replace(chunk, checksum=chunk.checksum ^ 1), [1, 2, 3])
    assert not pair.decode.store.blocks.any()
    await fetch(pair, "a", chunk, [1, 2, 3])
    np.testing.assert_array_equal(pair.decode.store.blocks[1:4], pair.prefill.store.blocks[1:4])
    await drop(pair, "a")


async def test_chunk_of_another_size_is_refused(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [1, 2])
    with pytest.raises(InvalidRequest):
        await fetch(pair, "a", chunk, [1, 2, 3])
    larger = replace(chunk, num_blocks=3, num_bytes=3 * 4096)
    with pytest.raises(DataLoss):
        await fetch(pair, "a", larger, [1, 2, 3])
    assert not pair.decode.store.blocks.any()
    await drop(pair, "a")


async def test_drop_frees_is_idempotent_and_final(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [0])
    await drop(pair, "a")
    await drop(pair, "a")
    await drop(pair, "never opened")
    assert (await pair.prefill.transport.stats()).num_objects == 0
    with pytest.raises(NotFound):
        await fetch(pair, "a", chunk, [0])
    with pytest.raises(NotFound):
        await publish(pair, "a", 1, [0])


async def test_a_chunk_is_published_once(make_pair: MakePair) -> None:
    pair = await make_pair()
    await publish(pair, "a", 0, [0])
    with pytest.raises(InvalidRequest):
        await publish(pair, "a", 0, [0])
    await drop(pair, "a")


async def test_lease_is_dropped_when_its_time_is_up(make_pair: MakePair) -> None:
    pair = await make_pair(budget_bytes=4096)
    for ttl_s in (0.6, 6.0, 30.0):
        lease, started = f"of {ttl_s} s", time.monotonic()
        chunk = await publish(pair, lease, 0, [0], ttl_s=ttl_s)
        renewed = await fetched_for_longer(pair, lease, chunk, ttl_s, started)
        await wait_for_stats(pair.prefill.transport, num_objects=0)
        with pytest.raises(NotFound):
            await fetch(pair, lease, chunk, [0])
        if renewed:
            break
    else:
        pytest.fail("nothing was fetched again in time")
    await publish(pair, "b", 0, [0])  # and its bytes are free again
    await drop(pair, "b")


async def fetched_for_longer(pair: Pair, lease: str, chunk: ChunkInfo, ttl_s: float, renewed: float) -> bool:
    """For half as long again as the lease lives by itself: fetching renews it. False: a pause of this machine was longer than its life."""
    end = renewed + 1.5 * ttl_s
    while renewed < end:
        began = time.monotonic()
        try:
            await fetch(pair, lease, chunk, [0])
        except NotFound:
            assert time.monotonic() >= renewed + ttl_s, "it has ended before its time"
            return False
        renewed = began
        await asyncio.sleep(ttl_s / 10)
    return True


async def test_full_budget_holds_publishers_back_until_a_drop(make_pair: MakePair) -> None:
    pair = await make_pair(budget_bytes=3 * 4096)
    await publish(pair, "a", 0, [0, 1])
    waiting = asyncio.create_task(publish(pair, "b", 0, [2, 3]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await drop(pair, "a")
    await fetch(pair, "b", await waiting, [2, 3])
    np.testing.assert_array_equal(pair.decode.store.blocks[2:4], pair.prefill.store.blocks[2:4])
    await drop(pair, "b")


async def test_full_budget_ends_at_the_deadline(make_pair: MakePair) -> None:
    pair = await make_pair(budget_bytes=3 * 4096)
    await publish(pair, "a", 0, [0, 1])
    start = time.monotonic()
    # Nothing else would end it.
    with pytest.raises(ResourceExhausted):
        await publish(pair, "b", 0, [2, 3], within_s=0.3)
    assert time.monotonic() - start > 0.25
    with pytest.raises(InvalidRequest, match="budget"):
        await publish(pair, "c", 0, [0, 1, 2, 3])
    await drop(pair, "a")


async def test_many_leases_at_once(make_pair: MakePair) -> None:
    pair = await make_pair(block_bytes=64 << 10, budget_bytes=8 << 20)
    pair.decode.store.blocks[:] = 0

    async def hand_over(number: int) -> None:
        lease, blocks = f"lease {number}", [2 * number, 2 * number + 1]
        chunks = await asyncio.gather(*(publish(pair, lease, i, [b]) for i, b in enumerate(blocks)))
        await asyncio.gather(*(fetch(pair, lease, c, [b]) for c, b in zip(chunks, blocks, strict=True)))
        await drop(pair, lease)

    await asyncio.gather(*(hand_over(n) for n in range(32)))
    np.testing.assert_array_equal(pair.decode.store.blocks, pair.prefill.store.blocks)


async def test_both_directions_and_a_side_that_fetches_from_itself(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [4])
    await pair.prefill.transport.fetch(pair.prefill.transport.endpoint, pair.salt + "a", chunk, [9], deadline=in_s(SOON_S))
    np.testing.assert_array_equal(pair.prefill.store.blocks[9], pair.prefill.store.blocks[4])
    back = await pair.decode.transport.publish(pair.salt + "b", 0, 0, [30], ttl_s=TTL_S, deadline=in_s(SOON_S))
    await pair.prefill.transport.fetch(pair.decode.transport.endpoint, pair.salt + "b", back, [4], deadline=in_s(SOON_S))
    assert not pair.prefill.store.blocks[4].any()
    await drop(pair, "a")
    await pair.decode.transport.drop(pair.salt + "b")


async def test_unknown_source_is_unavailable(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [0])
    with pytest.raises(Unavailable):
        await pair.decode.transport.fetch("kv:nobody:1:1", "a", chunk, [0], deadline=in_s(SOON_S))
    await drop(pair, "a")


async def test_closed_source_is_unavailable_and_closed_side_refuses(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [0])
    endpoint = pair.prefill.transport.endpoint
    await pair.prefill.transport.close()
    assert not pair.prefill.transport.ready
    # Ray may answer from the dying actor for a moment.
    async with asyncio.timeout(SOON_S):
        while not await unavailable(pair.decode.transport.fetch(endpoint, pair.salt + "a", chunk, [0], deadline=in_s(1000))):
            pass
    with pytest.raises(Unavailable):
        await publish(pair, "b", 0, [0])


class SlowStore(ArrayStore):
    """Counts who is inside, and waits there until it is let go."""

    def __init__(self, blocks: npt.NDArray[np.uint8]) -> None:
        super().__init__(blocks)
        self.inside = threading.Event()
        self.go_on = threading.Event()

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self.inside.set()
        assert self.go_on.wait(300)
        super().read_blocks(block_ids, out, layers)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self.inside.set()
        assert self.go_on.wait(300)
        super().write_blocks(block_ids, data, layers)


async def test_cancelled_publish_ends_when_nobody_reads_the_blocks(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await make_pair()
    slow = SlowStore(pair.prefill.store.blocks)
    monkeypatch.setattr(pair.prefill.transport, "_store", slow)
    task = asyncio.create_task(publish(pair, "a", 0, [0, 1]))
    assert await asyncio.to_thread(slow.inside.wait, SOON_S)
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await drop(pair, "a")


async def test_cancelled_fetch_ends_when_nobody_writes_the_blocks(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await make_pair()
    chunk = await publish(pair, "a", 0, [0, 1])
    slow = SlowStore(pair.decode.store.blocks)
    monkeypatch.setattr(pair.decode.transport, "_store", slow)
    task = asyncio.create_task(fetch(pair, "a", chunk, [0, 1]))
    assert await asyncio.to_thread(slow.inside.wait, SOON_S)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await drop(pair, "a")


async def test_cancelling_at_any_moment_leaks_nothing(make_pair: MakePair) -> None:
    pair = await make_pair(block_bytes=128 << 10, budget_bytes=2 << 20)
    rng = np.random.default_rng(3)

    async def hand_over(number: int) -> None:
        lease = f"lease {number}"
        try:
            chunk = await publish(pair, lease, 0, [number])
            await fetch(pair, lease, chunk, [number])
        finally:
            await drop(pair, lease)

    tasks = [asyncio.create_task(hand_over(n)) for n in range(48)]
    for task in tasks:
        await asyncio.sleep(float(rng.exponential(0.003)))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(o is None or isinstance(o, (asyncio.CancelledError, TwostepError)) for o in outcomes)
    # Calls that were cancelled under way may still be on their way back.
    await wait_for_stats(pair.prefill.transport, num_objects=0)
    for number in range(4):  # and the room is all there
        lease = f"after {number}"
        chunk = await publish(pair, lease, 0, list(range(16)))
        await fetch(pair, lease, chunk, list(range(16)))
        await drop(pair, lease)


async def test_bytes_are_fetched_for_the_callers_own_use(make_pair: MakePair) -> None:
    """Blocks of a size that the reader's pool does not have."""
    pair = await make_pair(block_bytes=4097)
    endpoint, lease = pair.prefill.transport.endpoint, pair.salt + "a"
    assert isinstance(pair.decode.transport, HostFetch)
    chunk = await publish(pair, "a", 0, [5, 1, 9])
    data = await pair.decode.transport.fetch_bytes(endpoint, lease, chunk, deadline=in_s(SOON_S))
    np.testing.assert_array_equal(data.reshape(3, 4097), pair.prefill.store.blocks[[5, 1, 9]])
    data[:] = 0
    again = await pair.decode.transport.fetch_bytes(endpoint, lease, chunk, deadline=in_s(SOON_S))
    np.testing.assert_array_equal(again.reshape(3, 4097), pair.prefill.store.blocks[[5, 1, 9]])
    with pytest.raises(DataLoss, match="checksum"):
        await pair.decode.transport.fetch_bytes(endpoint, lease, replace(chunk, checksum=chunk.checksum ^ 1), deadline=in_s(SOON_S))
    await drop(pair, "a")
    with pytest.raises(NotFound):
        await pair.decode.transport.fetch_bytes(endpoint, lease, chunk, deadline=in_s(SOON_S))
    assert not pair.decode.store.blocks.any()


async def test_bytes_are_published_that_no_pool_holds(make_pair: MakePair) -> None:
    pair = await make_pair(block_bytes=1000)
    endpoint, source, lease = pair.prefill.transport.endpoint, pair.prefill.transport, pair.salt + "a"
    assert isinstance(source, HostPublish)
    assert isinstance(pair.decode.transport, HostFetch)
    rng = np.random.default_rng(3)
    for index, size in enumerate((1, 4097, 60_000)):
        data = rng.integers(0, 256, size, np.uint8)
        digest = await source.publish_bytes(lease, index, data, ttl_s=TTL_S, deadline=in_s(SOON_S))
        assert digest == checksum(data)
        chunk = ChunkInfo(index=index, first_block=0, num_blocks=1, num_bytes=size, checksum=digest)
        got = await pair.decode.transport.fetch_bytes(endpoint, lease, chunk, deadline=in_s(SOON_S))
        np.testing.assert_array_equal(got, data)
    with pytest.raises(InvalidRequest, match="published already"):
        await source.publish_bytes(lease, 0, data, ttl_s=TTL_S, deadline=in_s(SOON_S))
    stats = await pair.prefill.transport.stats()
    assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (1, 3, 64_098)
    await drop(pair, "a")
    await wait_for_stats(pair.prefill.transport, num_objects=0)


async def test_a_probe_moves_bytes_and_leaves_nothing(make_pair: MakePair) -> None:
    pair = await make_pair()
    for _ in range(2):
        probe = await pair.decode.transport.probe(pair.prefill.transport.endpoint, deadline=in_s(SOON_S))
        assert probe.num_bytes >= 1 << 20
        assert probe.seconds > 0
        assert probe.bytes_per_s == pytest.approx(probe.num_bytes / probe.seconds)
    assert not pair.decode.store.blocks.any()


async def test_a_probe_of_an_unknown_source_is_unavailable(make_pair: MakePair) -> None:
    pair = await make_pair()
    with pytest.raises(Unavailable):
        await pair.decode.transport.probe("kv:nobody:1:1", deadline=in_s(SOON_S))
