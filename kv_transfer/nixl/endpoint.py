"""Says where a peer's pool lies, as text for a manifest; and how block ids become few large descriptors. Pure.

    nixl:1:{agent}:{memory}:{device}:{pool address}:{num_blocks}:{block_bytes}:{probe address}:{probe bytes}:{metadata, base64url}

The metadata is the NIXL library's own (addresses and memory keys of its backends), opaque to us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kv_transfer.endpoint_text import endpoint_text, parse_endpoint
from twostep.errors import Unavailable

_VERSION = "1"
_MAX_LENGTH = 256 << 10
_TYPES = (str, str, int, int, int, int, int, int, bytes)

# uint64 [N, 3]: address, bytes, device of each region
Descriptors = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class NixlEndpoint:
    """A source: its agent's name and metadata, its pool and the region that probes read. `memory` is "DRAM" or "VRAM". Fields are in the
    order of the text."""

    agent: str
    memory: str
    device: int
    pool_address: int
    num_blocks: int
    block_bytes: int
    probe_address: int
    probe_bytes: int
    metadata: bytes

    def __str__(self) -> str:
        return endpoint_text("nixl", _VERSION, astuple(self))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> NixlEndpoint:
        """Raises Unavailable for text that no source of ours wrote."""
        endpoint = cls(*parse_endpoint(text, "nixl", _VERSION, _TYPES, max_length=_MAX_LENGTH))
        if endpoint.memory not in ("DRAM", "VRAM") or not endpoint.agent or not endpoint.metadata:
            raise Unavailable(f"the nixl endpoint of {endpoint.agent[:40]!r} is damaged; prefill again")
        return endpoint

    def of_blocks(self, block_ids: Sequence[int], part: slice) -> Descriptors:
        """Returns one descriptor for each run of consecutive blocks; for a part of each block's bytes, one for each block. The blocks are
        the pool's."""
        ids = np.asarray(block_ids, np.int64)
        if part != slice(0, self.block_bytes):
            starts = self.pool_address + ids * self.block_bytes + part.start
            return _descriptors(starts, np.full_like(starts, part.stop - part.start), self.device)
        first, counts = merge_runs(ids)
        return _descriptors(self.pool_address + first * self.block_bytes, counts * self.block_bytes, self.device)

    @property
    def of_probe(self) -> Descriptors:
        return _descriptors(np.array([self.probe_address]), np.array([self.probe_bytes]), self.device)


def merge_runs(ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns (first id, count), int64 [R] each, of the R runs of consecutive ids, in order. ids int64 [N]"""
    if not len(ids):
        return ids, ids
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return ids[starts], np.diff(starts, append=len(ids))


def laid_out(address: int, sizes: npt.NDArray[np.uint64], device: int) -> Descriptors:
    """Returns regions of these sizes, one after the other from `address`: the near side of a read. sizes [R]"""
    ends = np.cumsum(sizes, dtype=np.int64)
    return _descriptors(address + ends - sizes.astype(np.int64), sizes.astype(np.int64), device)


def _descriptors(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], device: int) -> Descriptors:
    return np.stack([addresses, sizes, np.full_like(addresses, device)], axis=1).astype(np.uint64)
