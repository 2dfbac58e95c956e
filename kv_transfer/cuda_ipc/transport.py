"""The `cuda_ipc` transport: GPU to GPU within a host, one-sided, without staging.

    publish   1 the blocks' checksum, out of what the steps have kept (thread)
    fetch     1 the peer's pool, opened once (CUDA IPC)   2 one kernel on the reader's GPU: peer's blocks -> blocks, summed on the way
              3 the sums compared (thread)

The source's process takes no part in a fetch, and neither side's death harms the other (docs/cuda-ipc.md). A kernel cannot be called
back: a fetch that is cancelled or past its deadline ends when its kernel has, within milliseconds, and its target blocks are not to be
given out before.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from kv_transfer.checksums import chunk_sum, chunk_sums
from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId
from kv_transfer.cuda_ipc.peers import IpcPeers, PeerPool, export, gpu_uuid, opener_on
from kv_transfer.cuda_ipc.pulls import Lane, PullBatch, PullBatches
from kv_transfer.gpu_pool import check_words
from kv_transfer.pool_transport import InPlaceTransport, check_arrived
from kv_transfer.transport import PROBE_BYTES, ChunkInfo, ProbeTiming, probe_pattern
from kv_transfer.waiting import FifoGate
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest, ResourceExhausted, Unavailable
from twostep.model.kernels.triton_pull import PullShape
from twostep.model.step.kv_cache import KvCache

# Pulls share the link: a second one only fills the gaps between launches.
_NUM_LANES = 2
_SWEEP_S = 0.5
# No lane is taken for so long: a call takes milliseconds.
_TURN_S = 60.0
_PROBE_READS = 3

R = TypeVar("R")

# The transports of this process that share their pools, by incarnation.
_sources_here: weakref.WeakValueDictionary[str, CudaIpcTransport] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcProbeSize:
    """The probe region, which a probe reads in pieces, each of them `rounds` times."""

    num_bytes: int = PROBE_BYTES
    piece_bytes: int = 1 << 20
    rounds: int = 8


class CudaIpcTransport(InPlaceTransport):
    """See kv_transfer.transport for the contract. `endpoint` is empty also where the pool is not shared."""

    name = "cuda_ipc"
    why_not_ready = "it is starting"

    def __init__(
        self,
        cache: KvCache,
        *,
        serves: bool = True,
        shape: PullShape | None = None,
        blocking: bool = False,
        probe_size: IpcProbeSize | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serves`: peers may read the pool; else it only reads theirs. `shape`: how a pull is cut. `blocking`: threads sleep while they
        wait for the GPU, instead of spinning, which takes half a millisecond less of a fetch. A pool in host memory can be read within the
        process only. Raises SetupError."""
        check_words(cache.shape, self.name)
        super().__init__(
            cache.shape.num_blocks,
            cache.shape.block_bytes,
            cache.shape.num_layers,
            num_threads=_NUM_LANES,
            sweep_s=_SWEEP_S,
            enter=self._enter_thread,
            clock=clock,
        )
        self._cache = cache
        self._device = cache.tensor.device
        self._serves = serves
        self._shape = shape or PullShape()
        self._blocking = blocking
        self._probe_size = probe_size or IpcProbeSize()
        self._own = ProcessId.own()
        self._incarnation = secrets.token_hex(8)
        self.ready = False
        self._pattern: torch.Tensor | None = None
        self.peers = IpcPeers(opener_on(self._device, self._own), self._own)
        self._lane_of_thread = threading.local()
        self._batches = PullBatches(self._pull_batch)
        self._idle_lanes = _NUM_LANES
        self._turns = FifoGate("cuda_ipc")

    async def start(self) -> None:
        """Raises SetupError."""
        self._threads.start()
        try:
            endpoint = await self._threads.run(self._prepare)
        except BaseException:
            await self._threads.close()
            raise
        self.ready = True
        if endpoint is not None:
            self.endpoint = str(endpoint)
            _sources_here[self._incarnation] = self

    async def close(self) -> None:
        self.ready, self.endpoint = False, ""
        _sources_here.pop(self._incarnation, None)
        await self._batches.close()
        await self._threads.close()
        self._book.drop_all()
        await asyncio.to_thread(self.peers.close)

    # ---- the source's side ------------------------------------------------------------------------------------------------

    async def _checksum(self, block_ids: Sequence[int], layers: LayerRange | None, *, deadline: float) -> int:
        if not self._serves:
            raise InvalidRequest("this worker's KV pool is not shared over cuda_ipc; publish on a prefill worker")
        return await self._in_lane(self._sum, block_ids, self._part(layers), deadline=deadline)

    def _sum(self, ids: Sequence[int], part: slice) -> int:
        return chunk_sum(self._lane.sums_of(self._cache, ids, part))

    # ---- the reader's side --------------------------------------------------------------------------------------------------

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> float:
        source = IpcEndpoint.parse(endpoint)
        targets = self._check_fetch(chunk, block_ids, source)
        found = await self._batches.pull(source, self._part(chunk.layers), chunk.source_blocks, targets, deadline=deadline)
        check_arrived(chunk, found)
        return 0.0

    async def _pull_batch(self, batch: PullBatch) -> list[int]:
        """Pulls for all that wait. Its deadline is that of those who wait for it."""
        async with self._lane_free(time.monotonic() + _TURN_S):
            fetches = self._batches.begin(batch)
            sources = [block for fetch in fetches for block in fetch.source_blocks]
            targets = [block for fetch in fetches for block in fetch.target_blocks]
            counts = [len(fetch.source_blocks) for fetch in fetches]
            return await self._threads.run(self._pull, batch.source, batch.part, sources, targets, counts)

    def _pull(self, source: IpcEndpoint, part: slice, sources: list[int], targets: list[int], counts: list[int]) -> list[int]:
        """Returns the sums of chunks of so many blocks."""
        if not sources:
            return [0] * len(counts)
        if self._cache.sums is not None:
            self._cache.sums.overwritten(targets)
        with self._pool_of(source) as peer:
            sums = self._lane.pull(
                peer.pool, self._cache.tensor.data_ptr(), sources, targets, block_bytes=source.block_bytes, part=part, shape=self._shape
            )
        return chunk_sums(sums, counts)

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        """Takes the best of a few reads of the peer's probe region, after one that opens it."""
        return await self._in_lane(self._try, IpcEndpoint.parse(endpoint), deadline=deadline)

    def _try(self, source: IpcEndpoint) -> ProbeTiming:
        assert self._pattern is not None
        landed = torch.zeros_like(self._pattern)
        if landed.is_cuda:
            torch.cuda.current_stream().synchronize()
        size = self._probe_size
        ids = list(range(size.num_bytes // size.piece_bytes)) * size.rounds
        part = slice(0, size.piece_bytes)
        best = float("inf")
        with self._pool_of(source) as peer:
            for _ in range(1 + _PROBE_READS):
                start = time.perf_counter()
                self._lane.pull(peer.probe, landed.data_ptr(), ids, ids, block_bytes=size.piece_bytes, part=part, shape=self._shape)
                best = min(best, time.perf_counter() - start)
        if not torch.equal(landed, self._pattern):
            raise DataLoss("what a probe read over cuda_ipc is not what the peer holds; use another --kv-transfer")
        return ProbeTiming(num_bytes=size.num_bytes * size.rounds, seconds=best)

    @contextmanager
    def _pool_of(self, source: IpcEndpoint) -> Iterator[PeerPool]:
        """A handle cannot be opened where it was made, and need not be: the devices of a process reach each other's memory."""
        if source.process != self._own:
            with self.peers.pool_of(source) as peer:
                yield peer
            return
        other = _sources_here.get(source.incarnation)
        if other is None or other._pattern is None:
            raise Unavailable("the KV source of this process was closed; prefill again")
        if other.endpoint != str(source):
            # With other sizes, say: a kernel would read past the pool.
            raise Unavailable(f"there are two cuda_ipc endpoints of one incarnation, {source.incarnation}; prefill again")
        yield PeerPool(other._cache.tensor.data_ptr(), other._pattern.data_ptr())

    # ---- both --------------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> IpcEndpoint | None:
        """Exports the pool, and compiles the kernels before the first hand-over waits for them. Raises SetupError."""
        shape = self._cache.shape
        self._pattern = torch.from_numpy(probe_pattern(self._probe_size.num_bytes)).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            lane, scratch = self._lane, torch.empty_like(self._pattern)
            lane.pull(self._pattern.data_ptr(), scratch.data_ptr(), [0], [0], block_bytes=4096, part=slice(0, 4096), shape=self._shape)
            for of_bytes in (False, True):
                lane.sums_of(self._cache, [0], self._part(None), of_bytes=of_bytes)
        if not self._serves:
            return None
        pool, probe = (export(x) if x.is_cuda else None for x in (self._cache.tensor, self._pattern))
        return IpcEndpoint(
            process=self._own,
            incarnation=self._incarnation,
            gpu=gpu_uuid(self._device),
            pool_handle=pool.handle if pool else b"",
            pool_offset=pool.offset if pool else 0,
            num_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            probe_handle=probe.handle if probe else b"",
            probe_offset=probe.offset if probe else 0,
        )

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._lane_of_thread.lane = Lane(self._device, blocking=self._blocking)

    @property
    def _lane(self) -> Lane:
        lane = self._lane_of_thread.lane
        assert isinstance(lane, Lane)
        return lane

    async def _in_lane(self, function: Callable[..., R], *args: object, deadline: float) -> R:
        """Waits for a lane until the deadline, then for the call however long it takes: milliseconds. Raises ResourceExhausted."""
        async with self._lane_free(deadline):
            return await self._threads.run(function, *args)

    @asynccontextmanager
    async def _lane_free(self, deadline: float) -> AsyncIterator[None]:
        self._threads.check()
        await self._turns.take(self._take_lane, deadline=deadline)
        try:
            yield
        finally:
            self._idle_lanes += 1
            self._turns.pump()

    def _take_lane(self) -> bool | None:
        if not self._idle_lanes:
            return None
        self._idle_lanes -= 1
        return True

    async def _sweep(self) -> None:
        await super()._sweep()
        if self.peers.num_open:
            with suppress(ResourceExhausted):
                await self._in_lane(self.peers.sweep, deadline=time.monotonic() + _SWEEP_S)
