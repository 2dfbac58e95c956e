"""What the nixl transport does with memory: the regions it registers, checksums of blocks, the copy from the arena into the pool. Here of
pools on the host, in kv_transfer/nixl_device.py of pools on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import checksum
from kv_transfer.nixl_agent import Region
from kv_transfer.probing import probe_pattern
from twostep.errors import DataLoss


class NixlMemory(Protocol):
    """A pool, an arena that reads land in, and a region of known contents for probes. Methods block; callable from any thread for
    blocks that no step writes and parts of the arena that no read writes."""

    @property
    def checksum_name(self) -> str: ...

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

    def checksum_of_blocks(self, block_ids: Sequence[int], part: slice | None) -> int:
        """Of whole blocks, or of a part of the bytes of each."""
        ...

    def land(self, offset: int, block_ids: Sequence[int], part: slice | None, checksum: int) -> None:
        """Copies what lies in the arena from `offset` on, dense, into the blocks, or a part of each. Raises DataLoss if it does not have
        the checksum; the blocks may hold garbage then."""
        ...

    def check_probe(self, offset: int, num_bytes: int) -> None:
        """Raises DataLoss unless the arena holds a probe's pattern from `offset` on."""
        ...


class HostMemory:
    """Of a pool that is a numpy array, uint8 [num_blocks, block_bytes], dense."""

    def __init__(self, pool: npt.NDArray[np.uint8], *, arena_bytes: int, probe_bytes: int) -> None:
        assert pool.ndim == 2
        assert pool.flags.c_contiguous
        self._pool = pool
        self._arena = np.zeros(arena_bytes, np.uint8)
        self._pattern = probe_pattern(probe_bytes)

    @property
    def checksum_name(self) -> str:
        return "xxh3_64"

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

    def checksum_of_blocks(self, block_ids: Sequence[int], part: slice | None) -> int:
        return _checksum(np.ascontiguousarray(self._pool[list(block_ids), part or slice(None)]))

    def land(self, offset: int, block_ids: Sequence[int], part: slice | None, checksum: int) -> None:
        columns = part or slice(0, self.block_bytes)
        data = self._arena[offset : offset + len(block_ids) * (columns.stop - columns.start)]
        verify(_checksum(data), checksum)
        self._pool[list(block_ids), columns] = data.reshape(len(block_ids), -1)

    def check_probe(self, offset: int, num_bytes: int) -> None:
        if not np.array_equal(self._arena[offset : offset + num_bytes], probe_pattern(num_bytes)):
            raise probe_differs()


def verify(found: int, expected: int) -> None:
    """Raises DataLoss."""
    if found != expected:
        raise DataLoss("a chunk does not match its checksum; fetch it again once, then prefill again")


def probe_differs() -> DataLoss:
    return DataLoss("what a probe read over nixl is not what the peer holds; use another --kv-transfer")


_checksum = checksum


def _region(memory: npt.NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes, "DRAM", 0)
