"""Decode attention over a scattered pool, of numbers and of quantized blocks, against float64 attention over the numbers that the same
bytes stand for; on the CPU through Triton's interpreter. All that no sequence wrote is poison."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
from attention_oracle import assert_attends
from hypothesis import given
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, decode_rounding, poisoned_pool, some_sinks

from twostep.engine.batch import KvShape
from twostep.errors import SetupError
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodeLayout, DecodePlan, decode_layout, fitted
from twostep.model.kernels.triton_launch import DecodeWorkspace
from twostep.model.step.kv_cache import KvCache

LAYER = 1
ON_GPU = DEVICE == "cuda"
FORMATS = ["none", "fp8", "int8"]
NO_BLOCK = 2**31 - 1


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    torch.manual_seed(5)


def seldom(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def layout(heads: int, lanes: int, *, keys: int = 16) -> DecodeLayout:
    return DecodeLayout(num_heads=heads, num_lanes=lanes, num_keys=keys, num_warps=4, num_stages=2, programs_per_sm=1)


def fill(cache: KvCache, lengths: list[int], *, window: int = 0, columns: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Random keys and values in blocks in no order; int32 tables whose entries outside the lengths and the window are no blocks. `spread`:
    how much larger some vectors are than others."""
    shape = cache.shape
    size, heads = shape.block_size, 2 * shape.num_kv_heads
    free = random.Random(sum(lengths)).sample(range(shape.num_blocks), shape.num_blocks)
    tables = torch.full((len(lengths), columns or max(1, -(-max(lengths) // size))), NO_BLOCK, dtype=torch.int32)
    for s, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        for i in range(first // size, -(-length // size)):
            tables[s, i] = free.pop()
        place = torch.arange(first, length)
        vectors = torch.randn(len(place), heads, shape.head_dim) * torch.exp(spread * torch.randn(len(place), heads, 1))
        block, slot = tables[s, place // size].long(), place % size
        if cache.quantized is not None:
            cache.quantized.write(LAYER, block.to(DEVICE), slot.to(DEVICE), vectors.to(DEVICE))
        else:
            cache.tensor[block.to(DEVICE), LAYER, :, :, slot.to(DEVICE)] = vectors.unflatten(1, (2, -1)).to(cache.tensor)
    return tables.to(DEVICE)


def queries(num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The query heads of a fused projection."""
    qkv = torch.randn(num_seqs, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    return qkv[:, : num_heads * head_dim].view(num_seqs, num_heads, head_dim)


def assert_right(out: torch.Tensor, q: torch.Tensor, cache: KvCache, tables: torch.Tensor, lengths: list[int], **options: Any) -> None:
    rounding = decode_rounding(cache, q.dtype)
    for s, length in enumerate(lengths):
        table = tables[s].clamp(max=cache.shape.num_blocks - 1)
        assert_attends(out[s : s + 1], q[s : s + 1], cache, LAYER, table, length, rounding=rounding, **options)


def check(
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    quantization: str = "none",
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    program: DecodeLayout | None = None,
    scale: float | None = None,
    merges_itself: bool = True,
    spread: float = 0.0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> None:
    cache = poisoned_pool(
        dtype,
        num_blocks=sum(-(-n // block_size) for n in lengths) + 3,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        quantization=quantization,
    )
    tables = fill(cache, lengths, window=window, spread=spread)
    q = queries(len(lengths), num_heads, num_kv_heads, head_dim, dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = {"window": window, "layout": program, "num_sms": 6 if quantization == "none" else 3, "merges_itself": merges_itself}
    options |= {"softcap": softcap, "sinks": sinks}
    plan = DecodePlan(cache.shape, num_heads=num_heads, num_seqs=len(lengths), device=DEVICE, **options)
    plan.parts.fill_(torch.nan)
    plan.scales.fill_(torch.nan)
    plan.refresh(seq_lens)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    given = some_sinks(num_heads) if sinks else None
    decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out, scale=scale, sinks=given)
    assert_right(out, q, cache, tables, lengths, window=window, scale=scale, softcap=softcap, sinks=given)
    assert not plan.counters.any()


@pytest.mark.parametrize(
    ("dtype", "program", "quantization"),
    [
        (torch.float32, layout(2, 1), "none"),
        (torch.bfloat16, layout(1, 4), "none"),
        (torch.float16, layout(2, 2), "none"),
        (torch.bfloat16, None, "fp8"),
        (torch.float16, None, "int8"),
        (torch.float32, None, "fp8"),
        (torch.bfloat16, None, "int4"),
    ],
    ids=str,
)
def test_ragged_lengths_over_scattered_blocks(dtype: torch.dtype, program: DecodeLayout | None, quantization: str) -> None:
    check([1, 150, 0, 33, 16, 64, 0], 6, 2, 32, quantization, dtype=dtype, program=program)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "program", "quantization"),
    [(1, 80, layout(1, 1), "none"), (4, 80, layout(2, 1), "none"), (2, 32, layout(2, 2), "int8"), seldom(2, 64, layout(2, 2), "int4")],
    ids=str,
)
def test_parts_merged_by_a_second_launch(num_kv_heads: int, head_dim: int, program: DecodeLayout, quantization: str) -> None:
    check([1, 150, 0, 33], 12, num_kv_heads, head_dim, quantization, dtype=torch.float16, program=program, merges_itself=False)


def test_who_merges_depends_on_what_there_is_to_read() -> None:
    def plan(num_heads: int, num_kv_heads: int, num_seqs: int) -> DecodePlan:
        shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=num_kv_heads, head_dim=64, dtype="bfloat16")
        return DecodePlan(shape, num_heads=num_heads, num_seqs=num_seqs, device=DEVICE, num_sms=132)

    assert plan(32, 8, 1).merges_itself
    assert plan(32, 32, 1).merges_itself
    assert not plan(32, 1, 4).merges_itself
    assert not plan(16, 2, 4).merges_itself
    assert plan(16, 2, 64).merges_itself


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "quantization"),
    [(7, 7, "none"), (4, 1, "none"), (20, 1, "none"), (40, 1, "none"), (9, 3, "none"), (2, 2, "fp8"), (12, 1, "int8"), (20, 1, "fp8")],
    ids=str,
)
def test_groups_of_every_size(num_heads: int, num_kv_heads: int, quantization: str) -> None:
    check([130, 7], num_heads, num_kv_heads, 16, quantization)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "quantization"),
    [
        (80, 32, "none"),
        (96, 64, "none"),
        (112, 16, "none"),
        (256, 16, "none"),
        (64, 16, "fp8"),
        (80, 16, "int8"),
        (96, 64, "fp8"),
        (112, 16, "int8"),
        (128, 32, "int8"),
        (256, 16, "fp8"),
        seldom(96, 64, "int4"),
        (128, 16, "int4"),
    ],
    ids=str,
)
def test_head_sizes_and_block_sizes(head_dim: int, block_size: int, quantization: str) -> None:
    check([70, 3, 33], 4, 2, head_dim, quantization, block_size=block_size, dtype=torch.bfloat16)


def test_lanes_may_hold_more_keys_and_a_scale_be_given() -> None:
    check([100, 3, 65], 4, 2, 32, block_size=64, program=layout(1, 2, keys=32), scale=0.3)


@pytest.mark.parametrize(
    ("window", "quantization"),
    [(1, "none"), (16, "none"), (40, "none"), (1000, "none"), (1, "fp8"), (18, "int8"), seldom(18, "int4")],
    ids=str,
)
def test_sliding_window_reads_nothing_before_it(window: int, quantization: str) -> None:
    check([1, 90, 40, 0, 41, 17], 4, 2, 32, quantization, window=window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "quantization", "options"),
    [
        (6, 2, 32, "none", {"softcap": 2.0, "scale": 0.3}),
        (6, 2, 64, "none", {"sinks": True}),
        (24, 2, 16, "none", {"sinks": True, "softcap": 5.0, "merges_itself": False}),
        (8, 2, 256, "none", {"sinks": True, "softcap": 5.0, "window": 40, "dtype": torch.bfloat16}),
        (8, 2, 64, "fp8", {"sinks": True, "softcap": 2.0, "scale": 0.2}),
        (40, 2, 16, "int8", {"sinks": True, "window": 18, "merges_itself": False}),
        seldom(8, 2, 64, "int4", {"sinks": True, "softcap": 2.0, "scale": 0.2}),
    ],
    ids=str,
)
def test_softcaps_and_sinks(num_heads: int, num_kv_heads: int, head_dim: int, quantization: str, options: dict[str, Any]) -> None:
    """A sink counts once, in however many parts a sequence is; nothing is there of a sequence of no keys, whatever its sinks."""
    check([1, 150, 0, 33, 64], num_heads, num_kv_heads, head_dim, quantization, **options)


@pytest.mark.parametrize("quantization", ["fp8", "int8", seldom("int4")])
def test_scales_far_apart(quantization: str) -> None:
    """Factors of thousands between the scales of one sequence's keys and values."""
    check([90, 64], 4, 2, 32 if quantization == "int4" else 16, quantization, dtype=torch.bfloat16, spread=2.5)


@pytest.mark.system
def test_random_shapes() -> None:
    rng = random.Random(7)
    for _ in range(16):
        num_kv_heads = rng.choice([1, 2, 3, 4])
        check(
            [rng.choice([0, 1, rng.randrange(20), rng.randrange(200)]) for _ in range(rng.randrange(1, 10))],
            num_kv_heads * rng.choice([1, 2, 3, 8]),
            num_kv_heads,
            rng.choice([16, 24, 64]),
            rng.choice(FORMATS),
            block_size=rng.choice([16, 32]),
            dtype=rng.choice(DTYPES),
            window=rng.choice([0, 0, 30]),
            softcap=rng.choice([0.0, 0.0, 5.0]),
            sinks=rng.random() < 0.3,
        )


def test_large_scores_do_not_overflow() -> None:
    """Scores in the thousands, the largest of which come first in some sequences and last in others."""
    lengths = [90, 90]
    cache = poisoned_pool(torch.float32, num_blocks=15, num_layers=2, num_kv_heads=1, block_size=16, head_dim=16)
    tables = fill(cache, lengths)
    q = queries(2, 2, 1, 16, torch.float32) * 1000
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = DecodePlan(cache.shape, num_heads=2, num_seqs=2, device=DEVICE)
    plan.refresh(seq_lens)
    assert_right(decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan), q, cache, tables, lengths)


@pytest.mark.parametrize("merges_itself", [True, False])
def test_a_plan_serves_other_lengths_in_the_same_tensors(merges_itself: bool) -> None:
    """As a captured step is replayed: plan, tables and queries keep their addresses, counters are left at zero. Nothing is written of
    padding."""
    all_lengths = [[40, 1, 100], [0, 70, 5], [100, 100, 100], [90, -1, -1], [-1, -1, -1], [7, 120, -1]]
    cache = poisoned_pool(torch.float32, num_blocks=24, num_layers=2, num_kv_heads=2, block_size=16, head_dim=16)
    plan = DecodePlan(cache.shape, num_heads=4, num_seqs=3, device=DEVICE, num_sms=6, merges_itself=merges_itself)
    tables = torch.zeros(3, 13, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    q = queries(3, 4, 2, 16, torch.float32)
    out = torch.empty(3, 4, 16, device=DEVICE)

    def step() -> None:
        plan.refresh(seq_lens)
        decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out)

    run = step
    if ON_GPU:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for lengths in all_lengths:
        cache.tensor.fill_(torch.nan)
        real = [n for n in lengths if n >= 0]
        if real:
            tables[: len(real)].copy_(fill(cache, real, columns=13))
        seq_lens.copy_(torch.tensor(lengths))
        q.copy_(torch.randn(q.shape))
        out.fill_(torch.nan)
        run()
        assert_right(out, q, cache, tables, real)
        assert out[len(real) :].isnan().all()


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


@pytest.mark.parametrize("lengths", [[3000, *[5] * 30], [64] * 31, [1], [5000], [0] * 31, [900, 70, 5, -1, -1], [-1] * 3], ids=str)
def test_work_is_shared_out_equally(lengths: list[int]) -> None:
    """No worker has more than one tile above another, and together they have each tile once."""
    shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    plan = DecodePlan(shape, num_heads=8, num_seqs=len(lengths), device=DEVICE, num_sms=20)
    plan.refresh(torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    rows = plan.work[: plan.num_workers * 8].view(-1, 8)[:, :6].tolist()
    tiles = [max(1, -(-n // plan.layout.tile_keys)) if n >= 0 else 0 for n in lengths]
    want = [(seq, tile) for seq, count in enumerate(tiles) for tile in range(count)]
    assert plan.starts.tolist() == [sum(tiles[:s]) for s in range(len(tiles) + 1)]
    shares = [end - position for position, end, *_ in rows]
    busy = [share for share in shares if share]
    assert max(busy, default=0) - min(busy, default=0) <= 1
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
    assert done == len(want)


@pytest.mark.parametrize(("block_size", "num_heads", "says"), [(24, 4, "--block-size"), (16, 3, "multiple")])
def test_a_shape_that_cannot_be_served_is_refused(block_size: int, num_heads: int, says: str) -> None:
    shape = KvShape(num_blocks=1, block_size=block_size, num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    with pytest.raises(SetupError, match=says):
        DecodePlan(shape, num_heads=num_heads, num_seqs=1, device=DEVICE)


@pytest.mark.skipif(not ON_GPU, reason="a pool of 2**31 elements is for GPUs")
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
    assert_right(decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan), q, cache, tables, lengths)


@given(
    head_dim=st.sampled_from([64, 80, 96, 112, 128, 256]),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    num_seqs=st.sampled_from([1, 16, 17, 256]),
    shared=st.sampled_from([49152, 101376, 166912, 232448]),
)
def test_a_program_s_tiles_fit_the_card(head_dim: int, num_kv_heads: int, dtype: str, num_seqs: int, shared: int) -> None:
    shape = KvShape(num_blocks=1, block_size=16, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    wanted = decode_layout(shape, num_heads=32, num_seqs=num_seqs)
    layout = fitted(wanted, shape, shared)
    # The compiler was seen to ask for five sixths of K and V in every stage.
    wide, item = triton.next_power_of_2(head_dim), 4 if dtype == "float32" else 2
    needed = 2 * layout.tile_keys * wide * item * layout.num_stages * 5 / 6
    assert needed < shared or layout.num_lanes == 1
    if shared == 232448:
        assert layout == wanted, "the card that the layouts were chosen on has room for all of them"
