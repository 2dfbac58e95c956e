"""The fake device: its tokens come from its bytes, all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import make_request

from twostep.engine.batch import Batch, SamplingRow
from twostep.engine.fake import FakeRunner, fake_next_token


def one_sequence(token_ids: list[int], blocks: list[int], block_size: int, *, start: int = 0, min_tokens: int = 0) -> Batch:
    """A batch that computes token_ids[start:] of one sequence and samples after them."""
    positions = np.arange(start, len(token_ids))
    table = np.array([blocks], np.int32)
    request = make_request("a", token_ids, min_tokens=min_tokens)
    row = SamplingRow(params=request.sampling, position=0, history=token_ids, num_prompt_tokens=1, stop_ids=frozenset({28, 29}))
    return Batch(
        token_ids=np.array(token_ids[start:], np.int64),
        positions=positions,
        query_start=np.array([0, len(positions)], np.int32),
        seq_lens=np.array([len(token_ids)], np.int32),
        block_tables=table[None],
        slots=table[:, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        sample_rows=np.array([len(positions) - 1], np.int64),
        sampling=[row],
    )


def test_the_next_token_is_read_back_from_the_blocks() -> None:
    runner = FakeRunner(num_blocks=4, block_size=2, vocab_size=100)
    assert runner.run(one_sequence([5, 7, 2], [3, 1], 2)).token_ids == [28]
    # Only the last token is in the batch: the others come out of blocks 3 and 1.
    assert runner.run(one_sequence([5, 7, 2, 28], [3, 1], 2, start=3)).token_ids == [41]
    assert runner.run(one_sequence([5, 7, 2, 28], [2, 1], 2, start=3)).token_ids == [(41 - 5 - 14) % 100], "another block is another answer"


@pytest.mark.parametrize(("dtype", "planes"), [("float32", 2), ("bfloat16", 2), ("bfloat16", 1)])
def test_blocks_move_and_every_plane_counts(dtype: str, planes: int) -> None:
    shape: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "vocab_size": 1009,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "num_planes": planes,
        "dtype": dtype,
    }
    source, target = FakeRunner(**shape), FakeRunner(**shape)
    tokens = list(range(100, 110))
    source.run(one_sequence(tokens, [6, 0, 3], 4))
    data = np.empty((3, source.kv_shape.block_bytes), np.uint8)
    source.read_blocks([6, 0, 3], data)
    assert np.count_nonzero(data[:2].view(np.int32)) == 2 * source.kv_shape.block_bytes // 4, "full blocks are full of it"
    expected = fake_next_token([*tokens, 1], 1009)
    for lost, right in ((None, True), (slice(0, 8), False), (slice(-8, None), False)):
        moved = data.copy()
        if lost is not None:
            moved[1, lost] = 0
        target.write_blocks([2, 5, 4], moved)
        got = target.run(one_sequence([*tokens, 1], [2, 5, 4], 4, start=10)).token_ids
        assert (got == [expected]) is right
