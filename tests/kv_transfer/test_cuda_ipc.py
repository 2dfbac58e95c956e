"""The cuda_ipc transport within one process: the real one over the real kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from kv_pairs import in_s, wait_for_stats, wait_until

from kv_transfer.cuda_ipc import transport as cuda_ipc
from kv_transfer.cuda_ipc.endpoint import IpcEndpoint
from kv_transfer.cuda_ipc.transport import CudaIpcTransport
from kv_transfer.sum64 import block_sums, chunk_sum
from kv_transfer.transport import ChunkInfo
from twostep.engine.batch import KvShape, LayerRange
from twostep.engine.fake import FakeRunner
from twostep.errors import DataLoss, InvalidRequest, NotFound, ResourceExhausted, SetupError, Unavailable
from twostep.model.kernels.triton_pull import PullShape, slot_sums
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import KvSums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = KvShape(num_blocks=12, block_size=4, num_layers=3, num_kv_heads=2, head_dim=12, dtype="bfloat16")


@dataclass(frozen=True, slots=True)
class Side:
    cache: KvCache
    transport: CudaIpcTransport


@dataclass(frozen=True, slots=True)
class Pair:
    source: Side
    target: Side

    async def publish(self, index: int, blocks: list[int], layers: LayerRange | None = None, *, ttl_s: float = 600.0) -> ChunkInfo:
        return await self.source.transport.publish("lease", index, 0, blocks, layers=layers, ttl_s=ttl_s, deadline=in_s(60))

    async def fetch(self, chunk: ChunkInfo, blocks: list[int]) -> None:
        await self.target.transport.fetch(self.source.transport.endpoint, "lease", chunk, blocks, deadline=in_s(60))


def side(shape: KvShape) -> Side:
    cache = KvCache(shape, DEVICE)
    return Side(cache, CudaIpcTransport(cache, shape=PullShape(num_programs=3, tile_words=256, num_warps=1)))


@pytest_asyncio.fixture
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(cuda_ipc, "PROBE_BYTES", 1 << 14)
    monkeypatch.setattr(cuda_ipc, "_PROBE_PIECE", 1 << 12)
    monkeypatch.setattr(cuda_ipc, "_PROBE_ROUNDS", 2)
    made = Pair(side(SHAPE), side(SHAPE))
    made.source.cache.tensor.copy_(torch.randn(made.source.cache.tensor.shape))
    for one in (made.source, made.target):
        await one.transport.start()
    yield made
    await made.source.transport.drop("lease")
    for one in (made.source, made.target):
        assert (await one.transport.stats()).num_leases == 0
        await one.transport.close()
        assert one.transport.peers.num_open == 0


@pytest.mark.parametrize("kept", [False, True])
async def test_blocks_arrive_bit_for_bit(pair: Pair, kept: bool) -> None:
    source, target = pair.source.cache, pair.target.cache
    if kept:
        source.sums, target.sums = (KvSums(x.tensor, x.shape, 4, 8, slot_sums) for x in (source, target))
    whole = await pair.publish(0, [7, 0, 3])
    assert (whole.num_bytes, whole.source_blocks, whole.layers) == (3 * SHAPE.block_bytes, (7, 0, 3), None)
    data = source.tensor[[7, 0, 3]].contiguous().view(torch.uint8).reshape(3, -1).cpu().numpy()
    assert whole.checksum == chunk_sum(block_sums(data))
    await pair.fetch(whole, [2, 11, 5])
    assert torch.equal(target.tensor[[2, 11, 5]], source.tensor[[7, 0, 3]])
    some = await pair.publish(1, [4, 9], LayerRange(1, 2))
    assert some.num_bytes == 2 * SHAPE.bytes_of(LayerRange(1, 2)).stop - 2 * SHAPE.layer_bytes
    await pair.fetch(some, [8, 6])
    assert torch.equal(target.tensor[[8, 6], 1:], source.tensor[[4, 9], 1:])
    others = [block for block in range(12) if block not in (2, 11, 5, 8, 6)]
    assert not target.tensor[others].any()
    assert not target.tensor[[8, 6], 0].any()
    if kept:
        # What has arrived can be published in turn.
        again = await pair.target.transport.publish("there", 0, 0, [2, 11, 5], ttl_s=600, deadline=in_s(60))
        assert again.checksum == whole.checksum
        await pair.target.transport.drop("there")


async def test_what_differs_is_data_loss(pair: Pair) -> None:
    """A bit that flips after it was summed, two blocks for each other, memory that was given to others."""
    chunk = await pair.publish(0, [1, 2, 3])
    words = pair.source.cache.tensor.view(torch.int16)
    kept = words[2, 1, 0, 1, 3, 5].clone()
    words[2, 1, 0, 1, 3, 5] ^= 1
    with pytest.raises(DataLoss, match="checksum"):
        await pair.fetch(chunk, [1, 2, 3])
    words[2, 1, 0, 1, 3, 5] = kept
    await pair.fetch(chunk, [1, 2, 3])
    for wrong in (replace(chunk, source_blocks=(2, 1, 3)), replace(chunk, source_blocks=(1, 2, 4)), replace(chunk, checksum=0)):
        with pytest.raises(DataLoss, match="checksum"):
            await pair.fetch(wrong, [1, 2, 3])
    with pytest.raises(DataLoss, match="checksum"):
        await pair.fetch(replace(chunk, first_layer=0, num_layers=1, num_bytes=3 * SHAPE.layer_bytes), [1, 2, 3])


async def test_what_cannot_be_is_refused(pair: Pair) -> None:
    chunk = await pair.publish(0, [1, 2])
    before = pair.target.cache.tensor.clone()
    for targets in ([1, 2, 3], [1], [-1, 2], [1, 12]):
        with pytest.raises(InvalidRequest):
            await pair.fetch(chunk, targets)
    for wrong in (replace(chunk, source_blocks=(1,)), replace(chunk, source_blocks=(1, 12)), replace(chunk, source_blocks=(-1, 2))):
        with pytest.raises(DataLoss):
            await pair.fetch(wrong, [1, 2])
    with pytest.raises(InvalidRequest, match="layers"):
        await pair.fetch(replace(chunk, first_layer=2, num_layers=2), [1, 2])
    with pytest.raises(InvalidRequest):
        await pair.publish(1, [0, 12])
    with pytest.raises(InvalidRequest, match="published already"):
        await pair.publish(0, [1])
    assert torch.equal(pair.target.cache.tensor, before)
    wide = side(replace(SHAPE, num_kv_heads=4))
    await wide.transport.start()
    with pytest.raises(InvalidRequest, match="compare the layouts"):
        await pair.target.transport.fetch(wide.transport.endpoint, "lease", chunk, [1, 2], deadline=in_s(60))
    await wide.transport.close()


async def test_a_probe_reads_what_the_peer_holds(pair: Pair) -> None:
    found = await pair.target.transport.probe(pair.source.transport.endpoint, deadline=in_s(60))
    assert found.num_bytes == 2 << 14
    assert found.bytes_per_s > 0
    pattern = pair.source.transport._pattern
    assert pattern is not None
    pattern[5000] ^= 1
    with pytest.raises(DataLoss, match="probe"):
        await pair.target.transport.probe(pair.source.transport.endpoint, deadline=in_s(60))


async def test_leases_end_by_a_drop_or_their_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("kv_transfer.in_place.time", SimpleNamespace(monotonic=lambda: now[0]))
    await pair.publish(0, [1], ttl_s=5.0)
    now[0] += 5.0
    await wait_for_stats(pair.source.transport, num_objects=0)
    with pytest.raises(NotFound):
        await pair.publish(1, [2])
    await pair.source.transport.drop("another")
    with pytest.raises(NotFound):
        await pair.source.transport.publish("another", 0, 0, [2], ttl_s=5, deadline=in_s(60))


async def test_sources_that_cannot_be_read_are_unavailable(pair: Pair) -> None:
    chunk = await pair.publish(0, [1])
    here = IpcEndpoint.parse(pair.source.transport.endpoint)
    forgotten = replace(here, life="3" * 16)
    elsewhere = replace(here, life="0" * 16, process=replace(here.process, boot_id="another", pid_namespace=""))
    ended = replace(here, life="1" * 16, process=replace(here.process, start_time=here.process.start_time + 1))
    in_host_memory = replace(here, life="2" * 16, gpu="", process=replace(here.process, pid=1, pid_namespace="1"))
    for endpoint, why in (
        (forgotten, "was closed"),
        (elsewhere, "another host"),
        (ended, "ended"),
        (in_host_memory, "host memory"),
        ("nixl:1:x", "no cuda_ipc"),
    ):
        for call in (
            pair.target.transport.fetch(str(endpoint), "lease", chunk, [1], deadline=in_s(60)),
            pair.target.transport.probe(str(endpoint), deadline=in_s(60)),
        ):
            with pytest.raises(Unavailable, match=why):
                await call


async def test_a_pool_that_claims_to_be_larger_is_not_read_past_its_end(pair: Pair) -> None:
    chunk = await pair.publish(0, [1])
    larger = replace(IpcEndpoint.parse(pair.source.transport.endpoint), num_blocks=SHAPE.num_blocks + 1)
    beyond = replace(chunk, source_blocks=(SHAPE.num_blocks,))
    with pytest.raises(Unavailable, match="two cuda_ipc endpoints"):
        await pair.target.transport.fetch(str(larger), "lease", beyond, [1], deadline=in_s(60))


async def test_a_pool_that_is_not_shared_only_reads(pair: Pair) -> None:
    reader = Side(pair.target.cache, CudaIpcTransport(pair.target.cache, serves=False))
    await reader.transport.start()
    assert (reader.transport.ready, reader.transport.endpoint) == (True, "")
    chunk = await pair.publish(0, [1])
    await reader.transport.fetch(pair.source.transport.endpoint, "lease", chunk, [2], deadline=in_s(60))
    assert torch.equal(reader.cache.tensor[2], pair.source.cache.tensor[1])
    with pytest.raises(InvalidRequest, match="not shared"):
        await reader.transport.publish("lease", 0, 0, [1], ttl_s=5, deadline=in_s(60))
    await reader.transport.close()


async def test_a_closed_source_is_unavailable(pair: Pair) -> None:
    chunk, endpoint = await pair.publish(0, [1]), pair.source.transport.endpoint
    await pair.fetch(chunk, [1])
    await pair.source.transport.close()
    assert (pair.source.transport.ready, pair.source.transport.endpoint) == (False, "")
    with pytest.raises(Unavailable):
        await pair.target.transport.fetch(endpoint, "lease", chunk, [1], deadline=in_s(60))
    with pytest.raises(Unavailable):
        await pair.publish(1, [2])


async def test_chunks_that_wait_together_travel_together(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own checksum: a broken one harms no other."""
    whole = [await pair.publish(index, blocks) for index, blocks in enumerate(([1, 5], [3], [8, 9, 2], []))]
    layer = await pair.publish(4, [7], LayerRange(2, 1))
    pull, calls = pair.target.transport._pull, []

    def counted(source: IpcEndpoint, part: slice, sources: list[int], targets: list[int], counts: list[int]) -> list[int]:
        calls.append((part.stop - part.start, sources))
        return pull(source, part, sources, targets, counts)

    monkeypatch.setattr(pair.target.transport, "_pull", counted)
    done = await asyncio.gather(
        pair.fetch(whole[0], [0, 1]),
        pair.fetch(replace(whole[1], checksum=1), [2]),
        pair.fetch(whole[2], [3, 4, 5]),
        pair.fetch(layer, [6]),
        pair.fetch(whole[3], []),
        return_exceptions=True,
    )
    assert [type(x) for x in done] == [type(None), DataLoss, type(None), type(None), type(None)]
    assert sorted(calls) == [(SHAPE.layer_bytes, [7]), (SHAPE.block_bytes, [1, 5, 3, 8, 9, 2])]
    assert torch.equal(pair.target.cache.tensor[[0, 1, 3, 4, 5]], pair.source.cache.tensor[[1, 5, 8, 9, 2]])
    assert torch.equal(pair.target.cache.tensor[6, 2], pair.source.cache.tensor[7, 2])


