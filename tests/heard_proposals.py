"""Hears what proposers that compute are going to propose."""

from __future__ import annotations

from collections.abc import Sequence

from twostep.engine.proposer import WantedDrafts
from twostep.model.runner.head_proposer import HeadProposer


def listen(proposer: HeadProposer, most: int) -> list[tuple[WantedDrafts, list[int], Sequence[int]]]:
    """Returns what will be proposed: of whom, after what tokens."""
    told: list[tuple[WantedDrafts, list[int], Sequence[int]]] = []
    prepare = proposer.prepare

    def listening(wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        prepare(wanted, most_rows)
        for each in wanted:
            tokens = list(each.sequence.tokens)
            told.append((each, tokens, proposer.propose(each.sequence.seq_id, tokens, most)))

    proposer.prepare = listening  # type: ignore[method-assign]
    return told
