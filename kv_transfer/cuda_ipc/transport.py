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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import torch

from kv_transfer.cuda_ipc.batches import Ask, Batch, PullBatches
from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId
from kv_transfer.cuda_ipc.lanes import Lane
from kv_transfer.cuda_ipc.memory import export
from kv_transfer.cuda_ipc.opening import IpcOpener, gpu_uuid
from kv_transfer.cuda_ipc.peers import IpcPeers, PeerPool
from kv_transfer.in_place import InPlaceBook
from kv_transfer.local.transport import check_blocks, part_bytes
from kv_transfer.probing import PROBE_BYTES, probe_pattern
from kv_transfer.sum64 import WORD_BYTES, chunk_sum, chunk_sums
from kv_transfer.transport import ChunkInfo, Probe, TransportStats
from kv_transfer.waiting import FifoGate, finish
from twostep.engine.batch import LayerRange, Runner
from twostep.errors import DataLoss, InvalidRequest, ResourceExhausted, SetupError, Unavailable
from twostep.model.kernels.triton_pull import PullShape
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache
from twostep.worker.edge import EdgeParts

# Pulls share the link: a second one only fills the gaps between launches.
_NUM_LANES = 2
_SWEEP_S = 0.5
# No lane is taken for so long: a call takes milliseconds.
_TURN_S = 60.0
# A probe reads its region in pieces of this size, each of them several times.
_PROBE_PIECE = 1 << 20
_PROBE_ROUNDS = 8
_PROBE_READS = 3

R = TypeVar("R")

# Those of this process that share their pools.
_lives: weakref.WeakValueDictionary[str, CudaIpcTransport] = weakref.WeakValueDictionary()


