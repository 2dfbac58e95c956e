"""The reader's machine, one way at a time; test_hand_over_model.py has all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer import reader as rd
from kv_transfer.lease import Tick
from kv_transfer.reader import (
    Action,
    AskFailed,
    AskSource,
    BlockSpan,
    ChunkAnnounced,
    CommitToEngine,
    CompleteCame,
    DecodeAhead,
    EngineAnswered,
    Event,
    FetchEnded,
    FreeTargets,
    GivenUp,
    ManifestCame,
    ReaderState,
    RenewLease,
    SourceAnswered,
    SourceLost,
    StartFetch,
    TellSource,
)
from kv_transfer.transport import ChunkInfo
from twostep.errors import Cancelled, DataLoss, Unavailable

SPAN = BlockSpan(2, 5)
MANIFEST = ManifestCame(published=SPAN, wanted=SPAN, num_layers=4, one_sided=False)
ONE_SIDED = replace(MANIFEST, one_sided=True)
COMPLETE = CompleteCame(2, (7,))
LOST = Unavailable("the connection broke")
GIVEN_UP = GivenUp(Cancelled("cancelled"))


def ended_by(reason: str) -> list[Action]:
    """Once no fetch runs any more."""
    return [FreeTargets(), TellSource(committed=False, reason=reason)]


def chunk(index: int, first: int, count: int, **layers: int) -> ChunkInfo:
    blocks = tuple(range(100 + first, 100 + first + count))
    sizes = {"first_block": first, "num_blocks": count, "num_bytes": 10 * count}
    return ChunkInfo(index=index, checksum=index, source_blocks=blocks, generations=tuple(b % 3 for b in blocks), **sizes, **layers)


FIRST, SECOND = chunk(0, 2, 3), chunk(1, 5, 2)
ANNOUNCED = (ChunkAnnounced(FIRST), ChunkAnnounced(SECOND))


class Driven:
    """A machine and all actions that it gave."""

    def __init__(self, *events: Event, max_fetching: int = 4) -> None:
        self.reader = rd.Reader(reader_id=9, deadline=100.0, max_fetching=max_fetching)
        self.actions: list[Action] = []
        for event in events:
            self.apply(event)

    def apply(self, event: Event, now: float = 0.0) -> list[Action]:
        step = rd.advance(self.reader, event, now)
        self.reader = step.reader
        self.actions += step.actions
        return list(step.actions)


def verified(manifest: ManifestCame) -> Driven:
    """Everything is fetched."""
    return Driven(manifest, *ANNOUNCED, COMPLETE, FetchEnded(0), FetchEnded(1))


def test_what_was_copied_out_is_committed_as_soon_as_it_is_verified() -> None:
    driven = verified(MANIFEST)
    assert driven.actions == [StartFetch(FIRST), StartFetch(SECOND), CommitToEngine((7,))]
    assert (driven.reader.state, driven.reader.num_bytes, driven.reader.finished) == (ReaderState.COMPLETE, 50, False)
    assert driven.apply(GIVEN_UP) == [], "the engine has it in hand"
    assert driven.apply(EngineAnswered()) == [TellSource(committed=True)]
    for late in (EngineAnswered(), SourceAnswered("no"), SourceLost(LOST), Tick(), FetchEnded(0), ChunkAnnounced(FIRST)):
        assert driven.apply(late, now=1e9) == []
    assert (driven.reader.state, driven.reader.finished) == (ReaderState.COMMITTED, True)


def test_where_it_was_read_in_place_the_source_is_asked_first() -> None:
    driven = verified(ONE_SIDED)
    ask = AskSource(9, (*FIRST.source_blocks, *SECOND.source_blocks), (*FIRST.generations, *SECOND.generations))
    assert driven.actions == [StartFetch(FIRST), StartFetch(SECOND), ask, DecodeAhead((7,))]
    assert driven.reader.state is ReaderState.COMMITTING
    assert driven.apply(AskFailed("timeout")) == [ask]
    assert driven.apply(SourceAnswered()) == [CommitToEngine((7,))]
    assert driven.apply(SourceAnswered()) == [], "of the first time it was asked"
    assert driven.apply(EngineAnswered()) == [], "the source knows"
    assert driven.reader.state is ReaderState.COMMITTED


@pytest.mark.parametrize("answer", [SourceAnswered("lease a has ended"), AskFailed("timeout")])
def test_without_the_source_s_word_nothing_is_committed(answer: Event) -> None:
    driven = verified(ONE_SIDED)
    for _ in range(3):
        driven.apply(answer)
    assert isinstance(driven.reader.error, Unavailable)
    assert driven.actions[-2:] == ended_by(driven.reader.error.message)
    assert driven.apply(SourceAnswered()) == [], "too late"
    assert driven.reader.finished
    assert not any(isinstance(action, CommitToEngine) for action in driven.actions)


def test_bytes_that_do_not_match_are_fetched_again_once() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST))
    assert driven.apply(FetchEnded(0, DataLoss("torn"))) == [StartFetch(FIRST)]
    assert driven.reader.num_again == 1
    assert driven.apply(FetchEnded(0, DataLoss("torn again"))) == ended_by("torn again")
    assert isinstance(driven.reader.error, DataLoss)
    assert driven.apply(FetchEnded(0)) == []


def test_so_many_fetches_at_once_and_the_lease_is_renewed() -> None:
    driven = Driven(MANIFEST, *ANNOUNCED, max_fetching=1)
    assert driven.actions == [StartFetch(FIRST)]
    assert driven.apply(FetchEnded(0), now=5.0) == [RenewLease(), StartFetch(SECOND)]
    assert driven.apply(FetchEnded(1), now=6.0) == []


def test_a_watch_that_breaks_off_or_the_deadline_ends_it_unless_all_was_announced() -> None:
    assert Driven(MANIFEST, *ANNOUNCED, COMPLETE).apply(SourceLost(LOST)) == []
    assert Driven(MANIFEST).apply(SourceLost(LOST)) == ended_by(LOST.message)
    driven = Driven(MANIFEST)
    assert driven.apply(Tick(), now=99.0) == []
    assert driven.apply(Tick(), now=100.0)[0] == FreeTargets()
    assert isinstance(driven.reader.error, Unavailable)


NOTHING = BlockSpan(3, 0)
HALVES = [ChunkAnnounced(chunk(i, 2, 5, first_layer=2 * i, num_layers=2)) for i in range(2)]


@pytest.mark.parametrize(
    "events",
    [
        [MANIFEST, *HALVES, COMPLETE, FetchEnded(0), FetchEnded(1)],  # layer groups cover a block together
        [MANIFEST, ANNOUNCED[0], MANIFEST, *ANNOUNCED, COMPLETE, COMPLETE, FetchEnded(0), FetchEnded(1)],  # a second watch says it again
        [replace(MANIFEST, published=NOTHING, wanted=NOTHING), CompleteCame(0, (7,))],  # nothing is to be moved
    ],
)
def test_other_ways_to_be_complete(events: list[Event]) -> None:
    driven = Driven(*events)
    assert driven.actions[-1] == CommitToEngine((7,))
    assert len(driven.actions) == len({event.chunk.index for event in events if isinstance(event, ChunkAnnounced)}) + 1


@pytest.mark.parametrize(
    "events",
    [
        [ChunkAnnounced(FIRST)],
        [COMPLETE],
        [replace(MANIFEST, published=BlockSpan(0, 7))],
        [MANIFEST, ONE_SIDED],
        *([MANIFEST, ChunkAnnounced(chunk(0, first, count))] for first, count in ((1, 2), (6, 2), (3, 0))),
        [MANIFEST, ChunkAnnounced(chunk(0, 2, 1, first_layer=3, num_layers=2))],
        [MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(chunk(1, 4, 3))],
        [MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(replace(FIRST, checksum=5))],
        [ONE_SIDED, ChunkAnnounced(replace(FIRST, generations=()))],
        [MANIFEST, ChunkAnnounced(FIRST), CompleteCame(1, (7,))],
        [MANIFEST, *ANNOUNCED, CompleteCame(3, (7,))],
        [MANIFEST, *ANNOUNCED, CompleteCame(2, ())],
    ],
)
def test_what_no_honest_source_says_ends_it(events: list[Event]) -> None:
    driven = Driven(*events)
    assert isinstance(driven.reader.error, DataLoss)
    running = driven.reader.num_running
    assert driven.actions.count(FreeTargets()) == (0 if running else 1)
    for index in range(running):
        driven.apply(FetchEnded(index))
    assert driven.actions.count(FreeTargets()) == 1
