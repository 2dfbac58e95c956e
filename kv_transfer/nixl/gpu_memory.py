"""The nixl transport's memory where the pool is on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from kv_transfer.gpu_pool import gpu_pool_of
from kv_transfer.nixl.memory import Region, Sums, check_pattern
from kv_transfer.probing import PROBE_BYTES, probe_pattern
from kv_transfer.sum64 import WORD_BYTES
from twostep.engine.batch import Runner
from twostep.errors import SetupError
from twostep.model.kernels.triton_pull import PullShape, add_slot_sums, pull_blocks, sum_blocks
from twostep.model.step.kv_sums import KvSums

# Room for reads on their way, at most this share of the GPU's memory.
_ARENA_BYTES = 512 << 20
_ARENA_SHARE = 1 / 64
# Memory of one GPU: more programs than a pull over a link takes.
SHAPE = PullShape(num_programs=128)


class GpuMemory:
    """A pool that is a tensor, uint8 [num_blocks, block_bytes] on a GPU, dense. See NixlMemory for the contract.

    Kernels run on a stream of the calling thread's own: they wait for no step, and no step waits for them.
    """

    def __init__(self, pool: torch.Tensor, *, arena_bytes: int, probe_bytes: int, sums: KvSums | None = None) -> None:
        """`sums`: the checksums that the pool's owner keeps while it writes; whoever writes blocks in another way refreshes them. Raises
        SetupError if there is no memory for the arena."""
        assert pool.dim() == 2
        assert pool.dtype == torch.uint8
        assert pool.is_contiguous()
        assert pool.shape[1] % WORD_BYTES == 0
        self._pool = pool
        self.num_blocks, self.block_bytes = pool.shape
        self.device = pool.device
        try:
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=pool.device)
            self._pattern = torch.from_numpy(probe_pattern(probe_bytes)).to(pool.device)
        except torch.OutOfMemoryError as error:
            raise SetupError(
                f"no {(arena_bytes + probe_bytes) >> 20} MiB on {pool.device} for the arena that nixl reads land in; "
                "lower --gpu-memory-utilization, or leave nixl out of --kv-transfer"
            ) from error
        device = pool.device.index or 0
        self.pool, self.arena, self.probe = (Region(x.data_ptr(), x.numel(), "VRAM", device) for x in (pool, self._arena, self._pattern))
        self._sums = sums
        self._local = threading.local()
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)

    @classmethod
    def of_runner(cls, runner: Runner) -> GpuMemory:
        """Raises SetupError."""
        cache = gpu_pool_of(runner, "nixl")
        pool = cache.tensor.view(cache.shape.num_blocks, -1).view(torch.uint8)
        total = torch.cuda.get_device_properties(pool.device).total_memory
        arena_bytes = max(min(_ARENA_BYTES, int(total * _ARENA_SHARE)), 2 * cache.shape.block_bytes)
        return cls(pool, arena_bytes=arena_bytes, probe_bytes=PROBE_BYTES, sums=cache.sums)

    def enter_thread(self) -> None:
        if self._pool.is_cuda:
            torch.cuda.set_device(self._pool.device)
            self._local.stream = torch.cuda.Stream(self._pool.device)
            self._local.stream.synchronize()  # makes the device's context current

    def block_sums(self, block_ids: Sequence[int], part: slice) -> Sums:
        size = part.stop - part.start
        with self.on_stream():
            ids = torch.from_numpy(np.asarray(block_ids, np.int32)).to(self.device)
            sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self.device)
            if self._sums is None:
                address = self._pool.data_ptr()
                sum_blocks(address, ids, sums, block_bytes=self.block_bytes, first_byte=part.start, num_bytes=size, shape=SHAPE)
            else:
                layer_bytes = self._sums.layer_words * WORD_BYTES
                add_slot_sums(self._sums.tensor, ids, sums, first_layer=part.start // layer_bytes, num_layers=size // layer_bytes)
            return sums.cpu().numpy().view(np.uint64)

    def landing(self, offset: int, block_ids: Sequence[int], part: slice) -> GpuLanding:
        return GpuLanding(self, offset, block_ids, part)

    def copy_in(self, offset: int, ids: torch.Tensor, sums: torch.Tensor, part: slice) -> None:
        """Copies, on the current stream, what lies in the arena from `offset` on into blocks ids[1] (int32 [2, n], ids[0] counts from 0),
        its sums into `sums`, int64 [n], zeros before."""
        start, count, size = self._arena.data_ptr() + offset, ids.shape[1], part.stop - part.start
        if size == self.block_bytes:
            pull_blocks(start, self._pool.data_ptr(), ids, sums, block_bytes=size, first_byte=0, num_bytes=size, shape=SHAPE)
            return
        # A word's place is that in its block, wherever the part lies.
        sum_blocks(start - part.start, ids[0], sums, block_bytes=size, first_byte=part.start, num_bytes=size, shape=SHAPE)
        rows = self._arena[offset : offset + count * size].view(count, size)
        self._pool[:, part].index_copy_(0, ids[1].long(), rows)

    def written(self, block_ids: Sequence[int]) -> None:
        """To be called once their bytes are others, right ones or not."""
        if self._sums is not None:
            self._sums.refresh(block_ids)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Runs on the calling thread's. (Where there is no GPU, Triton's interpreter runs the kernels.)"""
        with torch.cuda.stream(self._local.stream) if self._pool.is_cuda else nullcontext():
            yield

    def check_probe(self, offset: int, num_bytes: int) -> None:
        check_pattern(self._arena[offset : offset + num_bytes].cpu().numpy())


class GpuLanding:
    """One kernel copies whole blocks and sums what it copies. Parts of blocks take two: rows of the arena are dense, those of the pool
    are not."""

    def __init__(self, memory: GpuMemory, offset: int, block_ids: Sequence[int], part: slice) -> None:
        self._memory = memory
        self._offset = offset
        self._block_ids = block_ids
        self._part = part

    @property
    def sums(self) -> Sums:
        return self._found.numpy().view(np.uint64)

    def prepare(self) -> None:
        pin = self._memory.device.type == "cuda"
        self._found = torch.empty(len(self._block_ids), dtype=torch.int64, pin_memory=pin)
        self._event = torch.cuda.Event() if pin else None
        ids = np.stack([np.arange(len(self._block_ids), dtype=np.int32), np.asarray(self._block_ids, np.int32)])
        with self._memory.on_stream():
            # int32 [2, n]: rows of the arena, blocks of the pool
            self._ids = torch.from_numpy(ids).to(self._memory.device)
            self._on_device = torch.zeros(len(self._block_ids), dtype=torch.int64, device=self._memory.device)

    def begin(self) -> None:
        with self._memory.on_stream():
            self._memory.copy_in(self._offset, self._ids, self._on_device, self._part)
            self._found.copy_(self._on_device, non_blocking=True)
            if self._event is not None:
                self._event.record()

    def done(self) -> bool:
        if self._event is not None and not self._event.query():
            return False
        self._memory.written(self._block_ids)
        return True
