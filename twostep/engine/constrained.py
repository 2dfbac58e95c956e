"""The constrained sequences of an engine: whose turn it is, whose next mask is being made, and who cannot go on (see constraint.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostep.engine.constraint import Advanced
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import StepWork
from twostep.engine.types import FailureKind, SequenceFailure


class ConstrainedSequences:
    """Part of the ledger: the engine's lock guards it."""

    def __init__(self) -> None:
        # How many there are, in whatever state.
        self.count = 0
        # Whose next mask is not known: they are in no step that samples.
        self.unready: set[EngineSequence] = set()
        # After which tokens masks are to be made.
        self._to_advance: list[tuple[EngineSequence, Sequence[int]]] = []
        self._failures: list[SequenceFailure] = []

    @property
    def waiting(self) -> bool:
        """Whether a mask is being made that somebody waits for."""
        return any(not sequence.num_pending for sequence in self.unready)

    @property
    def to_advance(self) -> bool:
        return bool(self._to_advance)

    @property
    def failed(self) -> bool:
        return bool(self._failures)

    def take_masks(self, work: StepWork) -> None:
        """For a step just planned. Who samples in it is ready again once it is known what, and what may follow that."""
        for row, sequence in enumerate(_sampling(work)):
            if sequence.constraint is not None:
                work.masks.append((row, sequence.constraint.take()))
                self.unready.add(sequence)

    def follow(self, work: StepWork) -> None:
        """A step is settled: those of it that go on are to be advanced."""
        sampling = _sampling(work)
        for sequence in (sampling[row] for row, _ in work.masks):
            if sequence.state in (SequenceState.RUNNING, SequenceState.PREEMPTED):
                self.advance(sequence, sequence.tokens[-1:])
            else:
                self.unready.discard(sequence)

    def advance(self, sequence: EngineSequence, tokens: Sequence[int]) -> None:
        """It has these tokens now."""
        if sequence.constraint is not None:
            sequence.constraint.mask = None
            self.unready.add(sequence)
            self._to_advance.append((sequence, tuple(tokens)))

    def take_advances(self) -> list[tuple[EngineSequence, Sequence[int]]]:
        """Whose masks are to be made now, after which tokens; then comes `advanced`."""
        taken, self._to_advance = self._to_advance, []
        return taken

    def advanced(self, sequences: Sequence[EngineSequence], results: Sequence[Advanced], end: Callable[[EngineSequence], None]) -> None:
        """Their masks are made, or cannot be: then `end` is called. Those that have ended meanwhile are passed over."""
        for sequence, result in zip(sequences, results, strict=True):
            if sequence.state is SequenceState.ENDED or sequence.constraint is None:
                continue
            if result.mask is None:
                self._failures.append(SequenceFailure(seq_id=sequence.seq_id, message=result.failure, kind=FailureKind.REQUEST))
                end(sequence)
            else:
                sequence.constraint.mask = result.mask
                self.unready.discard(sequence)

    def take_failures(self) -> list[SequenceFailure]:
        """Who is over though no step of it failed."""
        taken, self._failures = self._failures, []
        return taken


def _sampling(work: StepWork) -> list[EngineSequence]:
    """By row."""
    return [sequence for sequence, complete in zip(work.sequences, work.sampled, strict=True) if complete]
