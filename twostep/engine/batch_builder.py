"""From planned chunks to flat arrays. Runs once a step: no Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostep.engine.batch import Batch, SamplingRow
from twostep.engine.step_work import StepWork
from twostep.engine.token_masks import TokenMasks


def build_batch(work: StepWork, *, block_size: int, mark_layers: Sequence[int] = ()) -> Batch:
    """The planned chunks, S >= 1. Histories are the sequences' live lists: they do not change before the launch."""
    num_seqs = len(work.sequences)
    starts = np.array(work.starts, np.int64)
    counts = np.array(work.num_tokens, np.int64)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    seq_lens = starts + counts
    total = int(query_start[-1])

    num_blocks = -(-seq_lens // block_size)
    block_tables = np.zeros((num_seqs, int(num_blocks.max())), np.int32)
    for table, sequence, count in zip(block_tables, work.sequences, num_blocks.tolist(), strict=True):
        table[:count] = sequence.blocks[:count]
    if total == num_seqs:
        row_of, positions = np.arange(num_seqs), starts
    else:
        row_of = np.repeat(np.arange(num_seqs), counts)
        positions = np.repeat(starts - query_start[:-1], counts) + np.arange(total)
    slots = block_tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size

    known = [
        0 if row >= 0 else sequence.tokens[start] for sequence, start, row in zip(work.sequences, work.starts, work.carried, strict=True)
    ]
    firsts = query_start[:-1]
    token_ids = np.empty(total, np.int64)
    token_ids[firsts] = known
    for first, sequence, start, count in zip(
        firsts[work.num_decodes :].tolist(),
        work.sequences[work.num_decodes :],
        work.starts[work.num_decodes :],
        work.num_tokens[work.num_decodes :],
        strict=True,
    ):
        end = start + count
        tokens = sequence.given if end <= len(sequence.given) else sequence.tokens
        token_ids[first : first + count] = tokens[start:end]
    carried = None
    if any(row >= 0 for row in work.carried):
        carried = np.full(total, -1, np.int32)
        carried[firsts] = work.carried
    return Batch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=block_tables,
        slots=slots,
        sample_rows=query_start[1:][np.array(work.sampled, bool)].astype(np.int64) - 1,
        sampling=[
            SamplingRow(
                params=sequence.request.sampling,
                position=end - sequence.request.num_prompt_tokens,
                history=sequence.tokens,
                num_prompt_tokens=sequence.request.num_prompt_tokens,
                stop_ids=sequence.stop_ids,
                seq_id=sequence.request.seq_id,
            )
            for sequence, end, complete in zip(work.sequences, seq_lens.tolist(), work.sampled, strict=True)
            if complete
        ],
        carried=carried,
        masks=TokenMasks.of(work.masks) if work.masks else None,
        mark_layers=mark_layers,
    )
