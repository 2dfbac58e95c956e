"""Where a peer's pool lies, as text for a manifest; and how block ids become few large descriptors. Pure.

    nixl:1:{agent}:{memory}:{device}:{pool address}:{num_blocks}:{block_bytes}:{probe address}:{probe bytes}:{metadata, base64url}

The metadata is the NIXL library's own (addresses and memory keys of its backends), opaque to us.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from twostep.errors import DataLoss, Unavailable

_VERSION = "1"
_MAX_LENGTH = 256 << 10
# Addresses have 64 bits.
_MAX_NUMBER = 1 << 64
MEMORIES = ("DRAM", "VRAM")

# uint64 [N, 3]: address, bytes, device of each region
Descriptors = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlEndpoint:
    """A source: its agent's name and metadata, its pool and the region that probes read. `memory` is "DRAM" or "VRAM"."""

    agent: str
    metadata: bytes
    memory: str
    device: int
    pool_address: int
    num_blocks: int
    block_bytes: int
    probe_address: int
    probe_bytes: int

    def __str__(self) -> str:
        numbers = (self.device, self.pool_address, self.num_blocks, self.block_bytes, self.probe_address, self.probe_bytes)
        text = base64.urlsafe_b64encode(self.metadata).decode()
        return ":".join(("nixl", _VERSION, self.agent, self.memory, *map(str, numbers), text))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> NixlEndpoint:
        """Raises Unavailable: whoever wrote it is no source for us."""
        parts = text.split(":")
        if len(text) > _MAX_LENGTH or len(parts) != 11 or parts[:2] != ["nixl", _VERSION] or parts[3] not in MEMORIES:
            raise Unavailable(f"{text[:40]!r} is no nixl endpoint of version {_VERSION}; run the same version on both workers")
        try:
            numbers = [int(part) for part in parts[4:10]]
            metadata = base64.b64decode(parts[10], altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise Unavailable(f"the nixl endpoint of {parts[2][:40]!r} is damaged; prefill again") from None
        if not 0 <= min(numbers) <= max(numbers) < _MAX_NUMBER or not parts[2] or not metadata:
            raise Unavailable(f"the nixl endpoint of {parts[2][:40]!r} is damaged; prefill again")
        device, pool_address, num_blocks, block_bytes, probe_address, probe_bytes = numbers
        return cls(
            agent=parts[2],
            metadata=metadata,
            memory=parts[3],
            device=device,
            pool_address=pool_address,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            probe_address=probe_address,
            probe_bytes=probe_bytes,
        )

    def check(self, block_ids: Sequence[int]) -> None:
        """Raises DataLoss for blocks that the pool does not have: no fault of the request's, and another attempt may succeed."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise DataLoss(f"the source's pool has {self.num_blocks} blocks, but {max(block_ids)} was announced; prefill again")

    def of_blocks(self, block_ids: Sequence[int], part: slice | None = None) -> Descriptors:
        """One descriptor for each run of consecutive blocks; of a part of each block's bytes, one for each block. Raises DataLoss for
        blocks that the pool does not have."""
        self.check(block_ids)
        ids = np.asarray(block_ids, np.int64)
        if part is not None:
            starts = self.pool_address + ids * self.block_bytes + part.start
            return _descriptors(starts, np.full_like(starts, part.stop - part.start), self.device)
        first, counts = merge_runs(ids)
        return _descriptors(self.pool_address + first * self.block_bytes, counts * self.block_bytes, self.device)

    @property
    def of_probe(self) -> Descriptors:
        return _descriptors(np.array([self.probe_address]), np.array([self.probe_bytes]), self.device)


def merge_runs(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first id, count) int64 [R] each, of the R runs of consecutive ids, in order. ids int64 [N]"""
    if not len(ids):
        return ids, ids
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return ids[starts], np.diff(starts, append=len(ids))


def laid_out(address: int, sizes: npt.NDArray[np.uint64], device: int) -> Descriptors:
    """Regions of these sizes, one after the other from `address`: the near side of a read. sizes [R]"""
    ends = np.cumsum(sizes, dtype=np.int64)
    return _descriptors(address + ends - sizes.astype(np.int64), sizes.astype(np.int64), device)


def _descriptors(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], device: int) -> Descriptors:
    return np.stack([addresses, sizes, np.full_like(addresses, device)], axis=1).astype(np.uint64)
