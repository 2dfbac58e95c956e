"""Decode attention over a scattered pool against float64, on ragged lengths; on the CPU through Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch
import triton
from attention_oracle import paged_attention
from hypothesis import given
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, poisoned_pool, tolerance

from twostep.engine.batch import KvShape
from twostep.errors import SetupError
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodeLayout, DecodePlan, decode_layout, fitted
from twostep.model.kernels.triton_launch import DecodeWorkspace
from twostep.model.step.kv_cache import KvCache

LAYER = 1


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    torch.manual_seed(5)


def layout(heads: int, lanes: int, *, keys: int = 16) -> DecodeLayout:
    return DecodeLayout(num_heads=heads, num_lanes=lanes, num_keys=keys, num_warps=4, num_stages=2, programs_per_sm=1)


def fill(cache: KvCache, lengths: list[int], *, window: int = 0, columns: int = 0) -> torch.Tensor:
    """Random keys and values in blocks in no order; int32 tables whose entries outside the lengths and the window are no blocks."""
    size = cache.shape.block_size
    free = random.Random(sum(lengths)).sample(range(cache.shape.num_blocks), cache.shape.num_blocks)
    tables = torch.full((len(lengths), columns or max(1, -(-max(lengths) // size))), 2**31 - 1, dtype=torch.int32)
    for s, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        for i in range(first // size, -(-length // size)):
            block = tables[s, i] = free.pop()
            low, high = max(first - i * size, 0), min(size, length - i * size)
            part = cache.tensor[block, :, :, :, low:high]
            part.copy_(torch.randn(part.shape))
    return tables.to(DEVICE)


def pool_for(lengths: list[int], dtype: torch.dtype, *, num_kv_heads: int, head_dim: int, block_size: int) -> KvCache:
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    return poisoned_pool(dtype, num_blocks=num_blocks, num_layers=2, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)


def queries(num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The query heads of a fused projection."""
    qkv = torch.randn(num_seqs, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    return qkv[:, : num_heads * head_dim].view(num_seqs, num_heads, head_dim)


def assert_right(
    out: torch.Tensor, q: torch.Tensor, cache: KvCache, tables: torch.Tensor, lengths: list[int], window: int, scale: float | None = None
) -> None:
    for s, length in enumerate(lengths):
        table = tables[s].clamp(max=cache.shape.num_blocks - 1)
        want = paged_attention(q[s : s + 1], cache, LAYER, table, length, window=window, scale=scale)[0]
        torch.testing.assert_close(out[s].double(), want, **tolerance(out.dtype))


def check(
    lengths: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    program: DecodeLayout | None = None,
    scale: float | None = None,
    merges_itself: bool = True,
) -> None:
    cache = pool_for(lengths, dtype, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    tables = fill(cache, lengths, window=window)
    q = queries(len(lengths), num_heads, num_kv_heads, head_dim, dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = DecodePlan(
        cache.shape,
        num_heads=num_heads,
        num_seqs=len(lengths),
        device=DEVICE,
        window=window,
        layout=program,
        num_sms=6,
        merges_itself=merges_itself,
    )
    plan.parts.fill_(torch.nan)
    plan.scales.fill_(torch.nan)
    plan.refresh(seq_lens)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out, scale=scale)
    assert_right(out, q, cache, tables, lengths, window, scale)
    assert not plan.counters.any()


LAYOUTS = {
    "heads": layout(2, 1),
    "lanes": layout(1, 4),
    "heads and lanes": layout(2, 2),
}


@pytest.mark.parametrize("program", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_lengths_over_scattered_blocks(dtype: torch.dtype, program: DecodeLayout) -> None:
    check([1, 150, 0, 33, 16, 64, 0], num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype, program=program)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_parts_merged_by_a_second_launch(num_kv_heads: int) -> None:
    program = layout(2 if num_kv_heads > 1 else 1, 1)
    check(
        [1, 150, 0, 33, 64], num_heads=12, num_kv_heads=num_kv_heads, head_dim=80, dtype=torch.float16, program=program, merges_itself=False
    )


def test_who_merges_depends_on_what_there_is_to_read() -> None:
    def plan(num_heads: int, num_kv_heads: int, num_seqs: int) -> DecodePlan:
        shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=num_kv_heads, head_dim=64, dtype="bfloat16")
        return DecodePlan(shape, num_heads=num_heads, num_seqs=num_seqs, device=DEVICE, num_sms=132)

    assert plan(32, 8, 1).merges_itself
    assert plan(32, 32, 1).merges_itself
    assert not plan(32, 1, 4).merges_itself
    assert not plan(16, 2, 4).merges_itself
    assert plan(16, 2, 64).merges_itself


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 7), (4, 1), (12, 1), (20, 1), (40, 1), (9, 3)], ids=str)
def test_groups_of_every_size(num_heads: int, num_kv_heads: int) -> None:
    check([130, 7, 40], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 32), (96, 64), (128, 32), (256, 16)])
