"""Which sequences of a decode batch begin with the same blocks, whether to read those once for all of them, and the device's list of it.

    sequence 0   A B C D │ e f            group {0, 1, 3}: A B C D once for three sequences,
    sequence 1   A B C D │ g h i          then each its own remainder
    sequence 2   x y
    sequence 3   A B C D │ k

Prefix reuse gives equal prefixes equal block ids, so that tables say all there is to know (Juravsky et al., "Hydragen", 2024). The rows
of a draft (twostep/engine/drafts.py) are sequences here that share all that lies before the first of them. Everything here is a pure
function of tables and lengths on the host; kernels are in triton_shared_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Shared keys come in multiples of this: of any decode tile and of any tile of the shared pass.
GRANULE = 128
# Columns of a sequence in the list: key at which its own part begins, first item with its state, number of them, its place in each.
OWN_COLUMNS = 4
# Columns of an item: first member in the list, number of members, row of the block table to read, first key, end key; three unused.
ITEM_COLUMNS = 8
_MAX_GROUPS = 64
_MAX_NODES = 64

# Measured on an H200 (benchmarks/gpu_shared_prefix.py), in reads of the same keys from memory: a tile of the pass, whose products are not
# free; one from the second-level cache, where a shared block is found by all sequences but one; and, in bytes, the pass by itself.
_TILE_READS = 1.4
_CACHED_READ = 1 / 1.8
_PASS_BYTES = 26e6


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of a batch whose first `num_keys` keys lie in the same blocks."""

    members: npt.NDArray[np.int64]
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayout:
    """The shared pass of steps of `num_seqs` sequences.

    seqs_per_tile  sequences whose queries are rows of one tile
    num_splits     items at least that the card wants to be busy
    max_items      room in the list
    key_bytes      K and V of one key, all heads of a layer
    """

    num_seqs: int
    seqs_per_tile: int
    num_splits: int
    max_items: int
    key_bytes: int

    @property
    def list_size(self) -> int:
        """int32 numbers of a list: OWN_COLUMNS a sequence, ITEM_COLUMNS an item, members one after another."""
        return self.num_seqs * OWN_COLUMNS + self.max_items * ITEM_COLUMNS + self.num_seqs


