"""A head as a Proposer of the engine that serves its model (twostep/engine/model_proposer.py): all that is wanted is drafted at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from twostep.engine.batch import SamplingRow
from twostep.engine.model_proposer import ModelProposer
from twostep.engine.proposer import WantedDrafts
from twostep.engine.sequence import EngineSequence
from twostep.model.runner.head_rounds import DraftRow
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

# Rows of the rounds that are measured at the start, some times each: while a worker starts others do too, and what seems slow is hardly
# ever asked how slow it is.
_FIRST_ROWS = (1, 16)
_FIRST_TIMES = 6


class HeadProposer(ModelProposer):
    """Belongs to one runner with a head, and to its engine's thread."""

    def __init__(self, runner: ModelRunner, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Blocks until some rounds are measured, in a block that is nobody's yet."""
        assert runner.head is not None, "the runner was loaded without a head"
        self._runner = runner
        self._rounds = runner.head
        self._clock = clock
        super().__init__("the head", self._first_rounds)

    def _first_rounds(self) -> Sequence[tuple[int, float]]:
        params, seconds = SamplingParams(max_tokens=1, temperature=0.0), dict[int, float]()
        sampling = [SamplingRow(params, 0, (), 0, frozenset())]
        for _ in range(_FIRST_TIMES):
            for count in (min(each, self._rounds.max_rows) for each in _FIRST_ROWS):
                began = self._clock()
                self._rounds.draft([DraftRow(0, 0, (0,), sampling)] * count)
                seconds[count] = min(self._clock() - began, seconds.get(count, math.inf))
        return sorted(seconds.items())

    @property
    def max_len(self) -> int:
        return self._runner.max_model_len

    @property
    def failed(self) -> bool:
        return super().failed or self._runner.head_failed

    def _prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        asked, rows = list[tuple[EngineSequence, int]](), list[DraftRow]()
        for sequence, count in wanted:
            row = self._row(sequence, min(count, self._rounds.most_tokens))
            if row is not None and len(rows) < self._rounds.max_rows:
                asked.append((sequence, row.position + 1))
                rows.append(row)
        if not rows:
            return
        began = self._clock()
        drafted = self._rounds.draft(rows)
        num_rounds = max(map(len, drafted))
        self._time.saw(sum(map(len, drafted)) / num_rounds, (self._clock() - began) / num_rounds)
        for (sequence, num_tokens), token_ids in zip(asked, drafted, strict=True):
            self._keep(sequence, num_tokens, token_ids)

    def _row(self, sequence: EngineSequence, count: int) -> DraftRow | None:
        """None: it was drafted for and has not been looked at, or another thread has just taken its blocks."""
        tokens, blocks = sequence.tokens, next((list(blocks) for blocks in sequence.blocks), [])
        position = len(tokens) - 1
        if count < 1 or self._num_proposed(sequence) >= count or len(blocks) * self._runner.kv_shape.block_size < position:
            return None
        params = replace(sequence.request.sampling, logprobs=None, prompt_logprobs=None)
        num_prompt = sequence.request.num_prompt_tokens
        # As the model's next rows will be, if all drafts before come true. A history is looked at for penalties alone.
        history = list(tokens) if params.has_penalties else tokens
        sampling = [SamplingRow(params, sequence.position + number, history, num_prompt, sequence.stop_ids) for number in range(count)]
        return DraftRow(tokens[-1], position, blocks, sampling)
