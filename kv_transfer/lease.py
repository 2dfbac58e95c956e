"""The hand-over's state machine, as the prefill worker keeps it: one pure function, and a bounded table of leases.

    RESERVED ──▶ PUBLISHING ──▶ READY ──▶ FETCHING ──▶ COMMITTED ──▶ RELEASED
        │            │            │           │             (freeing is done)
        └────────────┴────────────┴───────────┴──▶ ABORTED | EXPIRED

READY and FETCHING are true of chunks while others are still being published, so that fetching overlaps publishing; the lease as a
whole is PUBLISHING until its last chunk is out. COMMITTED is once, for the whole request.

    owner of the KV       prefill up to COMMITTED, decode from then on; after ABORTED and EXPIRED there is none
    freeing               the caller that applies the event executes the returned actions (prefill_worker.hand_over); over a lease's life
                          each action comes at most once, and by the time it has ended, DROP_OBJECTS and RELEASE_BLOCKS came exactly once
    a running publisher   still reads the blocks: ending the lease under it first asks for CANCEL_PUBLISHER, and frees only at
                          PublisherStopped
    repeated, reordered   events that come too late, or twice, change nothing and are answered with the state as it is

Where the transport does not copy out, the reader looks at the pool itself, and cannot be stopped. Its blocks are kept until the lease
ends, and it asks for the commit after its last read and before it uses what it read: `Transition.refusal` must be empty. It is not if
the lease has ended (another life of the worker, expired, aborted: its blocks may hold anything by now), if another reader committed,
or if what was read is not what was published here, block by block and generation by generation. Asking again after a lost answer is
answered as before: reading was over before the first time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from itertools import chain

from kv_transfer.ticket import Ticket
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted


class LeaseState(IntEnum):
    """Values are those of twostep.v1.LeaseState."""

    RESERVED = 1
    PUBLISHING = 2
    READY = 3
    FETCHING = 4
    COMMITTED = 5
    RELEASED = 6
    ABORTED = 7
    EXPIRED = 8

    @property
    def ended(self) -> bool:
        """The peer can get nothing of it any more."""
        return self >= LeaseState.COMMITTED


class Action(Enum):
    # Cancel the publisher task, wait for its end, then apply PublisherStopped.
    CANCEL_PUBLISHER = auto()
    # The engine may reuse the sequence's blocks.
    RELEASE_BLOCKS = auto()
    # transport.drop(lease_id), then apply Freed.
    DROP_OBJECTS = auto()


@dataclass(frozen=True, slots=True)
class PublisherStarted:
    """A task now reads the sequence's blocks. If the answer's `lease.publishing` is False it must not. `copies_out` is its transport's."""

    copies_out: bool


@dataclass(frozen=True, slots=True)
class ChunkPublished:
    """A chunk is out. Transports that do not copy out give the source's blocks, and their generations while the sequence owns them."""

    index: int
    source_blocks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PublisherStopped:
    """The task reads no more. `num_chunks` is how many it published in all; None: it failed or was cancelled."""

    num_chunks: int | None = None


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The peer watches, or got one chunk more."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The peer has all of it, verified; of one-sided transports it asks whether that may be used. See `Transition.refusal`.

    reader         the number that the peer gave to this pull; the first that commits is the reader
    source_blocks  and `generations`: those of all chunks that it read, as they were announced, chunk after chunk by index
    now_in_pool    filled in by this side, not by the peer: the generations of the lease's `source_blocks` in the pool, at a moment after
                   the peer's last read (LeaseTable.blocks_to_compare)
    """

    reader: int = 0
    source_blocks: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    now_in_pool: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """One of the two sides does not want it any more."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Freed:
    """DROP_OBJECTS is done."""