class CudaIpcTransport:
    """See kv_transfer.transport for the contract."""

    def __init__(self, cache: KvCache, *, serves: bool = True, shape: PullShape | None = None, blocking: bool = False) -> None:
        """`serves`: peers may read the pool; else it only reads theirs. `shape`: how a pull is cut. `blocking`: threads sleep while they
        wait for the GPU, instead of spinning, which takes half a millisecond less of a fetch. A pool in host memory can be read within
        the process only. Raises SetupError."""
        if cache.shape.layer_bytes % WORD_BYTES:
            raise SetupError(
                f"cuda_ipc moves whole 64-bit words, and a layer of a KV block has {cache.shape.layer_bytes} bytes; "
                "use another --block-size, or leave cuda_ipc out"
            )
        self._cache = cache
        self._device = cache.tensor.device
        self._serves = serves
        self._shape = shape or PullShape()
        self._blocking = blocking
        self._own = ProcessId.own()
        self._life = secrets.token_hex(8)
        self._endpoint = ""
        self._pattern: torch.Tensor | None = None
        self._book = InPlaceBook()
        self._peers = IpcPeers(IpcOpener(self._device, self._own), self._own)
        self._local = threading.local()
        self._threads: ThreadPoolExecutor | None = None
        self._batches = PullBatches(self._pull_batch)
        self._idle_lanes = _NUM_LANES
        self._turns = FifoGate("cuda_ipc")
        self._sweeper: asyncio.Task[None] | None = None

    @classmethod
    def of_worker(cls, parts: EdgeParts) -> CudaIpcTransport:
        """Raises SetupError."""
        return cls(_cache_of(parts.model.runner), serves=parts.config.role == "prefill")

    @property
    def name(self) -> str:
        return "cuda_ipc"

    @property
    def copies_out(self) -> bool:
        return False

    @property
    def checksum_name(self) -> str:
        return "sum64"

    @property
    def endpoint(self) -> str:
        """Empty too where the pool is not shared."""
        return self._endpoint

    @property
    def ready(self) -> bool:
        return self._threads is not None

    @property
    def why_not_ready(self) -> str:
        return "it is starting"

    @property
    def max_lease_bytes(self) -> int:
        """The pool bounds it."""
        return 0

    @property
    def peers(self) -> IpcPeers:
        """For those who look after memory."""
        return self._peers

    async def start(self) -> None:
        """Raises SetupError."""
        threads = ThreadPoolExecutor(_NUM_LANES, thread_name_prefix="kv-ipc", initializer=self._enter_thread)
        try:
            endpoint = await asyncio.get_running_loop().run_in_executor(threads, self._prepare)
        except BaseException:
            threads.shutdown(wait=False)
            raise
        self._threads, self._endpoint = threads, "" if endpoint is None else str(endpoint)
        if endpoint is not None:
            _lives[self._life] = self
        self._sweeper = asyncio.create_task(self._sweep(), name="kv-ipc-sweep")

    async def close(self) -> None:
        self._endpoint = ""
        _lives.pop(self._life, None)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        self._book.drop_all()
        await self._batches.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
            await asyncio.to_thread(self._peers.close)

    # ---- the source's side ------------------------------------------------------------------------------------------------

    async def publish(
        self,
        lease_id: str,
        index: int,
        first_block: int,
        block_ids: Sequence[int],
        *,
        layers: LayerRange | None = None,
        ttl_s: float,
        deadline: float,
    ) -> ChunkInfo:
        if not self._serves:
            raise InvalidRequest("this worker's KV pool is not shared over cuda_ipc; publish on a prefill worker")
        ids = self._check_ids(block_ids)
        part = self._part(layers)
        num_bytes = len(ids) * (part.stop - part.start)
        self._running_threads()
        digest = partial(self._in_thread, self._sum, ids, part, deadline=deadline)
        return await self._book.publish(lease_id, index, first_block, ids, layers=layers, num_bytes=num_bytes, ttl_s=ttl_s, digest=digest)

    async def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)

    async def stats(self) -> TransportStats:
        return self._book.stats

    def _sum(self, ids: Sequence[int], part: slice) -> int:
        return chunk_sum(self._lane.sums_of(self._cache, ids, part))

    # ---- the reader's side --------------------------------------------------------------------------------------------------

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> None:
        shape = self._cache.shape
        check_blocks(chunk, block_ids, shape.block_bytes, shape.num_layers)
        source = IpcEndpoint.parse(endpoint)
        if source.block_bytes != shape.block_bytes:
            raise InvalidRequest(
                f"the source's blocks have {source.block_bytes} bytes, ours {shape.block_bytes}; compare the layouts before fetching"
            )
        if len(chunk.source_blocks) != chunk.num_blocks:
            raise DataLoss(f"chunk {chunk.index} names {len(chunk.source_blocks)} source blocks for {chunk.num_blocks}; prefill again")
        if chunk.source_blocks and not 0 <= min(chunk.source_blocks) <= max(chunk.source_blocks) < source.num_blocks:
            raise DataLoss(f"chunk {chunk.index} names source blocks that are not among {source.num_blocks}; prefill again")
        targets = self._check_ids(block_ids)
        self._running_threads()
        found = await self._batches.pull(source, self._part(chunk.layers), chunk.source_blocks, targets, deadline=deadline)
        if found != chunk.checksum:
            raise DataLoss(f"chunk {chunk.index} does not match its checksum; fetch it again once, then prefill again")

    async def _pull_batch(self, batch: Batch) -> list[int]:
        """Its deadline is that of those who wait for it."""
        return await self._in_lane(lambda: self._begun(batch), deadline=time.monotonic() + _TURN_S)

    def _begun(self, batch: Batch) -> Callable[[], list[int]]:
        asks = self._batches.begin(batch)
        sources, targets = ([x for ask in asks for x in blocks(ask)] for blocks in (_sources, _targets))
        return partial(self._pull, batch.source, batch.part, sources, targets, [len(ask.source_blocks) for ask in asks])

    def _pull(self, source: IpcEndpoint, part: slice, sources: list[int], targets: list[int], counts: list[int]) -> list[int]:
        """The sums of chunks of so many blocks."""
        if not sources:
            return [0] * len(counts)
        with self._pool_of(source) as peer:
            sums = self._lane.pull(
                peer.pool, self._cache.tensor.data_ptr(), sources, targets, block_bytes=source.block_bytes, part=part, shape=self._shape
            )
        if self._cache.sums is not None:
            self._cache.sums.refresh(targets)
        return chunk_sums(sums, counts)

    async def probe(self, endpoint: str, *, deadline: float) -> Probe:
        """The best of a few reads of the peer's probe region, after one that opens it."""
        return await self._in_thread(self._try, IpcEndpoint.parse(endpoint), deadline=deadline)

    def _try(self, source: IpcEndpoint) -> Probe:
        assert self._pattern is not None
        landed = torch.zeros_like(self._pattern)
        if landed.is_cuda:
            torch.cuda.current_stream().synchronize()
        ids = list(range(PROBE_BYTES // _PROBE_PIECE)) * _PROBE_ROUNDS
        best = float("inf")
        with self._pool_of(source) as peer:
            for _ in range(1 + _PROBE_READS):
                start = time.perf_counter()
                self._lane.pull(
                    peer.probe, landed.data_ptr(), ids, ids, block_bytes=_PROBE_PIECE, part=slice(0, _PROBE_PIECE), shape=self._shape
                )
                best = min(best, time.perf_counter() - start)
        if not torch.equal(landed, self._pattern):
            raise DataLoss("what a probe read over cuda_ipc is not what the peer holds; use another --kv-transfer")
        return Probe(num_bytes=PROBE_BYTES * _PROBE_ROUNDS, seconds=best)

    @contextmanager
    def _pool_of(self, source: IpcEndpoint) -> Iterator[PeerPool]:
        """A handle cannot be opened where it was made, and need not be: the devices of a process reach each other's memory."""
        if source.process != self._own:
            with self._peers.pool_of(source) as peer:
                yield peer
            return
        other = _lives.get(source.life)
        if other is None or other._pattern is None:
            raise Unavailable("the KV source of this process was closed; prefill again")
        if other.endpoint != str(source):
            # Of other sizes, say: a kernel would read past the pool.
            raise Unavailable(f"there are two cuda_ipc endpoints of life {source.life}; prefill again")
        yield PeerPool(other._cache.tensor.data_ptr(), other._pattern.data_ptr())

    # ---- both --------------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> IpcEndpoint | None:
        """Exports the pool, and compiles the kernels before the first hand-over waits for them. Raises SetupError."""
        shape = self._cache.shape
        self._pattern = torch.from_numpy(probe_pattern(PROBE_BYTES)).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
            lane, scratch = self._lane, torch.empty_like(self._pattern)
            lane.pull(self._pattern.data_ptr(), scratch.data_ptr(), [0], [0], block_bytes=4096, part=slice(0, 4096), shape=self._shape)
            lane.sums_of(self._cache, [0], self._part(None))
        if not self._serves:
            return None
        pool, probe = (export(x) if x.is_cuda else None for x in (self._cache.tensor, self._pattern))
        return IpcEndpoint(
            process=self._own,
            life=self._life,
            gpu=gpu_uuid(self._device),
            pool_handle=pool.handle if pool else b"",
            pool_offset=pool.offset if pool else 0,
            num_blocks=shape.num_blocks,
            block_bytes=shape.block_bytes,
            probe_handle=probe.handle if probe else b"",
            probe_offset=probe.offset if probe else 0,
        )

    def _part(self, layers: LayerRange | None) -> slice:
        """The layers' bytes of a block. Raises InvalidRequest."""
        shape = self._cache.shape
        num_bytes = part_bytes(shape.block_bytes, shape.num_layers, layers)
        start = 0 if layers is None else layers.first * shape.layer_bytes
        return slice(start, start + num_bytes)

    def _check_ids(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        ids, num_blocks = tuple(block_ids), self._cache.shape.num_blocks
        if ids and not 0 <= min(ids) <= max(ids) < num_blocks:
            raise InvalidRequest(f"block ids must be from 0 to {num_blocks - 1}")
        return ids

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._local.lane = Lane(self._device, blocking=self._blocking)

    @property
    def _lane(self) -> Lane:
        lane = self._local.lane
        assert isinstance(lane, Lane)
        return lane

    def _running_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            raise Unavailable("the cuda_ipc transport is not running; try another worker")
        return self._threads

    async def _in_thread(self, function: Callable[..., R], *args: object, deadline: float) -> R:
        return await self._in_lane(lambda: partial(function, *args), deadline=deadline)

    async def _in_lane(self, call: Callable[[], Callable[[], R]], *, deadline: float) -> R:
        """Waits for a thread until the deadline, asks what to call, then waits for that however long it takes: milliseconds."""
        threads = self._running_threads()
        await self._turns.take(self._take_lane, deadline=deadline)
        try:
            return await finish(_run(threads, call()))
        finally:
            self._idle_lanes += 1
            self._turns.pump()

    def _take_lane(self) -> bool | None:
        if not self._idle_lanes:
            return None
        self._idle_lanes -= 1
        return True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._book.expire()
            if self._peers.num_open:
                with suppress(ResourceExhausted):
                    await self._in_thread(self._peers.sweep, deadline=time.monotonic() + _SWEEP_S)


def _sources(ask: Ask) -> Sequence[int]:
    return ask.source_blocks


def _targets(ask: Ask) -> Sequence[int]:
    return ask.target_blocks


async def _run(threads: ThreadPoolExecutor, call: Callable[[], R]) -> R:
    return await asyncio.get_running_loop().run_in_executor(threads, call)


def _cache_of(runner: Runner) -> KvCache:
    """Raises SetupError."""
    if not isinstance(runner, ModelRunner) or not runner.kv_cache.tensor.is_cuda:
        raise SetupError(
            "cuda_ipc reads one KV pool in one GPU's memory, and this worker has none (a CPU, a fake runner, or several ranks that each "
            "hold a part); leave cuda_ipc out"
        )
    return runner.kv_cache
