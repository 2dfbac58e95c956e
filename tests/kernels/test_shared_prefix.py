"""Which sequences share what, and the list made of it, against all that could be shared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.model.kernels.shared_prefix import (
    GRANULE,
    ITEM_COLUMNS,
    OWN_COLUMNS,
    SharedLayout,
    best_groups,
    find_groups,
    pack,
    room_for_items,
    saved_keys,
)

BLOCK_SIZE = 16


def layout(num_seqs: int, *, seqs_per_tile: int = 32, num_splits: int = 16, key_bytes: int = 4096) -> SharedLayout:
    return SharedLayout(
        num_seqs=num_seqs,
        seqs_per_tile=seqs_per_tile,
        num_splits=num_splits,
        max_items=room_for_items(num_seqs, seqs_per_tile, num_splits),
        key_bytes=key_bytes,
    )


def batch(num_seqs: int, shared: int, own: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """All sequences share `shared` keys and have `own` more."""
    columns = (shared + own) // BLOCK_SIZE + 1
    tables = np.random.default_rng(num_seqs).permutation(num_seqs * columns).astype(np.int32).reshape(num_seqs, columns)
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    return tables, np.full(num_seqs, shared + own, np.int32)


@st.composite
def trees(draw: st.DrawFn) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Sequences that each go on from somewhere in an earlier one, or begin anew; tables padded with 0, which is a block too."""
    num_seqs, columns = draw(st.integers(1, 14)), 48
    tables = np.zeros((num_seqs, columns), np.int32)
    lengths = np.zeros(num_seqs, np.int32)
    next_block = 0
    for s in range(num_seqs):
        num_blocks = draw(st.integers(1, columns))
        common = 0
        if s and draw(st.booleans()):
            parent = draw(st.integers(max(0, s - 3), s - 1))
            common = min(draw(st.integers(0, columns)), num_blocks, int(lengths[parent] - 1) // BLOCK_SIZE)
            tables[s, :common] = tables[parent, :common]
        tables[s, common:num_blocks] = np.arange(next_block, next_block + num_blocks - common)
        next_block += num_blocks - common
        # A sequence may end with its shared blocks, but for its newest token's.
        lengths[s] = max(1, num_blocks * BLOCK_SIZE - draw(st.integers(0, BLOCK_SIZE - 1))) + (common == num_blocks) * BLOCK_SIZE
        if common == num_blocks == columns:
            lengths[s] = columns * BLOCK_SIZE
    return tables, np.minimum(lengths, columns * BLOCK_SIZE)


@given(trees(), st.integers(2, 5))
def test_groups_share_what_they_say_and_no_single_group_saves_more(
    step: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], seqs_per_tile: int
) -> None:
    tables, lengths = step
    chosen = layout(len(lengths), seqs_per_tile=seqs_per_tile)
    groups = best_groups(tables, lengths, block_size=BLOCK_SIZE, layout=chosen)
    rows = [int(s) for group in groups for s in group.members]
    assert len(rows) == len(set(rows))
    for group in groups:
        assert len(group.members) > 1
        assert group.num_keys > 0
        assert group.num_keys % GRANULE == 0
        assert group.num_keys < lengths[group.members].min()
        shared = tables[group.members, : group.num_keys // BLOCK_SIZE]
        assert (shared == shared[0]).all()
    best = 0.0
    for s in range(len(lengths)):
        for num_keys in range(GRANULE, int(lengths[s]), GRANULE):
            columns = num_keys // BLOCK_SIZE
            same = (tables[:, :columns] == tables[s, :columns]).all(axis=1) & (lengths > num_keys)
            best = max(best, saved_keys(int(same.sum()), num_keys, chosen) if same.sum() > 1 else 0.0)
    saved = sum(saved_keys(len(group.members), group.num_keys, chosen) for group in groups)
    assert saved >= best


@given(step=trees(), data=st.data())
def test_rows_of_a_draft_share_what_lies_before_it(step: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], data: st.DataObject) -> None:
    """Each sequence's tables and length once for each of its rows, the block of the last one among them."""
    tables, lengths = step
    # The block that a row writes to is a sequence's own, whatever the tree says.
    last = (lengths - 1) // BLOCK_SIZE
    tables[np.arange(len(lengths)), last] = 10_000 + np.arange(len(lengths))
    room = last * BLOCK_SIZE + BLOCK_SIZE - lengths
    counts = np.array([1 + data.draw(st.integers(0, min(7, int(most)))) for most in room])
    rows = np.repeat(np.arange(len(lengths)), counts)
    places = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    expanded, lens = tables[rows], (lengths[rows] + places).astype(np.int32)
    chosen = layout(len(rows), seqs_per_tile=8, key_bytes=1 << 30)
    groups = find_groups(expanded, lens, block_size=BLOCK_SIZE, layout=chosen)
    owner = np.full(len(rows), -1)
    for number, group in enumerate(groups):
        assert (owner[group.members] == -1).all(), "a row is in two groups"
        owner[group.members] = number
        assert group.num_keys % GRANULE == 0
        assert 0 < group.num_keys < lens[group.members].min()
        assert (expanded[group.members, : group.num_keys // BLOCK_SIZE] == expanded[group.members[0], : group.num_keys // BLOCK_SIZE]).all()
    assert all(len(set(owner[rows == s])) == 1 for s in range(len(lengths))), "a sequence's rows are read apart"
    if groups:
        alone = [s for s in range(len(lengths)) if counts[s] > 1 and lengths[s] > GRANULE and owner[rows == s][0] == -1]
        assert not alone, "rows of a draft are read one by one"


@given(trees(), st.integers(1, 5), st.integers(1, 9))
def test_the_list_has_each_shared_key_of_each_sequence_once(
    step: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], seqs_per_tile: int, num_splits: int
) -> None:
    tables, lengths = step
    chosen = layout(len(lengths), seqs_per_tile=seqs_per_tile, num_splits=num_splits)
    groups = best_groups(tables, lengths, block_size=BLOCK_SIZE, layout=chosen)
    packed = pack(groups, chosen)
    assert packed.shape == (chosen.list_size,)
    own, items, members = np.split(packed, np.cumsum([OWN_COLUMNS * len(lengths), ITEM_COLUMNS * chosen.max_items]))
    own, items = own.reshape(-1, OWN_COLUMNS), items.reshape(-1, ITEM_COLUMNS)
    num_shared = np.zeros(len(lengths), np.int64)
    for group in groups:
        num_shared[group.members] = group.num_keys
    used = 0
    for s, (start, first_item, num_items, place) in enumerate(own):
        assert start == num_shared[s]
        key = 0
        for first, count, table_row, first_key, end_key in items[first_item : first_item + num_items, :5]:
            assert first_key == key < end_key
            assert first_key % GRANULE == end_key % GRANULE == 0
            assert place < count <= seqs_per_tile
            assert members[first + place] == s
            assert (tables[table_row, : start // BLOCK_SIZE] == tables[s, : start // BLOCK_SIZE]).all()
            key = end_key
        assert key == start
        used = max(used, first_item + num_items)
    assert not items[used:].any()


@pytest.mark.parametrize(
    ("num_seqs", "shared", "own", "pays"),
    [
        (64, 4096, 256, True),
        (256, 1024, 128, True),
        (16, 8192, 64, True),
        (64, 512, 128, True),
        (256, 0, 300, False),
        (1, 4096, 64, False),
        (16, 512, 128, False),
        (32, 1024, 1024, False),
        (256, 128, 256, False),
    ],
)
def test_a_prefix_is_shared_where_it_pays(num_seqs: int, shared: int, own: int, pays: bool) -> None:
    """As measured on an H200 (benchmarks/RESULTS.md)."""
    groups = find_groups(*batch(num_seqs, shared, own), block_size=BLOCK_SIZE, layout=layout(num_seqs))
    assert [(sorted(group.members), group.num_keys) for group in groups] == ([(list(range(num_seqs)), shared)] if pays else [])


def test_a_deeper_prefix_of_some_is_taken_where_it_saves_more() -> None:
    """All 48 have 256 keys in common, 24 of them 2048, another 16 of them 1024."""
    tables, lengths = batch(48, 256, 3000)
    tables[:24, : 2048 // BLOCK_SIZE] = tables[0, : 2048 // BLOCK_SIZE]
    tables[30:46, : 1024 // BLOCK_SIZE] = tables[30, : 1024 // BLOCK_SIZE]
    groups = best_groups(tables, lengths, block_size=BLOCK_SIZE, layout=layout(48))
    assert {(tuple(group.members), group.num_keys) for group in groups} == {
        (tuple(range(24)), 2048),
        (tuple(range(30, 46)), 1024),
        ((*range(24, 30), 46, 47), 256),
    }


def test_a_batch_without_anything_in_common_is_packed_as_zeros() -> None:
    assert not pack([], layout(5)).any()