Event = PublisherStarted | ChunkPublished | PublisherStopped | FetchProgress | Commit | Abort | Tick | Freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One hand-over, of exactly one ticket. Times are seconds of a monotonic clock; progress moves `deadline`, nothing moves
    `hard_deadline`.

    `copies_out`: the transport copies at publish, so the source blocks are free once all is published; else they are kept to the end.
    """

    lease_id: str
    ticket: Ticket
    ttl_s: float
    deadline: float
    hard_deadline: float
    copies_out: bool = True
    state: LeaseState = LeaseState.RESERVED
    publishing: bool = False
    fetched: bool = False
    chunks: Mapping[int, ChunkPublished] = field(default_factory=dict)
    num_chunks: int | None = None
    reason: str = ""
    # The one that committed.
    reader: int | None = None
    # Actions already given out.
    given: frozenset[Action] = frozenset()
    freed: bool = False

    @property
    def source_blocks(self) -> tuple[int, ...]:
        """Those of all chunks published so far, chunk after chunk by index."""
        return tuple(chain.from_iterable(self.chunks[i].source_blocks for i in sorted(self.chunks)))

    @property
    def generations(self) -> tuple[int, ...]:
        """Aligned with `source_blocks`."""
        return tuple(chain.from_iterable(self.chunks[i].generations for i in sorted(self.chunks)))

    @property
    def finished(self) -> bool:
        """Nothing of it is held anywhere on this side: it may be forgotten."""
        return self.state.ended and not self.publishing and self.freed


@dataclass(frozen=True, slots=True)
class Transition:
    lease: Lease
    # In the order in which to execute them.
    actions: tuple[Action, ...] = ()
    # Why the reader that commits must not use what it read. Empty: it may.
    refusal: str = ""


def advance(lease: Lease, event: Event, now: float) -> Transition:
    """Applies one event. Never raises for one that comes late or twice; raises InvalidRequest for one no order of messages explains:
    a commit before everything was published, a wrong number of chunks, a chunk without generations where they are needed."""
    match event:
        case PublisherStarted(copies_out):
            if lease.state is not LeaseState.RESERVED:
                return Transition(lease)
            return Transition(_renewed(replace(lease, state=LeaseState.PUBLISHING, publishing=True, copies_out=copies_out), now))
        case ChunkPublished():
            return _chunk_published(lease, event, now)
        case PublisherStopped(num_chunks):
            return _publisher_stopped(lease, num_chunks, now)
        case FetchProgress():
            if lease.state.ended:
                return Transition(lease)
            state = LeaseState.FETCHING if lease.state is LeaseState.READY else lease.state
            return Transition(_renewed(replace(lease, state=state, fetched=True), now))
        case Commit():
            return _commit(lease, event)
        case Abort(reason):
            return Transition(lease) if lease.state.ended else _end(lease, LeaseState.ABORTED, reason)
        case Tick():
            if lease.state.ended or now < min(lease.deadline, lease.hard_deadline):
                return Transition(lease)
            return _end(lease, LeaseState.EXPIRED, f"no progress for {lease.ttl_s:g} s" if now < lease.hard_deadline else "its time is up")
        case Freed():
            if Action.DROP_OBJECTS not in lease.given:
                return Transition(lease)
            released = replace(lease, state=LeaseState.RELEASED) if lease.state is LeaseState.COMMITTED else lease
            return Transition(replace(released, freed=True))


def _chunk_published(lease: Lease, chunk: ChunkPublished, now: float) -> Transition:
    if lease.state is not LeaseState.PUBLISHING or chunk.index in lease.chunks:
        return Transition(lease)
    if not lease.copies_out and (not chunk.source_blocks or len(chunk.source_blocks) != len(chunk.generations)):
        raise InvalidRequest(
            f"chunk {chunk.index} of lease {lease.lease_id} is read where it lies: give its source_blocks and a generation for each"
        )
    return Transition(_renewed(replace(lease, chunks={**lease.chunks, chunk.index: chunk}), now))


def _commit(lease: Lease, commit: Commit) -> Transition:
    if lease.state in (LeaseState.ABORTED, LeaseState.EXPIRED):
        return Transition(lease, refusal=f"lease {lease.lease_id} has ended ({lease.state.name} {lease.reason}); prefill again")
    if lease.state.ended and lease.reader != commit.reader:
        return Transition(lease, refusal=f"another reader has committed lease {lease.lease_id}; prefill again")
    if not lease.copies_out:
        if (commit.source_blocks, commit.generations) != (lease.source_blocks, lease.generations):
            return Transition(lease, refusal=f"what was read is not what lease {lease.lease_id} published; prefill again")
        if not lease.state.ended and commit.now_in_pool != lease.generations:
            return Transition(lease, refusal=f"blocks of lease {lease.lease_id} were reused under it; prefill again")
    if lease.state.ended:
        return Transition(lease)
    if lease.num_chunks is None:
        raise InvalidRequest(f"lease {lease.lease_id} was committed before all of it was published; commit after Complete")
    return _end(replace(lease, reader=commit.reader), LeaseState.COMMITTED, "")


def _publisher_stopped(lease: Lease, num_chunks: int | None, now: float) -> Transition:
    if not lease.publishing:
        return Transition(lease)
    stopped = replace(lease, publishing=False)
    if lease.state.ended:
        return _free(stopped)
    if num_chunks is None:
        return _end(stopped, LeaseState.ABORTED, "publishing failed")
    if lease.chunks.keys() != set(range(num_chunks)):
        raise InvalidRequest(f"lease {lease.lease_id} was completed with {num_chunks} chunks, but {sorted(lease.chunks)} were published")
    state = LeaseState.FETCHING if lease.fetched else LeaseState.READY
    ready = _renewed(replace(stopped, state=state, num_chunks=num_chunks), now)
    return _give(ready, Action.RELEASE_BLOCKS) if ready.copies_out else Transition(ready)


def _end(lease: Lease, state: LeaseState, reason: str) -> Transition:
    ended = replace(lease, state=state, reason=reason)
    return _give(ended, Action.CANCEL_PUBLISHER) if ended.publishing else _free(ended)


def _free(lease: Lease) -> Transition:
    return _give(lease, Action.RELEASE_BLOCKS, Action.DROP_OBJECTS)


def _give(lease: Lease, *actions: Action) -> Transition:
    """Gives out the actions that were not given out before: each comes once in a lease's life."""
    new = tuple(a for a in actions if a not in lease.given)
    return Transition(replace(lease, given=lease.given | set(new)), new)


