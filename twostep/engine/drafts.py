"""Drafts: tokens that likely come next, computed in one step behind the last known one and kept as far as they are what is sampled
(Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023, arXiv 2211.17192).

    rows of the step     9   4   9   1          the last token, and three drafted after it
    sampled after each   4   9   6   2          4 and 9 were drafted right, 6 comes besides; what was sampled after 1 is dropped

A token is a function of logits, seed and position alone, so that a draft is accepted exactly when it is the token that would have been
sampled: answers are those without drafts, also where they are drawn at random.

How many tokens are drafted is chosen anew for each step. A draft that is accepted with probability p adds p tokens to a step, whose time
grows by what one row more costs; it is worth that as long as the step's tokens per second grow:

    (tokens + p) / (seconds + cost of a row)  >  tokens / seconds

Where a model proposes, its own time belongs to that cost, and how many tokens are worth it is chosen before it computes:

    device   ── draft model: catch up, draft, draft ──┬── step of the served model ──┐
    host     wanted (lock)   prepare                  plan: propose (lock)           settle (lock)

Where steps are planned ahead, one that has drafts is planned while another with drafts runs, of which it is not known how many are
accepted. The proposer says what may follow the tokens that are known, further than one step; what the running step samples is compared
on the device (triton_tokens.py, `go_on`), and the next step goes on from there with what is left:

    known    . . . │ a b c d e f g h                what may follow
    step n         │ a b c                          in flight: drafts of it
    step n+1       │     x │ d e f     if a b were right, and x came instead of c
                   │       d │ e f g   if all were, and so is d

Such late drafts know nothing of the token that comes instead of a wrong one. They go on behind it as if it were one word in place of
another, and where an answer goes another way they are wrong, and the next step is in vain. How often they are right all the same is
learnt, and where a wait for the running step is worth it, it is waited for (`is_worth`): for drafts of a model, which has to see the last
token, always. Where no drafts are worth it, planning goes on ahead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twostep.engine.sequence import EngineSequence
from twostep.engine.step_work import StepWork
from twostep.settings.speculative import SpeculativeConfig
from twostep.step_curve import StepCurve

# What a sequence's last drafts came to counts for so much less with each of its steps.
_FORGETTING = 0.8
# What drafts of all sequences came to counts for so much less with each of them: that is what is expected of one that has none yet.
_FORGETTING_ALL = 0.99
# Before anything is known: one draft, of which half were right.
_PRIOR_RATE = 0.5
# A sequence is taken to go on for as many tokens as it has generated, so many at least: over them, what a draft model must compute of it
# first has to pay.
_LEAST_TO_COME = 32
# Tokens that a draft model computes in one step of those it lacks, at most; and at least, or it would never catch up.
MOST_CAUGHT_UP, LEAST_CAUGHT_UP = 256, 16
# Share of the steps' time that goes into drafts which do not seem to pay, to find out whether they would.
_TRIAL_SHARE = 0.01
# What a step with drafts came to counts for so much less with each step; without any, so many count as known.
_FORGETTING_GAIN, _PRIOR_STEPS = 0.98, 16
# No step is shorter, whatever a curve says.
_LEAST_STEP_S = 1e-6
# Steps of one kind in a row, with drafts or without, at first, and twice as many each time that the other kind was no better, up to a
# bound; of the other kind, to see what they give: more of those with drafts, which are not all alike; and of those that begin such a run,
# so many were planned before. What gives so much more is better.
_FIRST_RUN, _LONGEST_RUN, _PLAIN_TRIAL, _LOOKING_TRIAL, _IN_FLIGHT = 50, 3200, 10, 20, 3
_CLEARLY = 1.02
# For so few sequences it takes less to look up than to reckon whether it may pay.
_LOOKED_UP_FIRST = 4
# Of a step, what it takes longer where it is not planned while another runs: for a trial.
_WAITING_SHARE = 0.15
# How much one step teaches of how long steps take, and one without drafts of that those with them take no longer; and how many times
# longer than was known one step may seem to take.
_LEARNING, _UNLEARNING, _MOST_SLOWER = 1 / 16, 1 / 512, 2.0


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


class PromptLookup(Proposer):
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


@dataclass(slots=True)
class CommonRate:
    """Remembers how often the proposals of all sequences were right of late."""

    right: float = _PRIOR_RATE
    wrong: float = 1.0 - _PRIOR_RATE

    @property
    def rate(self) -> float:
        return self.right / (self.right + self.wrong)

    def learn(self, num_right: int, *, failed: bool) -> None:
        self.right = _FORGETTING_ALL * self.right + num_right
        self.wrong = _FORGETTING_ALL * self.wrong + failed


class SequenceRate:
    """Remembers how often proposals of one sequence were right of late."""

    def __init__(self, common: CommonRate) -> None:
        self._common = common
        self._right = self._wrong = 0.0
        # What is known of all counts as one draft of its own, and then as less.
        self._weight = 1.0

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is right, those before it being so."""
        return (self._right + self._weight * self._common.rate) / (self._right + self._wrong + self._weight)

    def learn(self, proposed: Sequence[int], came: Sequence[int]) -> None:
        """Compares what was proposed with what came in its place, if anything was, and did."""
        num_right = num_seen = 0
        for draft, token in zip(proposed, came, strict=False):
            num_seen += 1
            if draft != token:
                break
            num_right += 1
        if num_seen:
            self._right = _FORGETTING * self._right + num_right
            self._wrong = _FORGETTING * self._wrong + (num_right < num_seen)
            self._weight *= _FORGETTING
            self._common.learn(num_right, failed=num_right < num_seen)


