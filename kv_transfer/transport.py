"""The contract every KV transport keeps.

A transport copies chunks (a range of a sequence's blocks, all layers or a range of them) from a prefill worker's pool to a decode
worker's. Bytes only: it knows nothing of sequences, tokens or tickets' meaning. Who frees, what blocks, what may be retried:

  publish   `copies_out`: returns once the source blocks may be reused. Else (one-sided transports) the reader reads the pool itself:
            the source keeps the blocks until the lease ends, and the reader commits only what the source, asked after the read, still
            held under the lease. Awaits while the byte budget is full, up to `deadline`, then ResourceExhausted.
            Not retried on the same lease: after any error the lease is aborted and dropped.
  fetch     pulls one published chunk, verifies its checksum and writes it into the target blocks. Until it returns, the target
            blocks hold garbage. DataLoss (checksum) may be retried once; Unavailable (source dead, Ray lost) must not be:
            prefill again. Cancelling it leaves nothing behind but garbage in the target blocks; the caller that cancels waits for the
            coroutine to end before it frees them.
  probe     copies some of the peer's memory as `fetch` would and says at what rate. A transport is offered for a pair only after that.
  drop      frees everything published under the lease. Idempotent, never raises for an unknown lease, never blocks on a peer.
            A transport also drops by itself `ttl_s` after a lease's last publish or fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import LayerRange


class BlockStore(Protocol):
    """The pool, as far as a transport needs it. Callable from any thread; see twostep.engine.batch.Runner."""

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None: ...

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """One published chunk: blocks [first_block, first_block + num_blocks) of a sequence, in its own order, of layers
    [first_layer, first_layer + num_layers); num_layers 0: all of them."""

    index: int
    first_block: int
    num_blocks: int
    num_bytes: int
    checksum: int  # by the algorithm that the transport's `checksum_name` names, of the bytes, block after block
    first_layer: int = 0
    num_layers: int = 0
    # Of one-sided transports: the blocks' ids in the source's pool.
    source_blocks: tuple[int, ...] = ()
    # The source blocks' generations when they were published: one more each time the pool gives a block out.
    generations: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        index: int,
        first_block: int,
        block_ids: Sequence[int],
        layers: LayerRange | None,
        *,
        num_bytes: int,
        checksum: int,
        source_blocks: tuple[int, ...] = (),
    ) -> ChunkInfo:
        """Describes what was published of these blocks."""
        return cls(
            index=index,
            first_block=first_block,
            num_blocks=len(block_ids),
            num_bytes=num_bytes,
            checksum=checksum,
            first_layer=layers.first if layers else 0,
            num_layers=layers.num_layers if layers else 0,
            source_blocks=source_blocks,
        )

    @property
    def layers(self) -> LayerRange | None:
        """None: all of them."""
        return LayerRange(self.first_layer, self.num_layers) if self.num_layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTiming:
    """Says what a probe copy moved and how long it took."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStats:
    """Counts what is published and not dropped yet. All zero when nothing is in flight: tests and liveness look at it."""

    num_leases: int
    num_objects: int
    stored_bytes: int


Bytes = npt.NDArray[np.uint8]

# Stands where a lease's id does; real ones contain slashes.
PROBE_LEASE = "probe"
PROBE_BYTES = 16 << 20


def probe_pattern(num_bytes: int) -> Bytes:
    """Returns uint8 [num_bytes] that both sides can work out, so that a wrong copy is no proof of a working path."""
    # A prime, so that a copy shifted by any power of two differs.
    return np.resize(np.arange(251, dtype=np.uint8), num_bytes)


class TransportEnd(Protocol):
    """One side's end of a transport, as an edge knows it, in whichever process it is; a worker has one for each kind it can use."""

    @property
    def name(self) -> str: ...

    @property
    def copies_out(self) -> bool:
        """The source's blocks may be reused once a chunk is published: its bytes pass host memory on both sides (CopyingTransport)."""
        ...

    @property
    def checksum_name(self) -> str:
        """Names the algorithm of ChunkInfo.checksum: "xxh3_64" (kv_transfer.checksums) or "sum64" (computed on GPUs beside a copy)."""
        ...

    @property
    def endpoint(self) -> str:
        """The address at which a peer's fetch finds this side; empty while not ready."""
        ...

    @property
    def ready(self) -> bool:
        """False: publish and fetch would raise Unavailable now. It comes back by itself."""
        ...

    @property
    def why_not_ready(self) -> str:
        """For operators; of no meaning while it is ready."""
        ...

    @property
    def max_lease_bytes(self) -> int:
        """Bytes that one lease can have published at once at most; 0 while unknown."""
        ...

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        """Measures the path from a peer, at the reader's side. Raises Unavailable with the reason where this transport does not work with
        that peer."""
        ...

    async def drop(self, lease_id: str) -> None: ...

    async def stats(self) -> TransportStats: ...


class KvTransport(TransportEnd, Protocol):
    """The end in the process that has the pool."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Drops everything published and stops helper processes."""
        ...

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
        """Publishes all layers of the blocks, or some. `deadline` is in time.monotonic() seconds."""
        ...

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> float:
        """Returns how many seconds of it verified and wrote the blocks, where that comes after the copy; else 0."""
        ...