def _renewed(lease: Lease, now: float) -> Lease:
    return replace(lease, deadline=max(lease.deadline, now + lease.ttl_s))


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The answer to a reader's acknowledgement; `refusal` as in `transition`, which is None if the lease is not known any more."""

    state: LeaseState
    refusal: str = ""
    transition: Transition | None = None


class LeaseTable:
    """The leases of one worker life, at most `max_leases` at once. Not thread-safe: one event loop owns it.

    Finished leases are forgotten but for their last state, of the latest `max_remembered`, so that a repeated Acknowledge gets an answer.
    """

    def __init__(self, *, max_leases: int = 1024, max_remembered: int = 4096) -> None:
        self._max_leases = max_leases
        self._max_remembered = max_remembered
        self._leases: dict[str, Lease] = {}
        self._remembered: OrderedDict[str, Lease] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of leases that still hold something."""
        return len(self._leases)

    def open(self, ticket: Ticket, *, now: float, ttl_s: float, max_life_s: float = 600.0) -> Lease:
        """Raises ResourceExhausted (table full) and InvalidRequest (the ticket's lease id is or was in use)."""
        lease_id = ticket.lease_id
        if lease_id in self._leases or lease_id in self._remembered:
            raise InvalidRequest(f"lease {lease_id} exists already; give every attempt a number of its own")
        if len(self._leases) >= self._max_leases:
            raise ResourceExhausted(f"all {self._max_leases} leases are taken; try another worker, or later")
        lease = Lease(lease_id=lease_id, ticket=ticket, ttl_s=ttl_s, deadline=now + ttl_s, hard_deadline=now + max_life_s)
        self._leases[lease_id] = lease
        return lease

    def apply(self, lease_id: str, event: Event, *, now: float) -> Transition:
        """Advances one lease. Raises NotFound, InvalidRequest (see `advance`)."""
        lease = self._leases.get(lease_id) or self._remembered.get(lease_id)
        if lease is None:
            raise NotFound(f"no lease {lease_id} here; it ended long ago or was never opened")
        transition = advance(lease, event, now)
        if lease_id in self._leases:
            self._store(transition.lease)
        return transition

    def acknowledge(self, ticket: Ticket, event: FetchProgress | Commit | Abort, *, now: float) -> Acknowledged:
        """Applies what the reader with this ticket says; that this worker life issued it was verified. A lease that is forgotten was
        RELEASED, as far as the sender of a late message is concerned; but a reader that asks whether it may use what it read is refused.
        Raises InvalidRequest (see `advance`)."""
        lease_id = ticket.lease_id
        lease = self._leases.get(lease_id) or self._remembered.get(lease_id)
        if lease is None:
            return Acknowledged(LeaseState.RELEASED, f"lease {lease_id} was forgotten long ago; prefill again")
        if lease.ticket != ticket:
            # A request that used its id again has another lease by the same name.
            return Acknowledged(LeaseState.RELEASED, f"lease {lease_id} of this ticket ended, and another has its name now; prefill again")
        transition = self.apply(lease_id, event, now=now)
        return Acknowledged(transition.lease.state, transition.refusal, transition)

    def blocks_to_compare(self, ticket: Ticket) -> Sequence[int]:
        """Returns the blocks of which a Commit with this ticket must say what is in the pool now; none where nothing is compared."""
        lease = self._leases.get(ticket.lease_id)
        return () if lease is None or lease.ticket != ticket or lease.copies_out or lease.state.ended else lease.source_blocks

    def sweep(self, now: float) -> list[Transition]:
        """Expires what is due; returns the transitions that ask for something. Call it a few times a second."""
        transitions = [advance(lease, Tick(), now) for lease in self._leases.values()]
        changed = [t for t in transitions if t.actions]
        for transition in changed:
            self._store(transition.lease)
        return changed

    def _store(self, lease: Lease) -> None:
        if not lease.finished:
            self._leases[lease.lease_id] = lease
            return
        self._leases.pop(lease.lease_id, None)
        self._remembered[lease.lease_id] = lease
        while len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)