class DraftRecord:
    """Remembers what was proposed last in a sequence, and how often its proposals were right, also those that no step computed: learning
    costs no row.

        tokens   . . . . │ a b c d e f g h      proposed after those that are known
        came     . . . . │ a b x                of the step in flight, which has a b c as drafts
        next     . . . .         │ d e f        drafts of the step that is planned meanwhile: as if x were a word in place of another
    """

    def __init__(self, common: CommonRate | None = None, common_again: CommonRate | None = None, most: int = sys.maxsize) -> None:
        """`most`: tokens drafted in one step."""
        self._right = SequenceRate(common or CommonRate())
        self._again = SequenceRate(common_again or CommonRate())
        self._most = most
        self._proposed: Sequence[int] = ()
        # What was to come behind a token that another one came for.
        self._behind_wrong: Sequence[int] = ()
        self._after = 0

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is right, those before it being so."""
        return self._right.rate

    @property
    def again_rate(self) -> float:
        """Returns the probability that the first one behind a wrong one is right."""
        return self._again.rate

    def learn(self, tokens: Sequence[int]) -> None:
        """Compares what was proposed last with what came since, if anything did."""
        proposed, num_came = self._proposed, len(tokens) - self._after
        if not num_came:
            return
        # At first, a prompt came.
        came = tokens[self._after : self._after + max(1, len(proposed))]
        self._right.learn(proposed[: self._most], came)
        self._again.learn(self._behind_wrong, came)
        right = all(draft == token for draft, token in zip(proposed, came, strict=False))
        self._behind_wrong = () if right else proposed[num_came : num_came + 1]
        self._proposed = ()

    def propose(self, proposed: Sequence[int], tokens: Sequence[int]) -> None:
        """`learn` has seen these tokens."""
        self._proposed, self._after = proposed, len(tokens)

    def is_after(self, tokens: Sequence[int]) -> bool:
        """Returns whether it was these after which something was proposed last."""
        return self._after == len(tokens)

    def proposed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns what was proposed after these."""
        return self._proposed if self._after == len(tokens) else ()


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


class DraftGain:
    """Learns how many tokens drafts give a sequence in the time that a step takes without them: what they are worth to whoever reckons with
    steps. It stays as it is while nothing decodes."""

    def __init__(self) -> None:
        self._tokens = self._steps = float(_PRIOR_STEPS)

    @property
    def tokens_per_step(self) -> float:
        """Returns 1 where drafts bring nothing, and never less."""
        return max(1.0, self._tokens / self._steps)

    def learn(self, num_tokens: float, longer: float) -> None:
        """Takes a step that gave each of its sequences so many tokens, on average, and took `longer` times as long as without drafts."""
        self._tokens = _FORGETTING_GAIN * self._tokens + num_tokens
        self._steps = _FORGETTING_GAIN * self._steps + longer


class _Offers(NamedTuple):
    """Says what a model could draft of each sequence, whose drafts would be the cheapest, and what one of those would take: infinity
    where there is none to draft of."""

    proposals: Sequence[Proposal]
    cheapest: int
    trial_s: float


