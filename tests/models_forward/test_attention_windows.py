"""The CPU's attention with windows against the float64 oracle, where blocks wholly behind every window hold NaN."""

from __future__ import annotations

import random

import torch
from attention_oracle import paged_attention
from forward_helpers import make_batch, scattered_sequences
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.batch import KvShape
from twostep.model.kernels.ops import Ops
from twostep.model.kernels.torch_attention import AttentionSpec, RopeTables
from twostep.model.step.kv_cache import KvCache

NUM_BLOCKS = 150
windows = st.integers(1, 20) | st.integers(1, 400)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6) | st.integers(1, 200)), min_size=1, max_size=4),
    window=windows,
    other=windows | st.just(0),
    block_size=st.sampled_from([8, 16, 32]),
    seed=st.integers(0, 99),
)
def test_chunks_and_decode(sequences: list[tuple[int, int]], window: int, other: int, block_size: int, seed: int) -> None:
    check(sequences, window, other, block_size, seed)


def test_more_keys_than_are_gathered_at_once() -> None:
    """Decoding sequences are attended one by one, in parts of several, and not in the order of their rows."""
    many = [(300, 1), (129, 1), (20, 150), (40, 1), (1, 1), (290, 1), (60, 1), (30, 1)]
    check(many, window=100, other=0, block_size=16, seed=0, head_dim=256)


def check(sequences: list[tuple[int, int]], window: int, other: int, block_size: int, seed: int, head_dim: int = 8) -> None:
    """`sequences` are (tokens in the pool before, tokens of the step)."""
    d = head_dim
    shape = KvShape(
        num_blocks=NUM_BLOCKS * 16 // block_size, block_size=block_size, num_layers=2, num_kv_heads=2, head_dim=d, dtype="float32"
    )
    cache = KvCache(shape)
    generator = torch.Generator().manual_seed(seed)
    cache.tensor.normal_(generator=generator)
    made = scattered_sequences([before + new for before, new in sequences], block_size, shape.num_blocks, random.Random(seed))
    for sequence, (before, _) in zip(made, sequences, strict=True):
        sequence.num_computed = before
        cache.tensor[sequence.blocks[: max(0, before - window + 1) // block_size], 0] = torch.nan
    batch = make_batch([(sequence, new) for sequence, (_, new) in zip(made, sequences, strict=True)], block_size)
    nothing = torch.empty(600, 0)
    plan = Ops().plan_attention(
        batch, cache, AttentionSpec(num_heads=4, rope=[RopeTables(cos=nothing, sin=nothing)] * 2, windows=(window, other))
    )
    for layer, keys in enumerate((window, other)):
        qkv = torch.randn(len(batch.token_ids), 8 * d, generator=generator)
        plan.rotate_and_write(layer, qkv)
        got = plan.attend(layer, qkv).view(-1, 4, d)
        rows = torch.split(qkv.view(-1, 8, d)[:, :4], [new for _, new in sequences])
        want = [
            paged_attention(query, cache, layer, torch.tensor(sequence.blocks), len(sequence.tokens), window=keys)
            for query, sequence in zip(rows, made, strict=True)
        ]
        torch.testing.assert_close(got.double(), torch.cat(want), rtol=0, atol=1e-5)