def test_head_sizes_and_block_sizes(head_dim: int, block_size: int) -> None:
    check([100, 3, 65], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)


def test_lanes_may_hold_more_keys() -> None:
    check([100, 3, 65], num_heads=4, num_kv_heads=2, head_dim=32, block_size=64, program=layout(1, 2, keys=32))


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
def test_sliding_window_reads_nothing_before_it(window: int) -> None:
    check([1, 150, 40, 0, 41, 17, 64], num_heads=4, num_kv_heads=2, head_dim=32, window=window)


def test_scale_may_be_given() -> None:
    check([50, 9], num_heads=4, num_kv_heads=2, head_dim=32, scale=0.3)


def test_random_shapes() -> None:
    rng = random.Random(7)
    for _ in range(12 if DEVICE == "cuda" else 8):
        num_kv_heads = rng.choice([1, 2, 3, 4])
        check(
            [rng.choice([0, 1, rng.randrange(20), rng.randrange(200)]) for _ in range(rng.randrange(1, 10))],
            num_heads=num_kv_heads * rng.choice([1, 2, 3, 8]),
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice([16, 24, 64]),
            block_size=rng.choice([16, 32]),
            dtype=rng.choice(DTYPES),
            window=rng.choice([0, 0, 30]),
        )


def test_large_scores_do_not_overflow() -> None:
    """Scores in the thousands, the largest of which come first in some sequences and last in others."""
    lengths = [90, 90]
    cache = pool_for(lengths, torch.float32, num_kv_heads=1, head_dim=16, block_size=16)
    tables = fill(cache, lengths)
    q = queries(2, 2, 1, 16, torch.float32) * 1000
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = DecodePlan(cache.shape, num_heads=2, num_seqs=2, device=DEVICE)
    plan.refresh(seq_lens)
    out = decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan)
    assert_right(out, q, cache, tables, lengths, 0)


def test_a_plan_serves_other_lengths_in_the_same_tensors() -> None:
    """As a captured step is replayed: plan, tables and queries keep their addresses, counters are left at zero."""
    all_lengths = [[40, 1, 200], [0, 170, 5], [16, 16, 16], [200, 200, 200]]
    workspace = DecodeWorkspace(DEVICE)
    cache = pool_for([200] * 3, torch.float32, num_kv_heads=2, head_dim=16, block_size=16)
    plan = DecodePlan(cache.shape, num_heads=4, num_seqs=3, device=DEVICE, num_sms=6, workspace=workspace)
    tables = torch.zeros(3, 13, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    q = queries(3, 4, 2, 16, torch.float32)
    out = torch.empty(3, 4, 16, device=DEVICE)

    def step() -> None:
        plan.refresh(seq_lens)
        decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out)

    run = step
    if DEVICE == "cuda":
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for lengths in all_lengths:
        cache.tensor.fill_(torch.nan)
        tables.copy_(fill(cache, lengths, columns=13))
        seq_lens.copy_(torch.tensor(lengths))
        q.copy_(torch.randn(q.shape))
        out.fill_(torch.nan)
        run()
        assert_right(out, q, cache, tables, lengths, 0)


