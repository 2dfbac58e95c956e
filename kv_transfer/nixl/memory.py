"""The nixl transport's memory: the regions it registers, checksums of blocks, the copy from the arena into the pool.

    pool [num_blocks, block_bytes]  ◀── landing ──  arena [bytes]  ◀── reads ── peers' pools          probe [bytes]: of known contents

All three are on one GPU, or on the host (tests: Triton's interpreter runs the kernels).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.checksums import WORD_BYTES
from kv_transfer.gpu_pool import WITHIN_GPU, add_block_sums, gpu_pool_of, launching
from kv_transfer.transport import PROBE_BYTES, probe_pattern
from twostep.engine.batch import Runner
from twostep.errors import DataLoss, SetupError
from twostep.model.kernels.triton_pull import PullShape, pull_blocks, sum_blocks
from twostep.model.step.kv_sums import KvSums

# Room for reads on their way, at most this share of the GPU's memory.
_ARENA_BYTES = 512 << 20
_ARENA_SHARE = 1 / 64

Sums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that stays registered as long as the agent runs. `memory` is "DRAM" or "VRAM"."""

    address: int
    num_bytes: int
    memory: str
    device: int


class NixlMemory:
    """A pool, uint8 [num_blocks, block_bytes], dense; an arena that reads land in; a region of known contents for probes.

    Methods are callable from any thread that has called `enter_thread`, for blocks that no step writes and parts of the arena that no read
    writes. Kernels run on a stream of the calling thread's own: they wait for no step, and no step waits for them.
    """

    def __init__(
        self, pool: torch.Tensor, *, arena_bytes: int, probe_bytes: int, sums: KvSums | None = None, shape: PullShape = WITHIN_GPU
    ) -> None:
        """`sums`: the checksums that the pool's owner keeps while it writes; any other writer of blocks notes that. `shape`:
        how kernels are cut. Raises SetupError if there is no memory for the arena."""
        assert pool.dim() == 2
        assert pool.dtype == torch.uint8
        assert pool.is_contiguous()
        assert pool.shape[1] % WORD_BYTES == 0
        self.num_blocks, self.block_bytes = pool.shape
        self.device = pool.device
        self.shape = shape
        self._pool = pool
        self._sums = sums
        try:
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=pool.device)
            self._pattern = torch.from_numpy(probe_pattern(probe_bytes)).to(pool.device)
        except torch.OutOfMemoryError as error:
            raise SetupError(
                f"no {(arena_bytes + probe_bytes) >> 20} MiB on {pool.device} for the arena that nixl reads land in; "
                "lower --gpu-memory-utilization, or leave nixl out of --kv-transfer"
            ) from error
        self.pool, self.arena, self.probe = map(_region, (pool, self._arena, self._pattern))
        self._thread = threading.local()
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)

    @classmethod
    def of_runner(cls, runner: Runner) -> NixlMemory:
        """Raises SetupError."""
        cache = gpu_pool_of(runner, "nixl")
        pool = cache.tensor.view(cache.shape.num_blocks, -1).view(torch.uint8)
        total = torch.cuda.get_device_properties(pool.device).total_memory
        arena_bytes = max(min(_ARENA_BYTES, int(total * _ARENA_SHARE)), 2 * cache.shape.block_bytes)
        return cls(pool, arena_bytes=arena_bytes, probe_bytes=PROBE_BYTES, sums=cache.sums)

    def enter_thread(self) -> None:
        """To be called first in a thread that uses the memory."""
        self._thread.stream = None
        if self._pool.is_cuda:
            torch.cuda.set_device(self.device)
            self._thread.stream = torch.cuda.Stream(self.device, priority=-1)
            self._thread.stream.synchronize()  # makes the device's context current

    def block_sums(self, block_ids: Sequence[int], part: slice) -> Sums:
        """Returns sum64 of a part of the bytes, whole layers, of each of the blocks: uint64 [n]. Blocks."""
        with self.on_stream():
            ids = torch.from_numpy(np.asarray(block_ids, np.int32)).to(self.device)
            sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self.device)
            if block_ids:
                add_block_sums(self._pool, self._sums, block_ids, ids, sums, part, block_bytes=self.block_bytes, shape=self.shape)
            return sums.cpu().numpy().view(np.uint64)

    def copy_in(self, offset: int, ids: torch.Tensor, sums: torch.Tensor, part: slice) -> None:
        """Copies, on the current stream, what lies in the arena from `offset` on into blocks ids[1] (int32 [2, n], ids[0] counts from 0),
        its sums into `sums`, int64 [n], zeros before."""
        start, count, size = self._arena.data_ptr() + offset, ids.shape[1], part.stop - part.start
        if size == self.block_bytes:
            pull_blocks(start, self._pool.data_ptr(), ids, sums, block_bytes=size, first_byte=0, num_bytes=size, shape=self.shape)
            return
        # A word's place is that in its block, wherever the part lies.
        sum_blocks(start - part.start, ids[0], sums, block_bytes=size, first_byte=part.start, num_bytes=size, shape=self.shape)
        rows = self._arena[offset : offset + count * size].view(count, size)
        self._pool[:, part].index_copy_(0, ids[1].long(), rows)

    def written(self, block_ids: Sequence[int]) -> None:
        """To be called once their bytes are others, right ones or not."""
        if self._sums is not None:
            self._sums.overwritten(block_ids)

    def check_probe(self, offset: int, num_bytes: int) -> None:
        """Raises DataLoss unless the arena holds a probe's pattern from `offset` on."""
        if not np.array_equal(self._arena[offset : offset + num_bytes].cpu().numpy(), probe_pattern(num_bytes)):
            raise DataLoss("what a probe read over nixl is not what the peer holds; use another --kv-transfer")

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launches on the calling thread's stream."""
        with launching(self._thread.stream):
            yield


