"""Cuts a sequence's KV into chunks: rectangles of blocks and layers.

    whole blocks                             layer groups, of a source whose steps say how far they are

    blocks   0 1 2 3 4 5 6 7 8 9             blocks       0 1 2 3 4   5 6 7 8 9      a column: what one step computes at most
    chunks   [ 0 . . ][ 1 . . ][ 2 ]         layers  0-5  [   0   ]   [   5   ]
                                                    6-11  [   1   ]   [   6   ]      ready once its blocks' tokens are computed
    ready as blocks become final,                  12-14  [   2   ]   [   7   ]      up to its last layer, while later layers
    step after step                                   15  [ 3 ][ 4]   [ 8 ][ 9]      of the same step still run

A chunk is one object of a transport. Each costs about a millisecond of processors' time whatever its size, so that many small ones
cannot keep up with a step; large ones take long. So groups are large until the last, of which little is left to do when the step ends:
it is thin, and cut so that its chunks go side by side. A short prompt has no groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostep.engine.batch import LayerRange

# Chunks that the rest of the step hides may be so many times larger than the target, up to so many bytes.
_HIDDEN = 3
_MOST_HIDDEN_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Bytes, about. `group`: of the last group of layers, in all; `last`: of a chunk of it; `hidden`: of a chunk of the groups before,
    which the rest of their step hides; `whole`: of a chunk of all layers. `num_thin`: groups of the last one's size at the end;
    `least_wide`: the layers are not cut into fewer parts than these, of which the groups before the thin ones are about one each."""

    group: int
    last: int
    hidden: int
    whole: int
    num_thin: int = 2
    least_wide: int = 4

    @classmethod
    def of(cls, target_bytes: int) -> ChunkSizes:
        hidden = max(target_bytes, min(_HIDDEN * target_bytes, _MOST_HIDDEN_BYTES))
        return cls(group=target_bytes, last=target_bytes, hidden=hidden, whole=target_bytes)


COPIED_OUT = ChunkSizes.of(8 << 20)
# What is read where it lies: a chunk costs its reader a few launches and messages, its source a checksum, and a large one no more.
IN_PLACE = ChunkSizes(group=32 << 20, last=256 << 20, hidden=256 << 20, whole=256 << 20, num_thin=1, least_wide=2)


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

    The cut depends on the arguments alone, not on when KV becomes final. Chunks of one group are equal in size to within one block: there
    is never a tiny rest. One layer of a block larger than the target is a chunk of its own.
    """

    def __init__(
        self,
        *,
        first_block: int,
        num_blocks: int,
        block_bytes: int,
        num_layers: int = 1,
        step_blocks: int = 1 << 30,
        sizes: ChunkSizes = COPIED_OUT,
    ) -> None:
        """`num_layers`: of the model, where chunks may be of some of them; else 1. `step_blocks`: most blocks that a step computes."""
        if first_block < 0 or num_blocks < 0 or min(block_bytes, num_layers, step_blocks, sizes.group, sizes.last) < 1:
            raise ValueError("first_block and num_blocks must not be negative; the other arguments must be positive")
        columns = _parts(num_blocks, step_blocks) if num_layers > 1 else []
        widest = max((count for _, count in columns), default=0)
        groups = _layer_groups(widest * block_bytes // num_layers, num_layers, sizes) if widest else []
        cut: list[tuple[int, int, LayerRange | None]] = []
        if len(groups) < 2:
            cut = [(start, count, None) for start, count in _parts(num_blocks, max(1, sizes.whole // block_bytes))]
        for column, width in columns if len(groups) >= 2 else ():
            for group in groups:
                size = sizes.last if group is groups[-1] else sizes.hidden
                most = size // (group.num_layers * (block_bytes // num_layers))
                cut += [(column + start, count, group) for start, count in _parts(width, max(1, most))]
        self.ranges: tuple[ChunkRange, ...] = tuple(
            ChunkRange(index=index, first_block=first_block + start, num_blocks=count, layers=layers)
            for index, (start, count, layers) in enumerate(cut)
        )
        self.sizes = sizes
        self._left = list(self.ranges)

    @property
    def num_chunks(self) -> int:
        return len(self.ranges)

    @property
    def mark_layers(self) -> tuple[int, ...]:
        """After how many layers of a step chunks of it are ready, ascending; none where the step's end is soon enough."""
        return tuple(sorted({chunk.layers.stop for chunk in self.ranges if chunk.layers is not None}))

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


def _layer_groups(layer_bytes: int, num_layers: int, sizes: ChunkSizes) -> list[LayerRange]:
    """`layer_bytes`: one layer of a column. The last groups have sizes.group bytes; those before them are larger. Fewer than two where the
    column has not the bytes for that."""
    thin = -(-sizes.group // layer_bytes)
    if 2 * thin > num_layers:
        return []
    wide = max(thin, min(sizes.hidden // layer_bytes, num_layers // sizes.least_wide))
    counts = [count for _, count in _parts(num_layers - sizes.num_thin * thin, wide)] + [thin] * sizes.num_thin
    return [LayerRange(sum(counts[:i]), count) for i, count in enumerate(counts)]


def _parts(total: int, most: int) -> list[tuple[int, int]]:
    """Returns [0, total) in the fewest parts of at most `most`, as (start, count), equal to within one."""
    num_parts = -(-total // most)
    base, extra = divmod(total, num_parts) if num_parts else (0, 0)
    return [(i * base + min(i, extra), base + (i < extra)) for i in range(num_parts)]
