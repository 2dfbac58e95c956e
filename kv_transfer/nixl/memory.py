"""What the nixl transport does with memory: the regions it registers, checksums of blocks, the copy from the arena into the pool. Here for
pools on the host, in kv_transfer/nixl/gpu_memory.py for pools on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_transfer.probing import probe_pattern
from kv_transfer.sum64 import WORD_BYTES, block_sums
from twostep.errors import DataLoss

Sums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that stays registered for the agent's life. `memory` is "DRAM" or "VRAM"."""

    address: int
    num_bytes: int
    memory: str
    device: int


class Landing(Protocol):
    """The copy of what a read brought into the pool. Used in the agent's thread only."""

    def prepare(self) -> None:
        """To be called once the read is posted."""
        ...

    def begin(self) -> None:
        """To be called once all bytes are here."""
        ...

    def done(self) -> bool:
        """Returns whether what was begun has ended; does not block."""
        ...

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
        """To be called first in a thread that uses the memory."""
        ...

    def block_sums(self, block_ids: Sequence[int], part: slice) -> Sums:
        """Returns sum64 of a part of the bytes of each of the blocks: uint64 [n]. May block."""
        ...

    def landing(self, offset: int, block_ids: Sequence[int], part: slice) -> Landing:
        """Returns the copy of what will lie in the arena from `offset` on, dense, into a part of each of the blocks."""
        ...

    def check_probe(self, offset: int, num_bytes: int) -> None:
        """Raises DataLoss unless the arena holds a probe's pattern from `offset` on."""
        ...


class HostMemory:
    """A pool that is a numpy array, uint8 [num_blocks, block_bytes], dense."""

    def __init__(self, pool: npt.NDArray[np.uint8], *, arena_bytes: int, probe_bytes: int) -> None:
        assert pool.ndim == 2
        assert pool.flags.c_contiguous
        assert pool.shape[1] % WORD_BYTES == 0
        self.num_blocks, self.block_bytes = pool.shape
        self._pool = pool
        self._arena = np.zeros(arena_bytes, np.uint8)
        self._pattern = probe_pattern(probe_bytes)
        self.pool, self.arena, self.probe = (Region(x.ctypes.data, x.nbytes, "DRAM", 0) for x in (pool, self._arena, self._pattern))

    def enter_thread(self) -> None:
        """Host memory needs nothing."""

    def block_sums(self, block_ids: Sequence[int], part: slice) -> Sums:
        return block_sums(self._pool[list(block_ids), part], part.start)

    def landing(self, offset: int, block_ids: Sequence[int], part: slice) -> HostLanding:
        data = self._arena[offset : offset + len(block_ids) * (part.stop - part.start)].reshape(len(block_ids), -1)
        return HostLanding(data, self._pool, block_ids, part)

    def check_probe(self, offset: int, num_bytes: int) -> None:
        check_pattern(self._arena[offset : offset + num_bytes])


class HostLanding:
    """Copies at once."""

    def __init__(self, data: npt.NDArray[np.uint8], pool: npt.NDArray[np.uint8], block_ids: Sequence[int], part: slice) -> None:
        self._data, self._pool, self._block_ids, self._part = data, pool, list(block_ids), part
        self.sums: Sums = np.empty(0, np.uint64)

    def prepare(self) -> None:
        """There is nothing to prepare."""

    def begin(self) -> None:
        self._pool[self._block_ids, self._part] = self._data
        self.sums = block_sums(self._data, self._part.start)

    def done(self) -> bool:
        return True


def check_pattern(found: npt.NDArray[np.uint8]) -> None:
    """Raises DataLoss unless this is a probe's pattern."""
    if not np.array_equal(found, probe_pattern(found.size)):
        raise DataLoss("what a probe read over nixl is not what the peer holds; use another --kv-transfer")
