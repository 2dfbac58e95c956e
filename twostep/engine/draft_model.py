"""A small model of the same vocabulary that says what may come next, as a Proposer (Leviathan, Kalman, Matias: Fast inference from
transformers via speculative decoding, 2023, arXiv 2211.17192).

It has a runner of its own, with a KV pool of its own, on the same device and thread as the served one:

    tokens            5 7 2 9 4            the last one, 4, has just been sampled
    computed          5 7 2                what the pool holds
    round 1                 9 4 ─▶ 8       what is missing, in one go: after a step of accepted drafts two tokens, else one
    round 2                     8 ─▶ 3
    round 3                       3 ─▶ 6   proposed: 8 3 6. The KV of 8 and 3 is good as far as they come true

Its sampler is that of the served model, with the same parameters and the noise of the same (seed, position): two models that think alike
draw alike, at any temperature. What a sequence's KV is lost by (another one needed the blocks) or never was there (prefix hits, hand-over,
a long prompt) is computed from its tokens, so much in a step.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from twostep.engine.batch import Batch, Runner, SamplingRow
from twostep.engine.model_proposer import ModelProposer
from twostep.engine.proposer import LEAST_CAUGHT_UP, WantedDrafts
from twostep.engine.sequence import EngineSequence
from twostep.sampling_params import SamplingParams

# Rows of the rounds that are measured at the start: the first of a size may touch memory for the first time.
_FIRST_ROUNDS = (1, 1, 64, 64)
# So few tokens of a sequence are computed as rows of a decode step, which is what graphs of a GPU are captured for.
_MOST_ROWS_EACH = 8


@dataclass(slots=True)
class _Held:
    """The draft model's part of a sequence: blocks, in which the KV of its first `num_computed` tokens lies; then that of `drafted`,
    which were proposed there and may not have come. `params`: what its tokens are drawn with."""

    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafted: Sequence[int] = ()

    def follow(self, tokens: Sequence[int]) -> None:
        """Counts what has come of the drafts that were computed."""
        for draft in self.drafted:
            if self.num_computed >= len(tokens) or tokens[self.num_computed] != draft:
                break
            self.num_computed += 1
        self.drafted = ()

    def lose(self) -> list[int]:
        """Returns its blocks, which it has no more."""
        blocks, self.blocks, self.num_computed, self.drafted = self.blocks, [], 0, ()
        return blocks


@dataclass(slots=True)
class _Part:
    """Tokens of one sequence in a step: `token_ids` from position `start` on."""

    held: _Held
    token_ids: Sequence[int]
    start: int


@dataclass(slots=True)
class _Job:
    sequence: EngineSequence
    held: _Held
    count: int
    tokens: list[int] = field(default_factory=list)


class DraftModel(ModelProposer):
    """A Proposer over a runner of its own."""

    def __init__(self, runner: Runner, *, max_num_seqs: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`runner`: of a model with the served one's vocabulary, whose layers keep no states, and that nobody else uses. `max_num_seqs`:
        rows of a decode step that it is made for. Blocks until some steps are measured."""
        assert not runner.kv_shape.num_state_blocks, "a state cannot forget drafts that did not come"
        assert runner.kv_shape.num_groups == 1, "what is drafted from is kept whole"
        self._runner = runner
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._block_size = runner.kv_shape.block_size
        self._free = list(range(runner.kv_shape.num_blocks))
        # The one used longest ago first.
        self._held: OrderedDict[str, _Held] = OrderedDict()
        super().__init__("the draft model", self._first_rounds)

    def _first_rounds(self) -> Sequence[tuple[int, float]]:
        """Returns sizes and times, the quickest of each; in blocks that are nobody's yet."""
        held = _Held(SamplingParams(max_tokens=1), blocks=self._free[: -(-_FIRST_ROUNDS[-1] // self._block_size)])
        most = min(self._runner.max_model_len, len(held.blocks) * self._block_size)
        seconds: dict[int, float] = {}
        for rows in (min(each, most) for each in _FIRST_ROUNDS):
            began = self._clock()
            self._runner.launch(self._batch([_Part(held, [0] * rows, 0)], [])).result()
            seconds[rows] = min(self._clock() - began, seconds.get(rows, math.inf))
        return sorted(seconds.items())

    @property
    def max_len(self) -> int:
        return self._runner.max_model_len

    def num_missing(self, sequence: EngineSequence) -> int:
        held = self._held.get(sequence.seq_id)
        if held is None:
            return len(sequence.tokens) - 1
        if self._num_proposed(sequence):
            return 0
        held.follow(sequence.tokens)
        return max(0, len(sequence.tokens) - 1 - held.num_computed)

    @property
    def num_blocks(self) -> int:
        return self._runner.kv_shape.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def _prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        jobs = self._jobs(wanted)
        # What is nearly there first: it drafts at once.
        jobs.sort(key=lambda job: self.num_missing(job.sequence))
        asked = {job.sequence.seq_id for job in jobs}
        parts, drafting = list[_Part](), list[_Job]()
        for job in jobs:
            held, tokens = job.held, job.sequence.tokens
            # The last token is computed again where its KV is there: what comes after it is not.
            start, num_missing = min(held.num_computed, len(tokens) - 1), self.num_missing(job.sequence)
            caught_up = min(num_missing, most_rows)
            if caught_up < num_missing and caught_up < LEAST_CAUGHT_UP:
                continue
            end = start + caught_up + (caught_up == num_missing)
            if not self._take(held, end + job.count - 1 if end == len(tokens) else end, asked):
                continue
            most_rows -= caught_up
            held.num_computed = end
            part = _Part(held, tokens[start:end], start)
            # Those that sample come first.
            if end == len(tokens):
                parts.insert(len(drafting), part)
                drafting.append(job)
            else:
                parts.append(part)
        while parts:
            self._run(parts, drafting)
            drafting = [job for job in drafting if len(job.tokens) < job.count]
            parts = [_Part(job.held, job.tokens[-1:], len(job.sequence.tokens) + len(job.tokens) - 1) for job in drafting]
        for job in jobs:
            if job.tokens:
                self._keep(job.sequence, len(job.sequence.tokens), job.tokens)
                job.held.drafted = job.tokens[:-1]

    def _drop(self, seq_id: str) -> None:
        if (ended := self._held.pop(seq_id, None)) is not None:
            self._free += ended.blocks

    def _jobs(self, wanted: Sequence[WantedDrafts]) -> list[_Job]:
        """Returns what is to be done: nothing for what was proposed before and not looked at, or is beyond the model's context."""
        jobs = []
        for sequence, count in wanted:
            num_tokens = len(sequence.tokens)
            count = min(count, self._runner.max_model_len - num_tokens)
            held = self._held.get(sequence.seq_id)
            if held is None:
                # What it thinks of the tokens is nobody's business.
                held = self._held[sequence.seq_id] = _Held(replace(sequence.request.sampling, logprobs=None, prompt_logprobs=None))
            self._held.move_to_end(sequence.seq_id)
            if count < 1 or self._num_proposed(sequence) >= count:
                continue
            held.follow(sequence.tokens)
            jobs.append(_Job(sequence, held, count))
        return jobs

    def _take(self, held: _Held, num_tokens: int, asked: set[str]) -> bool:
        """Makes room for the KV of so many tokens, if need be by taking it from sequences that nothing is asked for. False: there is not
        enough."""
        num_blocks = -(-num_tokens // self._block_size) - len(held.blocks)
        if num_blocks > len(self._free):
            for seq_id, other in self._held.items():
                if seq_id not in asked and other.blocks:
                    self._free += other.lose()
                    if num_blocks <= len(self._free):
                        break
            else:
                return False
        for _ in range(num_blocks):
            held.blocks.append(self._free.pop())
        return True

    def _run(self, parts: Sequence[_Part], jobs: Sequence[_Job]) -> None:
        """Computes the parts and draws a token after each of the first ones, which are the jobs'."""
        began = self._clock()
        batch = self._batch(parts, [_sampling_row(job) for job in jobs])
        token_ids = self._runner.launch(batch).result().token_ids
        self._time.saw(len(batch.token_ids), self._clock() - began)
        for job, token_id in zip(jobs, token_ids, strict=True):
            if token_id < 0:
                # Without a token there are no more either.
                job.count = len(job.tokens)
            else:
                job.tokens.append(token_id)

    def _batch(self, parts: Sequence[_Part], sampling: Sequence[SamplingRow]) -> Batch:
        lengths = np.array([len(part.token_ids) for part in parts])
        starts = np.array([part.start for part in parts])
        owners = np.repeat(np.arange(len(parts)), lengths)
        ends = np.cumsum(lengths)
        positions = starts[owners] + np.arange(ends[-1]) - (ends - lengths)[owners]
        tables = np.zeros((len(parts), max(len(part.held.blocks) for part in parts)), np.int32)
        for row, part in enumerate(parts):
            tables[row, : len(part.held.blocks)] = part.held.blocks
        slots = tables[owners, positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
        query_ends, seq_lens = ends, starts + lengths
        if lengths.max() <= _MOST_ROWS_EACH and len(owners) <= self._max_num_seqs:
            query_ends, seq_lens, tables = np.arange(1, len(owners) + 1), positions + 1, tables[owners]
        return Batch(
            token_ids=np.array([token for part in parts for token in part.token_ids], np.int64),
            positions=positions,
            query_start=np.concatenate(([0], query_ends)).astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=tables[None],
            slots=slots[None],
            sample_rows=ends[: len(sampling)] - 1,
            sampling=sampling,
        )


def _sampling_row(job: _Job) -> SamplingRow:
    """Returns what the served model's next row is drawn with, if all drafts so far come true."""
    sequence, params = job.sequence, job.held.params
    # A history is looked at for penalties alone.
    history = [*sequence.tokens, *job.tokens] if params.has_penalties else sequence.tokens
    return SamplingRow(params, sequence.position + len(job.tokens), history, sequence.request.num_prompt_tokens, sequence.stop_ids)
