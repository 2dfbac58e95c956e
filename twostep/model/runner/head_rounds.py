"""Tokens that a head drafts for many sequences at once, a round after the other.

    round 0    5 sequences     the last tokens, and the states before them
    round 1    5 of them       the tokens drafted, and what the head made of the round before
    round 2    3 of them       those that more is wanted of stand first

On a GPU the tokens stay there from round to round; the host waits once, for all of them. Rounds are captured (head_graphs.py) up to the
most rows that they are made for. What is written behind a sequence's blocks goes to scratch blocks of the pool; what lies in its own is
written again by the step that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from twostep.engine.batch import Batch, SamplingRow
from twostep.model.heads.head import DraftHead
from twostep.model.heads.tap import HeadTap
from twostep.model.kernels.ops import AttentionPlan, Ops
from twostep.model.kernels.torch_attention import slots_before
from twostep.model.runner.sampler import sample
from twostep.model.step.kv_cache import KvCache

# Sequences that are drafted for at once: beyond, drafts hardly pay, and each takes scratch.
MOST_ROWS = 64


class DraftRow(NamedTuple):
    """Asks for `len(sampling)` tokens after the token `token_id` at `position`, drawn so. `blocks`: the sequence's, which hold all
    positions before that."""

    token_id: int
    position: int
    blocks: Sequence[int]
    sampling: Sequence[SamplingRow]


def num_scratch_blocks(block_size: int, max_num_seqs: int, most_tokens: int) -> int:
    """Returns how many blocks rounds need behind the pool's."""
    return min(MOST_ROWS, max_num_seqs) * -(-most_tokens // block_size)


class Rounds(Protocol):
    """Runs rounds on a device: CpuRounds, or DeviceRounds (head_graphs.py)."""

    def run(self, batches: Sequence[Batch]) -> Sequence[Sequence[int]]:
        """Returns the tokens of each round, those of its batch's rows in order, negative where there is none. Of every batch but the first,
        tokens are those that the round before gives to the first rows."""
        ...


class HeadRounds:
    """Belongs to a runner and its thread. The pool has `num_scratch_blocks`. A sequence may lose its blocks to another one while it is
    drafted for: then some keys of that one's in the head's layer are wrong, and its proposals worse."""

    def __init__(self, head: DraftHead, cache: KvCache, rounds: Rounds, *, max_num_seqs: int, most_tokens: int) -> None:
        self.max_rows = min(MOST_ROWS, max_num_seqs)
        self.most_tokens = min(most_tokens, head.most_tokens)
        self._head = head
        self._cache = cache
        self._rounds = rounds
        self._block_size = cache.shape.block_size
        each = -(-most_tokens // self._block_size)
        first = cache.shape.num_blocks
        self._scratch = np.arange(first, first + self.max_rows * each, dtype=np.int32).reshape(self.max_rows, each)

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns what may follow in each of at most `max_rows` sequences, of which at most `most_tokens` tokens each are wanted. Waits for
        the device."""
        assert len(rows) <= self.max_rows
        order = sorted(range(len(rows)), key=lambda r: -len(rows[r].sampling))
        ordered = [rows[r] for r in order]
        batches = self._batches(ordered)
        drafted: list[list[int]] = [[] for _ in rows]
        with torch.inference_mode():
            for token_ids in self._rounds.run(batches):
                for r, token_id in zip(order, token_ids, strict=False):
                    drafted[r].append(max(0, token_id))
        if self._head.attention is not None and self._cache.sums is not None:
            self._cache.sums.overwritten(self._written(ordered))
        return drafted

    def _batches(self, rows: Sequence[DraftRow]) -> list[Batch]:
        owned = np.array([len(row.blocks) for row in rows])
        tables = np.zeros((len(rows), int(owned.max()) + self._scratch.shape[1]), np.int32)
        for r, row in enumerate(rows):
            tables[r, : len(row.blocks)] = row.blocks
            tables[r, len(row.blocks) : len(row.blocks) + self._scratch.shape[1]] = self._scratch[r]
        counts = np.array([len(row.sampling) for row in rows])
        positions = np.array([row.position for row in rows], np.int64)
        token_ids = np.array([row.token_id for row in rows], np.int64)
        batches = []
        for number in range(int(counts[0])):
            count = int((counts > number).sum())
            at, of_round = positions[:count] + number, np.arange(count)
            batches.append(
                Batch(
                    token_ids=token_ids[:count],
                    positions=at,
                    query_start=np.arange(count + 1, dtype=np.int32),
                    seq_lens=(at + 1).astype(np.int32),
                    block_tables=tables[None, :count],
                    slots=tables[None, of_round, at // self._block_size].astype(np.int64) * self._block_size + at % self._block_size,
                    sample_rows=of_round,
                    sampling=[row.sampling[number] for row in rows[:count]],
                    carried=of_round.astype(np.int32) if number else None,
                )
            )
        return batches

    def _written(self, rows: Sequence[DraftRow]) -> list[int]:
        return [block for row in rows for block in row.blocks[row.position // self._block_size :]]


class CpuRounds:
    """Rounds of a device that is done when it is asked."""

    def __init__(self, tap: HeadTap, cache: KvCache, ops: Ops) -> None:
        self._head = tap.head
        self._tap = tap
        self._cache = cache.with_scratch()
        self._ops = ops

    def run(self, batches: Sequence[Batch]) -> Sequence[Sequence[int]]:
        drafted: list[list[int]] = []
        states = self._tap.by_slot.index_select(0, torch.from_numpy(slots_before(batches[0], self._cache.shape.block_size)))
        for number, batch in enumerate(batches):
            count, rows = len(batch.seq_lens), batch.sampling
            if drafted:
                batch = replace(batch, token_ids=np.maximum(np.array(drafted[-1][:count], np.int64), 0), carried=None)
                rows = [_after(row, [of_round[r] for of_round in drafted]) for r, row in enumerate(rows)]
            plan, token_ids = plan_of(self._head, batch, self._cache, self._ops), torch.from_numpy(batch.token_ids)
            states, logits = self._head.step(plan, token_ids, states[:count], number)
            drafted.append(self._choose(logits, rows))
        return drafted

    def _choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        ids = self._head.target_ids
        if ids is None or any(map(asks_for_tokens, rows)):
            return list(sample(self._head.whole_logits(logits), rows).token_ids)
        # All other tokens have no share, and in their order noise falls on the same ones.
        return [token if token < 0 else int(ids[token]) for token in sample(logits, rows).token_ids]


def plan_of(head: DraftHead, batch: Batch, cache: KvCache, ops: Ops) -> AttentionPlan | None:
    """Returns the plan of a round; None where the head attends to nothing."""
    return None if head.attention is None else ops.plan_attention(batch, cache, head.attention)


def asks_for_tokens(row: SamplingRow) -> bool:
    """Returns whether a row's sampling treats some tokens otherwise than others."""
    params = row.params
    return params.has_penalties or bool(params.logit_bias) or bool(params.min_tokens and row.stop_ids)


def _after(row: SamplingRow, drafted: Sequence[int]) -> SamplingRow:
    """Returns the row as it is once these have come."""
    return replace(row, history=[*row.history, *drafted]) if row.params.has_penalties else row
