"""Proposers say which tokens may come next in a sequence: by what came before, by a smaller model, or by heads on the served one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from twostep.engine.sequence import EngineSequence

# Tokens that a draft model computes in one step of those it lacks, at most; and at least, or it would never catch up.
MOST_CAUGHT_UP, LEAST_CAUGHT_UP = 256, 16


class WantedDrafts(NamedTuple):
    """Asks for so many tokens, at least one, after the last of a sequence; its tokens do not change meanwhile."""

    sequence: EngineSequence
    num_tokens: int


class DraftTime(NamedTuple):
    """Says what one token more of each of some sequences takes a proposer: fixed_s + per_row_s * sequences. A token of a sequence that it
    has yet to compute takes per_row_s."""

    fixed_s: float
    per_row_s: float


class Proposer(Protocol):
    """Says what may come next: what came before, a smaller model, or heads on the served one. For each step, in this order:

      1. time, num_missing   under the engine's lock, on its thread: how many tokens are worth drafting is chosen by them
      2. prepare             without the lock, on the engine's thread, with nothing else on the device: a model computes here, and may read
                             what the step settled last has left on the device (hidden states, for heads)
      3. propose             under the lock: takes microseconds

    Subclasses that propose at once leave the first two as they are."""

    @property
    def time(self) -> DraftTime | None:
        """None: proposals take no time, and `prepare` is never called."""
        return None

    @property
    def max_len(self) -> int:
        """Returns how many tokens of a sequence, drafts among them, it can see."""
        return sys.maxsize

    def num_missing(self, sequence: EngineSequence) -> int:
        """Returns how many tokens, but for the last one, have to be computed before the first can be drafted."""
        return 0

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        """Drafts what can be; called before each step, also where nothing is wanted. Of tokens that are missing at most `most_rows` are
        computed. Never raises: whoever fails proposes nothing any more."""
        return

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Returns at most `most` tokens that may follow `tokens`, prompt and answer of a sequence so far; they only grow at their end from
        call to call."""
        ...

    def forget(self, seq_id: str) -> None:
        """The sequence has ended, or has never been here. From any thread, also while another one prepares."""
        ...

    @property
    def failed(self) -> bool:
        """Returns whether it has given up."""
        return False