def room_for_items(num_seqs: int, seqs_per_tile: int, num_splits: int) -> int:
    """Items that a list of SharedLayout must have room for (see _split)."""
    return num_splits + -(-num_seqs // seqs_per_tile) + min(_MAX_GROUPS, num_seqs // 2)


def saved_keys(num_members: int, num_keys: int, layout: SharedLayout) -> float:
    """Returns what a group saves, in keys of one sequence read from memory, did the cache not help; negative where it costs."""
    tiles = -(-num_members // layout.seqs_per_tile)
    return (num_members - _TILE_READS * tiles) * num_keys


def pays(groups: Sequence[PrefixGroup], num_keys: int, layout: SharedLayout) -> bool:
    """Returns whether a batch of `num_keys` keys, of all sequences together, is read sooner with a pass over these groups.

    Without, the cache serves what is shared while memory serves the rest: all keys at the cache's rate, where that takes longer than
    the rest at memory's. With, the rest and the pass are read from memory, one after the other.
    """
    saved = sum(saved_keys(len(group.members), group.num_keys, layout) for group in groups)
    return (saved - (1 - _CACHED_READ) * num_keys) * layout.key_bytes > _PASS_BYTES


def best_groups(
    block_tables: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], *, block_size: int, layout: SharedLayout
) -> list[PrefixGroup]:
    """The groups that together save most, each sequence in one at most.

    Prefixes form a tree; a node is worth what saved_keys says, or what its branches and the rest of it are worth where that is more.
    Costs one sort of the first column where nothing is shared, and a comparison of the shared columns where something is.

    block_tables  [S, B]; seq_lens [S], the new token counted: its block is never shared
    """
    return _largest(_Tree(block_tables, (seq_lens - 1) // block_size, block_size, layout).best_groups(), layout)


def find_groups(
    block_tables: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], *, block_size: int, layout: SharedLayout
) -> list[PrefixGroup]:
    """The best groups where a pass over them pays, else none."""
    goes_on = _goes_on(block_tables, seq_lens, block_size)
    if goes_on.any():
        found = _with_drafts(block_tables, seq_lens, np.flatnonzero(~goes_on), block_size=block_size, layout=layout)
    else:
        found = best_groups(block_tables, seq_lens, block_size=block_size, layout=layout)
    return found if found and pays(found, int(seq_lens.sum()), layout) else []


def _goes_on(block_tables: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], block_size: int) -> npt.NDArray[np.bool_]:
    """Says of each row whether it is the next token of the row before."""
    # The block that a row writes to is its sequence's alone: blocks are found by others only once they are full.
    written = np.maximum(seq_lens[:-1] - 1, 0) // block_size
    rows = np.arange(len(written))
    same = (seq_lens[1:] == seq_lens[:-1] + 1) & (block_tables[rows + 1, written] == block_tables[rows, written])
    return np.concatenate(([False], same))


def _with_drafts(
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    firsts: npt.NDArray[np.int64],
    *,
    block_size: int,
    layout: SharedLayout,
) -> list[PrefixGroup]:
    """Groups of sequences with drafts, whose first rows are `firsts`: those of equal prefixes together, the others each by itself."""
    ends = np.append(firsts[1:], len(seq_lens))
    rows_of = [np.arange(first, end) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]
    groups, alone = [], np.ones(len(firsts), np.bool_)
    for group in best_groups(block_tables[firsts], seq_lens[firsts], block_size=block_size, layout=layout):
        groups.append(PrefixGroup(np.concatenate([rows_of[i] for i in group.members]), group.num_keys))
        alone[group.members] = False
    num_keys = (seq_lens[firsts] - 1) // GRANULE * GRANULE
    for i in np.flatnonzero(alone & (num_keys > 0) & (ends - firsts > 1)).tolist():
        group = PrefixGroup(rows_of[i], int(num_keys[i]))
        if saved_keys(len(group.members), group.num_keys, layout) > 0:
            groups.append(group)
    return _largest(groups, layout)


def _largest(groups: Sequence[PrefixGroup], layout: SharedLayout) -> list[PrefixGroup]:
    """As many as a list has room for."""
    return sorted(groups, key=lambda group: -saved_keys(len(group.members), group.num_keys, layout))[:_MAX_GROUPS]


def pack(groups: Sequence[PrefixGroup], layout: SharedLayout) -> npt.NDArray[np.int32]:
    """The list that kernels read, int32 [layout.list_size]; all zeros where nothing is shared."""
    packed = np.zeros(layout.list_size, np.int32)
    own_end = layout.num_seqs * OWN_COLUMNS
    own = packed[:own_end].reshape(-1, OWN_COLUMNS)
    items = packed[own_end : own_end + layout.max_items * ITEM_COLUMNS].reshape(-1, ITEM_COLUMNS)
    members = packed[own_end + items.size :]
    if not groups:
        return packed
    # All at once: of drafts there are as many groups as sequences. First tiles, each of one group, then their items.
    num_members = np.array([len(group.members) for group in groups])
    num_tiles = -(-num_members // layout.seqs_per_tile)
    group_of, tile_of_group = _places(num_tiles)
    tile_first = (np.cumsum(num_members) - num_members)[group_of] + tile_of_group * layout.seqs_per_tile
    tile_size = np.minimum(num_members[group_of] - tile_of_group * layout.seqs_per_tile, layout.seqs_per_tile)
    num_items = np.array(_split(groups, layout))[group_of]
    units = np.array([group.num_keys // GRANULE for group in groups])[group_of]
    listed = np.concatenate([group.members for group in groups])
    members[: len(listed)] = listed
    tile, item = _places(num_items)
    rows = items[: len(tile)]
    rows[:, 0], rows[:, 1] = tile_first[tile], tile_size[tile]
    rows[:, 2] = listed[(np.cumsum(num_members) - num_members)[group_of]][tile]
    rows[:, 3], rows[:, 4] = item * units[tile] // num_items[tile] * GRANULE, (item + 1) * units[tile] // num_items[tile] * GRANULE
    tile, place = _places(tile_size)
    first_item = np.cumsum(num_items) - num_items
    own[listed] = np.stack((units[tile] * GRANULE, first_item[tile], num_items[tile], place), axis=1)
    return packed


def _places(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns, for `counts` things in a row each, the row and the place in it of every one."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def _split(groups: Sequence[PrefixGroup], layout: SharedLayout) -> list[int]:
    """Items for each tile of each group: about equal numbers of keys, `num_splits` items together, or one more for a tile at most."""
    tiles = [-(-len(group.members) // layout.seqs_per_tile) for group in groups]
    units = [group.num_keys // GRANULE for group in groups]
    each = max(1, -(-sum(t * u for t, u in zip(tiles, units, strict=True)) // layout.num_splits))
    return [-(-u // each) for u in units]


class _Tree:
    """The tree of shared prefixes, walked from its root."""

    def __init__(
        self, block_tables: npt.NDArray[np.int32], num_full: npt.NDArray[np.integer], block_size: int, layout: SharedLayout
    ) -> None:
        self._tables = block_tables
        self._num_full = num_full
        self._block_size = block_size
        self._layout = layout
        self._nodes_left = _MAX_NODES

    def best_groups(self) -> list[PrefixGroup]:
        there = np.flatnonzero(self._num_full > 0)
        return [group for rows in self._branches(there, 0) for group in self._best(rows, 1)[1]]

    def _branches(self, rows: npt.NDArray[np.int64], depth: int) -> list[npt.NDArray[np.int64]]:
        """Rows with equal blocks at `depth`, where they are more than one."""
        blocks = self._tables[rows, depth]
        order = np.argsort(blocks, kind="stable")
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1, append=-1))
        counts = np.diff(starts)
        return [rows[order[starts[i] : starts[i] + counts[i]]] for i in np.flatnonzero(counts > 1)]

    def _best(self, rows: npt.NDArray[np.int64], depth: int) -> tuple[float, list[PrefixGroup]]:
        """Saved keys and groups of rows that are equal before `depth`."""
        self._nodes_left -= 1
        reach = self._num_full[rows]
        depth = self._first_difference(rows, depth, int(reach.min()))
        num_keys = depth * self._block_size // GRANULE * GRANULE
        saved = saved_keys(len(rows), num_keys, self._layout)
        branches = [self._best(branch, depth + 1) for branch in self._branches(rows[reach > depth], depth) if self._nodes_left > 0]
        apart, groups = sum(value for value, _ in branches), [group for _, found in branches for group in found]
        if groups:
            rest = np.setdiff1d(rows, np.concatenate([group.members for group in groups]))
            saved_by_rest = saved_keys(len(rest), num_keys, self._layout)
            if saved_by_rest > 0:
                apart, groups = apart + saved_by_rest, [*groups, PrefixGroup(rest, num_keys)]
        if apart >= max(saved, 0.0):
            return apart, groups
        return saved, [PrefixGroup(rows, num_keys)]

    def _first_difference(self, rows: npt.NDArray[np.int64], start: int, end: int) -> int:
        """The first column from `start` on in which the rows differ, or `end`. Looks further the longer they agree."""
        width = 32
        while start < end:
            window = self._tables[:, start : min(end, start + width)][rows]
            same = (window == window[0]).all(axis=0)
            if not same.all():
                return start + int(same.argmin())
            start += window.shape[1]
            width *= 4
        return end
