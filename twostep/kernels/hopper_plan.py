"""How a step's prefill attention is shared out over Hopper's multiprocessors: a pure function of lengths, on the host, once a step.

    item      a tile of queries (of one KV head) with a range of its tiles of keys
    turn      one item for every program; a program takes its items in order of turns

Items that read the same keys are near each other in time, so that L2 has them; within that, heavy ones come first, and in each turn the
least laden program gets the heaviest item. A tile that alone is more than a program's fair share is cut by keys into parts, which a
second kernel merges: a short chunk behind a long prefix would leave most of the chip idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import KvShape
from twostep.kernels.prefill_choice import HOPPER_ROWS

HOPPER_KEYS = 128
ITEM_COLUMNS = 8
MERGE_COLUMNS = 5
# Keys and values that are read at the same time: less than H100's and H200's 50 MB of L2.
_SHARED_BYTES = 36e6
# What an item costs beside its tiles of keys, in tiles: queries in, results out.
_ITEM_COST = 1.0
_LEAST_TILES_OF_A_PART = 4

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HopperItems:
    """`num_programs` programs take one row each of every turn.

    items      int32 [turns * num_programs, 8]: sequence, KV head, row of its first token, number of tokens, position of the first, first
               tile of keys, one past the last (0: no item), part (-1: not cut)
    merges     int32 [merges, 5]: KV head, row of the first token, number of tokens, first part, number of parts
    num_parts  rows of parts over all
    """

    items: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    num_programs: int
    num_parts: int


def plan_items(
    query_start: npt.NDArray[np.int32],
    num_queries: Ints,
    seq_lens: Ints,
    kv: KvShape,
    *,
    num_heads: int,
    num_programs: int,
    window: int = 0,
) -> HopperItems:
    """`num_queries` may be 0 for sequences that others attend to; `query_start` counts their rows all the same. `num_programs`: how many
    run at once at most."""
    tokens = HOPPER_ROWS // (num_heads // kv.num_kv_heads)
    counts = -(-num_queries // tokens)
    seq = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    taken = np.minimum(num_queries[seq] - first, tokens)
    position = (seq_lens - num_queries)[seq] + first
    end = -(-(position + taken) // HOPPER_KEYS)
    begin = np.maximum(position + 1 - window, 0) // HOPPER_KEYS if window else np.zeros_like(end)

    fair = max(1.0, float((end - begin).sum()) * kv.num_kv_heads / num_programs)
    num_parts = np.maximum(1, np.minimum((end - begin) // _LEAST_TILES_OF_A_PART, ((end - begin) / fair).astype(np.int64)))
    of = np.repeat(np.arange(len(seq)), num_parts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    length, size = (end - begin)[of], num_parts[of]
    part_begin, part_end = begin[of] + nth * length // size, begin[of] + (nth + 1) * length // size

    # Parts are numbered by tile, KV head and place, those of tiles that are cut only.
    cut = np.where(num_parts > 1, num_parts, 0)
    first_part = (np.cumsum(cut) - cut) * kv.num_kv_heads
    head = np.tile(np.arange(kv.num_kv_heads), len(of))
    of, nth, part_begin, part_end = (np.repeat(column, kv.num_kv_heads) for column in (of, nth, part_begin, part_end))
    part = np.where(cut[of] > 0, first_part[of] + head * cut[of] + nth, -1)
    row = query_start[:-1].astype(np.int64)[seq] + first
    items = np.stack((seq[of], head, row[of], taken[of], position[of], part_begin, part_end, part), axis=1)

    order, num_programs = _in_turns(items, np.where(num_queries > 0, seq_lens, 0), kv, num_programs)
    is_cut = np.flatnonzero(cut)
    merges = np.stack(
        (
            np.tile(np.arange(kv.num_kv_heads), len(is_cut)),
            *(np.repeat(column[is_cut], kv.num_kv_heads) for column in (row, taken)),
            (first_part[is_cut, None] + np.arange(kv.num_kv_heads) * cut[is_cut, None]).reshape(-1),
            np.repeat(cut[is_cut], kv.num_kv_heads),
        ),
        axis=1,
    )
    placed = np.zeros((len(order), ITEM_COLUMNS), np.int32)
    placed[order >= 0] = items[order[order >= 0]]
    return HopperItems(placed, merges.astype(np.int32), num_programs, int(cut.sum()) * kv.num_kv_heads)


def _in_turns(items: Ints, seq_lens: Ints, kv: KvShape, num_programs: int) -> tuple[Ints, int]:
    """Which item each program has in each turn, flat, -1 where none; and how many programs there are."""
    num_programs = max(1, min(num_programs, len(items)))
    if not len(items):
        return np.zeros(0, np.int64), num_programs
    # Sections (a head of a sequence) that read their keys at the same time.
    section_bytes = np.repeat(seq_lens, kv.num_kv_heads) * (kv.head_dim * 2.0 * 2)
    groups = max(1.0, np.ceil(section_bytes.sum() / _SHARED_BYTES))
    group = (np.cumsum(section_bytes) - section_bytes / 2) // (section_bytes.sum() / groups)
    weight = (items[:, 6] - items[:, 5]) + _ITEM_COST
    order = np.lexsort((-weight, group[items[:, 0] * kv.num_kv_heads + items[:, 1]]))

    turns = -(-len(items) // num_programs)
    placed = np.full((turns, num_programs), -1, np.int64)
    load = np.zeros(num_programs)
    for turn in range(turns):
        mine = order[turn * num_programs : (turn + 1) * num_programs]
        mine = mine[np.argsort(-weight[mine], kind="stable")]
        least = np.argsort(load, kind="stable")[: len(mine)]
        placed[turn, least] = mine
        load[least] += weight[mine]
    return placed.reshape(-1), num_programs
