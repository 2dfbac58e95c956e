"""The sequences that are held to a grammar: who has a mask for its next token, and the threads that make masks.

    step n samples a token ─ settle ─▶ ask ─ another thread: grammar, mask ─▶ take_masks ─▶ the sequence is planned again

Where tokens are drafted, the same thread makes a mask for each of those too, and drafts itself what the grammar forces.

A mask needs the token before it, so that the step after n, which is planned while n runs, is one without the sequence: on a GPU it takes
part in every other step. No other sequence waits for it, and a step without such sequences knows nothing of all this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from twostep.engine.drafts import Drafting
from twostep.engine.grammar import DEAD_END, AllowedTokens, Constraint, NextTokens, advance_all
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import StepWork
from twostep.engine.types import FailureKind, SequenceFailure

log = logging.getLogger(__name__)

# Sequences of two steps take turns: the masks of one are made while the other's are.
_THREADS = 2


@dataclass(frozen=True, slots=True, eq=False)
class NextMask:
    """Says what may come next in a sequence, or why nothing may."""

    next: NextTokens | None
    failure: str = ""


class MaskRequest(NamedTuple):
    """Asks for the mask behind `tokens`, which follow those that the constraint knows, and behind at most `most` drafts."""

    constraint: Constraint
    tokens: Sequence[int]
    proposed: Sequence[int] = ()
    most: int = 0


class ConstrainedSequences:
    """The engine's lock guards it. The scheduler says what becomes of its sequences, the engine has their masks made."""

    def __init__(self, drafting: Drafting | None = None) -> None:
        self._drafting = drafting
        # Those whose next mask is not known: they are in no step that samples.
        self.unready: set[EngineSequence] = set()
        # After which tokens masks are to be made.
        self._requests: list[tuple[EngineSequence, Sequence[int]]] = []
        self._failures: list[SequenceFailure] = []
        # Threads are made from the first sequence on.
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="grammar")

    def ended(self, sequence: EngineSequence) -> None:
        """Forgets a sequence that has ended: it waits for no mask any more."""
        self.unready.discard(sequence)

    @property
    def waiting(self) -> bool:
        """Returns whether a sequence waits for a mask that is being made."""
        return any(not sequence.num_pending for sequence in self.unready)

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    def planned(self, work: StepWork) -> None:
        """Notes that a step is planned: a sequence that samples in it is ready again once it is known what, and what may follow that."""
        self.unready.update(sequence for _, sequence, _ in work.masks)

    def settled(self, work: StepWork) -> None:
        """Asks for the next masks of those that go on, now that their step is settled."""
        for sequence in dict.fromkeys(sequence for _, sequence, _ in work.masks):
            if sequence.constraint is not None and sequence.state in (SequenceState.RUNNING, SequenceState.PREEMPTED):
                self.ask(sequence, sequence.tokens[sequence.request.num_prompt_tokens + len(sequence.constraint.live.tokens) :])
            else:
                self.unready.discard(sequence)

    def ask(self, sequence: EngineSequence, tokens: Sequence[int]) -> None:
        """Asks for the mask behind these tokens, which the sequence has now; `make_masks` begins to make it."""
        if sequence.constraint is not None:
            sequence.constraint.next = None
            self.unready.add(sequence)
            self._requests.append((sequence, tuple(tokens)))

    def make_masks(self, on_ready: Callable[[Sequence[EngineSequence], Sequence[NextMask]], None]) -> None:
        """Begins to make the masks that are due, if any. `on_ready` is called once, on another thread, with one result for each sequence;
        then comes `take_masks`."""
        work, self._requests = self._requests, []
        if work:
            requests = [
                self._request(sequence, sequence.constraint, tokens) for sequence, tokens in work if sequence.constraint is not None
            ]
            self._threads.submit(lambda: on_ready([sequence for sequence, _ in work], make_all(requests)))

    def _request(self, sequence: EngineSequence, constraint: Constraint, tokens: Sequence[int]) -> MaskRequest:
        if self._drafting is None:
            return MaskRequest(constraint, tokens)
        return MaskRequest(constraint, tokens, self._drafting.look_up(sequence), self._drafting.num_wanted(sequence))

    def take_masks(self, sequences: Sequence[EngineSequence], results: Sequence[NextMask], end: Callable[[EngineSequence], None]) -> None:
        """Takes the masks that were made. Where there is none, `end` is called. Sequences that have ended meanwhile are passed over."""
        for sequence, result in zip(sequences, results, strict=True):
            if sequence.state is SequenceState.ENDED or sequence.constraint is None:
                continue
            if result.next is None:
                self._failures.append(SequenceFailure(seq_id=sequence.seq_id, message=result.failure, kind=FailureKind.REQUEST))
                end(sequence)
            else:
                sequence.constraint.next = result.next
                self.unready.discard(sequence)

    def take_failures(self) -> list[SequenceFailure]:
        """Returns those that are over though no step of them failed."""
        taken, self._failures = self._failures, []
        return taken


def make_all(work: Sequence[MaskRequest]) -> Sequence[NextMask]:
    """Returns one result for each constraint without a mask. Never raises."""
    for each in work:
        each.constraint.live.tokens += each.tokens
    try:
        found = advance_all([(each.constraint.live, each.tokens) for each in work])
        return [_result(each, allowed) for each, allowed in zip(work, found, strict=True)]
    except Exception:
        log.exception("the masks of %d sequences could not be made side by side; each is made by itself", len(work))
        return [_make_alone(each) for each in work]


def _make_alone(work: MaskRequest) -> NextMask:
    """Does so whatever became of an attempt with others."""
    try:
        return _result(work._replace(most=0), work.constraint.live.again())
    except Exception as error:
        # Whatever it was, this sequence cannot go on, and none may be kept waiting.
        log.exception("a mask could not be made")
        return NextMask(None, f"the answer's grammar failed: {type(error).__name__}")


def _result(work: MaskRequest, allowed: AllowedTokens) -> NextMask:
    if allowed.failure:
        return NextMask(None, f"the answer's grammar cannot be followed any further: {allowed.failure}; make it simpler")
    following = work.constraint.after(allowed, work.proposed, work.most)
    return NextMask(following, "" if following is not None else DEAD_END)
