"""The contract of kv_transfer.transport, kept alike by every transport (kv_pairs.PAIRS; the one over Ray with Ray, and without). Those that
copy what is published out of the pool, and those whose readers take it from there, have some rules of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np
import pytest
from kv_pairs import NUM_BLOCKS, SOON_S, TTL_S, MakePair, Pair, copying, in_s, one_sided, wait_for_objects

from kv_transfer.checksums import block_sums, checksum, chunk_sum
from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest, NotFound, ResourceExhausted, TwostepError, Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_transport_says_what_it_is(make_pair: MakePair, request: pytest.FixtureRequest) -> None:
    pair = await make_pair()
    transport = pair.prefill.transport
    assert transport.name in request.node.callspec.id
    assert transport.ready
    assert transport.endpoint not in ("", pair.decode.transport.endpoint)
    # Others' bytes cannot be converted on their way.
    assert isinstance(transport, CopyingTransport) == transport.copies_out
    assert transport.max_lease_bytes == (64 << 20 if transport.copies_out else 0)


@pytest.mark.parametrize("block_bytes", [1, 4097, 20_001])
async def test_blocks_arrive_in_order(make_pair: MakePair, block_bytes: int) -> None:
    pair = await make_pair(layer_bytes=block_bytes)
    block_bytes = pair.prefill.read([0]).size
    rng = np.random.default_rng(block_bytes)
    for index, count in enumerate((1, 3, 7, 13)):
        source, target = (rng.permutation(NUM_BLOCKS)[:count].tolist() for _ in range(2))
        chunk = await pair.publish("a", index, source)
        assert (chunk.index, chunk.num_blocks, chunk.num_bytes, chunk.layers) == (index, count, count * block_bytes, None)
        assert chunk.source_blocks == (() if pair.prefill.transport.copies_out else tuple(source))
        await pair.fetch("a", chunk, target)
        np.testing.assert_array_equal(pair.decode.read(target), pair.prefill.read(source))
    stats = await pair.prefill.transport.stats()
    assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (1, 4, 24 * block_bytes)
    await pair.drop("a")


async def test_layers_of_blocks_arrive_in_order_and_nothing_else_does(make_pair: MakePair) -> None:
    num_layers = 7
    pair = await make_pair(layer_bytes=1025, num_layers=num_layers)
    source = pair.prefill.read().reshape(NUM_BLOCKS, num_layers, -1)
    wanted, layer_bytes = np.zeros_like(source), source.shape[2]
    rng = np.random.default_rng(layer_bytes)
    for index, (first, count) in enumerate([(0, 1), (num_layers - 1, 1), (1, 2), (0, num_layers)]):
        ids, places = (rng.permutation(NUM_BLOCKS)[:9].tolist() for _ in range(2))
        layers = slice(first, first + count)
        chunk = await pair.publish("a", index, ids, layers=LayerRange(first, count))
        assert (chunk.layers, chunk.num_bytes) == (LayerRange(first, count), 9 * count * layer_bytes)
        await pair.fetch("a", chunk, places)
        wanted[places, layers] = source[ids, layers]
        np.testing.assert_array_equal(pair.decode.read().reshape(wanted.shape), wanted)
    with pytest.raises(InvalidRequest):
        await pair.publish("a", 9, [0], layers=LayerRange(1, num_layers))
    with pytest.raises(InvalidRequest):
        await pair.fetch("a", replace(chunk, first_layer=num_layers), places)
    await pair.drop("a")


async def test_what_does_not_match_its_checksum_is_data_loss_and_may_be_fetched_again(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [1, 2, 3])
    with pytest.raises(DataLoss):
        await pair.fetch("a", replace(chunk, checksum=chunk.checksum ^ 1), [1, 2, 3])
    # Readers may have written by then, but into these blocks alone: they hold garbage until a fetch returns.
    assert not pair.decode.read([0, *range(4, NUM_BLOCKS)]).any()
    await pair.fetch("a", chunk, [1, 2, 3])
    np.testing.assert_array_equal(pair.decode.read([1, 2, 3]), pair.prefill.read([1, 2, 3]))
    await pair.drop("a")


async def test_a_chunk_of_another_size_is_refused(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [1, 2])
    for targets in ([1, 2, 3], [1]):
        with pytest.raises(InvalidRequest):
            await pair.fetch("a", chunk, targets)
    with pytest.raises(DataLoss):
        await pair.fetch("a", replace(chunk, num_blocks=3, num_bytes=3 * 4096), [1, 2, 3])
    assert not pair.decode.read().any()
    await pair.drop("a")


async def test_a_chunk_is_published_once_and_a_drop_frees_is_idempotent_and_final(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [0])
    with pytest.raises(InvalidRequest):
        await pair.publish("a", 0, [1])
    for lease in ("a", "a", "never opened"):
        await pair.drop(lease)
    assert (await pair.prefill.transport.stats()).num_objects == 0
    for lease in ("a", "never opened"):
        with pytest.raises(NotFound):
            await pair.publish(lease, 1, [0])
    if pair.prefill.transport.copies_out:
        with pytest.raises(NotFound):
            await pair.fetch("a", chunk, [0])


async def test_a_lease_is_dropped_once_nothing_was_published_or_fetched_for_its_time(make_pair: MakePair) -> None:
    pair = await make_pair(budget_bytes=2 * 4096)
    ttl_s = 6.0
    chunk = await pair.publish("a", 0, [0], ttl_s=ttl_s)
    await pair.pass_time(0.6 * ttl_s)
    await pair.publish("a", 1, [1], ttl_s=ttl_s)
    await pair.pass_time(0.6 * ttl_s)
    if pair.prefill.transport.copies_out:
        await pair.fetch("a", chunk, [0])
        await pair.pass_time(0.6 * ttl_s)
    assert (await pair.prefill.transport.stats()).num_objects == 2
    await pair.pass_time(0.4 * ttl_s)
    await wait_for_objects(pair.prefill.transport, 0)
    with pytest.raises(NotFound):
        await pair.publish("a", 2, [0], ttl_s=ttl_s)
    await pair.publish("b", 0, [0, 1])  # and its bytes are free again
    await pair.drop("b")


async def test_many_leases_at_once(make_pair: MakePair) -> None:
    pair = await make_pair(layer_bytes=16 << 10, budget_bytes=1 << 20)

    async def hand_over(number: int) -> None:
        lease, blocks = f"lease {number}", [2 * number, 2 * number + 1]
        chunks = await asyncio.gather(*(pair.publish(lease, i, [b]) for i, b in enumerate(blocks)))
        await asyncio.gather(*(pair.fetch(lease, c, [b]) for c, b in zip(chunks, blocks, strict=True)))
        await pair.drop(lease)

    await asyncio.gather(*(hand_over(n) for n in range(32)))
    np.testing.assert_array_equal(pair.decode.read(), pair.prefill.read())


async def test_both_directions_and_a_side_that_fetches_from_itself(make_pair: MakePair) -> None:
    pair = await make_pair()
    itself, back = replace(pair, decode=pair.prefill), replace(pair, prefill=pair.decode, decode=pair.prefill)
    await itself.fetch("a", await pair.publish("a", 0, [4]), [9])
    np.testing.assert_array_equal(pair.prefill.read([9]), pair.prefill.read([4]))
    await back.fetch("b", await back.publish("b", 0, [30]), [4])
    assert not pair.prefill.read([4]).any()
    await pair.drop("a")
    await back.drop("b")


async def test_an_unknown_source_is_unavailable(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [0])
    for endpoint in ("kv:nobody:1:1", "", "nixl:1:x", "cuda_ipc:2"):
        assert await unavailable(pair.fetch("a", chunk, [0], endpoint=endpoint))
        assert await unavailable(pair.probe(endpoint))
    await pair.drop("a")


async def test_a_closed_source_is_unavailable_and_a_closed_side_refuses(make_pair: MakePair) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [0])
    endpoint = pair.prefill.transport.endpoint
    await pair.prefill.transport.close()
    assert not pair.prefill.transport.ready
    assert pair.prefill.transport.why_not_ready
    # Ray may answer from the dying actor for a moment.
    async with asyncio.timeout(SOON_S):
        while not await unavailable(pair.fetch("a", chunk, [0], within_s=1000, endpoint=endpoint)):
            pass
    assert await unavailable(pair.probe(endpoint))
    assert await unavailable(pair.publish("b", 0, [0]))
    with pytest.raises((Unavailable, NotFound)):
        await replace(pair, decode=pair.prefill).fetch("a", chunk, [0], endpoint=pair.decode.transport.endpoint)


async def unavailable(call: Awaitable[object]) -> bool:
    try:
        await call
    except Unavailable:
        return True
    return False


async def test_cancelling_at_any_moment_leaks_nothing(make_pair: MakePair) -> None:
    pair = await make_pair(layer_bytes=16 << 10, budget_bytes=256 << 10)
    rng = np.random.default_rng(3)

    async def hand_over(number: int) -> None:
        lease = f"lease {number}"
        try:
            await pair.fetch(lease, await pair.publish(lease, 0, [number]), [number])
        finally:
            await pair.drop(lease)

    tasks = [asyncio.create_task(hand_over(n)) for n in range(48)]
    for task in tasks:
        await asyncio.sleep(float(rng.exponential(0.003)))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(o is None or isinstance(o, (asyncio.CancelledError, TwostepError)) for o in outcomes)
    # Calls that were cancelled under way may still be on their way back.
    await wait_for_objects(pair.prefill.transport, 0)
    for number in range(4):  # and the room is all there
        chunk = await pair.publish(f"after {number}", 0, list(range(16)))
        await pair.fetch(f"after {number}", chunk, list(range(16)))
        await pair.drop(f"after {number}")


async def test_a_probe_moves_bytes_and_leaves_nothing(make_pair: MakePair) -> None:
    pair = await make_pair()
    for _ in range(2):
        probe = await pair.probe()
        assert probe.num_bytes >= 4096
        assert probe.seconds > 0
        assert probe.bytes_per_s == pytest.approx(probe.num_bytes / probe.seconds)
    assert not pair.decode.read().any()


# ---- readers take the blocks from the pool itself ------------------------------------------------------------------------------


@one_sided
async def test_checksums_are_those_that_the_reference_computes(make_pair: MakePair) -> None:
    pair = await make_pair(num_layers=3, layer_bytes=1032)
    whole, part = await pair.publish("a", 0, [7, 0, 3]), await pair.publish("a", 1, [4, 9], layers=LayerRange(1, 2))
    assert whole.checksum == chunk_sum(block_sums(pair.prefill.read([7, 0, 3])))
    assert part.checksum == chunk_sum(block_sums(pair.prefill.read([4, 9])[:, 1032:], 1032))
    await pair.drop("a")


@one_sided
async def test_source_blocks_that_changed_since_are_data_loss(make_pair: MakePair) -> None:
    """A bit that flips after it was summed, two blocks for each other, blocks that were given to others."""
    pair = await make_pair(num_layers=2, layer_bytes=2048)
    chunk = await pair.publish("a", 0, [3, 4, 9, 20, 21, 22])
    before = pair.prefill.read()
    targets = [1, 2, 3, 4, 5, 6]
    flips = before.copy(), before.copy(), before.copy()
    flips[0][4, 1000] ^= 1
    flips[1][22, 4095] ^= 128
    flips[2][[3, 4]] = before[[4, 3]]
    for changed in flips:
        pair.prefill.write(range(NUM_BLOCKS), changed)
        with pytest.raises(DataLoss):
            await pair.fetch("a", chunk, targets)
    pair.prefill.write(range(NUM_BLOCKS), before)
    others = replace(chunk, source_blocks=(4, 3, 9, 20, 21, 22)), replace(chunk, first_layer=0, num_layers=1, num_bytes=6 * 2048)
    for wrong in others:
        with pytest.raises(DataLoss):
            await pair.fetch("a", wrong, targets)
    await pair.fetch("a", chunk, targets)
    np.testing.assert_array_equal(pair.decode.read(targets), before[[3, 4, 9, 20, 21, 22]])
    await pair.drop("a")


@one_sided
async def test_blocks_that_are_not_in_a_pool_are_neither_read_nor_written(make_pair: MakePair) -> None:
    pair, other = await make_pair(), await make_pair(layer_bytes=8192)
    chunk = await pair.publish("a", 0, [1, 2])
    for wrong in ((1,), (1, NUM_BLOCKS), (-1, 2)):
        with pytest.raises(DataLoss):
            await pair.fetch("a", replace(chunk, source_blocks=wrong), [1, 2])
    with pytest.raises(InvalidRequest):
        await pair.fetch("a", chunk, [1, 2], endpoint=other.prefill.transport.endpoint)
    for ids in ([-1, 2], [1, NUM_BLOCKS]):
        with pytest.raises(InvalidRequest):
            await pair.fetch("a", chunk, ids)
        with pytest.raises(InvalidRequest):
            await pair.publish("a", 1, ids)
    assert not pair.decode.read().any()
    await pair.drop("a")


@one_sided
async def test_an_empty_chunk_is_fetched_too(make_pair: MakePair) -> None:
    pair = await make_pair()
    await pair.fetch("a", await pair.publish("a", 0, []), [])
    assert not pair.decode.read().any()
    await pair.drop("a")


# ---- what is published is copied out of the pool ------------------------------------------------------------------------------


@copying
async def test_source_blocks_are_free_once_published_and_a_fetch_says_how_long_writing_took(make_pair: MakePair) -> None:
    pair = await make_pair()
    before = pair.prefill.read([0, 1])
    chunk = await pair.publish("a", 0, [0, 1])
    pair.prefill.write([0, 1], np.zeros_like(before))
    start = time.monotonic()
    assert 0 < await pair.fetch("a", chunk, [5, 6]) <= time.monotonic() - start
    np.testing.assert_array_equal(pair.decode.read([5, 6]), before)
    await pair.drop("a")


@copying
async def test_a_full_budget_holds_publishers_back_until_a_drop_or_their_deadline(make_pair: MakePair) -> None:
    pair = await make_pair(budget_bytes=3 * 4096)
    await pair.publish("a", 0, [0, 1])
    with pytest.raises(InvalidRequest):
        await pair.publish("b", 1, [0, 1, 2, 3])  # it never fits
    waiting = asyncio.create_task(pair.publish("b", 0, [2, 3]))
    # Nothing else would end it.
    with pytest.raises(ResourceExhausted):
        await pair.publish("c", 0, [2, 3], within_s=0.1)
    assert not waiting.done()
    await pair.drop("a")
    await pair.fetch("b", await waiting, [2, 3])
    np.testing.assert_array_equal(pair.decode.read([2, 3]), pair.prefill.read([2, 3]))
    await pair.drop("b")


@copying
@pytest.mark.parametrize("step", ["publish", "fetch"])
async def test_what_is_cancelled_ends_when_nobody_uses_the_blocks_any_more(make_pair: MakePair, step: str) -> None:
    pair = await make_pair()
    chunk = await pair.publish("a", 0, [0, 1])
    store = (pair.prefill if step == "publish" else pair.decode).gated
    store.inside.clear()
    store.gate.clear()
    task = asyncio.ensure_future(pair.publish("a", 1, [0, 1]) if step == "publish" else pair.fetch("a", chunk, [0, 1]))
    assert await asyncio.to_thread(store.inside.wait, SOON_S)
    for _ in range(2):
        task.cancel()
        assert not (await asyncio.wait([task], timeout=0.05))[0]
    store.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await pair.drop("a")


async def writing(pair: Pair, lease: str) -> asyncio.Future[float]:
    """Publishes a chunk and fetches it, up to where it is written into the target, which waits."""
    chunk = await pair.publish(lease, 0, [1, 2, 3])
    store = pair.decode.gated
    store.inside.clear()
    store.gate.clear()
    fetching = asyncio.ensure_future(pair.fetch(lease, chunk, [1, 2, 3]))
    assert await asyncio.to_thread(store.inside.wait, SOON_S)
    return fetching


@copying
async def test_a_chunk_stays_what_it_is_while_it_is_written_though_its_lease_ends(make_pair: MakePair) -> None:
    pair = await make_pair(layer_bytes=1 << 16)
    for number in range(8):  # the first may take a way of their own
        pair.decode.memory.zero_()
        fetching = await writing(pair, f"a{number}")
        await pair.drop(f"a{number}")
        await pair.publish(f"b{number}", 0, [4, 5, 6])
        pair.decode.gated.gate.set()
        await fetching
        np.testing.assert_array_equal(pair.decode.read([1, 2, 3]), pair.prefill.read([1, 2, 3]))
        await pair.drop(f"b{number}")


@copying
async def test_memory_that_goes_with_its_source_while_it_is_written_is_not_taken_for_the_chunk(make_pair: MakePair) -> None:
    pair = await make_pair(layer_bytes=1 << 16)
    for number in range(8):
        await pair.fetch(f"a{number}", await pair.publish(f"a{number}", 0, [1, 2, 3]), [1, 2, 3])
    pair.decode.memory.zero_()
    fetching = await writing(pair, "b")
    await pair.prefill.transport.close()
    pair.decode.gated.gate.set()
    try:
        await fetching
    except (DataLoss, Unavailable):
        return
    np.testing.assert_array_equal(pair.decode.read([1, 2, 3]), pair.prefill.read([1, 2, 3]))


@copying
async def test_bytes_are_published_that_no_pool_holds_and_fetched_for_the_callers_own_use(make_pair: MakePair) -> None:
    pair = await make_pair(layer_bytes=4097)
    source, reader, endpoint, lease = pair.prefill.transport, pair.decode.transport, pair.prefill.transport.endpoint, pair.salt + "a"

    async def fetched(chunk: ChunkInfo) -> np.ndarray:
        return await reader.fetch_bytes(endpoint, lease, chunk, deadline=in_s(SOON_S))

    rng = np.random.default_rng(3)
    for index, size in enumerate((1, 4097, 60_000)):
        data = rng.integers(0, 256, size, np.uint8)
        digest = await source.publish_bytes(lease, index, data, ttl_s=TTL_S, deadline=in_s(SOON_S))
        assert digest == checksum(data)
        chunk = ChunkInfo(index=index, first_block=0, num_blocks=1, num_bytes=size, checksum=digest)
        for _ in range(2):
            got = await fetched(chunk)
            np.testing.assert_array_equal(got, data)
            got[:] = 0
    with pytest.raises(InvalidRequest):
        await source.publish_bytes(lease, 0, data, ttl_s=TTL_S, deadline=in_s(SOON_S))
    stats = await source.stats()
    assert (stats.num_leases, stats.num_objects, stats.stored_bytes) == (1, 3, 64_098)
    blocks = await pair.publish("a", 3, [5, 1, 9])
    np.testing.assert_array_equal((await fetched(blocks)).reshape(3, 4097), pair.prefill.read([5, 1, 9]))
    with pytest.raises(DataLoss):
        await fetched(replace(blocks, checksum=blocks.checksum ^ 1))
    await pair.drop("a")
    with pytest.raises(NotFound):
        await fetched(blocks)
    assert not pair.decode.read().any()
