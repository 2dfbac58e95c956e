"""An EAGLE-3 head as a Proposer of the engine that serves its model.

    step of the model ── states of three layers ── fc ──▶ kept by slot, as the KV is: position, token, [hidden_size]
    prepare           ◀── of a wanted sequence, what came since ── the head's keys and values, of that sequence ──▶ tokens

The head sees of a sequence what this worker has computed: of a prompt that was handed over, nothing, and then the answer as it grows. What
lies in a slot counts as a sequence's own if position and token are the same; were it another one's all the same, a proposal would be
worse, and no answer another.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import Batch, SamplingRow
from twostep.engine.drafts import DraftTime, Proposer, WantedDrafts
from twostep.engine.sequence import EngineSequence
from twostep.model.eagle.head import EagleHead
from twostep.model.eagle.proposals import Choice, DraftedSequence
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.sampler import sample
from twostep.model.step.layer_states import LayerStates

log = logging.getLogger(__name__)

# So many rows that are computed at once take about as long as one token that is drafted: the head's output layer is most of it, and only
# the last row goes through it.
_ROWS_TOGETHER = 16
# Of what a token took, so much is believed at once.
_LEARNT = 0.1
_FIRST_ROUNDS, _FIRST_TOKENS = 8, 4
_GIVES_UP = "the EAGLE head failed: nothing is drafted by it any more until the worker is restarted"


@dataclass(slots=True)
class _Held:
    drafted: DraftedSequence
    proposed: Sequence[int] = ()
    after: int = 0  # `proposed` follows so many tokens


class EagleProposer(Proposer):
    """Belongs to one runner, on a CPU, and to its engine's thread."""

    def __init__(self, runner: ModelRunner, head: EagleHead, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """`head`: of the runner's model. Blocks until some tokens are drafted, to learn how long that takes."""
        shape = runner.kv_shape
        self._head = head
        self._in_order = bool((head.target_ids.diff() > 0).all())
        self._clock = clock
        self._block_size = shape.block_size
        self._num_slots = num_slots = shape.num_blocks * shape.block_size
        self._positions = np.full(num_slots, -1, np.int64)
        self._tokens = np.full(num_slots, -1, np.int64)
        self._fused = torch.zeros(num_slots, head.config.hidden_size, dtype=head.fc.weight.dtype)
        # The one used longest ago first.
        self._held: OrderedDict[str, _Held] = OrderedDict()
        # Of those that were asked for and are not held: the first position from which the model's states are here.
        self._first_known: dict[str, int] = {}
        self._ended: deque[str] = deque()  # since the last `prepare`: other threads say so
        self._failed = False
        runner.watch(LayerStates(head.config.layers_of(runner.config)), self._saw)
        self._token_s = self._first_tokens()

    def _first_tokens(self) -> float:
        """Returns what a token takes, the quickest of some rounds: while a worker starts, others do too, and a head that seems slow is
        hardly ever asked how slow it is."""
        trial = DraftedSequence(self._head)
        trial.extend(torch.zeros(1, 3 * self._head.config.target_hidden_size), [0])
        quickest = math.inf
        for _ in range(_FIRST_ROUNDS):
            began = self._clock()
            trial.propose(_FIRST_TOKENS, own=True)
            quickest = min(quickest, self._clock() - began)
        return quickest / _FIRST_TOKENS

    @property
    def time(self) -> DraftTime:
        # One sequence after the other.
        return DraftTime(0.0, self._token_s)

    @property
    def failed(self) -> bool:
        return self._failed

    def num_missing(self, sequence: EngineSequence) -> int:
        held, end = self._held.get(sequence.seq_id), len(sequence.tokens) - 1
        if held is not None:
            return max(0, end - held.drafted.end) // _ROWS_TOGETHER
        known = self._first_known.get(sequence.seq_id)
        if known is None:
            # Of a prompt that was handed over there is nothing to compute.
            known = self._known_from(sequence.tokens, self._slots(list(sequence.blocks), end), 0)
            self._first_known[sequence.seq_id] = known
        return max(0, end - known) // _ROWS_TOGETHER

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        if self._failed:
            return
        try:
            rows = (most_rows + 1) * _ROWS_TOGETHER
            for sequence, count in wanted:
                rows -= self._prepare(sequence, count, rows)
            self._drop({sequence.seq_id for sequence, _ in wanted})
        except Exception:
            # Requests are none the worse for it.
            log.exception(_GIVES_UP)
            self._failed = True

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        held = self._held.get(seq_id)
        return held.proposed[:most] if held is not None and held.after == len(tokens) and not self._failed else ()

    def forget(self, seq_id: str) -> None:
        if not self._failed:
            self._ended.append(seq_id)

    @property
    def num_held(self) -> int:
        """Positions whose keys and values are kept."""
        return sum(len(held.drafted) for held in self._held.values())

    def _saw(self, batch: Batch, states: LayerStates) -> None:
        """A step of the model: what it was half-way, where its KV went. Drafts that are not accepted are written over with it."""
        if self._failed:
            return
        try:
            self._positions[batch.slots] = batch.positions
            self._tokens[batch.slots] = batch.token_ids
            self._fused.index_copy_(0, torch.from_numpy(batch.slots), self._head.fuse(states.joined()))
        except Exception:
            log.exception(_GIVES_UP)
            self._failed = True

    def _prepare(self, sequence: EngineSequence, count: int, most_rows: int) -> int:
        """Drafts `count` tokens, if no more than so many rows have to be computed first. Returns how many were."""
        tokens = sequence.tokens
        held = self._held.get(sequence.seq_id)
        if held is not None and held.after == len(tokens) and len(held.proposed) >= count:
            return 0
        end = len(tokens) - 1  # of the last token there is no state
        slots = self._slots(list(sequence.blocks), end)
        if len(slots) < end:
            return 0
        start = 0 if held is None else held.drafted.end
        known = self._known_from(tokens, slots, start)
        if held is None or known > start:
            # Of what lies before a gap nothing can be used.
            held = self._held[sequence.seq_id] = _Held(DraftedSequence(self._head, known))
            start = known
        self._held.move_to_end(sequence.seq_id)
        held.proposed, held.after = (), len(tokens)
        num_rows = min(end - start, most_rows)
        began = self._clock()
        if num_rows > 0:
            held.drafted.extend_fused(
                self._fused[torch.from_numpy(slots[start : start + num_rows])], tokens[start + 1 : start + 1 + num_rows]
            )
        if held.drafted.end == end > held.drafted.first:
            own = self._in_order and not _asks_for_tokens(sequence)
            held.proposed = held.drafted.propose(count, _choice(sequence, own), own=own)
            if num_rows <= _ROWS_TOGETHER:
                # With the rows that come with every step: what a prompt takes is reckoned by its rows.
                self._token_s += _LEARNT * ((self._clock() - began) / count - self._token_s)
        return max(0, num_rows)

    def _slots(self, blocks: Sequence[int], end: int) -> npt.NDArray[np.int64]:
        """int64 [end], or fewer where another thread has just taken the sequence's blocks."""
        slots = np.repeat(np.array(blocks, np.int64) * self._block_size, self._block_size) + np.tile(
            np.arange(self._block_size), len(blocks)
        )
        return slots[:end]

    def _known_from(self, tokens: Sequence[int], slots: npt.NDArray[np.int64], start: int) -> int:
        """Returns the first position from `start` on from which all are here that have slots."""
        own = slots[start:]
        here = (self._positions[own] == np.arange(start, len(slots))) & (
            self._tokens[own] == np.array(tokens[start : len(slots)], np.int64)
        )
        gaps = np.flatnonzero(~here)
        return start + (int(gaps[-1]) + 1 if len(gaps) else 0)

    def _drop(self, wanted: set[str]) -> None:
        """Drops what is held of sequences that have ended, and of others while more is kept than the pool has slots."""
        while self._ended:
            seq_id = self._ended.popleft()
            self._held.pop(seq_id, None)
            self._first_known.pop(seq_id, None)
        excess = self.num_held - self._num_slots
        for seq_id in [seq_id for seq_id in self._held if seq_id not in wanted]:
            if excess <= 0:
                return
            excess -= len(self._held.pop(seq_id).drafted)


def _asks_for_tokens(sequence: EngineSequence) -> bool:
    """Returns whether its sampling treats some tokens otherwise than others."""
    params = sequence.request.sampling
    return params.has_penalties or bool(params.logit_bias) or bool(params.min_tokens and sequence.stop_ids)


def _choice(sequence: EngineSequence, own: bool) -> Choice:
    """Picks as the model's next rows will, if all drafts before come true. `own`: among the head's tokens, where none is treated otherwise
    than others."""
    params, num_prompt = replace(sequence.request.sampling, logprobs=None), sequence.request.num_prompt_tokens
    drafted: list[int] = []

    def choose(logits: torch.Tensor, number: int) -> int:
        # A history is looked at for penalties alone.
        history = [*sequence.tokens, *drafted] if params.has_penalties else sequence.tokens
        row = SamplingRow(params, sequence.position + number, history, num_prompt, frozenset() if own else sequence.stop_ids)
        drafted.append(max(0, int(sample(logits[None], [row]).token_ids[0])))
        return drafted[-1]

    return choose
