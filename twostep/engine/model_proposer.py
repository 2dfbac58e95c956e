"""Holds what proposers that compute have in common, smaller models (draft_model.py) and heads of the served one (twostep/model/heads):
what their rounds take is learnt from each, what they said is kept until it is asked for, and one that fails says nothing any more.

A *round* drafts a token more of each of some sequences.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostep.engine.proposer import DraftTime, Proposer, WantedDrafts
from twostep.engine.sequence import EngineSequence

log = logging.getLogger(__name__)

# Of what a round took, so much is believed at once.
_LEARNT = 0.1
# From so many rows on, a round tells what a row takes; with fewer, what it takes at all.
_MANY_ROWS = 16


class RoundTime:
    """Learns what a round takes: fixed_s + per_row_s * rows."""

    def __init__(self, least: Sequence[tuple[int, float]]) -> None:
        """`least`: rows and seconds of the smallest round that was measured, and of the largest; they may be the same."""
        (few, few_s), (many, many_s) = least[0], least[-1]
        per_row_s = max(0.0, (many_s - few_s) / max(1, many - few))
        self.time = DraftTime(max(0.0, few_s - per_row_s * few), per_row_s)

    def saw(self, rows: float, seconds: float) -> None:
        fixed_s, per_row_s = self.time
        if rows < _MANY_ROWS:
            fixed_s += _LEARNT * (max(0.0, seconds - per_row_s * rows) - fixed_s)
        else:
            per_row_s += _LEARNT * (max(0.0, seconds - fixed_s) / rows - per_row_s)
        self.time = DraftTime(fixed_s, per_row_s)


class _Proposed(NamedTuple):
    """Holds tokens that follow a sequence's first `after`."""

    token_ids: Sequence[int]
    after: int


class ModelProposer(Proposer):
    """A Proposer that computes in `prepare`, which belongs to the engine's thread as all else but `forget` does."""

    def __init__(self, name: str, first_rounds: Callable[[], Sequence[tuple[int, float]]]) -> None:
        """`name`: what the log calls it. `first_rounds`: measures some rounds, see RoundTime."""
        self._name = name
        self._proposed: dict[str, _Proposed] = {}
        # Those that have ended since the last `prepare`: other threads say so, while this one computes.
        self._ended: deque[str] = deque()
        self._failed = False
        self._time = RoundTime(first_rounds())

    @property
    def time(self) -> DraftTime:
        return self._time.time

    @property
    def failed(self) -> bool:
        return self._failed

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        if self._failed:
            return
        try:
            self._prepare(wanted, most_rows)
            # Last: one of the wanted may have ended before it was known here.
            while self._ended:
                seq_id = self._ended.popleft()
                self._proposed.pop(seq_id, None)
                self._drop(seq_id)
        except Exception:
            # Requests are none the worse for it.
            log.exception("%s failed: nothing is drafted by it any more until the worker is restarted", self._name)
            self._failed = True

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        proposed = self._proposed.get(seq_id)
        return () if proposed is None or proposed.after != len(tokens) or self._failed else proposed.token_ids[:most]

    def forget(self, seq_id: str) -> None:
        if not self._failed:
            self._ended.append(seq_id)

    @abstractmethod
    def _prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        """As `prepare`; may raise."""

    def _drop(self, seq_id: str) -> None:
        """Drops what is kept of a sequence that has ended, if anything is."""

    def _keep(self, sequence: EngineSequence, num_tokens: int, token_ids: Sequence[int]) -> None:
        """Keeps what may follow the first `num_tokens` of the sequence."""
        self._proposed[sequence.seq_id] = _Proposed(token_ids, num_tokens)

    def _num_proposed(self, sequence: EngineSequence) -> int:
        """Returns how many tokens were proposed after those that the sequence has now."""
        proposed = self._proposed.get(sequence.seq_id)
        return 0 if proposed is None or proposed.after != len(sequence.tokens) else len(proposed.token_ids)
