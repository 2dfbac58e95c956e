"""The reader's machine, one way at a time; tests/kv_transfer/test_hand_over_model.py has all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.lease import Tick
from kv_transfer.reader import (
    Action,
    AskFailed,
    AskSource,
    BlockSpan,
    CancelFetches,
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
    Reader,
    ReaderState,
    RenewLease,
    SourceAnswered,
    SourceLost,
    StartFetch,
    TellSource,
    advance,
)
from kv_transfer.transport import ChunkInfo
from twostep.errors import Cancelled, DataLoss, InvalidRequest, TwostepError, Unavailable

SPAN = BlockSpan(2, 5)
MANIFEST = ManifestCame(published=SPAN, wanted=SPAN, num_layers=4, one_sided=False)
ONE_SIDED = replace(MANIFEST, one_sided=True)
COMPLETE = CompleteCame(2, (7,))
LOST = Unavailable("the connection broke")
GIVEN_UP = GivenUp(Cancelled("cancelled"))


def ended_by(reason: str) -> list[Action]:
    """Once no fetch runs any more."""
    return [FreeTargets(), TellSource(committed=False, reason=reason)]


def chunk(index: int, first: int, count: int, *, first_layer: int = 0, num_layers: int = 0) -> ChunkInfo:
    blocks = tuple(range(100 + first, 100 + first + count))
    return ChunkInfo(
        index=index,
        first_block=first,
        num_blocks=count,
        num_bytes=10 * count,
        checksum=index,
        first_layer=first_layer,
        num_layers=num_layers,
        source_blocks=blocks,
        generations=tuple(block % 3 for block in blocks),
    )


FIRST, SECOND = chunk(0, 2, 3), chunk(1, 5, 2)


class Driven:
    """A machine and all actions that it gave."""

    def __init__(self, *events: Event, max_fetching: int = 4) -> None:
        self.reader = Reader(reader_id=9, deadline=100.0, max_fetching=max_fetching)
        self.actions: list[Action] = []
        for event in events:
            self.apply(event)

    def apply(self, event: Event, now: float = 0.0) -> list[Action]:
        step = advance(self.reader, event, now)
        self.reader = step.reader
        self.actions += step.actions
        return list(step.actions)

    @property
    def error(self) -> str:
        assert self.reader.state is ReaderState.ABORTED
        assert self.reader.error is not None
        return self.reader.error.message


def verified(manifest: ManifestCame) -> Driven:
    """Everything is fetched."""
    return Driven(manifest, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), COMPLETE, FetchEnded(0), FetchEnded(1))


def test_what_was_copied_out_is_committed_as_soon_as_it_is_verified() -> None:
    driven = verified(MANIFEST)
    assert driven.actions == [StartFetch(FIRST), StartFetch(SECOND), CommitToEngine((7,))]
    assert (driven.reader.state, driven.reader.num_bytes, driven.reader.finished) == (ReaderState.COMPLETE, 50, False)
    assert driven.apply(GIVEN_UP) == [], "the engine has it in hand"
    assert driven.apply(EngineAnswered()) == [TellSource(committed=True)]
    assert (driven.reader.state, driven.reader.finished) == (ReaderState.COMMITTED, True)
    for late in (EngineAnswered(), SourceAnswered("no"), SourceLost(LOST), Tick(), FetchEnded(0), ChunkAnnounced(FIRST)):
        assert driven.apply(late, now=1e9) == []
    assert driven.reader.state is ReaderState.COMMITTED


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


@pytest.mark.parametrize("manifest", [MANIFEST, ONE_SIDED])
def test_what_the_engine_does_not_take_is_freed_and_the_source_told(manifest: ManifestCame) -> None:
    driven = verified(manifest)
    driven.apply(SourceAnswered())
    refused = InvalidRequest("nothing is left to decode")
    assert driven.apply(EngineAnswered(refused)) == ended_by("nothing is left to decode")
    assert (driven.reader.state, driven.reader.error) == (ReaderState.ABORTED, refused)


@pytest.mark.parametrize("answer", [SourceAnswered("lease a has ended"), AskFailed("timeout")])
def test_without_the_source_s_word_nothing_is_committed(answer: Event) -> None:
    driven = verified(ONE_SIDED)
    for _ in range(3):
        driven.apply(answer)
    assert ("lease a has ended" if isinstance(answer, SourceAnswered) else "timeout") in driven.error
    assert driven.actions[-2:] == ended_by(driven.error)
    assert not any(isinstance(action, CommitToEngine) for action in driven.actions)
    assert driven.apply(SourceAnswered()) == [], "too late"
    assert driven.reader.finished


def test_bytes_that_do_not_match_are_fetched_again_once() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST))
    assert driven.apply(FetchEnded(0, DataLoss("torn"))) == [StartFetch(FIRST)]
    assert driven.reader.num_again == 1
    assert driven.apply(FetchEnded(0, DataLoss("torn again"))) == ended_by("torn again")
    assert isinstance(driven.reader.error, DataLoss)
    assert driven.apply(FetchEnded(0)) == []


def test_targets_are_free_when_the_last_fetch_has_ended() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND))
    assert driven.apply(FetchEnded(0, LOST)) == [CancelFetches()]
    assert not driven.reader.finished
    assert driven.apply(GIVEN_UP) == []
    assert driven.apply(FetchEnded(1)) == ended_by("the connection broke")
    assert driven.reader.finished
    assert driven.apply(FetchEnded(1)) == []


def test_so_many_fetches_at_once_and_the_lease_is_renewed() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), max_fetching=1)
    assert driven.actions == [StartFetch(FIRST)]
    assert driven.apply(FetchEnded(0), now=5.0) == [RenewLease(), StartFetch(SECOND)]
    assert driven.apply(FetchEnded(1), now=6.0) == []


def test_a_watch_that_breaks_off_ends_it_unless_all_was_announced() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), COMPLETE)
    assert driven.apply(SourceLost(LOST)) == []
    driven = Driven(MANIFEST, SourceLost(LOST))
    assert driven.reader.error is LOST
    driven = Driven(MANIFEST)
    assert driven.apply(Tick(), now=99.0) == []
    assert driven.apply(Tick(), now=100.0) == ended_by(driven.error)
    assert isinstance(driven.reader.error, Unavailable)


def test_layer_groups_cover_a_block_together() -> None:
    halves = [chunk(0, 2, 5, num_layers=2), chunk(1, 2, 5, first_layer=2, num_layers=2)]
    driven = Driven(MANIFEST, ChunkAnnounced(halves[0]), ChunkAnnounced(halves[1]), COMPLETE, FetchEnded(0), FetchEnded(1))
    assert driven.actions[-1] == CommitToEngine((7,))


def test_what_comes_again_with_a_second_watch_changes_nothing() -> None:
    driven = Driven(MANIFEST, ChunkAnnounced(FIRST), MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), COMPLETE, COMPLETE)
    assert driven.actions == [StartFetch(FIRST), StartFetch(SECOND)]


def test_nothing_to_move_is_complete_at_once() -> None:
    nothing = BlockSpan(3, 0)
    driven = Driven(replace(MANIFEST, published=nothing, wanted=nothing), CompleteCame(0, (7,)))
    assert driven.actions == [CommitToEngine((7,))]


@pytest.mark.parametrize(
    ("events", "error", "why"),
    [
        ([ChunkAnnounced(FIRST)], DataLoss, "before the manifest"),
        ([COMPLETE], DataLoss, "before the manifest"),
        ([replace(MANIFEST, published=BlockSpan(0, 7))], DataLoss, r"blocks 0 \+ 7 are published, but 2 \+ 5 are missing"),
        ([MANIFEST, ONE_SIDED], DataLoss, "second manifest"),
        ([MANIFEST, ChunkAnnounced(chunk(0, 1, 2))], DataLoss, "does not fit"),
        ([MANIFEST, ChunkAnnounced(chunk(0, 6, 2))], DataLoss, "does not fit"),
        ([MANIFEST, ChunkAnnounced(chunk(0, 3, 0))], DataLoss, "does not fit"),
        ([MANIFEST, ChunkAnnounced(chunk(0, 2, 1, first_layer=3, num_layers=2))], DataLoss, "does not fit"),
        ([MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(chunk(1, 4, 3))], DataLoss, "chunk 1 does not fit"),
        ([MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(replace(FIRST, checksum=5))], DataLoss, "chunk 0 does not fit"),
        ([ONE_SIDED, ChunkAnnounced(replace(FIRST, generations=()))], DataLoss, "which blocks to read"),
        ([MANIFEST, ChunkAnnounced(FIRST), CompleteCame(1, (7,))], DataLoss, "12 of 20 blocks of a layer"),
        ([MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), CompleteCame(3, (7,))], DataLoss, "2 of 3 chunks"),
        ([MANIFEST, ChunkAnnounced(FIRST), ChunkAnnounced(SECOND), CompleteCame(2, ())], DataLoss, "0 tokens"),
    ],
)
def test_what_no_honest_source_says_ends_it(events: list[Event], error: type[TwostepError], why: str) -> None:
    driven = Driven(*events)
    with pytest.raises(error, match=why):
        raise driven.reader.error or AssertionError("it was taken")
    running = driven.reader.num_running
    assert driven.actions.count(FreeTargets()) == (0 if running else 1)
    for index in range(running):
        driven.apply(FetchEnded(index))
    assert driven.actions.count(FreeTargets()) == 1
