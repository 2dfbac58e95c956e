"""Drafts: tokens that likely come next, computed in one step behind the last known one and kept as far as they are what is sampled
(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023, arXiv 2211.17192).

    rows of the step     9   4   9   1          the last token, and three drafted after it
    sampled after each   4   9   6   2          4 and 9 were drafted right, 6 comes besides; what was sampled after 1 is dropped

A token is a function of logits, seed and position alone, so that a draft is accepted exactly when it is the token that would have been
sampled: answers are those without drafts, also where they are drawn at random.

How many tokens are drafted is chosen anew for each step. A draft that is accepted with probability p adds p tokens to a step, whose time
grows by what one row more costs; it is worth that as long as the step's tokens per second grow:

    (tokens + p) / (seconds + cost of a row)  >  tokens / seconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostep.engine.sequence import EngineSequence
from twostep.settings.speculative import SpeculativeConfig

# What a sequence's last drafts came to counts for so much less with each of its steps.
_FORGETTING = 0.8
# Before anything is known: one draft, of which half were right.
_PRIOR_RIGHT, _PRIOR_WRONG = 0.5, 0.5


class Proposer(Protocol):
    """Says what may come next. Called under the engine's lock: a proposal takes microseconds."""

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Returns at most `most` tokens that may follow `tokens`, prompt and answer of a sequence so far; they only grow at their end from
        call to call."""
        ...

    def forget(self, seq_id: str) -> None:
        """The sequence has ended, or has never been here."""
        ...


class PromptLookup:
    """A Proposer that looks the last tokens up in what came before, and proposes what followed there: the longest run of equal tokens wins,
    then the latest (Saxena: Prompt lookup decoding, 2023)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._known: dict[str, _Tokens] = {}

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        known = self._known.get(seq_id)
        if known is None:
            known = self._known[seq_id] = _Tokens()
        known.extend(tokens)
        return look_up(known.array, most, shortest=self._config.prompt_lookup_min, longest=self._config.prompt_lookup_max)

    def forget(self, seq_id: str) -> None:
        self._known.pop(seq_id, None)


def look_up(tokens: npt.NDArray[np.int32], most: int, *, shortest: int, longest: int) -> list[int]:
    """Returns what followed the last `shortest` to `longest` of the tokens [N] where they came before; none: they did not."""
    count = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < longest and len(ends):
        before = ends[ends >= length] - length
        longer = before[tokens[before] == tokens[count - 1 - length]] + length
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < shortest or not len(ends):
        return []
    # Close to the end little follows: then the first one.
    far = ends[ends + 1 + most <= count]
    start = int(far[-1] if len(far) else ends[0]) + 1
    return [int(token) for token in tokens[start : start + most]]


