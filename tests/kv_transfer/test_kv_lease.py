"""The hand-over's state machine under any order of events, and its table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.lease import (
    Abort,
    Action,
    ChunkPublished,
    Commit,
    Event,
    FetchProgress,
    Freed,
    LeaseState,
    LeaseTable,
    Owner,
    PublisherStarted,
    PublisherStopped,
    Tick,
    Transition,
)
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted, Unavailable
from twostep.rpc.v1 import kv_pb2

TTL_S = 10.0
NUM_CHUNKS = 3
_ORDER = [LeaseState.RESERVED, LeaseState.PUBLISHING, LeaseState.READY, LeaseState.FETCHING, LeaseState.COMMITTED, LeaseState.RELEASED]


READER = 77
# Two blocks a chunk.
CHUNKS = [ChunkPublished(i, (10 + i, 20 + i), (1, i)) for i in range(NUM_CHUNKS)]


def commit_of(num_chunks: int = NUM_CHUNKS, **changes: Any) -> Commit:
    """What a reader of so many chunks says."""
    blocks = tuple(block for chunk in CHUNKS[:num_chunks] for block in chunk.source_blocks)
    generations = tuple(generation for chunk in CHUNKS[:num_chunks] for generation in chunk.generations)
    return replace(Commit(reader=READER, source_blocks=blocks, generations=generations), **changes)


def published(table: LeaseTable, lease_id: str = "a", *, copies_out: bool = False) -> None:
    """Opens a lease and publishes all of it."""
    table.open(lease_id, now=0, ttl_s=TTL_S, copies_out=copies_out)
    for event in (PublisherStarted(), *CHUNKS, PublisherStopped(NUM_CHUNKS)):
        table.apply(lease_id, event, now=0)


class HandOver(RuleBasedStateMachine):
    """A publisher that behaves (it stops once, when asked or done), and a peer, a clock and a network that do not."""

    @initialize(copies_out=st.booleans())
    def open(self, copies_out: bool) -> None:
        self.now = 0.0
        self.table = LeaseTable(epoch=5, max_leases=1)
        self.lease = self.table.open("a", now=0.0, ttl_s=TTL_S, max_life_s=100.0, copies_out=copies_out)
        self.given: list[Action] = []
        self.reading = False  # the publisher task looks at the blocks
        self.next_chunk = 0

    def apply(self, event: Event) -> Transition:
        before = self.lease
        transition = self.table.apply("a", event, now=self.now)
        self.lease = transition.lease
        self.given += transition.actions
        # Backwards never, out of an end never but COMMITTED -> RELEASED.
        if before.state.ended and before.state is not LeaseState.COMMITTED:
            assert self.lease.state is before.state
        if before.state in _ORDER and self.lease.state in _ORDER:
            assert _ORDER.index(self.lease.state) >= _ORDER.index(before.state)
        assert self.lease.deadline >= before.deadline
        # Whoever looks at blocks is stopped first.
        if Action.RELEASE_BLOCKS in transition.actions:
            assert not self.reading
        return transition

    @rule()
    def start_publisher(self) -> None:
        fresh = self.lease.state is LeaseState.RESERVED
        self.reading = self.apply(PublisherStarted()).lease.publishing
        assert not fresh or self.reading

    @rule()
    def publish(self) -> None:
        if self.reading and self.next_chunk < NUM_CHUNKS:
            self.apply(CHUNKS[self.next_chunk])
            self.next_chunk += 1

    @rule(chunk=st.integers(0, NUM_CHUNKS - 1))
    def publish_again(self, chunk: int) -> None:
        if chunk < self.next_chunk:
            before = self.lease
            assert self.apply(ChunkPublished(chunk)) == Transition(before)

    @rule()
    def publisher_ends(self) -> None:
        if self.reading:
            self.reading = False
            self.apply(PublisherStopped(NUM_CHUNKS if self.next_chunk == NUM_CHUNKS else None))

    @rule()
    def publisher_ends_again(self) -> None:
        if not self.reading:
            before = self.lease
            assert self.apply(PublisherStopped(None)) == Transition(before)

    @rule()
    def peer_progresses(self) -> None:
        self.apply(FetchProgress())

    @rule()
    def peer_commits(self) -> None:
        if self.lease.num_chunks is None and not self.lease.state.ended:
            with pytest.raises(InvalidRequest):
                self.apply(commit_of(len(self.lease.chunks)))
            return
        gone = self.lease.state in (LeaseState.ABORTED, LeaseState.EXPIRED)
        assert bool(self.apply(commit_of(len(self.lease.chunks))).refusal) == gone
        assert self.lease.reader == (None if gone else READER)

    @rule()
    def somebody_aborts(self) -> None:
        self.apply(Abort("why not"))

    @rule(seconds=st.sampled_from([0.1, 5.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = not self.lease.state.ended and self.now >= min(self.lease.deadline, self.lease.hard_deadline)
        self.apply(Tick())
        assert not due or self.lease.state is LeaseState.EXPIRED

    @rule()
    def freed(self) -> None:
        self.apply(Freed())

    @invariant()
    def each_action_once_and_all_in_the_end(self) -> None:
        assert len(self.given) == len(set(self.given))
        if self.lease.state.ended and not self.reading:
            assert {Action.RELEASE_BLOCKS, Action.DROP_OBJECTS} <= set(self.given)
        if not self.lease.state.ended:
            assert Action.DROP_OBJECTS not in self.given
            published = self.lease.state in (LeaseState.READY, LeaseState.FETCHING)
            assert (Action.RELEASE_BLOCKS in self.given) == (published and self.lease.copies_out)

    @invariant()
    def it_is_counted_until_it_is_finished(self) -> None:
        assert len(self.table) == (0 if self.lease.finished else 1)
        assert self.table.get("a") == self.lease

    @invariant()
    def one_owner(self) -> None:
        if self.lease.state in (LeaseState.ABORTED, LeaseState.EXPIRED):
            assert self.lease.owner is Owner.NOBODY
        elif self.lease.state in (LeaseState.COMMITTED, LeaseState.RELEASED):
            assert self.lease.owner is Owner.DECODE
        else:
            assert self.lease.owner is Owner.PREFILL


TestHandOver = HandOver.TestCase
TestHandOver.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_the_straight_way() -> None:
    table = LeaseTable(epoch=1)
    table.open("a", now=0, ttl_s=TTL_S)
    seen: list[tuple[LeaseState, tuple[Action, ...]]] = []
    events: list[Event] = [
        PublisherStarted(),
        ChunkPublished(0),
        ChunkPublished(1),
        PublisherStopped(2),
        FetchProgress(),
        Commit(),
        Freed(),
    ]
    for event in events:
        transition = table.apply("a", event, now=1, epoch=1)
        seen.append((transition.lease.state, transition.actions))
    assert seen == [
        (LeaseState.PUBLISHING, ()),
        (LeaseState.PUBLISHING, ()),
        (LeaseState.PUBLISHING, ()),
        (LeaseState.READY, (Action.RELEASE_BLOCKS,)),
        (LeaseState.FETCHING, ()),
        (LeaseState.COMMITTED, (Action.DROP_OBJECTS,)),
        (LeaseState.RELEASED, ()),
    ]
    assert table.apply("a", Commit(), now=2).lease.state is LeaseState.RELEASED


def test_abort_under_a_publisher_frees_when_it_has_stopped() -> None:
    table = LeaseTable(epoch=1)
    table.open("a", now=0, ttl_s=TTL_S)
    table.apply("a", PublisherStarted(), now=0)
    assert table.apply("a", Abort("gone"), now=0).actions == (Action.CANCEL_PUBLISHER,)
    assert table.apply("a", Abort("gone"), now=0).actions == ()
    stopped = table.apply("a", PublisherStopped(None), now=0)
    assert stopped.actions == (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)
    assert (stopped.lease.state, stopped.lease.reason) == (LeaseState.ABORTED, "gone")


def test_progress_renews_up_to_the_hard_deadline() -> None:
    table = LeaseTable(epoch=1)
    table.open("a", now=0, ttl_s=TTL_S, max_life_s=25)
    for now in (9.0, 18.0, 24.0):
        table.apply("a", FetchProgress(), now=now)
        assert table.sweep(now) == []
    (expired,) = table.sweep(25.0)
    assert expired.lease.state is LeaseState.EXPIRED
    assert expired.actions == (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)
    assert table.sweep(26.0) == []


def test_wrong_number_of_chunks_is_refused() -> None:
    table = LeaseTable(epoch=1)
    table.open("a", now=0, ttl_s=TTL_S)
    table.apply("a", PublisherStarted(), now=0)
    table.apply("a", ChunkPublished(1), now=0)
    with pytest.raises(InvalidRequest, match="2 chunks"):
        table.apply("a", PublisherStopped(2), now=0)


def test_table_is_bounded_fences_epochs_and_remembers() -> None:
    table = LeaseTable(epoch=2, max_leases=2, max_remembered=1)
    table.open("a", now=0, ttl_s=TTL_S)
    table.open("b", now=0, ttl_s=TTL_S)
    with pytest.raises(ResourceExhausted):
        table.open("c", now=0, ttl_s=TTL_S)
    with pytest.raises(InvalidRequest):
        table.open("a", now=0, ttl_s=TTL_S)
    with pytest.raises(Unavailable, match="epoch 1"):
        table.apply("a", Commit(), now=0, epoch=1)
    assert [t.lease.lease_id for t in table.abort_all("stop", 0)] == ["a", "b"]
    for lease_id in ("a", "b"):
        table.apply(lease_id, Freed(), now=0)
    assert len(table) == 0
    assert table.get("b").state is LeaseState.ABORTED
    with pytest.raises(NotFound):
        table.get("a")
    with pytest.raises(InvalidRequest):
        table.open("b", now=0, ttl_s=TTL_S)


def test_only_the_first_reader_of_what_was_published_may_use_it() -> None:
    table = LeaseTable(epoch=1)
    published(table)
    for wrong, why in [
        (commit_of(generations=(1, 0, 1, 1, 1, 3)), "not what lease a published"),
        (commit_of(source_blocks=(10, 20, 11, 21, 12, 23)), "not what lease a published"),
        (commit_of(2), "not what lease a published"),
        (Commit(reader=READER), "not what lease a published"),
        (commit_of(now_in_pool=(1, 0, 1, 1, 1, 3)), "reused under it"),
    ]:
        refused = table.apply("a", wrong, now=0)
        assert why in refused.refusal
        assert (refused.lease.state, refused.actions) == (LeaseState.READY, ())
    taken = table.apply("a", commit_of(now_in_pool=(1, 0, 1, 1, 1, 2)), now=0)
    assert (taken.refusal, taken.actions) == ("", (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS))
    assert "another reader" in table.apply("a", commit_of(reader=READER + 1), now=0).refusal
    table.apply("a", Freed(), now=0)
    assert table.apply("a", commit_of(), now=0) == Transition(table.get("a")), "its first answer was lost: the same again"
    assert "another reader" in table.apply("a", commit_of(reader=READER + 1), now=0).refusal


@pytest.mark.parametrize("copies_out", [False, True])
def test_a_commit_after_the_end_is_refused(copies_out: bool) -> None:
    table = LeaseTable(epoch=1)
    for lease_id, end in (("a", Abort("gone")), ("b", Tick())):
        published(table, lease_id, copies_out=copies_out)
        table.apply(lease_id, end, now=2 * TTL_S)
        assert f"lease {lease_id} has ended" in table.apply(lease_id, commit_of(), now=0).refusal


def test_a_chunk_that_is_read_where_it_lies_has_generations() -> None:
    table = LeaseTable(epoch=1)
    table.open("a", now=0, ttl_s=TTL_S, copies_out=False)
    table.apply("a", PublisherStarted(), now=0)
    for chunk in (ChunkPublished(0), ChunkPublished(0, (1, 2), (1,))):
        with pytest.raises(InvalidRequest, match="a generation for each"):
            table.apply("a", chunk, now=0)


def test_states_are_those_of_the_wire() -> None:
    assert {s.name: int(s) for s in LeaseState} == {
        name.removeprefix("LEASE_STATE_"): value for name, value in kv_pb2.LeaseState.items() if value
    }
