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
learnt, and where a wait for the running step is worth it, it is waited for (`waits`): for drafts of a model, which has to see the last
token, always. Where no drafts are worth it, planning goes on ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from twostep.engine.draft_choice import NO_TIME, DraftBounds, Proposal, choose_drafts, may_pay
from twostep.engine.draft_learning import DraftGain, Looking, Slowness
from twostep.engine.draft_record import CommonRate, DraftRecord
from twostep.engine.proposer import MOST_CAUGHT_UP, DraftTime, Proposer, WantedDrafts
from twostep.engine.sequence import EngineSequence
from twostep.engine.step_work import StepWork
from twostep.step_curve import StepCurve

# A sequence is taken to go on for as many tokens as it has generated, so many at least: over them, what a draft model must compute of it
# first has to pay.
_LEAST_TO_COME = 32
# Share of the steps' time that goes into drafts which do not seem to pay, to find out whether they would.
_TRIAL_SHARE = 0.01
# No step is shorter, whatever a curve says.
_LEAST_STEP_S = 1e-6
# For so few sequences it takes less to look up than to reckon whether it may pay.
_LOOKED_UP_FIRST = 4
# Steps that are planned ahead, at most, after drafts were waited for in vain.
_MOST_AHEAD = 15
# Steps that are planned ahead, unasked, behind one that was not worth the drafts of a model.
_NOT_ASKED = 7
# Of a step, what it takes longer where it is not planned while another runs: for a trial.
_WAITING_SHARE = 0.15
_NOTHING = Proposal((), 0.0)


class _Offers(NamedTuple):
    """Says what a model could draft of each sequence, whose drafts would be the cheapest, and what one of those would take: infinity
    where there is none to draft of."""

    proposals: Sequence[Proposal]
    cheapest: int
    trial_s: float


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
        # The next step waits for the one in flight; those that did so in vain, in a row; those that are still to be planned ahead.
        self._awaited, self._num_vain, self._num_ahead = False, 0, 0
        # By place among a step's drafts, since the start.
        self.num_drafted = [0] * most
        self.num_accepted = [0] * most
        self.gain = DraftGain()
        self._num_seen = 0

    def draft(self, decodes: Sequence[EngineSequence], bounds: Callable[[], DraftBounds]) -> list[Sequence[int]]:
        """Returns what is drafted after the last token of each of a step's decodes; see choose_drafts. `bounds` are asked for only where
        there may be any: that takes as long as all else here."""
        nothing: list[Sequence[int]] = [()] * len(decodes)
        # What computes has to see the last tokens.
        found = None if self.computes and all(sequence.num_pending for sequence in decodes) else self._bounds(decodes, bounds)
        if found is None:
            return nothing
        most, step_s, bound_s = found
        slower = self.slowness.of(len(decodes))
        proposals = [self._late_proposal(sequence) if sequence.num_pending else self._proposal(sequence) for sequence in decodes]
        choice = choose_drafts(proposals, num_tokens=len(decodes), most=most, step_s=step_s, bound_s=bound_s, slower=slower)
        return [proposal.tokens[:count] for proposal, count in zip(proposals, choice.counts, strict=True)]

    def waits(
        self,
        last: StepWork | None,
        decodes: Callable[[], Sequence[EngineSequence]],
        bounds: Callable[[Sequence[EngineSequence]], DraftBounds],
        wait_s: float,
    ) -> bool:
        """Returns whether the next step is to be planned only when the `last` one planned has ended, for the sake of drafts, though the
        device waits so long. Asked once for each step. `decodes` are those that it would draft for."""
        if last is not None and any(last.drafts):
            behind = zip(last.sequences, last.drafts, strict=False)
            if self.computes or any(drafted and not may_go_on(sequence) for sequence, drafted in behind):
                # It is in no step before its drafts have ended.
                return True
        if self._num_ahead:
            self._num_ahead -= 1
            return False
        asked = decodes()
        if not asked:
            return False
        # Where each is reckoned with, that takes the host a part of a short step: not in each, while the answer is no.
        num_steps = 1 + _NOT_ASKED if self.computes else 1
        self._awaited = self._is_worth(asked, partial(bounds, asked), wait_s=wait_s, num_steps=num_steps)
        if not self._awaited:
            self._num_ahead = num_steps - 1
        return self._awaited

    def planned(self, drafts: Sequence[Sequence[int]]) -> None:
        """Notes what is drafted in the step that is planned now."""
        if self._awaited:
            # What was foretold did not come, for want of room beside prompts, say: the next steps are planned ahead, more each time.
            self._awaited = False
            self._num_vain = 0 if any(drafts) else min(_MOST_AHEAD, 2 * self._num_vain + 1)
            self._num_ahead = self._num_vain

    def _is_worth(self, decodes: Sequence[EngineSequence], bounds: Callable[[], DraftBounds], *, wait_s: float, num_steps: int) -> bool:
        """Returns whether it is worth it to wait so long for the last tokens of these before the next step is planned, as if it were this
        one. It learns, and where the answer is no, saves time up for a trial: of `num_steps`, after which it is asked again."""
        found = self._bounds(decodes, bounds)
        if found is None:
            return False
        most, step_s, bound_s = found
        slower = self.slowness.of(len(decodes))
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

    def _bounds(self, decodes: Sequence[EngineSequence], bounds: Callable[[], DraftBounds]) -> DraftBounds | None:
        """Returns what bounds their drafts; None: there are none, or none can pay."""
        found = bounds() if self._may_propose(decodes) else None
        if found is None or found.most < 1:
            return None
        return found if may_pay(len(decodes), found.step_s, found.bound_s, self.slowness.of(len(decodes))) else None

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
        if time is None or self._proposer.failed or most < 1 or not decodes or not may_pay(len(decodes), step_s, bound_s):
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
            time = self._proposer.time or NO_TIME
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
