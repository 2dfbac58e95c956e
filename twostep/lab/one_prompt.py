"""One prompt as a step whose every row is looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostep.engine.batch import Batch, KvShape


def prompt_batch(token_ids: Sequence[int], shape: KvShape) -> Batch:
    """Returns the step of a prompt in the pool's first blocks, which nobody else uses meanwhile; nothing is sampled."""
    count, block_size = len(token_ids), shape.block_size
    return Batch(
        token_ids=np.array(token_ids, np.int64),
        positions=np.arange(count),
        query_start=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=shape.in_groups(np.arange(-(-count // block_size), dtype=np.int32)[None]),
        slots=shape.in_groups(np.arange(count)),
        sample_rows=np.arange(count),
        sampling=(),
        state_sources=shape.trial_states(1),
        state_tables=shape.trial_states(1),
    )
