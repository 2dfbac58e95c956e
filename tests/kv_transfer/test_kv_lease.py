"""The source's machine, one way at a time, and its table; tests/kv_transfer/test_hand_over_model.py has all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.lease import (
    Abort,
    Action,
    ChunkPublished,
    Commit,
    Event,
    FetchProgress,
    Freed,
    Lease,
    LeaseState,
    LeaseTable,
    PublisherStarted,
    PublisherStopped,
    Tick,
)
from kv_transfer.ticket import Ticket
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted
from twostep.rpc.v1 import kv_pb2

TTL_S = 10.0
NUM_CHUNKS = 3
READER = 77
# Two blocks a chunk.
CHUNKS = [ChunkPublished(i, (10 + i, 20 + i), (1, i)) for i in range(NUM_CHUNKS)]


def commit_of(num_chunks: int = NUM_CHUNKS, **changes: Any) -> Commit:
    """What a reader of so many chunks says."""
    blocks = tuple(block for chunk in CHUNKS[:num_chunks] for block in chunk.source_blocks)
    generations = tuple(generation for chunk in CHUNKS[:num_chunks] for generation in chunk.generations)
    return replace(Commit(reader=READER, source_blocks=blocks, generations=generations), **changes)


def ticket(name: str = "a", *, expires_unix_ms: int = 0) -> Ticket:
    return Ticket(worker_id="p", address="", epoch=1, request_id=name, attempt=1, layout="", expires_unix_ms=expires_unix_ms)


A = ticket().lease_id


class Pool:
    """The generations of blocks, each of which a test may reuse."""

    def __init__(self) -> None:
        self.now = {block: generation for chunk in CHUNKS for block, generation in zip(chunk.source_blocks, chunk.generations, strict=True)}

    def generations(self, blocks: Sequence[int]) -> list[int]:
        return [self.now[block] for block in blocks]


def table_of(pool: Pool | None = None, **limits: int) -> LeaseTable:
    return LeaseTable((pool or Pool()).generations, **limits)


def opened(table: LeaseTable, name: str = "a", **options: Any) -> Lease:
    return table.open(ticket(name), now=0, ttl_s=TTL_S, **options)


def published(table: LeaseTable, name: str = "a", *, copies_out: bool = False) -> None:
    """Opens a lease and publishes all of it."""
    lease = opened(table, name)
    for event in (PublisherStarted(copies_out), *CHUNKS, PublisherStopped(NUM_CHUNKS)):
        table.apply(lease.lease_id, event, now=0)


def test_the_straight_way() -> None:
    table = table_of()
    opened(table)
    seen: list[tuple[LeaseState, tuple[Action, ...]]] = []
    events: list[Event] = [
        PublisherStarted(copies_out=True),
        ChunkPublished(0),
        ChunkPublished(1),
        PublisherStopped(2),
        FetchProgress(),
        Commit(),
        Freed(),
    ]
    for event in events:
        transition = table.apply(A, event, now=1)
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
    assert table.apply(A, Commit(), now=2).lease.state is LeaseState.RELEASED


def test_abort_under_a_publisher_frees_when_it_has_stopped() -> None:
    table = table_of()
    opened(table)
    table.apply(A, PublisherStarted(copies_out=True), now=0)
    assert table.apply(A, Abort("gone"), now=0).actions == (Action.CANCEL_PUBLISHER,)
    assert table.apply(A, Abort("gone"), now=0).actions == ()
    stopped = table.apply(A, PublisherStopped(None), now=0)
    assert stopped.actions == (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)
    assert (stopped.lease.state, stopped.lease.reason) == (LeaseState.ABORTED, "gone")


def test_progress_renews_up_to_the_hard_deadline() -> None:
    table = table_of()
    opened(table, max_life_s=25)
    for now in (9.0, 18.0, 24.0):
        table.apply(A, FetchProgress(), now=now)
        assert table.sweep(now) == []
    (expired,) = table.sweep(25.0)
    assert expired.lease.state is LeaseState.EXPIRED
    assert expired.actions == (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)
    assert table.sweep(26.0) == []


def test_wrong_number_of_chunks_is_refused() -> None:
    table = table_of()
    opened(table)
    table.apply(A, PublisherStarted(copies_out=True), now=0)
    table.apply(A, ChunkPublished(1), now=0)
    with pytest.raises(InvalidRequest):
        table.apply(A, PublisherStopped(2), now=0)


def test_the_table_is_bounded_and_remembers_how_leases_ended() -> None:
    table = table_of(max_leases=2, max_remembered=1)
    for name in "ab":
        opened(table, name)
    with pytest.raises(ResourceExhausted):
        opened(table, "c")
    with pytest.raises(InvalidRequest):
        opened(table, "a")
    for name in "ab":
        for event in (Abort("stop"), Freed()):
            table.apply(ticket(name).lease_id, event, now=0)
    assert len(table) == 0
    assert table.acknowledge(ticket("b"), FetchProgress(), now=0).state is LeaseState.ABORTED
    with pytest.raises(NotFound):
        table.apply(A, FetchProgress(), now=0)
    forgotten = table.acknowledge(ticket("a"), commit_of(), now=0)
    assert (forgotten.state, forgotten.transition) == (LeaseState.RELEASED, None)
    assert forgotten.refusal
    with pytest.raises(InvalidRequest):
        opened(table, "b")


def test_another_ticket_of_the_same_name_changes_nothing() -> None:
    table = table_of()
    published(table, copies_out=True)
    for event in (commit_of(), Abort("gone"), FetchProgress()):
        answer = table.acknowledge(ticket(expires_unix_ms=5), event, now=0)
        assert (answer.state, bool(answer.refusal), answer.transition) == (LeaseState.RELEASED, True, None)
    assert table.acknowledge(ticket(), FetchProgress(), now=0).state is LeaseState.FETCHING


def test_only_the_first_reader_of_what_was_published_may_use_it() -> None:
    pool = Pool()
    table = table_of(pool)
    published(table)
    pool.now[22] += 1
    reused = table.acknowledge(ticket(), commit_of(), now=0)
    pool.now[22] -= 1
    wrong = [
        commit_of(generations=(1, 0, 1, 1, 1, 3)),
        commit_of(source_blocks=(10, 20, 11, 21, 12, 23)),
        commit_of(2),
        Commit(reader=READER),
    ]
    for refused in (reused, *(table.acknowledge(ticket(), commit, now=0) for commit in wrong)):
        assert refused.refusal
        assert refused.transition is not None
        assert (refused.state, refused.transition.actions) == (LeaseState.READY, ())
    taken = table.acknowledge(ticket(), commit_of(), now=0)
    assert taken.transition is not None
    assert (taken.refusal, taken.transition.actions) == ("", (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS))
    for _ in range(2):
        assert table.acknowledge(ticket(), commit_of(reader=READER + 1), now=0).refusal
        # Its first answer was lost, and its blocks have been given out since: the same again.
        pool.now[22] += 1
        assert not table.acknowledge(ticket(), commit_of(), now=0).refusal
        table.apply(A, Freed(), now=0)


@pytest.mark.parametrize("copies_out", [False, True])
def test_a_commit_after_the_end_is_refused(copies_out: bool) -> None:
    table = table_of()
    for name, end in (("a", Abort("gone")), ("b", Tick())):
        published(table, name, copies_out=copies_out)
        table.apply(ticket(name).lease_id, end, now=2 * TTL_S)
        answer = table.acknowledge(ticket(name), commit_of(), now=0)
        assert answer.refusal
        assert answer.state in (LeaseState.ABORTED, LeaseState.EXPIRED)


def test_a_chunk_that_is_read_where_it_lies_has_generations() -> None:
    table = table_of()
    opened(table)
    table.apply(A, PublisherStarted(copies_out=False), now=0)
    for chunk in (ChunkPublished(0), ChunkPublished(0, (1, 2), (1,))):
        with pytest.raises(InvalidRequest):
            table.apply(A, chunk, now=0)


def test_states_are_those_of_the_wire() -> None:
    assert {s.name: int(s) for s in LeaseState} == {
        name.removeprefix("LEASE_STATE_"): value for name, value in kv_pb2.LeaseState.items() if value
    }