class DraftChoice(NamedTuple):
    """Says of how many tokens of each proposal a step gains, and how many tokens a second it gives then, in all."""

    counts: Sequence[int]
    tokens_per_s: float


_NOTHING = Proposal((), 0.0)
_NO_TIME = DraftTime(0.0, 0.0)


def choose_drafts(
    proposals: Sequence[Proposal],
    *,
    num_tokens: int,
    most: int,
    step_s: Callable[[int], float] | None,
    bound_s: float,
    time: DraftTime = _NO_TIME,
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


class Slowness:
    """Remembers how many times longer steps with drafts take than is foretold, as against steps without: whatever costs time and is not
    foretold ends drafting by itself. Apart for steps of about as many sequences. While none is drafted it is slowly forgotten, so
    that it is tried again."""

    def __init__(self) -> None:
        # By the power of 2 of sequences: what steps without drafts took of what was foretold, and how many times that those with them did.
        self._shares: dict[int, tuple[float, float]] = {}

    def of(self, num_seqs: int) -> float:
        return max(1.0, self._shares.get(num_seqs.bit_length(), (1.0, 1.0))[1])

    def learn(self, num_seqs: int, seconds: float, foretold_s: float, *, drafted: bool) -> None:
        """A step of so many sequences came so long after the one before it."""
        if foretold_s <= 0.0 or seconds <= 0.0:
            return
        share, key = seconds / foretold_s, num_seqs.bit_length()
        without, slower = self._shares.get(key, (1.0, 1.0))
        # One step that took very long did so for other reasons.
        if drafted:
            slower += _LEARNING * (min(share / without, _MOST_SLOWER * slower) - slower)
        else:
            without += _LEARNING * (min(share, _MOST_SLOWER * without) - without)
            slower += _UNLEARNING * (1.0 - slower)
        self._shares[key] = without, slower


class Looking:
    """Chooses whether steps are drafted for at all, apart for steps of about as many sequences: as those that gave more tokens a second.
    What looking up takes the host is in no curve, and it is taken where nothing is drafted in the end, too. Behind each run of steps of one
    kind comes a short one of the other, to see."""

    def __init__(self) -> None:
        # By the power of 2 of sequences.
        self._runs: dict[int, _Run] = {}

    def looks(self, num_seqs: int) -> bool:
        run = self._runs.get(num_seqs.bit_length())
        return run is None or run.looks

    def learn(self, num_seqs: int, num_tokens: int, seconds: float, foretold_s: float) -> None:
        """A step of so many sequences gave so many tokens, so long after the one before it; without drafts it was to take `foretold_s`."""
        if seconds > 0.0 and foretold_s > 0.0:
            run = self._runs.setdefault(num_seqs.bit_length(), _Run())
            run.learn(num_tokens / num_seqs * foretold_s / seconds)


@dataclass(slots=True)
class _Run:
    """A run of steps of one kind. Gains are tokens of a sequence in the time that a step is foretold to take."""

    looks: bool = True
    trial: bool = False
    # Of a run that is none.
    length: int = _FIRST_RUN
    left: int = _FIRST_RUN
    settling: int = 0
    total: float = 0.0
    seen: int = 0
    before: float | None = None

    def learn(self, gain: float) -> None:
        self.left -= 1
        # What was planned before the last change is still on its way.
        if self.settling:
            self.settling -= 1
        else:
            self.total += gain
            self.seen += 1
        if self.left > 0:
            return
        mean, better = self.total / self.seen, False
        if self.trial:
            better = self.before is not None and mean > _CLEARLY * self.before
            self.length = _FIRST_RUN if better else min(2 * self.length, _LONGEST_RUN)
        else:
            self.before = mean
        looks = self.looks if better else not self.looks
        self.trial = not self.trial
        self.left = self.length if not self.trial else _LOOKING_TRIAL if looks else _PLAIN_TRIAL
        self.settling = _IN_FLIGHT if looks != self.looks else 0
        self.looks, self.total, self.seen = looks, 0.0, 0


class DraftBounds(NamedTuple):
    """Says what bounds the drafts of a step: `most` tokens in all, `step_s` as in choose_drafts, `bound_s` that it may take."""

    most: int
    step_s: Callable[[int], float] | None
    bound_s: float


def _may_pay(num_tokens: int, step_s: Callable[[int], float] | None, bound_s: float, slower: float = 1.0) -> bool:
    """Returns whether a step of so many tokens gains by drafts that are certain, one for each. Where not, nothing is looked up, which under
    load would take longer than anything here."""
    # Where one costs more than the next, many may pay what one does not.
    most = 1 if slower == 1.0 else num_tokens
    certain = [Proposal((0,), 1.0)] * most
    return any(choose_drafts(certain, num_tokens=num_tokens, most=most, step_s=step_s, bound_s=bound_s, slower=slower).counts)


class Drafting:
    """Drafts for an engine's sequences. The engine's lock guards it."""

    def __init__(self, proposer: Proposer, most: int, *, ahead: bool = False) -> None:
        """`most`: tokens drafted in one sequence and step. `ahead`: steps are planned while others run."""
        self._proposer = proposer
        self._most = most
        # Of the step in flight as many may be accepted, and one comes besides, before those of the step that is planned.
        self._reach = 2 * most + 1 if ahead and proposer.time is None else most
        self._records: dict[str, DraftRecord] = {}
        self._common, self._common_again = CommonRate(), CommonRate()
        self.slowness = Slowness()
        self.looking = Looking()
        # Seconds that may go into drafts to find out whether they would pay.
        self._trial_s = 0.0
        # By place among a step's drafts, since the start.
        self.num_drafted = [0] * most
        self.num_accepted = [0] * most
        self.gain = DraftGain()
        self._num_seen = 0

    def draft(self, decodes: Sequence[EngineSequence], bounds: Callable[[], DraftBounds]) -> list[Sequence[int]]:
        """Returns what is drafted after the last token of each of a step's decodes; see choose_drafts. `bounds` are asked for only where
        there may be any: that takes as long as all else here."""
        nothing: list[Sequence[int]] = [()] * len(decodes)
        if not self._may_propose(decodes):
            return nothing
        most, step_s, bound_s = bounds()
        slower = self.slowness.of(len(decodes))
        if most < 1 or not _may_pay(len(decodes), step_s, bound_s, slower):
            return nothing
        proposals = [self._late_proposal(sequence) if sequence.num_pending else self._proposal(sequence) for sequence in decodes]
        choice = choose_drafts(proposals, num_tokens=len(decodes), most=most, step_s=step_s, bound_s=bound_s, slower=slower)
        return [proposal.tokens[:count] for proposal, count in zip(proposals, choice.counts, strict=True)]

    def is_worth(self, decodes: Sequence[EngineSequence], bounds: Callable[[], DraftBounds], *, wait_s: float, num_steps: int = 1) -> bool:
        """Returns whether it is worth it to wait so long for the last tokens of these before the next step is planned, for the sake of its
        drafts: as if it were this one. It learns, and where the answer is no, saves time up for a trial: of `num_steps`, after which it is
        asked again."""
        if not self._may_propose(decodes):
            return False
        most, step_s, bound_s = bounds()
        slower = self.slowness.of(len(decodes))
        if most < 1 or not _may_pay(len(decodes), step_s, bound_s, slower):
            return False
        choose = partial(choose_drafts, num_tokens=len(decodes), most=most, step_s=step_s, bound_s=bound_s, slower=slower)
        time = self._proposer.time
        if time is None:
            late = choose([self._late_proposal(sequence) for sequence in decodes])
            if step_s is None and any(late.counts):
                return False
            waited = choose([self._proposal(sequence) for sequence in decodes], wait_s=wait_s)
            return any(waited.counts) and waited.tokens_per_s > late.tokens_per_s
        offers = self._offers(decodes, time, math.inf if step_s is None else step_s(0))
        if any(choose(offers.proposals, time=time, wait_s=wait_s).counts):
            return True
        if step_s is None:
            return False
        if self._may_try(offers, time, step_s(0), bound_s):
            return True
        self._save_up(offers, num_steps * step_s(0))
        return False

    def _may_propose(self, decodes: Sequence[EngineSequence]) -> bool:
        """Returns whether anything is proposed, or may be. Proposers that compute are tried by what they take instead."""
        if self.computes:
            return True
        if not self.looking.looks(len(decodes)):
            return False
        return len(decodes) > _LOOKED_UP_FIRST or any(self._looked_up(sequence).proposed(sequence.tokens) for sequence in decodes)

    @property
    def computes(self) -> bool:
        """Returns whether proposals take the device's time, so that they are made before a step is planned."""
        return self._proposer.time is not None

    @property
    def failed(self) -> bool:
        return self._proposer.failed

    def wanted(self, decodes: Sequence[EngineSequence], bounds: DraftBounds) -> tuple[list[WantedDrafts], int]:
        """Returns what is worth drafting for a step of these decodes, and how many missing tokens may be computed for it."""
        most, step_s, bound_s = bounds
        time = self._proposer.time
        if time is None or self._proposer.failed or most < 1 or not decodes or not _may_pay(len(decodes), step_s, bound_s):
            return [], 0
        # Not known how long steps take: anything is worth it.
        least_s = math.inf if step_s is None else step_s(0)
        offers = self._offers(decodes, time, least_s)
        choice = choose_drafts(offers.proposals, num_tokens=len(decodes), most=most, step_s=step_s, bound_s=bound_s, time=time)
        counts = list(choice.counts)
        if step_s is not None and not any(counts):
            self._save_up(offers, least_s)
            if self._may_try(offers, time, least_s, bound_s):
                self._trial_s -= offers.trial_s
                counts[offers.cheapest] = 1
        # As long as the step itself, others may wait for it.
        room_s = least_s
        if step_s is not None and bound_s < math.inf:
            drafts_s = time.fixed_s * max(counts) + time.per_row_s * sum(counts)
            room_s = max(0.0, min(least_s, bound_s - step_s(sum(counts)) - drafts_s))
        most_rows = MOST_CAUGHT_UP if room_s >= MOST_CAUGHT_UP * time.per_row_s else int(room_s / time.per_row_s)
        return [WantedDrafts(sequence, count) for sequence, count in zip(decodes, counts, strict=True) if count], most_rows

    def _offers(self, decodes: Sequence[EngineSequence], time: DraftTime, least_s: float) -> _Offers:
        """Returns what a model could draft of each. `least_s`: of the step without."""
        proposals, cheapest_s, cheapest = list[Proposal](), math.inf, 0
        for sequence in decodes:
            # With a grammar, each draft needs a mask, which takes another thread its time.
            count = self.num_wanted(sequence) if sequence.constraint is None else 0
            missing_s = time.per_row_s * self._proposer.num_missing(sequence)
            if missing_s < cheapest_s:
                cheapest_s, cheapest = missing_s, len(proposals)
            record = self._record(sequence)
            record.learn(sequence.tokens)
            to_come = min(max(_LEAST_TO_COME, sequence.position), sequence.max_len - len(sequence.tokens))
            before_s = missing_s / to_come if count else math.inf
            gain = sum(record.rate ** (i + 1) for i in range(count))
            # What would not pay even if it were all that it costs must not stand before others.
            pays = count > 0 and before_s * len(decodes) <= gain * least_s
            proposals.append(Proposal(range(count if pays else 0), record.rate, before_s))
        return _Offers(proposals, cheapest, cheapest_s + time.fixed_s + time.per_row_s + _WAITING_SHARE * least_s)

    def _save_up(self, offers: _Offers, least_s: float) -> None:
        """For one trial at most: what is saved while none is possible is not spent at once later."""
        if offers.trial_s < math.inf:
            self._trial_s = min(self._trial_s + _TRIAL_SHARE * least_s, offers.trial_s)

    def _may_try(self, offers: _Offers, time: DraftTime, least_s: float, bound_s: float) -> bool:
        """Returns whether steps without drafts have left enough time over to draft one all the same."""
        return offers.trial_s <= self._trial_s and least_s + time.fixed_s + time.per_row_s <= bound_s

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        """Without the lock; see Proposer."""
        self._proposer.prepare(wanted, most_rows)

    def num_wanted(self, sequence: EngineSequence) -> int:
        """Returns how many tokens may be drafted at most: after the last token there can be comes none."""
        return self._num_wanted(sequence, self._most)

    def _num_wanted(self, sequence: EngineSequence, most: int) -> int:
        if not sequence.request.sampling.speculate:
            return 0
        return max(0, min(most, sequence.max_len - 1 - len(sequence.tokens), self._proposer.max_len - len(sequence.tokens)))

    def look_up(self, sequence: EngineSequence) -> Sequence[int]:
        """Returns what the proposer proposes."""
        most = self._num_wanted(sequence, self._most if sequence.constraint is not None else self._reach)
        return self._proposer.propose(sequence.seq_id, sequence.tokens, most) if most else ()

    def _record(self, sequence: EngineSequence) -> DraftRecord:
        record = self._records.get(sequence.seq_id)
        if record is None:
            record = self._records[sequence.seq_id] = DraftRecord(self._common, self._common_again, self._most)
        return record

    def _proposal(self, sequence: EngineSequence) -> Proposal:
        """Returns what may follow the tokens that are known."""
        record = self._looked_up(sequence)
        return Proposal(record.proposed(sequence.tokens)[: self._most], record.rate)

    def _late_proposal(self, sequence: EngineSequence) -> Proposal:
        """Returns what may follow the tokens that are in flight, as if all that is drafted there were accepted."""
        if self.computes or not may_go_on(sequence):
            return _NOTHING
        record, num_pending = self._looked_up(sequence), sequence.num_pending
        expected = record.proposed(sequence.tokens)
        most = min(self._most, sequence.max_len - 1 - len(sequence.tokens) - num_pending)
        tokens = expected[num_pending : num_pending + max(0, most)]
        if not tokens:
            return _NOTHING
        # As many drafts in flight are accepted as are what is expected now, if that is right; so must be what is sampled behind them.
        num_same = 0
        for drafted, token in zip(sequence.drafted, expected, strict=False):
            if drafted != token:
                break
            num_same += 1
        rate = record.rate
        so_far = rate ** (num_same + 1)
        return Proposal(tokens, rate, first=so_far * rate + (1.0 - so_far) * record.again_rate)

    def _looked_up(self, sequence: EngineSequence) -> DraftRecord:
        """Returns the record once it has what may follow the tokens that are known."""
        record = self._record(sequence)
        if sequence.constraint is not None:
            # Drafts were looked up when its masks were made.
            record.learn(sequence.tokens)
            record.propose(sequence.constraint.drafts, sequence.tokens)
        elif not record.is_after(sequence.tokens):
            record.learn(sequence.tokens)
            record.propose(self.look_up(sequence), sequence.tokens)
        return record

    def expected(self, sequence: EngineSequence) -> Sequence[int]:
        """Returns what was proposed after the tokens that are known."""
        return self._record(sequence).proposed(sequence.tokens)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """A step computed so many drafts of a sequence, the first of which were accepted."""
        for i in range(num_drafted):
            self.num_drafted[i] += 1
            self.num_accepted[i] += i < num_accepted

    def settled(self, work: StepWork, curve: StepCurve | None) -> None:
        """A step with decodes is over, and its drafts are counted. `curve` None: not known how long it took; drafts then cost nothing."""
        counts, longer = [len(drafted) for drafted in work.drafts], 1.0
        if any(counts) and curve is not None:
            time = self._proposer.time or _NO_TIME
            drafting_s = time.fixed_s * max(counts) + time.per_row_s * sum(counts)
            with_drafts_s = self.slowness.of(work.num_decodes) * curve.step_s(work.workload) + drafting_s
            longer = with_drafts_s / max(curve.step_s(work.without_drafts), _LEAST_STEP_S)
        num_accepted = sum(self.num_accepted)
        self.gain.learn(1.0 + (num_accepted - self._num_seen) / work.num_decodes, longer)
        self._num_seen = num_accepted

    def forget(self, sequence: EngineSequence) -> None:
        self._records.pop(sequence.seq_id, None)
        self._proposer.forget(sequence.seq_id)


def may_go_on(sequence: EngineSequence) -> bool:
    """Returns whether a step may have rows of it behind drafts in flight: nothing of how they are sampled may hang on what those come to,
    but for the position, which devices move."""
    params = sequence.request.sampling
    held_back = sequence.stop_ids and sequence.position + 1 < params.min_tokens
    # Devices move the slots of one group of layers.
    return sequence.constraint is None and not params.has_penalties and not held_back and len(sequence.blocks) == 1


def num_sampled(sequence: EngineSequence, drafted: Sequence[int], token_ids: Sequence[int]) -> int:
    """Returns how many tokens a decode with drafts comes to, of those sampled after each of its rows: one more than were drafted right, or
    those up to its last."""
    position = sequence.position
    for i, (draft, token) in enumerate(zip(drafted, token_ids, strict=False)):
        if draft != token or sequence.finish_reason(token, position + i) is not None:
            return i + 1
    return len(drafted) + 1
