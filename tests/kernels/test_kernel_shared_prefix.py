"""Decode attention where sequences share prefixes, against float64; on the CPU through Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import assert_attends, unit
from kernel_pools import DEVICE, DTYPES, decode_rounding, poison, poisoned_pool, some_sinks

from twostep.engine.batch import KvShape
from twostep.model.kernels.shared_prefix import PrefixGroup, pack
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodePlan
from twostep.model.kernels.triton_shared_prefix import SharedPrefix, SharedTile, serves_shared
from twostep.model.step.kv_cache import KvCache

LAYER = 1
NO_BLOCK = 2**31 - 1
# Rows of the batch, and the keys that they share.
Groups = Sequence[tuple[Sequence[int], int]]


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    torch.manual_seed(5)


def tile(rows: int, keys: int = 32) -> SharedTile:
    return SharedTile(num_rows=rows, num_keys=keys, num_warps=4, num_stages=2, programs_per_sm=1)


class Step:
    """A batch whose sequences have `own` keys each behind what they share. All else in the pool is NaN."""

    def __init__(self, cache: KvCache, groups: Groups, own: Sequence[int], *, columns: int, rng: random.Random) -> None:
        size = cache.shape.block_size
        free = rng.sample(range(cache.shape.num_blocks), cache.shape.num_blocks)
        poison(cache)
        self.groups = [PrefixGroup(np.array(rows), num_keys) for rows, num_keys in groups]
        self.lengths = list(own)
        self.tables = torch.full((len(own), columns), NO_BLOCK, dtype=torch.int32)
        for group in self.groups:
            for s in group.members:
                self.lengths[s] += group.num_keys
            for i in range(group.num_keys // size):
                self.tables[torch.from_numpy(group.members), i] = block = free.pop()
                _write(cache, block, size)
        # The tables for kernels: only one row has the blocks of a shared stretch.
        self.given = self.tables.clone()
        for group in self.groups:
            self.given[torch.from_numpy(group.members[1:]), : group.num_keys // size] = NO_BLOCK
        for s, (length, more) in enumerate(zip(self.lengths, own, strict=True)):
            for i in range((length - more) // size, -(-length // size)):
                self.tables[s, i] = self.given[s, i] = block = free.pop()
                _write(cache, block, min(size, length - i * size))


def _write(cache: KvCache, block: int, count: int) -> None:
    """Random keys and values in the first slots of a block."""
    shape = cache.shape
    if cache.quantized is None:
        part = cache.tensor[block, :, :, :, :count]
        part.copy_(torch.randn(part.shape))
        return
    vectors = torch.randn(count, 2 * shape.num_kv_heads, shape.head_dim)
    vectors *= torch.exp(torch.randn(count, 2 * shape.num_kv_heads, 1))
    cache.quantized.write(LAYER, torch.full((count,), block, device=DEVICE), torch.arange(count, device=DEVICE), vectors.to(DEVICE))


def assert_right(out: torch.Tensor, q: torch.Tensor, cache: KvCache, step: Step, **logits: Any) -> None:
    rounding = decode_rounding(cache, q.dtype)
    if cache.quantized is not None and DEVICE == "cuda":
        # What the shared stretch is multiplied in.
        rounding = replace(rounding, keys_and_values=out.dtype, weights=max(torch.float16, out.dtype, key=unit))
    for s, length in enumerate(step.lengths):
        table = step.tables[s].clamp(max=cache.shape.num_blocks - 1).to(DEVICE)
        assert_attends(out[s : s + 1], q[s : s + 1], cache, LAYER, table, length, rounding=rounding, **logits)


def check(
    groups: Groups,
    own: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    program: SharedTile | None = None,
    quantization: str = "none",
    softcap: float = 0.0,
    sinks: bool = False,
) -> None:
    rng = random.Random(sum(own))
    keys = sum(own) + sum(num_keys for _, num_keys in groups)
    cache = poisoned_pool(
        dtype,
        num_blocks=keys // block_size + len(own) + 3,
        num_layers=2,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        quantization=quantization,
    )
    step = Step(cache, groups, own, columns=60, rng=rng)
    q = torch.randn(len(own), num_heads, head_dim, device=DEVICE).to(dtype)
    shared = SharedPrefix(cache.shape, num_heads=num_heads, num_seqs=len(own), device=DEVICE, tile=program, num_sms=3 * num_kv_heads)
    shared.listed.copy_(torch.from_numpy(pack(step.groups, shared.layout)))
    sizes = {"num_heads": num_heads, "num_seqs": len(own), "num_sms": 6}
    plan = DecodePlan(cache.shape, **sizes, device=DEVICE, shared=shared, softcap=softcap, sinks=sinks)
    for memory in (plan.parts, plan.scales, shared.parts, shared.scales):
        memory.fill_(torch.nan)
    seq_lens = torch.tensor(step.lengths, dtype=torch.int32, device=DEVICE)
    plan.refresh(seq_lens)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    given = some_sinks(num_heads) if sinks else None
    decode_attention(q, cache, LAYER, step.given.to(DEVICE), seq_lens, plan=plan, out=out, sinks=given)
    assert_right(out, q, cache, step, softcap=softcap, sinks=given)
    assert not plan.counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_remainders_behind_a_shared_prefix(dtype: torch.dtype) -> None:
    """Rows 1 and 4 share nothing; row 6 has nothing of its own but the newest token, row 4 nothing at all."""
    check([((0, 2, 3, 5, 6), 256)], [17, 150, 1, 129, 0, 40, 1], num_heads=6, num_kv_heads=2, dtype=dtype, program=tile(16))


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "quantization"),
    [
        (6, 64, torch.bfloat16, "fp8"),
        (6, 64, torch.bfloat16, "int8"),
        (4, 32, torch.bfloat16, "int4"),
        (40, 24, torch.float32, "fp8"),
        (40, 24, torch.float32, "int8"),
    ],
    ids=str,
)
def test_quantized_prefixes(num_heads: int, head_dim: int, dtype: torch.dtype, quantization: str) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": 2, "head_dim": head_dim}
    check([((0, 2, 3), 256)], [17, 150, 1, 129, 0], **shape, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize(("quantization", "head_dim"), [("none", 32), ("int8", 64)])
def test_softcaps_and_sinks(quantization: str, head_dim: int) -> None:
    """A sink counts once for the shared stretch and what is a sequence's own."""
    groups = [((0, 2, 3), 256)]
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim}
    check(groups, [17, 150, 1, 129, 0], **shape, quantization=quantization, softcap=2.0, sinks=True)


