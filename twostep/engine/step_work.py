"""A planned step, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from twostep.engine.block_pool import BlockCopy
from twostep.engine.preemption import SavedBlocks
from twostep.engine.sequence import EngineSequence
from twostep.engine.types import PrefillProgress, SequenceFailure, TokenOutput
from twostep.step_curve import StepWorkload, chunk_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSave:
    """The pool's `blocks` of a sequence are to be copied to the rows of `saved`."""

    sequence: EngineSequence
    blocks: Sequence[int]
    saved: SavedBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoad:
    """Rows of `saved`, from the `first` on, are to be copied to the pool's `blocks`."""

    saved: SavedBlocks
    first: int
    blocks: Sequence[int]

    @property
    def rows(self) -> Sequence[int]:
        return self.saved.rows[self.first :]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One planned step: one chunk of each of S sequences, its first `num_decodes` decodes, then prompts. `copies` and `loads` are made
    before it runs.

    starts      first token of each chunk
    num_tokens  at least 1 each
    carried     row of the step planned before that samples the chunk's only token, or -1: the tokens are known
    sampled     whether a token is sampled after the chunk: rows count through these, in order
    """

    sequences: Sequence[EngineSequence]
    starts: Sequence[int]
    num_tokens: Sequence[int]
    carried: Sequence[int]
    sampled: Sequence[bool]
    num_decodes: int
    copies: Sequence[BlockCopy]
    loads: Sequence[BlockLoad]
    # Blocks that the step reads and whose sequence has taken others in exchange since: owned until it is settled.
    exchanged: list[int] = field(default_factory=list)
    # Of the sampled rows that are constrained: (row, its mask).
    masks: list[tuple[int, npt.NDArray[np.int32]]] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.num_tokens[self.num_decodes :])

    @property
    def workload(self) -> StepWorkload:
        chunks = zip(self.num_tokens[self.num_decodes :], self.starts[self.num_decodes :], strict=True)
        return StepWorkload(
            prompt_tokens=self.num_prefill_tokens,
            pairs=sum(chunk_pairs(count, start) for count, start in chunks),
            decodes=self.num_decodes,
            context=sum(self.starts[: self.num_decodes]) + self.num_decodes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    tokens: Sequence[TokenOutput] = ()
    progress: Sequence[PrefillProgress] = ()
    failures: Sequence[SequenceFailure] = ()


def plan_chunks(
    sequences: Sequence[EngineSequence], prompt_tokens: Sequence[int], copies: Sequence[BlockCopy], loads: Sequence[BlockLoad]
) -> StepWork:
    """The step of these sequences, decodes first; the last ones compute `prompt_tokens`. Counts what is planned."""
    num_decodes = len(sequences) - len(prompt_tokens)
    num_tokens = [1] * num_decodes + list(prompt_tokens)
    starts, carried, sampled = [], [], []
    row = 0
    for sequence, count in zip(sequences, num_tokens, strict=True):
        start = sequence.num_planned
        starts.append(start)
        carried.append(sequence.pending_row if sequence.num_pending else -1)
        sequence.num_planned = start + count
        sequence.num_steps += 1
        complete = start + count == len(sequence.tokens) + sequence.num_pending
        sampled.append(complete)
        if complete:
            sequence.num_pending += 1
            sequence.pending_row = row
            row += 1
    return StepWork(
        sequences=sequences,
        starts=starts,
        num_tokens=num_tokens,
        carried=carried,
        sampled=sampled,
        num_decodes=num_decodes,
        copies=copies,
        loads=loads,
    )
