"""Whether what a ledger's sequences say of themselves is what its lists say."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import StepWork
from twostep.errors import InternalError


def check_sequences(
    sequences: Collection[EngineSequence],
    planned: Collection[StepWork],
    saving: Collection[EngineSequence],
    listed: Mapping[SequenceState, int],
) -> None:
    """`planned`: steps not yet settled; `saving`: whose blocks are being copied out; `listed`: how many are in the lists of their state.
    Raises InternalError."""
    counted = dict.fromkeys(SequenceState, 0)
    for sequence in sequences:
        counted[sequence.state] += 1
        num_uses = sum(sequence in work.sequences for work in planned) + (sequence in saving) + sequence.loading
        if sequence.num_steps != num_uses:
            raise InternalError(f"{sequence.seq_id} counts {sequence.num_steps} uses and has {num_uses}")
        if sequence.state is SequenceState.ENDED and not num_uses:
            raise InternalError(f"{sequence.seq_id} has ended, is in no step and still owns blocks")
    for state, count in listed.items():
        if counted[state] != count:
            raise InternalError(f"{counted[state]} sequences are {state.value} and {count} are listed so")
