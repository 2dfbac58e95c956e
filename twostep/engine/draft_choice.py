"""A step drafts as many tokens of each sequence as make its tokens per second grow (drafts.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostep.engine.proposer import DraftTime


@dataclass(frozen=True, slots=True)
class Proposal:
    """Holds tokens that may follow in one sequence, and with what probability each is right, those before it being so: `first` that of the
    first, if it is another. Tokens that have yet to be drafted are any; `before_s` is then this step's part of what the proposer must
    compute first."""

    tokens: Sequence[int]
    rate: float
    before_s: float = 0.0
    first: float | None = None

    def gains(self) -> Iterator[float]:
        """Yields what each adds to a step's tokens."""
        gain = self.rate if self.first is None else self.first
        for _ in self.tokens:
            yield gain
            gain *= self.rate


class DraftChoice(NamedTuple):
    """Says of how many tokens of each proposal a step gains, and how many tokens a second it gives then, in all."""

    counts: Sequence[int]
    tokens_per_s: float


class DraftBounds(NamedTuple):
    """Says what bounds the drafts of a step: `most` tokens in all, `step_s` as in choose_drafts, `bound_s` that it may take."""

    most: int
    step_s: Callable[[int], float] | None
    bound_s: float


NO_TIME = DraftTime(0.0, 0.0)


def choose_drafts(
    proposals: Sequence[Proposal],
    *,
    num_tokens: int,
    most: int,
    step_s: Callable[[int], float] | None,
    bound_s: float,
    time: DraftTime = NO_TIME,
    slower: float = 1.0,
    wait_s: float = 0.0,
) -> DraftChoice:
    """Returns of how many tokens of each proposal a step gains, at most `most` in all.

    num_tokens  tokens that the step gives without drafts
    step_s      how long it takes with so many rows of drafts; None: not known, and all are worth it
    bound_s     that it may take with them
    time        what it takes to draft them
    slower      how many times that it takes, where it has drafts
    wait_s      how long it is waited for them

    Of the drafts in the order of what each adds, so many are taken that the step gives most tokens a second. One more may gain where the
    one before it did not: the first token drafted costs what drafting takes at all. A row never gets cheaper, so that the search ends with
    the first whose own is not worth it."""
    # A token is right if all before it are.
    gains = sorted(((gain, -index) for index, proposal in enumerate(proposals) for gain in proposal.gains()), reverse=True)[: max(0, most)]
    counts, best = [0] * len(proposals), [0] * len(proposals)
    if step_s is None:
        for _, index in gains:
            best[-index] += 1
        return DraftChoice(best, num_tokens + sum(gain for gain, _ in gains))
    least_s = step_s(0)
    tokens, before_s, draft_s, num_rounds = float(num_tokens), slower * least_s, wait_s, 0
    best_tokens, best_s, bound_s = tokens, least_s, max(bound_s, least_s)
    for rows, (gain, index) in enumerate(gains, 1):
        longer_s = slower * step_s(rows)
        if gain * best_s <= best_tokens * (longer_s - before_s + time.per_row_s):
            break
        counts[-index] += 1
        draft_s += time.per_row_s
        if counts[-index] > num_rounds:
            num_rounds += 1
            draft_s += time.fixed_s
        if counts[-index] == 1:
            draft_s += proposals[-index].before_s
        tokens, before_s = tokens + gain, longer_s
        if longer_s + draft_s > bound_s:
            break
        if tokens * best_s > best_tokens * (longer_s + draft_s):
            best, best_tokens, best_s = counts.copy(), tokens, longer_s + draft_s
    return DraftChoice(best, best_tokens / best_s if best_s > 0.0 else math.inf)


def may_pay(num_tokens: int, step_s: Callable[[int], float] | None, bound_s: float, slower: float = 1.0) -> bool:
    """Returns whether a step of so many tokens gains by drafts that are certain, one for each. Where not, nothing is looked up, which under
    load would take longer than anything here."""
    # Where one costs more than the next, many may pay what one does not.
    most = 1 if slower == 1.0 else num_tokens
    certain = [Proposal((0,), 1.0)] * most
    return any(choose_drafts(certain, num_tokens=num_tokens, most=most, step_s=step_s, bound_s=bound_s, slower=slower).counts)
