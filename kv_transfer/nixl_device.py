"""The nixl transport's memory where the pool is on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_transfer.nixl_agent import Region
from kv_transfer.nixl_memory import probe_differs, verify
from kv_transfer.probing import PROBE_BYTES, probe_pattern
from kv_transfer.sum64 import WORD_BYTES, chunk_sum
from twostep.engine.batch import Runner
from twostep.engine.model_runner import ModelRunner
from twostep.errors import SetupError
from twostep.kernels.triton_pull import PullShape, add_slot_sums, pull_blocks, sum_blocks

if TYPE_CHECKING:
    from twostep.kernels.kv_sums import KvSums

# Room for reads on their way: half of it for one peer, so four chunks of up to 32 MiB from each of two at once.
ARENA_BYTES = 256 << 20
# Memory of one GPU: more programs than a pull over a link takes.
SHAPE = PullShape(num_programs=128)


class DeviceMemory:
    """Of a pool that is a tensor, uint8 [num_blocks, block_bytes] on a GPU, dense. See NixlMemory for the contract.

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
        try:
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=pool.device)
            self._pattern = torch.from_numpy(probe_pattern(probe_bytes)).to(pool.device)
        except torch.OutOfMemoryError as error:
            raise SetupError(
                f"no {(arena_bytes + probe_bytes) >> 20} MiB on {pool.device} for the arena that nixl reads land in; "
                "lower --gpu-memory-utilization, or leave nixl out of --kv-transfer"
            ) from error
        self._sums = sums
        self._local = threading.local()
        if pool.is_cuda:
            torch.cuda.synchronize(pool.device)

    @classmethod
    def of_runner(cls, runner: Runner) -> DeviceMemory:
        """Raises SetupError."""
        if not isinstance(runner, ModelRunner) or not runner.kv_cache.tensor.is_cuda:
            raise SetupError(
                "nixl reads one KV pool in one GPU's memory, and this worker has none (a CPU, a fake runner, or several ranks with a part "
                "each); leave nixl out of --kv-transfer"
            )
        cache = runner.kv_cache
        if cache.shape.layer_bytes % WORD_BYTES:
            raise SetupError(
                f"nixl's checksums take whole 64-bit words, and a layer of a KV block has {cache.shape.layer_bytes} bytes; "
                "use another --block-size, or leave nixl out of --kv-transfer"
            )
        pool = cache.tensor.view(cache.shape.num_blocks, -1).view(torch.uint8)
        return cls(pool, arena_bytes=ARENA_BYTES, probe_bytes=PROBE_BYTES, sums=cache.sums)

    @property
    def checksum_name(self) -> str:
        return "sum64"

    @property
    def num_blocks(self) -> int:
        return self._pool.shape[0]

    @property
    def block_bytes(self) -> int:
        return self._pool.shape[1]

    @property
    def pool(self) -> Region:
        return _region(self._pool)

    @property
    def arena(self) -> Region:
        return _region(self._arena)

    @property
    def probe(self) -> Region:
        return _region(self._pattern)

    def enter_thread(self) -> None:
        if self._pool.is_cuda:
            torch.cuda.set_device(self._pool.device)
            self._local.stream = torch.cuda.Stream(self._pool.device)
            self._local.stream.synchronize()  # makes the device's context current

    def checksum_of_blocks(self, block_ids: Sequence[int], part: slice | None) -> int:
        columns = part or slice(0, self.block_bytes)
        num_bytes = columns.stop - columns.start
        with self._on_stream():
            ids = self._ids(block_ids)
            sums = torch.zeros(len(block_ids), dtype=torch.int64, device=self._pool.device)
            if self._sums is None:
                sum_blocks(
                    self._pool.data_ptr(),
                    ids,
                    sums,
                    block_bytes=self.block_bytes,
                    first_byte=columns.start,
                    num_bytes=num_bytes,
                    shape=SHAPE,
                )
            else:
                of_layer = self._sums.layer_words * WORD_BYTES
                layers = (columns.start // of_layer, num_bytes // of_layer)
                add_slot_sums(self._sums.tensor, ids, sums, first_layer=layers[0], num_layers=layers[1])
            return chunk_sum(sums.cpu().numpy().view(np.uint64))

    def land(self, offset: int, block_ids: Sequence[int], part: slice | None, checksum: int) -> None:
        try:
            self._land(offset, block_ids, part, checksum)
        finally:
            if self._sums is not None:
                self._sums.refresh(block_ids)

    def _land(self, offset: int, block_ids: Sequence[int], part: slice | None, checksum: int) -> None:
        """Whole blocks in one kernel, which sums what it copies; a part of each is summed first."""
        count = len(block_ids)
        columns = part or slice(0, self.block_bytes)
        num_bytes = columns.stop - columns.start
        start = self._arena.data_ptr() + offset
        with self._on_stream():
            ids = self._ids(range(count), block_ids)
            sums = torch.zeros(count, dtype=torch.int64, device=self._pool.device)
            if part is None:
                pull_blocks(
                    start, self._pool.data_ptr(), ids, sums, block_bytes=self.block_bytes, first_byte=0, num_bytes=num_bytes, shape=SHAPE
                )
            else:
                # Rows of the arena are dense, those of the pool are not. A word's place is that in its block all the same.
                sum_blocks(
                    start - columns.start, ids[0], sums, block_bytes=num_bytes, first_byte=columns.start, num_bytes=num_bytes, shape=SHAPE
                )
            verify(chunk_sum(sums.cpu().numpy().view(np.uint64)), checksum)
            if part is not None:
                rows = self._arena[offset : offset + count * num_bytes].view(count, num_bytes)
                self._pool[:, columns].index_copy_(0, ids[1].long(), rows)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """What is launched within has ended after it. (Where there is no GPU, Triton's interpreter runs the kernels.)"""
        if not self._pool.is_cuda:
            yield
            return
        with torch.cuda.stream(self._local.stream):
            yield
        self._local.stream.synchronize()

    def _ids(self, *rows: Sequence[int]) -> torch.Tensor:
        """int32 [n] of one row, [R, n] of several."""
        host = np.array(rows if len(rows) > 1 else rows[0], np.int32)
        return torch.from_numpy(host).to(self._pool.device)

    def check_probe(self, offset: int, num_bytes: int) -> None:
        found = self._arena[offset : offset + num_bytes].cpu().numpy()
        if not np.array_equal(found, probe_pattern(num_bytes)):
            raise probe_differs()


def _region(memory: torch.Tensor) -> Region:
    return Region(memory.data_ptr(), memory.numel(), "VRAM", memory.device.index or 0)
