"""What layers without KV remember of a step's sequences, in blocks of the pool that the sequences own (KvShape.num_state_blocks).

a sequence's state blocks    │ layer 0        │ layer 1        │ …       each layer in whole blocks, so that it is one gather of rows,
                                                                          in columns of them (state_columns.py)

A step reads them in the blocks that hold them before it and leaves them in those of afterwards, mostly the same (Batch.state_sources).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from twostep.engine.batch import Batch
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.state_columns import StateColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChunk:
    """Several tokens of one sequence: rows [start, stop) of a step's T."""

    sequence: int
    start: int
    stop: int


class SequenceStates:
    """One step's view of its S sequences' states.

    singles   int64 [N]  sequences with one token in the step, and
    rows      int64 [N]  the rows of these tokens
    chunks    the other sequences
    """

    def __init__(self, batch: Batch, cache: KvCache) -> None:
        assert batch.state_sources is not None
        assert batch.state_tables is not None
        device = cache.tensor.device
        counts = np.diff(batch.query_start)
        starts = batch.query_start[:-1]
        single = np.flatnonzero(counts == 1)
        self.singles = torch.from_numpy(single).to(device)
        self.rows = torch.from_numpy(starts[single].astype(np.int64)).to(device)
        self.chunks = [
            SequenceChunk(sequence=int(i), start=int(starts[i]), stop=int(starts[i] + counts[i])) for i in np.flatnonzero(counts > 1)
        ]
        self._cache = cache
        self._sources = torch.from_numpy(batch.state_sources.astype(np.int64)).to(device)
        self._tables = torch.from_numpy(batch.state_tables.astype(np.int64)).to(device)
        self._is_new = torch.from_numpy(batch.seq_lens == counts).to(device).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self._tables)

    def read(self, layer: int, columns: StateColumns, num_bytes: int) -> torch.Tensor:
        """Returns what a layer left of each sequence before the step, uint8 [S, columns.num_own, num_bytes]; zeros of a sequence that
        begins."""
        held = self._cache.read_states(self._sources, layer, columns, num_bytes)
        return held.masked_fill_(self._is_new, 0)

    def write(self, layer: int, columns: StateColumns, states: torch.Tensor) -> None:
        """Leaves what the layer has of each sequence after it, uint8 [S, columns.num_own, num_bytes]."""
        self._cache.write_states(self._tables, layer, columns, states)