class _Tokens:
    """A sequence's tokens as an array that grows."""

    def __init__(self) -> None:
        self._buffer = np.empty(256, np.int32)
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens`: all of them, those known already among them."""
        count = len(tokens)
        if count > len(self._buffer):
            larger = np.empty(max(count, 2 * len(self._buffer)), np.int32)
            larger[: self._count] = self._buffer[: self._count]
            self._buffer = larger
        self._buffer[self._count : count] = tokens[self._count : count]
        self._count = count

    @property
    def array(self) -> npt.NDArray[np.int32]:
        return self._buffer[: self._count]


class DraftRecord:
    """Remembers how often a sequence's proposals were right of late, also those that no step computed: learning costs no row."""

    def __init__(self) -> None:
        self._right, self._wrong = _PRIOR_RIGHT, _PRIOR_WRONG
        self._proposed: Sequence[int] = ()
        self._after = 0

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is right, those before it being so."""
        return self._right / (self._right + self._wrong)

    def learn(self, tokens: Sequence[int]) -> None:
        """Compares what was proposed last with what came."""
        came = tokens[self._after : self._after + len(self._proposed)]
        num_right = 0
        for proposed, token in zip(self._proposed, came, strict=False):
            if proposed != token:
                break
            num_right += 1
        if came:
            self._right = _FORGETTING * self._right + num_right
            self._wrong = _FORGETTING * self._wrong + (num_right < len(came))
        self._proposed = ()

    def propose(self, proposed: Sequence[int], tokens: Sequence[int]) -> None:
        self._proposed, self._after = proposed, len(tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Holds tokens that may follow in one sequence, and with what probability each is right, those before it being so."""

    tokens: Sequence[int]
    rate: float


_NOTHING = Proposal((), 0.0)


def choose_drafts(
    proposals: Sequence[Proposal], *, num_tokens: int, most: int, step_s: Callable[[int], float] | None, bound_s: float
) -> list[int]:
    """Returns of how many tokens of each proposal a step gains, at most `most` in all.

    num_tokens  tokens that the step gives without drafts
    step_s      how long it takes with so many rows of drafts; None: not known, and all are worth it
    bound_s     that it may take with them
    """
    counts = [0] * len(proposals)
    # A token is right if all before it are.
    gains = sorted(
        ((proposal.rate ** (i + 1), -index) for index, proposal in enumerate(proposals) for i in range(len(proposal.tokens))), reverse=True
    )
    tokens = float(num_tokens)
    for rows, (gain, index) in enumerate(gains[: max(0, most)]):
        if not _pays(gain, tokens, rows, step_s, bound_s):
            break
        tokens += gain
        counts[-index] += 1
    return counts


def _pays(gain: float, tokens: float, rows: int, step_s: Callable[[int], float] | None, bound_s: float) -> bool:
    """Returns whether a draft that adds `gain` to a step's tokens is worth a row, beside as many `rows` of others."""
    if step_s is None:
        return True
    seconds, longer = step_s(rows), step_s(rows + 1)
    return longer <= max(bound_s, step_s(0)) and (tokens + gain) * seconds > tokens * longer


class Drafting:
    """Drafts for an engine's sequences. The engine's lock guards it."""

    def __init__(self, proposer: Proposer, most: int) -> None:
        """`most`: tokens drafted in one sequence and step."""
        self._proposer = proposer
        self._most = most
        self._records: dict[str, DraftRecord] = {}
        # By place among a step's drafts, since the start.
        self.num_drafted = [0] * most
        self.num_accepted = [0] * most

    def draft(
        self, decodes: Sequence[EngineSequence], *, most: int, step_s: Callable[[int], float] | None, bound_s: float
    ) -> list[Sequence[int]]:
        """Returns what is drafted after the last token of each of a step's decodes, at most `most` tokens in all; see choose_drafts."""
        if most < 1 or not _pays(1.0, len(decodes), 0, step_s, bound_s):
            # Not even certain ones would: nothing is looked up, which under load would take longer than anything here.
            return [()] * len(decodes)
        proposals = [self._propose(sequence) for sequence in decodes]
        counts = choose_drafts(proposals, num_tokens=len(decodes), most=most, step_s=step_s, bound_s=bound_s)
        return [proposal.tokens[:count] for proposal, count in zip(proposals, counts, strict=True)]

    def num_wanted(self, sequence: EngineSequence) -> int:
        """Returns how many tokens may be drafted at most: after the last token there can be comes none."""
        if not sequence.request.sampling.speculate:
            return 0
        return max(0, min(self._most, sequence.max_len - 1 - len(sequence.tokens)))

    def look_up(self, sequence: EngineSequence) -> Sequence[int]:
        """Returns what the proposer proposes."""
        most = self.num_wanted(sequence)
        return self._proposer.propose(sequence.seq_id, sequence.tokens, most) if most else ()

    def _propose(self, sequence: EngineSequence) -> Proposal:
        if sequence.num_pending:
            return _NOTHING
        # With a grammar, drafts were looked up when its masks were made.
        proposed = self.look_up(sequence) if sequence.constraint is None else sequence.constraint.drafts
        record = self._records.setdefault(sequence.seq_id, DraftRecord())
        record.learn(sequence.tokens)
        record.propose(proposed, sequence.tokens)
        return Proposal(proposed, record.rate)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """A step computed so many drafts of a sequence, the first of which were accepted."""
        for i in range(num_drafted):
            self.num_drafted[i] += 1
            self.num_accepted[i] += i < num_accepted

    def forget(self, sequence: EngineSequence) -> None:
        self._records.pop(sequence.seq_id, None)
        self._proposer.forget(sequence.seq_id)


def num_sampled(sequence: EngineSequence, drafted: Sequence[int], token_ids: Sequence[int]) -> int:
    """Returns how many tokens a decode with drafts comes to, of those sampled after each of its rows: one more than were drafted right, or
    those up to its last."""
    position = sequence.position
    for i, (draft, token) in enumerate(zip(drafted, token_ids, strict=False)):
        if draft != token or sequence.finish_reason(token, position + i) is not None:
            return i + 1
    return len(drafted) + 1
