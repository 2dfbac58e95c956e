"""The plan of Hopper's prefill attention: every query meets every key it sees once; and the merge of what was cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_pools import DEVICE

from twostep.engine.batch import KvShape
from twostep.kernels.hopper_plan import HOPPER_KEYS, HopperItems, plan_items
from twostep.kernels.prefill_choice import HOPPER_ROWS
from twostep.kernels.triton_prefill_merge import merge_parts

CHUNKS = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0, 1, 2, 31, 32, 33, 200, 777])), min_size=1, max_size=6)


def plan(
    chunks: list[tuple[int, int]], *, num_heads: int = 8, num_kv_heads: int = 2, num_programs: int = 9, window: int = 0
) -> HopperItems:
    kv = KvShape(num_blocks=9, block_size=16, num_layers=2, num_kv_heads=num_kv_heads, head_dim=128, dtype="bfloat16")
    counts = np.array([count for _, count in chunks], np.int64)
    lens = counts + [context for context, _ in chunks]
    # A sequence without queries here has a row of somebody else's.
    starts = np.concatenate(([0], np.cumsum(np.maximum(counts, 1)))).astype(np.int32)
    return plan_items(starts, counts, lens, kv, num_heads=num_heads, num_programs=num_programs, window=window)


@given(
    chunks=CHUNKS,
    heads=st.sampled_from([(8, 2), (3, 1), (7, 7)]),
    num_programs=st.sampled_from([1, 5, 132]),
    window=st.sampled_from([0, 1, 100, 1000]),
)
def test_every_query_meets_its_keys_once(chunks: list[tuple[int, int]], heads: tuple[int, int], num_programs: int, window: int) -> None:
    num_heads, num_kv_heads = heads
    tokens = HOPPER_ROWS // (num_heads // num_kv_heads)
    planned = plan(chunks, num_heads=num_heads, num_kv_heads=num_kv_heads, num_programs=num_programs, window=window)
    assert planned.num_programs <= num_programs
    assert len(planned.items) % planned.num_programs == 0
    # Empty items are in the last turn only: the next one's queries are sent for while an item runs.
    empty = planned.items[:, 5] >= planned.items[:, 6]
    assert not empty[: -planned.num_programs].any()
    items = planned.items[~empty]
    first_row = 0
    for seq, (context, count) in enumerate(chunks):
        for head in range(num_kv_heads):
            mine = items[(items[:, 0] == seq) & (items[:, 1] == head)]
            assert sorted(set(mine[:, 2].tolist())) == list(range(first_row, first_row + count, tokens))
            for row in set(mine[:, 2].tolist()):
                tile = mine[mine[:, 2] == row]
                tile = tile[np.argsort(tile[:, 5])]
                position, taken = context + row - first_row, min(tokens, first_row + count - row)
                assert (tile[:, 3] == taken).all()
                assert (tile[:, 4] == position).all()
                assert tile[0, 5] == (max(0, position + 1 - window) // HOPPER_KEYS if window else 0)
                assert tile[-1, 6] == -(-(position + taken) // HOPPER_KEYS)
                assert (tile[1:, 5] == tile[:-1, 6]).all()
                check_parts(planned, tile, head)
        first_row += max(1, count)
    parts = items[items[:, 7] >= 0, 7]
    assert sorted(parts.tolist()) == list(range(planned.num_parts))


def check_parts(planned: HopperItems, tile: np.ndarray, head: int) -> None:
    merge = planned.merges[(planned.merges[:, 0] == head) & (planned.merges[:, 1] == tile[0, 2])]
    if len(tile) == 1:
        assert tile[0, 7] == -1
        assert not len(merge)
        return
    assert merge.tolist() == [[head, tile[0, 2], tile[0, 3], tile[0, 7], len(tile)]]
    assert tile[:, 7].tolist() == list(range(tile[0, 7], tile[0, 7] + len(tile)))


def test_a_short_chunk_behind_a_long_prefix_is_cut_and_a_prompt_is_not() -> None:
    short = plan([(8192, 64)], num_heads=32, num_kv_heads=8, num_programs=132)
    assert 100 <= np.count_nonzero(short.items[:, 6]) <= 132
    assert short.num_parts
    assert not plan([(0, 8192)], num_heads=32, num_kv_heads=8, num_programs=132).num_parts


def test_programs_end_together() -> None:
    for chunks in ([(0, 8192)], [(0, 2048)] * 8, [(0, 5000), (0, 17), (1000, 1500), (100, 40), (0, 1635)]):
        planned = plan(chunks, num_heads=32, num_kv_heads=8, num_programs=132)
        load = (planned.items[:, 6] - planned.items[:, 5]).reshape(-1, 132).sum(0)
        assert load.max() <= 1.05 * load.mean()


@pytest.mark.parametrize(("share", "head_dim", "dtype"), [(4, 128, torch.bfloat16), (3, 24, torch.float16), (1, 64, torch.float32)])
def test_merged_parts_are_the_whole(share: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows, keys, num_tokens = 32, [7, 40, 1, 16], 32 // share
    score = torch.randn(2, num_rows, sum(keys), generator=generator, dtype=torch.float64) * 3
    score[0, 5, :7] = -torch.inf  # a part that sees no key of this row
    value = torch.randn(2, sum(keys), head_dim, generator=generator, dtype=torch.float64)
    want = score.softmax(-1) @ value
    # What lies between belongs to nobody.
    parts = torch.full((11, num_rows, head_dim), torch.nan)
    scales = torch.full((11, num_rows), torch.nan)
    for merge, first in enumerate((6, 1)):
        for i, (s, v) in enumerate(zip(score[merge].split(keys, -1), value[merge].split(keys), strict=True)):
            parts[first + i] = torch.nan_to_num(s.softmax(-1)) @ v
            scales[first + i] = s.logsumexp(-1) / np.log(2)
    # Head 1 of 5 tokens from row 3 on, head 0 of all it can be from row 9 on.
    merges = torch.tensor([[1, 3, 5, 6, 4], [0, 9, num_tokens, 1, 4]], dtype=torch.int32, device=DEVICE)
    out = torch.full((9 + num_tokens, 2 * share * head_dim), torch.nan, dtype=dtype, device=DEVICE)
    merge_parts(parts.to(DEVICE), scales.to(DEVICE), merges, out, share=share, head_dim=head_dim, num_rows=num_rows)
    got = out.cpu().double().view(len(out), 2, share, head_dim)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for head, row, num, which in ((1, 3, 5, 0), (0, 9, num_tokens, 1)):
        part = want[which].view(-1, head_dim)[: num * share].view(num, share, head_dim)
        torch.testing.assert_close(got[row : row + num, head], part, rtol=tolerance, atol=tolerance)
    assert got.isnan().sum() == got.numel() - (5 + num_tokens) * share * head_dim
