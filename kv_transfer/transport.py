"""The contract every KV transport keeps.

A transport copies chunks (a range of a sequence's blocks, all layers) from a prefill worker's pool to a decode worker's.
Bytes only: it knows nothing of sequences, tokens or tickets' meaning. Who frees, what blocks, what may be retried:

  publish   returns once the source blocks may be reused: the bytes were copied out, or (one-sided transports) the source
            keeps the blocks until `drop`. Awaits while the byte budget is full, up to `deadline`, then ResourceExhausted.
            Not retried on the same lease: after any error the lease is aborted and dropped.
  fetch     pulls one published chunk, verifies its checksum and writes it into the target blocks. Until it returns, the target
            blocks hold garbage. DataLoss (checksum) may be retried once; Unavailable (source dead, Ray lost) must not be:
            prefill again. Cancelling it leaves nothing behind but garbage in the target blocks; whoever cancels waits for the
            coroutine to end before it frees them.
  drop      frees everything published under the lease. Idempotent, never raises for an unknown lease, never blocks on a peer.
            A transport also drops by itself `ttl_s` after a lease's last publish or fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class BlockStore(Protocol):
    """What a transport needs of a pool. Callable from any thread; see twostep.engine.batch.Runner."""

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None: ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """One published chunk: blocks [first_block, first_block + num_blocks) of a sequence, in its own order, all layers."""

    index: int
    first_block: int
    num_blocks: int
    num_bytes: int
    checksum: int  # xxh3_64 of the bytes, block after block


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStats:
    """What is published and not dropped yet. All zero when nothing is in flight: tests and liveness look at it."""

    num_leases: int
    num_objects: int
    stored_bytes: int


class KvTransport(Protocol):
    """One side's end of a transport; a worker has one for each kind it can use."""

    @property
    def name(self) -> str:
        """ "local", "ray", "cuda_ipc" or "nixl"."""
        ...

    @property
    def endpoint(self) -> str:
        """Where a peer's fetch finds this side; empty while not ready."""
        ...

    @property
    def ready(self) -> bool:
        """False: publish and fetch would raise Unavailable now. It comes back by itself."""
        ...

    @property
    def max_lease_bytes(self) -> int:
        """Bytes that one lease can have published at once at most; 0 while unknown."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Drops everything published and stops helper processes."""
        ...

    async def publish(
        self, lease_id: str, index: int, first_block: int, block_ids: Sequence[int], *, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        """`deadline` is in time.monotonic() seconds."""
        ...

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> None: ...

    async def drop(self, lease_id: str) -> None: ...

    async def stats(self) -> TransportStats: ...
