"""The source's book of chunks that readers take from the pool itself: nothing is copied, the lease keeps the blocks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from kv_transfer.object_book import ObjectBook
from kv_transfer.transport import ChunkInfo, TransportStats
from twostep.engine.batch import LayerRange

# The pool bounds what is published.
_NO_BUDGET = 1 << 62


class InPlaceBook:
    """Of one transport, on one event loop."""

    def __init__(self) -> None:
        self._book: ObjectBook[bool] = ObjectBook(_NO_BUDGET)

    @property
    def stats(self) -> TransportStats:
        return self._book.stats

    async def publish(
        self,
        lease_id: str,
        index: int,
        first_block: int,
        block_ids: Sequence[int],
        *,
        layers: LayerRange | None,
        num_bytes: int,
        ttl_s: float,
        digest: Callable[[], Awaitable[int]],
    ) -> ChunkInfo:
        """The chunk, with what `digest` gives as its checksum. A chunk whose digest fails or is cancelled is not there."""
        entry = self._book.reserve(lease_id, index, num_bytes, ttl_s=ttl_s, now=time.monotonic())
        assert entry is not None, "there is no budget"
        try:
            checksum = await digest()
            self._book.fill(entry, True, now=time.monotonic())
        except BaseException:
            self._book.cancel(entry)
            raise
        return ChunkInfo(
            index=index,
            first_block=first_block,
            num_blocks=len(block_ids),
            num_bytes=num_bytes,
            checksum=checksum,
            first_layer=layers.first if layers else 0,
            num_layers=layers.num_layers if layers else 0,
            source_blocks=tuple(block_ids),
        )

    def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)

    def drop_all(self) -> None:
        self._book.drop_all()

    def expire(self) -> None:
        """To be called a few times a second: what nobody asked for in time is not published any more."""
        self._book.expire(time.monotonic())