def test_several_groups() -> None:
    check([((4, 0), 128), ((1, 5, 2), 384), ((6, 7), 128)], [30, 9, 1, 70, 16, 2, 33, 5], num_heads=4, num_kv_heads=1, program=tile(16))


def test_long_remainders_have_parts_of_several_programs() -> None:
    check([((0, 1, 3), 256)], [200, 9, 1, 300], num_heads=4, num_kv_heads=2, head_dim=80, dtype=torch.float16)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1), (20, 1)], ids=str)
def test_query_heads_to_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    check([((0, 1, 2), 128)], [5, 33, 64], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 32), (128, 64), (256, 16)])
def test_head_sizes_and_block_sizes(head_dim: int, block_size: int) -> None:
    check([((2, 0), 256)], [100, 3, 65], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)


@pytest.mark.system
def test_random_groups() -> None:
    rng = random.Random(11)
    for _ in range(8):
        num_seqs, num_kv_heads = rng.randrange(2, 12), rng.choice([1, 2, 3])
        rows = rng.sample(range(num_seqs), num_seqs)
        groups: list[tuple[list[int], int]] = []
        while len(rows) > 1 and len(groups) < 3:
            size = rng.randrange(2, len(rows) + 1)
            groups.append((rows[:size], 128 * rng.randrange(1, 5)))
            rows = rows[size:]
        check(
            groups,
            [rng.choice([1, 16, rng.randrange(1, 20), rng.randrange(1, 200)]) for _ in range(num_seqs)],
            num_heads=num_kv_heads * rng.choice([1, 2, 3, 8]),
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice([16, 24, 64]),
            block_size=rng.choice([16, 32]),
            dtype=rng.choice(DTYPES),
            program=tile(rng.choice([16, 32, 64]), rng.choice([16, 32, 128])),
        )