class Landing:
    """The copy of what a read brought, dense, into the arena from `offset` on, into a part of each of these blocks. Used in the agent's
    thread only.

    One kernel copies whole blocks and sums what it copies. Parts of blocks take two: rows of the arena are dense, those of the pool are
    not.
    """

    def __init__(self, memory: NixlMemory, offset: int, block_ids: Sequence[int], part: slice) -> None:
        self._memory = memory
        self._offset = offset
        self._block_ids = block_ids
        self._part = part
        # From the last byte's arrival to the end of the copy.
        self.seconds = 0.0

    @property
    def sums(self) -> Sums:
        """sum64 of what was copied into each block, uint64 [n]. Once it is done."""
        return self._found.numpy().view(np.uint64)

    def prepare(self) -> None:
        """To be called once the read is posted."""
        on_gpu = self._memory.device.type == "cuda"
        self._found = torch.empty(len(self._block_ids), dtype=torch.int64, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        ids = np.stack([np.arange(len(self._block_ids), dtype=np.int32), np.asarray(self._block_ids, np.int32)])
        with self._memory.on_stream():
            # int32 [2, n]: rows of the arena, blocks of the pool
            self._ids = torch.from_numpy(ids).to(self._memory.device)
            self._on_device = torch.zeros(len(self._block_ids), dtype=torch.int64, device=self._memory.device)

    def begin(self) -> None:
        """To be called once all bytes are here."""
        self.seconds = -time.monotonic()
        with self._memory.on_stream():
            self._memory.copy_in(self._offset, self._ids, self._on_device, self._part)
            self._found.copy_(self._on_device, non_blocking=True)
            if self._event is not None:
                self._event.record()

    def done(self) -> bool:
        """Returns whether what was begun has ended; does not block."""
        if self._event is not None and not self._event.query():
            return False
        self._memory.written(self._block_ids)
        self.seconds += time.monotonic()
        return True


def _region(memory: torch.Tensor) -> Region:
    return Region(memory.data_ptr(), memory.numel(), "VRAM" if memory.is_cuda else "DRAM", memory.device.index or 0)
