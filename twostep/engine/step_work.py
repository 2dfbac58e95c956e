"""A planned step, the arrays that a runner gets of it, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Batch, PooledRows, RowsBehind, SamplingRow, ScoredRows, TokenMasks
from twostep.engine.block_tables import BlockTables
from twostep.engine.sequence import EngineSequence
from twostep.engine.types import PooledPrompt, PrefillProgress, PromptScores, SequenceFailure, StepTokens
from twostep.pooling import Pooling
from twostep.step_curve import StepWorkload, chunk_pairs


class LeftState(NamedTuple):
    """Holds the state of a sequence after its first `num_tokens`."""

    sequence: EngineSequence
    num_tokens: int
    blocks: Sequence[int]


class Behind(NamedTuple):
    """A decode that goes on behind drafts of the step planned before. `place`: in its step; `drafted`: there; `expected`: the tokens that
    may follow the last one that is known, the first of which is sampled there."""

    place: int
    drafted: Sequence[int]
    expected: Sequence[int]

    def token(self, num_accepted: int, place: int) -> int:
        """Returns the draft at that place of its decode, from 1 on, if so many are accepted before it. Any token is as good where none
        is expected."""
        at = num_accepted + place
        return self.expected[at] if at < len(self.expected) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One planned step: one chunk of each of S sequences, its first `num_decodes` decodes, then prompts.

    starts      first token of each chunk; behind drafts, if none of them is accepted
    num_tokens  at least 1 each
    carried     row of the step planned before that samples the chunk's first token, or -1: it is known. Behind drafts, the first of the
                rows one of which does
    sampled     after how many of the chunk's last tokens one is sampled: none, the last, or in a decode with drafts all. Rows count through
                these, in order
    drafts      of each decode: the tokens drafted after its own; behind drafts, if all of those are accepted, until that is known
    behind      the decodes that go on behind drafts of the step planned before
    scored      of how many of its first tokens the successors' log probabilities are wanted
    pooled      of how many of its last tokens the hidden states are added up; where the chunk ends a prompt, the pooling is over, and
                nothing is sampled
    states      where each chunk finds its sequence's state; none where the model has none
    """

    sequences: Sequence[EngineSequence]
    starts: Sequence[int]
    num_tokens: Sequence[int]
    carried: Sequence[int]
    sampled: Sequence[int]
    scored: Sequence[int]
    pooled: Sequence[int]
    states: Sequence[Sequence[int]]
    num_decodes: int
    drafts: list[Sequence[int]] = field(default_factory=list)
    behind: dict[EngineSequence, Behind] = field(default_factory=dict)
    # The rows of a decode and its drafts read what lies before them once; else each does.
    reads_once: bool = False
    # Blocks that the step reads and whose sequence has taken others in exchange: owned until it is settled.
    exchanged: list[int] = field(default_factory=list)
    # Of these, states that their sequences go on from elsewhere and that are their prefixes' once the step is settled.
    left_states: Sequence[LeftState] = ()
    # Of the sampled rows that are constrained: (row, its sequence, its mask).
    masks: Sequence[tuple[int, EngineSequence, npt.NDArray[np.int32]]] = ()

    def accept(self, sequence: EngineSequence, num_accepted: int) -> None:
        """Notes how many drafts of the step before were accepted; nothing of it is behind drafts if it is not in `behind`."""
        behind = self.behind.get(sequence)
        if behind is not None and self.drafts:
            drafted = [behind.token(num_accepted, i) for i in range(1, self.num_tokens[behind.place])]
            self.drafts[behind.place] = sequence.drafted = drafted

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.num_tokens[self.num_decodes :])

    @property
    def workload(self) -> StepWorkload:
        """A draft counts as a decode; whether it is one more that reads what lies before it, `reads_once` says."""
        num_drafts, context = 0, 0
        for start, drafted in zip(self.starts, self.drafts, strict=False):
            num_drafts += len(drafted)
            context += 0 if self.reads_once else len(drafted) * start
        work = self.without_drafts
        return replace(work, decodes=work.decodes + num_drafts, context=work.context + context + num_drafts) if num_drafts else work

    @property
    def without_drafts(self) -> StepWorkload:
        """Returns the work that would be left without drafts."""
        chunks = zip(self.num_tokens[self.num_decodes :], self.starts[self.num_decodes :], strict=True)
        return StepWorkload(
            prompt_tokens=self.num_prefill_tokens,
            pairs=sum(chunk_pairs(count, start) for count, start in chunks),
            decodes=self.num_decodes,
            context=sum(self.starts[: self.num_decodes]) + self.num_decodes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    tokens: StepTokens = field(default_factory=StepTokens)
    progress: Sequence[PrefillProgress] = ()
    failures: Sequence[SequenceFailure] = ()
    scores: Sequence[PromptScores] = ()
    pooled: Sequence[PooledPrompt] = ()


def plan_chunks(
    sequences: Sequence[EngineSequence],
    prompt_tokens: Sequence[int],
    *,
    left_states: Sequence[LeftState] = (),
    drafts: Sequence[Sequence[int]] = (),
    expected: Callable[[EngineSequence], Sequence[int]] | None = None,
    reads_once: bool = False,
) -> StepWork:
    """Returns the step of these sequences, decodes first, each with its drafts if there are any; the last ones compute `prompt_tokens`.
    Counts what is planned of each, and takes the masks of those that sample. `expected`: what may follow the last known token of one that
    has drafts in flight; where it has no more of them in this step, nobody asks."""
    num_decodes = len(sequences) - len(prompt_tokens)
    num_drafts = list(map(len, drafts)) or [0] * num_decodes
    num_tokens = [1 + count for count in num_drafts] + list(prompt_tokens)
    starts, carried, sampled, masks = [], list[int](), [], []
    states = [sequence.state_source or sequence.state_blocks for sequence in sequences]
    exchanged: list[int] = []
    scored = [0] * num_decodes + list(map(_num_scored, sequences[num_decodes:], prompt_tokens))
    pooled = [0] * num_decodes + list(map(_num_pooled, sequences[num_decodes:], prompt_tokens))
    row, behind = 0, dict[EngineSequence, Behind]()
    for sequence, count, num_pooled, num_drafted in zip(sequences, num_tokens, pooled, chain(num_drafts, repeat(0)), strict=False):
        start = sequence.num_planned
        if sequence.num_pending > 1:
            starts.append(start - len(sequence.drafted))
            follows = expected(sequence) if num_drafted and expected is not None else ()
            behind[sequence] = Behind(len(carried), sequence.drafted, follows)
        else:
            starts.append(start)
        carried.append(sequence.pending_row if sequence.num_pending else -1)
        sequence.num_planned = start + count
        sequence.num_steps += 1
        if sequence.state_source:
            exchanged += sequence.state_source
            sequence.state_source = ()
        complete = start + count - num_drafted == len(sequence.tokens) + sequence.num_pending
        sampled.append(0 if num_pooled or not complete else 1 + num_drafted)
        if num_pooled:
            sequence.num_pooled = start + count
            # In place of a token: nothing more is planned of it.
            sequence.num_pending += complete
        elif complete:
            sequence.num_pending += 1 + num_drafted
            sequence.drafted = drafts[len(carried) - 1] if num_drafted else ()
            sequence.pending_row = row
            if sequence.constraint is not None:
                masks += [(row + i, sequence, mask) for i, mask in enumerate(sequence.constraint.take(num_drafted))]
            row += 1 + num_drafted
    return StepWork(
        sequences=sequences,
        starts=starts,
        num_tokens=num_tokens,
        carried=carried,
        sampled=sampled,
        scored=scored,
        pooled=pooled,
        states=states,
        num_decodes=num_decodes,
        exchanged=exchanged,
        left_states=left_states,
        drafts=list(drafts),
        behind=behind,
        reads_once=reads_once,
        masks=masks,
    )


def _num_scored(sequence: EngineSequence, count: int) -> int:
    """Returns how many of a prompt's next `count` tokens are scored: the last one's successor is sampled, or no part of the prompt."""
    return max(0, min(count, sequence.request.num_prompt_tokens - 1 - sequence.num_planned)) if sequence.wants_scores else 0


def _num_pooled(sequence: EngineSequence, count: int) -> int:
    """Returns how many of a prompt's next `count` tokens are pooled: after a preemption some were before."""
    end = sequence.num_planned + count
    match sequence.request.pooling:
        case Pooling.LAST:
            return int(end == len(sequence.tokens))
        case Pooling.MEAN:
            return min(count, max(0, end - sequence.num_pooled))
        case None:
            return 0


class _BatchSequences(NamedTuple):
    """The S sequences of a batch: those of a step, but that a decode with drafts is as many sequences of one token.

    starts       int64 [S]  place of the first token; behind drafts, if none of those is accepted
    counts       int64 [S]  tokens
    slack        int64 [S]  how many places further it may be than is known
    carried      int32 [S]  the row of the step before that samples its token, or -1; behind drafts, -1
    sampled      bool [S]   whether a token is sampled after its last one
    tables       S rows of the block tables
    num_encoded  int32 [S], as Batch.num_encoded
    num_decodes  the first ones, which are decodes and their drafts
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    slack: npt.NDArray[np.int64]
    carried: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]
    tables: list[int]
    num_encoded: npt.NDArray[np.int32] | None
    num_decodes: int


def build_batch(work: StepWork, tables: BlockTables, *, block_size: int, mark_layers: Sequence[int] = ()) -> Batch:
    """Returns the planned chunks, S >= 1, as flat arrays, without a Python loop over tokens. Histories are the sequences' live lists: they
    do not change before the launch.

    A decode with drafts is as many sequences of one row: each sees what lies before it, as what is written in a step is there before it is
    attended. Their tables are the same, so that a runner which reads shared prefixes once reads theirs once."""
    rows = _batch_sequences(work)
    num_seqs = len(rows.counts)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(rows.counts, out=query_start[1:])
    seq_lens = rows.starts + rows.counts
    total = int(query_start[-1])

    block_tables = tables.gather(rows.tables, -(-int((seq_lens + rows.slack).max()) // block_size))
    if total == num_seqs:
        row_of, positions = np.arange(num_seqs), rows.starts
    else:
        row_of = np.repeat(np.arange(num_seqs), rows.counts)
        positions = np.repeat(rows.starts - query_start[:-1], rows.counts) + np.arange(total)
    slots = block_tables[:, row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size

    carried = None
    if rows.carried.max() >= 0:
        carried = np.full(total, -1, np.int32)
        carried[query_start[:-1]] = rows.carried
    has_state = bool(work.states[0])
    prompts_start = query_start[rows.num_decodes :]
    return Batch(
        token_ids=_token_ids(work, rows, query_start),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=block_tables,
        slots=slots,
        sample_rows=query_start[1:][rows.sampled].astype(np.int64) - 1,
        sampling=_sampling(work),
        carried=carried,
        masks=TokenMasks.of([(row, bits) for row, _, bits in work.masks]) if work.masks else None,
        mark_layers=mark_layers,
        scored=_scored_rows(work, prompts_start) if any(work.scored) else None,
        state_sources=np.array(work.states, np.int32) if has_state else None,
        state_tables=np.array([s.state_blocks for s in work.sequences], np.int32) if has_state else None,
        pooled=_pooled_rows(work, prompts_start) if any(work.pooled) else None,
        behind=_rows_behind(work, rows.slack, positions, block_tables, block_size) if work.behind else None,
        num_encoded=rows.num_encoded,
    )


def _batch_sequences(work: StepWork) -> _BatchSequences:
    sequences, num_decodes = work.sequences, work.num_decodes
    starts, counts = np.array(work.starts, np.int64), np.array(work.num_tokens, np.int64)
    carried, sampled = np.array(work.carried, np.int32), np.array(work.sampled, bool)
    tables = [sequence.table for sequence in sequences]
    num_encoded = None if sequences[0].num_encoded is None else np.array([sequence.num_encoded for sequence in sequences], np.int32)
    slack = np.zeros(len(counts), np.int64)
    for each in work.behind.values():
        slack[each.place] = len(each.drafted)
    if work.drafts:
        num_rows = np.ones(len(counts), np.int64)
        num_rows[:num_decodes] = counts[:num_decodes]
        owners = np.repeat(np.arange(len(counts)), num_rows)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        starts, counts = starts[owners] + places, np.where(owners < num_decodes, 1, counts[owners])
        sampled, carried = sampled[owners], np.where(places, -1, carried[owners])
        tables = [tables[owner] for owner in owners.tolist()]
        slack = slack[owners]
        num_encoded = None if num_encoded is None else num_encoded[owners]
        num_decodes += len(owners) - len(sequences)
    carried[slack > 0] = -1
    return _BatchSequences(starts, counts, slack, carried, sampled, tables, num_encoded, num_decodes)


def _token_ids(work: StepWork, rows: _BatchSequences, query_start: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Returns the tokens, int64 [T]; 0 where one is carried, or hangs on how many drafts are accepted."""
    token_ids = np.zeros(int(query_start[-1]), np.int64)
    firsts = query_start[:-1]
    if work.drafts:
        token_ids[: rows.num_decodes] = [
            token
            for sequence, start, carried_row, drafted in zip(work.sequences, work.starts, work.carried, work.drafts, strict=False)
            for token in (sequence.tokens[start] if carried_row < 0 else 0, *drafted)
        ]
    elif len(known := np.flatnonzero(np.array(work.carried, np.int32) < 0)):
        token_ids[firsts[known]] = [work.sequences[i].tokens[work.starts[i]] for i in known.tolist()]
    prompts = slice(work.num_decodes, None)
    for first, sequence, start, count in zip(
        firsts[rows.num_decodes :].tolist(), work.sequences[prompts], work.starts[prompts], work.num_tokens[prompts], strict=True
    ):
        end = start + count
        tokens = sequence.given if end <= len(sequence.given) else sequence.tokens
        token_ids[first : first + count] = tokens[start:end]
    return token_ids


def _rows_behind(
    work: StepWork,
    slack: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    block_tables: npt.NDArray[np.int32],
    block_size: int,
) -> RowsBehind:
    """Returns the rows behind drafts: those that may be further than is known, by `slack`."""
    rows = np.flatnonzero(slack)
    most = int(slack.max())
    each = list(work.behind.values())
    num_rows = [work.num_tokens[one.place] for one in each]
    owners = np.repeat(np.arange(len(each)), num_rows)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    width = most + max(num_rows)
    drafted = np.array([[*one.drafted, *repeat(-1, most - len(one.drafted))] for one in each])[owners]
    expected = np.array([[one.token(0, i) for i in range(width)] for one in each])
    accepted = np.arange(most + 1)
    tokens = np.where(places[:, None] > 0, expected[owners[:, None], places[:, None] + accepted], -1)
    at = positions[rows][:, None] + np.minimum(accepted, slack[rows][:, None])
    # Drafts are planned behind drafts only where all layers are in one group.
    slots = block_tables[0, rows[:, None], at // block_size].astype(np.int64) * block_size + at % block_size
    firsts = np.array([work.carried[one.place] for one in each])[owners]
    return RowsBehind.of(rows, firsts, drafted, tokens, slots)


def _sampling(work: StepWork) -> list[SamplingRow]:
    rows = []
    for sequence, start, num_tokens, count, drafted in zip(
        work.sequences, work.starts, work.num_tokens, work.sampled, chain(work.drafts, repeat(())), strict=False
    ):
        if count:
            request, tokens = sequence.request, sequence.tokens
            params, num_prompt, stop_ids = request.sampling, request.num_prompt_tokens, sequence.stop_ids
            position = start + num_tokens + 1 - count - num_prompt
            rows.append(SamplingRow(params, position, tokens, num_prompt, stop_ids, request.seq_id if count == 1 else ""))
            for i in range(1, count) if count > 1 else ():
                # A history is looked at for penalties alone.
                history = [*tokens, *drafted[:i]] if params.has_penalties else tokens
                rows.append(SamplingRow(params, position + i, history, num_prompt, stop_ids))
    return rows


def _scored_rows(work: StepWork, query_start: npt.NDArray[np.int32]) -> ScoredRows:
    """`query_start`: of the prompts."""
    rows, targets, num_top = [], [], 0
    prompts = slice(work.num_decodes, None)
    for first, sequence, start, count in zip(
        query_start[:-1].tolist(), work.sequences[prompts], work.starts[prompts], work.scored[prompts], strict=True
    ):
        if count:
            rows.append(np.arange(first, first + count))
            targets.append(sequence.given[start + 1 : start + 1 + count])
            num_top = max(num_top, sequence.request.sampling.prompt_logprobs or 0)
    return ScoredRows(np.concatenate(rows), np.concatenate(targets), num_top)


def _pooled_rows(work: StepWork, query_start: npt.NDArray[np.int32]) -> PooledRows:
    """`query_start`: of the prompts."""
    counts = work.pooled[work.num_decodes :]
    rows = [np.arange(end - count, end) for end, count in zip(query_start[1:].tolist(), counts, strict=True) if count]
    return PooledRows(np.concatenate(rows), np.array([count for count in counts if count], np.int64))
