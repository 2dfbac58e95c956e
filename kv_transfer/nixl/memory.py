"""What the nixl transport does with memory: the regions it registers, checksums of blocks, the copy from the arena into the pool. Here of
pools on the host, in kv_transfer/nixl/device.py of pools on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.nixl.read import Landing, Region
from kv_transfer.probing import probe_pattern
from kv_transfer.sum64 import WORD_BYTES, block_sums
from twostep.errors import DataLoss

Sums = npt.NDArray[np.uint64]


class BlockLanding(Landing, Protocol):
    @property
    def sums(self) -> Sums:
        """sum64 of what was copied into each block, uint64 [n]. Once it is done."""
        ...


class NixlMemory(Protocol):
    """A pool, an arena that reads land in, and a region of known contents for probes. Methods are callable from any thread for blocks
    that no step writes and parts of the arena that no read writes."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def pool(self) -> Region: ...

    @property
    def arena(self) -> Region: ...

    @property
    def probe(self) -> Region: ...

    def enter_thread(self) -> None:
        """Called first in a thread that uses the memory."""
        ...

    def block_sums(self, block_ids: Sequence[int], part: slice | None) -> Sums:
        """sum64 of each of the blocks, or of a part of the bytes of each: uint64 [n]. Blocks."""
        ...

    def landing(self, offset: int, block_ids: Sequence[int], part: slice | None) -> BlockLanding:
        """For the copy of what will lie in the arena from `offset` on, dense, into the blocks, or a part of each."""
        ...

    def check_probe(self, offset: int, num_bytes: int) -> None:
        """Raises DataLoss unless the arena holds a probe's pattern from `offset` on."""
        ...


class HostMemory:
    """Of a pool that is a numpy array, uint8 [num_blocks, block_bytes], dense."""

    def __init__(self, pool: npt.NDArray[np.uint8], *, arena_bytes: int, probe_bytes: int) -> None:
        assert pool.ndim == 2
        assert pool.flags.c_contiguous
        assert pool.shape[1] % WORD_BYTES == 0
        self._pool = pool
        self._arena = np.zeros(arena_bytes, np.uint8)
        self._pattern = probe_pattern(probe_bytes)

    @property
    def num_blocks(self) -> int:
        return int(self._pool.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self._pool.shape[1])

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
        """Host memory needs nothing."""

    def block_sums(self, block_ids: Sequence[int], part: slice | None) -> Sums:
        columns = part or slice(0, self.block_bytes)
        return block_sums(self._pool[list(block_ids), columns], columns.start)

    def landing(self, offset: int, block_ids: Sequence[int], part: slice | None) -> HostLanding:
        columns = part or slice(0, self.block_bytes)
        data = self._arena[offset : offset + len(block_ids) * (columns.stop - columns.start)].reshape(len(block_ids), -1)
        return HostLanding(data, self._pool, block_ids, columns)

    def check_probe(self, offset: int, num_bytes: int) -> None:
        if not np.array_equal(self._arena[offset : offset + num_bytes], probe_pattern(num_bytes)):
            raise probe_differs()


class HostLanding:
    """Copies at once."""

    def __init__(self, data: npt.NDArray[np.uint8], pool: npt.NDArray[np.uint8], block_ids: Sequence[int], columns: slice) -> None:
        self._data, self._pool, self._block_ids, self._columns = data, pool, list(block_ids), columns
        self.sums: Sums = np.empty(0, np.uint64)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def begin(self) -> None:
        self._pool[self._block_ids, self._columns] = self._data
        self.sums = block_sums(self._data, self._columns.start)

    def done(self) -> bool:
        return True


def probe_differs() -> DataLoss:
    return DataLoss("what a probe read over nixl is not what the peer holds; use another --kv-transfer")


def _region(memory: npt.NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes, "DRAM", 0)