def test_large_scores_do_not_overflow() -> None:
    cache = poisoned_pool(torch.float32, num_blocks=20, num_layers=2, num_kv_heads=1, block_size=16, head_dim=16)
    step = Step(cache, [((0, 1), 128)], [40, 20], columns=12, rng=random.Random(3))
    q = torch.randn(2, 2, 16, device=DEVICE) * 1000
    shared = SharedPrefix(cache.shape, num_heads=2, num_seqs=2, device=DEVICE, num_sms=3)
    shared.listed.copy_(torch.from_numpy(pack(step.groups, shared.layout)))
    plan = DecodePlan(cache.shape, num_heads=2, num_seqs=2, device=DEVICE, num_sms=6, shared=shared)
    seq_lens = torch.tensor(step.lengths, dtype=torch.int32, device=DEVICE)
    plan.refresh(seq_lens)
    assert_right(decode_attention(q, cache, LAYER, step.given.to(DEVICE), seq_lens, plan=plan), q, cache, step)


def test_a_captured_step_serves_other_groups_in_the_same_tensors() -> None:
    """As it is replayed: plan, list, tables and queries keep their addresses; nothing shared is a list like any other."""
    steps: list[tuple[Groups, list[int]]] = [
        ([((0, 1, 2), 256)], [40, 1, 100, 30]),
        ([], [0, 170, 5, 16]),
        ([((3, 1), 128), ((0, 2), 384)], [16, 16, 16, 16]),
    ]
    cache = poisoned_pool(torch.float32, num_blocks=60, num_layers=2, num_kv_heads=2, block_size=16, head_dim=16)
    shared = SharedPrefix(cache.shape, num_heads=4, num_seqs=4, device=DEVICE, num_sms=6, tile=tile(16))
    plan = DecodePlan(cache.shape, num_heads=4, num_seqs=4, device=DEVICE, num_sms=6, shared=shared)
    tables = torch.zeros(4, 30, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    q = torch.randn(4, 4, 16, device=DEVICE)
    out = torch.empty(4, 4, 16, device=DEVICE)

    def attend() -> None:
        plan.refresh(seq_lens)
        decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out)

    run = attend
    if DEVICE == "cuda":
        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        run = graph.replay
    for groups, own in steps:
        step = Step(cache, groups, own, columns=30, rng=random.Random(len(groups)))
        tables.copy_(step.given)
        seq_lens.copy_(torch.tensor(step.lengths))
        shared.listed.copy_(torch.from_numpy(pack(step.groups, shared.layout)))
        q.copy_(torch.randn(q.shape))
        out.fill_(torch.nan)
        run()
        assert_right(out, q, cache, step)


@pytest.mark.parametrize(
    ("changes", "num_heads", "windows", "serves"),
    [
        ({}, 8, (0, 0), True),
        ({}, 8, (30, 0), True),
        ({}, 8, (30, 30), False),
        ({"quantization": "fp8"}, 8, (0, 0), True),
        ({"block_size": 24}, 8, (0, 0), False),
        ({}, 512, (0, 0), False),
    ],
    ids=str,
)
def test_which_pools_are_served(changes: dict[str, Any], num_heads: int, windows: tuple[int, ...], serves: bool) -> None:
    shape = KvShape(num_blocks=1, block_size=16, num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    assert serves_shared(replace(shape, **changes), num_heads=num_heads, windows=windows) == serves