async def test_a_fetch_under_way_ends_before_its_caller_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, parts = await pair.publish(0, [1]), [await pair.publish(1 + i, [1], LayerRange(i, 1)) for i in range(2)]
    pull, go_on, running, most = pair.target.transport._pull, threading.Event(), [0], [0]

    def held(*args: Any) -> list[int]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert go_on.wait(300)
        try:
            return pull(*args)
        finally:
            running[0] -= 1

    monkeypatch.setattr(pair.target.transport, "_pull", held)
    # Two have the lanes, each of its own range of layers; two more wait behind them in one batch.
    tasks = [asyncio.create_task(pair.fetch(what, [block])) for block, what in enumerate((*parts, chunk, chunk))]
    await wait_until(lambda: running[0] == 2)
    with pytest.raises(ResourceExhausted):
        await pair.target.transport.fetch(pair.source.transport.endpoint, "lease", chunk, [6], deadline=time.monotonic() + 0.02)
    tasks[0].cancel()
    tasks[3].cancel()
    await asyncio.wait([tasks[3]], timeout=60)
    done, _ = await asyncio.wait(tasks[:3], timeout=0.1)
    assert (done, tasks[3].done()) == (set(), True)  # it had not begun
    go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(x, asyncio.CancelledError) for x in results] == [True, False, False, True]
    assert results[1:3] == [None, None]
    assert (running, most) == ([0], [2])
    target, source = pair.target.cache.tensor, pair.source.cache.tensor
    assert torch.equal(target[0, 0], source[1, 0])
    assert torch.equal(target[2], source[1])
    assert not target[[3, 6]].any()


def test_what_has_no_pool_on_a_gpu_is_told_so() -> None:
    with pytest.raises(SetupError, match="leave cuda_ipc out"):
        cuda_ipc._cache_of(FakeRunner(num_blocks=4, block_size=4))
    odd = replace(SHAPE, num_kv_heads=1, block_size=1, head_dim=5)
    with pytest.raises(SetupError, match="64-bit"):
        CudaIpcTransport(KvCache(odd))
