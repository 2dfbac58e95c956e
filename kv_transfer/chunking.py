"""How a sequence's KV is cut into chunks: rectangles of blocks and layers.

    whole blocks                                       layer groups, of a source whose steps tell how far they are

    blocks   0 1 2 3 4 5 6 7 8 9                       blocks     0 1 2 3 4 5 6 7 8 9
    chunks   [ 0 . . ][ 1 . . ][ 2 ]                   layers 0-3 [   0   ][   4   ]
                                                              4-7 [   1   ][   5   ]      ready once its blocks' tokens are computed
    ready as blocks become final, step after step            8-11 [   2   ][   6   ]      up to its last layer, while later layers
                                                            12-15 [   3   ][   7   ]      of the same step still run

A chunk is one object of a transport. Small ones cost about 1 ms each, large ones overlap badly, so 4-16 MB is right. Chunks
are equal in size to within one block or layer: there is never a tiny rest. A long prompt has thin groups, so that little is left to do
when its last layer is done; a short one has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostep.engine.batch import LayerRange

TARGET_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Layers `layers` (None: all) of blocks [first_block, first_block + num_blocks) of a sequence, in its own order."""

    index: int
    first_block: int
    num_blocks: int
    layers: LayerRange | None = None

    @property
    def stop_block(self) -> int:
        return self.first_block + self.num_blocks


class ChunkPlan:
    """Cuts blocks [first_block, first_block + num_blocks) of one sequence, and hands chunks out as they become final.

    The cut depends on the arguments alone, not on when KV becomes final. One layer of a block larger than the target is a chunk of its own.
    """

    def __init__(
        self, *, first_block: int, num_blocks: int, block_bytes: int, num_layers: int = 1, target_bytes: int = TARGET_CHUNK_BYTES
    ) -> None:
        """`num_layers`: of the model, where chunks may be of some of them; else 1."""
        if first_block < 0 or num_blocks < 0 or block_bytes <= 0 or num_layers < 1 or target_bytes <= 0:
            raise ValueError("first_block and num_blocks must not be negative; block_bytes, num_layers and target_bytes must be positive")
        groups = _layer_groups(num_blocks * block_bytes // num_layers, num_layers, target_bytes) if num_blocks else [None]
        tallest = max(block_bytes if group is None else block_bytes // num_layers * group.num_layers for group in groups)
        self.ranges: tuple[ChunkRange, ...] = tuple(
            ChunkRange(index=column * len(groups) + row, first_block=first_block + start, num_blocks=count, layers=group)
            for column, (start, count) in enumerate(_parts(num_blocks, max(1, target_bytes // tallest)))
            for row, group in enumerate(groups)
        )
        self._left = list(self.ranges)

    @property
    def num_chunks(self) -> int:
        return len(self.ranges)

    @property
    def done(self) -> bool:
        """Every chunk was handed out by `take`."""
        return not self._left

    def take(self, final_blocks: int, *, step_blocks: int = 0, step_layers: int = 0) -> list[ChunkRange]:
        """Chunks not handed out before that are final. Blocks are counted from the sequence's start: those below `final_blocks` are
        final, and of those below `step_blocks` the first `step_layers` layers."""
        taken: list[ChunkRange] = []
        left: list[ChunkRange] = []
        for chunk in self._left:
            early = chunk.layers is not None and chunk.layers.stop <= step_layers and chunk.stop_block <= step_blocks
            (taken if early or chunk.stop_block <= final_blocks else left).append(chunk)
        self._left = left
        return taken


def _layer_groups(layer_bytes: int, num_layers: int, target_bytes: int) -> list[LayerRange | None]:
    """`layer_bytes`: one layer of all blocks. [None] where at least two groups of the target's size cannot be made."""
    most = -(-target_bytes // layer_bytes)
    if 2 * most > num_layers:
        return [None]
    return [LayerRange(start, count) for start, count in _parts(num_layers, most)]


def _parts(total: int, most: int) -> list[tuple[int, int]]:
    """[0, total) in the fewest parts of at most `most`, as (start, count), equal to within one."""
    num_parts = -(-total // most)
    base, extra = divmod(total, num_parts) if num_parts else (0, 0)
    return [(i * base + min(i, extra), base + (i < extra)) for i in range(num_parts)]
