"""From planned chunks to flat arrays. Runs once a step: no Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostep.engine.batch import Batch, SamplingRow
from twostep.engine.sequence import EngineSequence


def build_batch(sequences: Sequence[EngineSequence], num_tokens: Sequence[int], *, block_size: int) -> Batch:
    """The next `num_tokens[s]` tokens of each sequence, S >= 1, each at least one token. A sequence whose tokens are then all
    computed is sampled. Histories are the sequences' live lists: they do not change before the step ends."""
    num_seqs = len(sequences)
    starts = np.fromiter((s.num_computed for s in sequences), np.int64, num_seqs)
    counts = np.asarray(num_tokens, dtype=np.int64)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    seq_lens = starts + counts
    total = int(query_start[-1])

    positions = np.repeat(starts - query_start[:-1], counts) + np.arange(total)
    num_blocks = -(-seq_lens // block_size)
    block_tables = np.zeros((num_seqs, int(num_blocks.max())), np.int32)
    for table, sequence, count in zip(block_tables, sequences, num_blocks.tolist(), strict=True):
        table[:count] = sequence.blocks[:count]
    row_of = np.repeat(np.arange(num_seqs), counts)
    slots = block_tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size

    token_ids = np.empty(total, np.int64)
    sampled: list[EngineSequence] = []
    sample_rows: list[int] = []
    row = 0
    for sequence, count in zip(sequences, num_tokens, strict=True):
        first, end = sequence.num_computed, sequence.num_computed + count
        if count == 1:
            token_ids[row] = sequence.tokens[first]
        elif end <= len(sequence.given):
            token_ids[row : row + count] = sequence.given[first:end]
        else:
            token_ids[row : row + count] = sequence.tokens[first:end]
        row += count
        if end == len(sequence.tokens):
            sampled.append(sequence)
            sample_rows.append(row - 1)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=block_tables,
        slots=slots,
        sample_rows=np.asarray(sample_rows, dtype=np.int64),
        sampling=[
            SamplingRow(
                params=s.request.sampling,
                position=s.position,
                history=s.tokens,
                num_prompt_tokens=s.request.num_prompt_tokens,
                stop_ids=s.stop_ids,
            )
            for s in sampled
        ],
    )
