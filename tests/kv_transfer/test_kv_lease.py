"""The source's machine and its table: what the model of all ways at once (test_hand_over_model.py) does not look at."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from kv_transfer.lease import (
    Abort,
    Acknowledged,
    Action,
    ChunkPublished,
    Commit,
    Event,
    FetchProgress,
    Freed,
    LeaseState,
    LeaseTable,
    PublisherStarted,
    PublisherStopped,
)
from kv_transfer.ticket import Ticket
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted
from twostep.rpc.v1 import kv_pb2

TTL_S = 10.0
# Two blocks a chunk.
CHUNKS = [ChunkPublished(i, (10 + i, 20 + i), (1, i)) for i in range(3)]
BLOCKS, GENERATIONS = (tuple(chain(*each)) for each in zip(*((c.source_blocks, c.generations) for c in CHUNKS), strict=True))
COMMIT = Commit(reader=77, source_blocks=BLOCKS, generations=GENERATIONS)
FREE = (Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)


def ticket(name: str = "a") -> Ticket:
    return Ticket(worker_id="p", address="", epoch=1, request_id=name, attempt=1, layout="", expires_unix_ms=0)


A = ticket().lease_id


class Table(LeaseTable):
    """The leases of a pool whose blocks a test may `reuse`."""

    def __init__(self, **limits: int) -> None:
        self.reuse: defaultdict[int, int] = defaultdict(int)
        now = dict(zip(BLOCKS, GENERATIONS, strict=True))
        super().__init__(**limits)
        self._in_pool = now

    def acknowledge(self, ticket: Ticket, event: FetchProgress | Commit | Abort, *, now: float) -> Acknowledged:
        if isinstance(event, Commit):
            blocks = self.blocks_to_compare(ticket)
            event = replace(event, now_in_pool=tuple(self._in_pool[block] + self.reuse[block] for block in blocks))
        return super().acknowledge(ticket, event, now=now)

    def opened(self, name: str = "a", **options: Any) -> None:
        self.open(ticket(name), now=0, ttl_s=TTL_S, **options)


def test_the_straight_way() -> None:
    table = Table()
    table.opened()
    ways: list[tuple[Event, LeaseState, tuple[Action, ...]]] = [
        (PublisherStarted(copies_out=True), LeaseState.PUBLISHING, ()),
        (ChunkPublished(0), LeaseState.PUBLISHING, ()),
        (ChunkPublished(1), LeaseState.PUBLISHING, ()),
        (PublisherStopped(2), LeaseState.READY, (Action.RELEASE_BLOCKS,)),
        (FetchProgress(), LeaseState.FETCHING, ()),
        (Commit(), LeaseState.COMMITTED, (Action.DROP_OBJECTS,)),
        (Freed(), LeaseState.RELEASED, ()),
        (Commit(), LeaseState.RELEASED, ()),
    ]
    for event, state, actions in ways:
        transition = table.apply(A, event, now=1)
        assert (transition.lease.state, transition.actions) == (state, actions)


def test_progress_renews_up_to_the_hard_deadline() -> None:
    table = Table()
    table.opened(max_life_s=25)
    for now in (9.0, 18.0, 24.0):
        table.apply(A, FetchProgress(), now=now)
        assert table.sweep(now) == []
    (expired,) = table.sweep(25.0)
    assert (expired.lease.state, expired.actions) == (LeaseState.EXPIRED, FREE)
    assert table.sweep(26.0) == []


@pytest.mark.parametrize(
    ("copies_out", "events"),
    [
        (True, [ChunkPublished(1), PublisherStopped(2)]),  # a wrong number of chunks
        (False, [ChunkPublished(0)]),  # a chunk that is read where it lies has generations
        (False, [ChunkPublished(0, (1, 2), (1,))]),
        (True, [ChunkPublished(0), Commit()]),  # before all of it was published
    ],
)
def test_what_no_order_of_messages_explains_is_refused(copies_out: bool, events: list[Event]) -> None:
    table = Table()
    table.opened()
    for event in (PublisherStarted(copies_out), *events[:-1]):
        table.apply(A, event, now=0)
    with pytest.raises(InvalidRequest):
        table.apply(A, events[-1], now=0)


def test_the_table_is_bounded_and_remembers_how_leases_ended() -> None:
    table = Table(max_leases=2, max_remembered=1)
    for name in "ab":
        table.opened(name)
    with pytest.raises(ResourceExhausted):
        table.opened("c")
    with pytest.raises(InvalidRequest):
        table.opened("a")
    for name in "ab":
        for event in (Abort("stop"), Freed()):
            table.apply(ticket(name).lease_id, event, now=0)
    assert len(table) == 0
    assert table.acknowledge(ticket("b"), FetchProgress(), now=0).state is LeaseState.ABORTED
    with pytest.raises(NotFound):
        table.apply(A, FetchProgress(), now=0)
    forgotten = table.acknowledge(ticket("a"), COMMIT, now=0)
    assert (forgotten.state, forgotten.transition, bool(forgotten.refusal)) == (LeaseState.RELEASED, None, True)
    with pytest.raises(InvalidRequest):
        table.opened("b")


def test_another_ticket_of_the_same_name_changes_nothing() -> None:
    table = Table()
    table.opened()
    for event in (COMMIT, Abort("gone"), FetchProgress()):
        answer = table.acknowledge(replace(ticket(), expires_unix_ms=5), event, now=0)
        assert (answer.state, bool(answer.refusal), answer.transition) == (LeaseState.RELEASED, True, None)
    assert table.acknowledge(ticket(), FetchProgress(), now=0).state is LeaseState.RESERVED


def test_only_the_first_reader_of_what_was_published_may_use_it() -> None:
    table = Table()
    table.opened()
    for event in (PublisherStarted(copies_out=False), *CHUNKS, PublisherStopped(len(CHUNKS))):
        table.apply(A, event, now=0)
    table.reuse[22] += 1
    refusals = [table.acknowledge(ticket(), COMMIT, now=0)]
    table.reuse[22] -= 1
    for wrong in (
        {"generations": (1, 0, 1, 1, 1, 3)},
        {"source_blocks": (10, 20, 11, 21, 12, 23)},
        {"source_blocks": BLOCKS[:4], "generations": GENERATIONS[:4]},
        {"source_blocks": (), "generations": ()},
    ):
        refusals.append(table.acknowledge(ticket(), replace(COMMIT, **wrong), now=0))
    for refused in refusals:
        assert refused.refusal
        assert refused.transition is not None
        assert (refused.state, refused.transition.actions) == (LeaseState.READY, ())
    taken = table.acknowledge(ticket(), COMMIT, now=0)
    assert taken.transition is not None
    assert (taken.refusal, taken.transition.actions) == ("", FREE)
    for _ in range(2):
        assert table.acknowledge(ticket(), replace(COMMIT, reader=78), now=0).refusal
        # Its first answer was lost, and its blocks have been given out since: the same again.
        table.reuse[22] += 1
        assert not table.acknowledge(ticket(), COMMIT, now=0).refusal
        table.apply(A, Freed(), now=0)


def test_states_are_those_of_the_wire() -> None:
    assert {s.name: int(s) for s in LeaseState} == {
        name.removeprefix("LEASE_STATE_"): value for name, value in kv_pb2.LeaseState.items() if value
    }
