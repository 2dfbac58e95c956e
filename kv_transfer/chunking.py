"""How a sequence's blocks are cut into chunks.

    blocks   0 1 2 3 4 5 6 7 8 9         `final_blocks` grows while a chunked prefill runs
    chunks   [ 0 . . ][ 1 . . ][ 2 ]     each as large as the target allows, the last one what is left

A chunk is one object of a transport. Small ones cost about 1 ms each, large ones overlap badly, so 4-16 MB is right. Chunks
are equal in size to within one block: the last one is never a tiny rest.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Blocks [first_block, first_block + num_blocks) of a sequence, in its own order."""

    index: int
    first_block: int
    num_blocks: int


class ChunkPlan:
    """Cuts blocks [first_block, first_block + num_blocks) of one sequence, incrementally, as they become final.

    The cut depends on the arguments alone, not on when blocks become final. A block larger than the target is a chunk of its own.
    """

    def __init__(self, *, first_block: int, num_blocks: int, block_bytes: int, target_bytes: int = TARGET_CHUNK_BYTES) -> None:
        if first_block < 0 or num_blocks < 0 or block_bytes <= 0 or target_bytes <= 0:
            raise ValueError("first_block and num_blocks must not be negative; block_bytes and target_bytes must be positive")
        largest = max(1, target_bytes // block_bytes)
        count = -(-num_blocks // largest)
        base, extra = divmod(num_blocks, count) if count else (0, 0)
        ranges: list[ChunkRange] = []
        start = first_block
        for index in range(count):
            size = base + (1 if index < extra else 0)
            ranges.append(ChunkRange(index=index, first_block=start, num_blocks=size))
            start += size
        self.ranges = tuple(ranges)
        self._next = 0

    @property
    def num_chunks(self) -> int:
        return len(self.ranges)

    @property
    def done(self) -> bool:
        """Every chunk was handed out by `take`."""
        return self._next == len(self.ranges)

    def take(self, final_blocks: int) -> list[ChunkRange]:
        """Chunks not handed out before, all of whose blocks lie below `final_blocks` (counted from the sequence's start)."""
        start = self._next
        while self._next < len(self.ranges) and self._end(self.ranges[self._next]) <= final_blocks:
            self._next += 1
        return list(self.ranges[start : self._next])

    @staticmethod
    def _end(chunk: ChunkRange) -> int:
        return chunk.first_block + chunk.num_blocks