def test_a_larger_plan_leaves_the_memory_of_a_smaller_one() -> None:
    """A captured graph of the smaller plan would go on using it."""
    shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32")
    workspace = DecodeWorkspace(DEVICE)
    small = DecodePlan(shape, num_heads=2, num_seqs=1, device=DEVICE, num_sms=2, workspace=workspace)
    parts, counters = small.parts, small.counters
    large = DecodePlan(shape, num_heads=2, num_seqs=9, device=DEVICE, num_sms=8, workspace=workspace)
    again = DecodePlan(shape, num_heads=2, num_seqs=1, device=DEVICE, num_sms=2, workspace=workspace)
    assert large.parts.numel() > parts.numel()
    assert (small.parts.data_ptr(), small.counters.data_ptr()) == (parts.data_ptr(), counters.data_ptr())
    assert (again.parts.data_ptr(), again.counters.data_ptr()) == (large.parts.data_ptr(), large.counters.data_ptr())


@pytest.mark.parametrize("lengths", [[3000, *[5] * 30], [64] * 31, [1], [5000], [0] * 31], ids=str)
def test_work_is_shared_out_equally(lengths: list[int]) -> None:
    """No worker has more than one tile above another, and together they have each tile once."""
    shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    plan = DecodePlan(shape, num_heads=8, num_seqs=len(lengths), device=DEVICE, num_sms=20)
    plan.refresh(torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    rows = plan.work[: plan.num_workers * 8].view(-1, 8)[:, :6].tolist()
    tiles = [max(1, -(-n // plan.layout.tile_keys)) for n in lengths]
    want = [(seq, tile) for seq, count in enumerate(tiles) for tile in range(count)]
    assert plan.starts.tolist() == [sum(tiles[:s]) for s in range(len(tiles) + 1)]
    shares = [end - position for position, end, *_ in rows]
    assert sum(shares) == len(want)
    busy = [share for share in shares if share]
    assert max(busy) - min(busy) <= 1
    assert len(busy) == min(len(want), plan.num_workers)
    done = 0
    for position, end, seq, tile, length, next_length in rows:
        if position == end:
            continue
        assert position == done
        assert (seq, tile) == want[position]
        assert length == lengths[seq]
        assert next_length == (lengths[seq + 1] if seq + 1 < len(lengths) else 0)
        done = end


def test_a_shape_that_cannot_be_served_says_what_to_give() -> None:
    shape = KvShape(num_blocks=1, block_size=24, num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    with pytest.raises(SetupError, match="--block-size 16"):
        DecodePlan(shape, num_heads=4, num_seqs=1, device=DEVICE)
    with pytest.raises(SetupError, match="multiple"):
        DecodePlan(shape, num_heads=3, num_seqs=1, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="a pool of 2**31 elements is for GPUs")
def test_offsets_beyond_31_bits() -> None:
    lengths = [70_000, 1, 5000]
    cache = KvCache(KvShape(num_blocks=140_000, block_size=16, num_layers=2, num_kv_heads=4, head_dim=128, dtype="bfloat16"), DEVICE)
    assert cache.tensor.numel() > 2**31
    cache.tensor[:, LAYER].normal_()
    blocks = torch.randperm(cache.shape.num_blocks, dtype=torch.int32, device=DEVICE)
    tables = blocks[: 3 * 4375].view(3, 4375).contiguous()
    q = queries(3, 16, 4, 128, torch.bfloat16)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = DecodePlan(cache.shape, num_heads=16, num_seqs=3, device=DEVICE)
    plan.refresh(seq_lens)
    out = decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan)
    assert_right(out, q, cache, tables, lengths, 0)


@given(
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    num_seqs=st.sampled_from([1, 16, 17, 256]),
    shared=st.sampled_from([49152, 101376, 166912, 232448]),
)
def test_a_program_s_tiles_fit_the_card(head_dim: int, num_kv_heads: int, dtype: str, num_seqs: int, shared: int) -> None:
    shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    wanted = decode_layout(shape, num_heads=32, num_seqs=num_seqs)
    layout = fitted(wanted, shape, shared)
    # What the compiler was seen to ask for: five sixths of K and V in every stage.
    wide, item = triton.next_power_of_2(head_dim), 4 if dtype == "float32" else 2
    needed = 2 * layout.tile_keys * wide * item * layout.num_stages * 5 / 6
    assert needed < shared or layout.num_lanes == 1
    if shared == 232448:
        assert layout == wanted, "the card that the layouts were chosen on has room for all of them"
