"""The prefill side of all hand-overs: opens leases, publishes blocks as they become final, frees what an ended lease holds.

A reader's first Watch says which transports work between the two, and so decides by which one a lease is published: nothing is before.
It usually comes while the prompt is still queued, since the ticket leaves with Accepted. If it never comes, the lease expires.

The lease's state machine (kv_transfer.lease) decides; this module applies its events and executes its actions, on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace

from kv_transfer.chunking import COPIED_OUT, IN_PLACE, ChunkPlan, ChunkSizes
from kv_transfer.lease import (
    Abort,
    Acknowledged,
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
    Transition,
)
from kv_transfer.telemetry import TransferTelemetry
from kv_transfer.ticket import ProbePass, Ticket, fingerprint
from kv_transfer.transport import ChunkInfo, TransportEnd
from kv_transfer.transports import TransportTable
from kv_transfer.wire_encoding import RAW
from prefill_worker.publisher import HandOver, Publisher
from twostep.block_order import BlockOrder
from twostep.engine.types import EngineRequest, LayerProgress, StepOutput
from twostep.errors import InvalidRequest, NonFiniteLogits, ResourceExhausted, TwostepError, Unavailable
from twostep.worker.edge import EdgeParts
from twostep.worker.requests import attempt_id

log = logging.getLogger(__name__)

_SWEEP_S = 0.2
# Two workers that hand over to each other can wait for each other's blocks. An engine that has planned nothing for so long does.
_STUCK_S = 1.0
# The longest life of a lease and its ticket.
MAX_LIFE_S = 600.0
# Leases beyond those of requests that wait or run: what ends takes a moment.
_SPARE_LEASES = 256
# Ended leases whose request cannot be answered anywhere, kept so that readers that come late do not have it repeated.
_MAX_REFUSALS = 1024
_FINAL_ERRORS = (InvalidRequest, NonFiniteLogits)


class HandOvers:
    """Has all attempts of one worker life. The transports are the caller's, who starts and closes them."""

    def __init__(self, parts: EdgeParts, transports: TransportTable[TransportEnd], telemetry: TransferTelemetry) -> None:
        """Raises SetupError where KV cannot travel as the configuration says."""
        config = parts.config
        self.layout = parts.engine.facts.layout
        self.lease_ttl_s = config.lease_ttl
        self.bytes_published = 0
        self.blocks_published = 0
        self.blocks_skipped = 0
        self.num_handed_over = 0
        self._parts = parts
        self._engine = parts.engine
        self._transports = transports
        self._layout_fingerprint = fingerprint(self.layout)
        self._table = LeaseTable(max_leases=config.max_waiting + config.max_num_seqs + _SPARE_LEASES)
        # Those of the last reader's transport: the next one's are likely the same.
        self._sizes: ChunkSizes | None = None
        self._live: dict[str, HandOver] = {}  # by the engine's name of the sequence
        self._refusals: OrderedDict[str, TwostepError] = OrderedDict()  # by lease id
        self._publisher = Publisher(
            transports.pool(parts),
            transports,
            self._on_chunk,
            telemetry,
            block_bytes=self._block_bytes,
            wire=config.kv_wire,
            lease_ttl_s=self.lease_ttl_s,
        )
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        # The engine's steps when they were looked at, and since when they have not become more.
        self._steps, self._stuck_since = -1, 0.0

    def __len__(self) -> int:
        """Returns the number of leases that still hold something."""
        return len(self._table)

    @property
    def oldest_s(self) -> float:
        """The age of the oldest lease that still holds something; 0: there is none."""
        oldest = next(iter(self._live.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.submitted_at

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="lease-sweep")

    async def close(self) -> None:
        """Aborts what is left and waits until it is freed. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        self._closed = True
        self.abort_all(Unavailable("the prefill worker is stopping; another one will do"))
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- what routers and readers ask ---------------------------------------------------------------------------------------

    async def open(self, request: EngineRequest, *, num_decode_cached_tokens: int, life_s: float, tenant: str = "") -> HandOver:
        """Queues the prompt and opens its lease. Raises Unavailable (no transport), ResourceExhausted and InvalidRequest, and then
        holds nothing."""
        order = self.layout.order(len(request.token_ids))
        life_s = min(life_s, MAX_LIFE_S)
        first, count = self._first_block(order, num_decode_cached_tokens), order.count
        self._publisher.check_size((count - first) * self._block_bytes)
        ticket = self._ticket(request, life_s, tenant)
        # Its first step may be launched before a reader has chosen: it is marked as for the last one.
        plan = self._plan(first, count - first, self._sizes or self._sizes_of(self._transports.ready[0]))
        await self._engine.submit(request, hold=True, mark_layers=plan.mark_layers)
        try:
            if self._closed:
                raise Unavailable("the prefill worker is stopping; another one will do")
            lease = self._table.open(ticket, now=time.monotonic(), ttl_s=self.lease_ttl_s, max_life_s=life_s)
        except TwostepError:
            self._engine.cancel(request.seq_id)
            raise
        hand_over = HandOver(
            request=request,
            lease=lease,
            order=order,
            first_block=first,
            num_blocks=count,
            plan=plan,
        )
        self._live[hand_over.seq_id] = hand_over
        self._refusals.pop(hand_over.lease_id, None)
        return hand_over

    def ended_error(self, hand_over: HandOver) -> TwostepError:
        """Returns the error for a reader of a lease that has ended."""
        if (refusal := self._refusals.get(hand_over.lease_id)) is not None:
            return refusal
        why = f": {hand_over.error.message}" if hand_over.error is not None else ""
        return Unavailable(f"the lease ended ({hand_over.lease.state.name} {hand_over.lease.reason}{why}); prefill again")

    @property
    def _block_bytes(self) -> int:
        return self._engine.facts.shape.block_bytes

    def find(self, ticket: Ticket) -> HandOver:
        """Returns the hand-over of a ticket that verifies. Raises what Ticket.verify raises, and if its lease has ended Unavailable, or
        what is wrong with the request."""
        self._verify(ticket)
        hand_over = self._live.get(attempt_id(ticket.request_id, ticket.attempt))
        # A request that used its id again has another lease by the same name.
        if hand_over is None or hand_over.ticket != ticket:
            raise self._refusals.get(
                ticket.lease_id, Unavailable("the lease of this ticket has ended and what it held is free; prefill again")
            )
        return hand_over

    def _first_block(self, order: BlockOrder, num_cached_tokens: int) -> int:
        """Raises InvalidRequest."""
        if num_cached_tokens > order.num_tokens:
            raise InvalidRequest(f"the decode worker holds {num_cached_tokens} tokens of {order.num_tokens}; give that many at most")
        # A decode worker of another block size may hold a part of a block of ours.
        return order.before(num_cached_tokens // order.block_size)

    def watched(
        self, hand_over: HandOver, offered: Sequence[str], wires: Sequence[str] = (), *, num_cached_tokens: int | None = None
    ) -> TransportEnd:
        """Returns the transport by which it is published, chosen by the first reader, as is the form of its blocks (`wire`) and, with
        `num_cached_tokens`, which of them: those that it does not hold. `offered`: those that work for this one, best first; `wires`: forms
        that it takes besides raw. Raises Unavailable, Incompatible and InvalidRequest, and then nothing is chosen."""
        if hand_over.transport is None:
            first = hand_over.first_block
            if num_cached_tokens is not None:
                first = self._first_block(hand_over.order, num_cached_tokens)
            wanted = hand_over.num_blocks - first
            hand_over.transport, hand_over.wire = self._publisher.choose(offered, wires, wanted * self._block_bytes)
            self._sizes = self._sizes_of(hand_over.transport)
            if (self._sizes, first) != (hand_over.plan.sizes, hand_over.first_block):
                hand_over.first_block, hand_over.plan = first, self._plan(first, wanted, self._sizes)
                self._engine.mark_layers(hand_over.seq_id, hand_over.plan.mark_layers)
            if hand_over.started:
                self._start_publisher(hand_over)
        elif offered and hand_over.transport.name not in offered:
            raise Unavailable(
                f"the lease is published by {hand_over.transport.name}, this reader takes {', '.join(offered)}; prefill again"
            )
        elif hand_over.wire != RAW and hand_over.wire not in wires:
            raise Unavailable(f"the lease is published as {hand_over.wire}, this reader takes {', '.join((RAW, *wires))}; prefill again")
        return hand_over.transport

    def _sizes_of(self, transport: TransportEnd) -> ChunkSizes:
        if self._parts.config.chunk_bytes:
            return ChunkSizes.of(self._parts.config.chunk_bytes)
        return COPIED_OUT if transport.copies_out else IN_PLACE

    def _plan(self, first_block: int, num_blocks: int, sizes: ChunkSizes) -> ChunkPlan:
        """Cuts them by groups of layers where the steps say how far they are."""
        facts = self._engine.facts
        return ChunkPlan(
            first_block=first_block,
            num_blocks=num_blocks,
            block_bytes=self._block_bytes,
            num_layers=facts.shape.num_layers if facts.marks_layers else 1,
            step_blocks=max(1, self._engine.max_num_batched_tokens // facts.shape.block_size * facts.shape.num_groups),
            sizes=sizes,
        )

    async def acknowledge(self, ticket: Ticket, event: FetchProgress | Commit | Abort) -> Acknowledged:
        """Applies what the decode worker says. Raises what Ticket.verify raises but for expiry, and InvalidRequest (a commit before all
        was published)."""
        self._verify(ticket, expired_too=True)
        if isinstance(event, Commit) and (blocks := self._table.blocks_to_compare(ticket)):
            # Its last read is over: what is true of the pool now was true then.
            event = replace(event, now_in_pool=tuple(await self._engine.generations(blocks)))
        answer = self._table.acknowledge(ticket, event, now=time.monotonic())
        hand_over = self._live.get(attempt_id(ticket.request_id, ticket.attempt))
        if hand_over is not None and answer.transition is not None:
            self._settle(hand_over, answer.transition)
        return answer

    def renew(self, hand_over: HandOver) -> None:
        """Renews the lease: the decode worker watches, it is alive, and waits for us."""
        self._apply(hand_over, FetchProgress())

    def abort(self, hand_over: HandOver, reason: str, error: TwostepError | None = None) -> None:
        """Ends the lease if it has not ended, and frees all of it, in the background. `error` is what Run shall raise."""
        if not hand_over.lease.state.ended:
            hand_over.error = hand_over.error or error
            if isinstance(hand_over.error, _FINAL_ERRORS):
                self._refusals[hand_over.lease_id] = hand_over.error
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            self._apply(hand_over, Abort(reason))

    def abort_all(self, error: TwostepError) -> None:
        for hand_over in list(self._live.values()):
            self.abort(hand_over, error.message, error)

    # ---- the engine's steps ---------------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        for progress in output.progress:
            if (hand_over := self._under_way(progress.seq_id)) is not None:
                hand_over.on_progress(progress, output.began_at)
                self._start_publisher(hand_over)
        for scores in output.scores:
            if (hand_over := self._under_way(scores.seq_id)) is not None:
                hand_over.on_scores(scores)
        for row, seq_id in enumerate(output.tokens.seq_ids):
            if (hand_over := self._under_way(seq_id)) is not None:
                token = output.tokens[row]
                hand_over.on_token(token)
                if token.finish_reason is not None:
                    self.abort(hand_over, "the first token ended the request")
        for failure in output.failures:
            if (hand_over := self._under_way(failure.seq_id)) is not None:
                self.abort(hand_over, failure.message, failure.as_error())

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        """Takes, while a step runs, what of it is done already."""
        for each in progress:
            if (hand_over := self._under_way(each.seq_id)) is not None:
                hand_over.on_layers(each)
                self._start_publisher(hand_over)

    def _under_way(self, seq_id: str) -> HandOver | None:
        hand_over = self._live.get(seq_id)
        return None if hand_over is None or hand_over.lease.state.ended else hand_over

    def _start_publisher(self, hand_over: HandOver) -> None:
        """Starts to publish, once the transport is chosen."""
        if hand_over.publisher is not None or hand_over.transport is None:
            return
        self._apply(hand_over, PublisherStarted(hand_over.transport.copies_out))
        if hand_over.lease.publishing:
            hand_over.publisher = asyncio.create_task(
                self._publish(hand_over), name=f"publish {hand_over.seq_id}", context=hand_over.context.copy()
            )

    async def _publish(self, hand_over: HandOver) -> None:
        """Publishes all of it and says so to the lease. Cancelling leaves that to the canceller."""
        try:
            await self._publisher.run(hand_over)
        except TwostepError as error:
            hand_over.error = error
            self._apply(hand_over, PublisherStopped())
            return
        self._apply(hand_over, PublisherStopped(hand_over.plan.num_chunks))

    def _on_chunk(self, hand_over: HandOver, info: ChunkInfo) -> None:
        # To the lease first: a watcher may hear only of what a commit may name.
        self._apply(hand_over, ChunkPublished(info.index, info.source_blocks, info.generations))
        hand_over.on_chunk(info)
        self.bytes_published += info.num_bytes
        if not info.first_layer:
            self.blocks_published += info.num_blocks

    # ---- lease events and actions ---------------------------------------------------------------------------------------

    def _apply(self, hand_over: HandOver, event: Event) -> None:
        self._settle(hand_over, self._table.apply(hand_over.lease_id, event, now=time.monotonic()))

    def _settle(self, hand_over: HandOver, transition: Transition) -> None:
        before, hand_over.lease = hand_over.lease, transition.lease
        for action in transition.actions:
            match action:
                case Action.RELEASE_BLOCKS:
                    # Held after the first token; before it, still queued or running.
                    self._engine.cancel(hand_over.seq_id)
                case Action.CANCEL_PUBLISHER:
                    self._spawn(self._stop_publisher(hand_over), hand_over)
                case Action.DROP_OBJECTS:
                    self._spawn(self._drop(hand_over), hand_over)
        if hand_over.lease.finished and self._live.pop(hand_over.seq_id, None) is not None:
            self._publisher.give_back(hand_over)
            if hand_over.lease.state is LeaseState.RELEASED:
                self.blocks_skipped += hand_over.first_block
                self.num_handed_over += 1
        # Not for a mere renewal: each watcher renews when it wakes, and would wake the others for ever.
        if (before.state, before.num_chunks, before.finished) != (
            hand_over.lease.state,
            hand_over.lease.num_chunks,
            hand_over.lease.finished,
        ):
            hand_over.changed()

    async def _stop_publisher(self, hand_over: HandOver) -> None:
        assert hand_over.publisher is not None, "only a running publisher is cancelled"
        hand_over.publisher.cancel()
        await asyncio.wait([hand_over.publisher])
        self._apply(hand_over, PublisherStopped())

    async def _drop(self, hand_over: HandOver) -> None:
        try:
            if hand_over.transport is not None:
                await hand_over.transport.drop(hand_over.lease_id)
        finally:
            # Whatever went wrong there, the transport's own time limit frees the rest; the lease must not wait for it.
            self._apply(hand_over, Freed())

    def _spawn(self, work: Coroutine[object, object, None], hand_over: HandOver) -> None:
        task = asyncio.create_task(work, context=hand_over.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("freeing a lease failed", exc_info=error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            for transition in self._table.sweep(time.monotonic()):
                lease: Lease = transition.lease
                hand_over = self._live[attempt_id(lease.ticket.request_id, lease.ticket.attempt)]
                hand_over.context.run(log.warning, "lease %s expired: %s", lease.lease_id, lease.reason)
                hand_over.error = hand_over.error or Unavailable(f"the hand-over ended ({lease.reason}); try again")
                self._settle(hand_over, transition)
            self._give_way(time.monotonic())

    def _give_way(self, now: float) -> None:
        """Ends what waits for blocks that are reserved for prompts of other workers, which may wait for blocks that this worker's
        prompts have reserved there: routers place them again."""
        waiting = [h for h in self._live.values() if not h.started and not h.lease.state.ended and now - h.submitted_at > _STUCK_S]
        stats = self._engine.stats() if waiting else None
        if stats is None or stats.steps != self._steps or stats.stalled_s or not stats.num_waiting or not stats.num_reserved:
            self._steps, self._stuck_since = -1 if stats is None else stats.steps, now
        elif now - self._stuck_since > _STUCK_S:
            for hand_over in waiting:
                error = ResourceExhausted("the blocks for this prompt are reserved for KV of other workers; try another worker, or later")
                self.abort(hand_over, error.message, error)

    # ---- tickets --------------------------------------------------------------------------------------------------------

    def _ticket(self, request: EngineRequest, life_s: float, tenant: str) -> Ticket:
        request_id, _, attempt = request.seq_id.rpartition("/")
        return Ticket(
            worker_id=self._parts.worker_id,
            address=self._parts.address(),
            epoch=self._parts.epoch,
            request_id=request_id,
            attempt=int(attempt),
            layout=self._layout_fingerprint,
            expires_unix_ms=time.time_ns() // 1_000_000 + int(life_s * 1000),
            tenant=tenant,
        ).signed(self._parts.secret)

    def probed(self, request: ProbePass) -> Sequence[TransportEnd]:
        """Returns the transports that a reader may try now. Raises what ProbePass.verify raises."""
        request.verify(self._parts.secret, worker_id=self._parts.worker_id, epoch=self._parts.epoch)
        return self._transports.ready

    def _verify(self, ticket: Ticket, *, expired_too: bool = False) -> None:
        ticket.verify(
            self._parts.secret,
            worker_id=self._parts.worker_id,
            epoch=self._parts.epoch,
            layout=self._layout_fingerprint,
            now_unix_ms=0 if expired_too else None,  # at 0 nothing has expired
        )
