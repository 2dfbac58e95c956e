"""The prefill side of all hand-overs: opens leases, publishes blocks as they become final, frees what an ended lease holds.

A reader's first Watch says which transports work between the two, and so decides by which one a lease is published: nothing is before.
It usually comes while the prompt is still queued, since the ticket leaves with Accepted. If it never comes the lease expires.

The lease's state machine (kv_transfer.lease) decides; this module applies its events and executes its actions, on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from kv_transfer import layout as kv_layout
from kv_transfer.chunking import COPIED_OUT, IN_PLACE, ChunkPlan, ChunkSizes
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
    Transition,
)
from kv_transfer.observer import TransferLedger, TransferObserver
from kv_transfer.probing import ProbePass
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ChunkInfo, KvTransport
from kv_transfer.transports import Transports
from kv_transfer.wire_encoding import RAW
from prefill_worker.encoder import Encoder
from prefill_worker.job import Job
from prefill_worker.outlet import Outlets
from prefill_worker.publisher import Publisher
from twostep.cluster.records import LayoutRecord
from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, LayerProgress, StepOutput
from twostep.errors import InvalidRequest, NonFiniteLogits, NotFound, TwostepError, Unavailable

log = logging.getLogger(__name__)

_SWEEP_S = 0.2
# Of ended leases whose request cannot be answered anywhere: readers that come late are told so, and not to have it repeated.
_MAX_REFUSALS = 1024
_FINAL_ERRORS = (InvalidRequest, NonFiniteLogits)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverConfig:
    """`lease_ttl_s`: a lease without progress ends. `max_life_s`: the longest life of a lease and its ticket. `chunk_bytes`: of a published
    chunk, about; 0: what suits the transport. `wire`: how blocks travel, where transport and reader take it so
    (kv_transfer.wire_encoding)."""

    worker_id: str
    epoch: int
    layout: LayoutRecord
    lease_ttl_s: float = 30.0
    max_life_s: float = 600.0
    max_leases: int = 1024
    chunk_bytes: int = 0
    wire: str = RAW


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The lease's state after a reader's word; `refusal`: why it must not use what it read."""

    state: LeaseState
    refusal: str = ""


class HandOvers:
    """All attempts of one worker life. `address` gives the host:port where decode workers find Kv. It starts its transports, and
    leaves them running to whoever closes it."""

    def __init__(
        self,
        engine: Engine,
        transports: Transports,
        config: HandOverConfig,
        *,
        secret: bytes,
        address: Callable[[], str],
        observer: TransferObserver | None = None,
    ) -> None:
        """Raises SetupError where KV cannot travel as the configuration says."""
        self.outlets = Outlets(transports)
        self.config = config
        self.layout_fingerprint = kv_layout.fingerprint(config.layout)
        self.bytes_published = 0
        self.blocks_published = 0
        self.blocks_skipped = 0
        self._engine = engine
        self._secret = secret
        self._address = address
        self._table = LeaseTable(epoch=config.epoch, max_leases=config.max_leases)
        self._jobs: dict[str, Job] = {}  # by lease id
        self._by_seq: dict[str, Job] = {}
        self._refusals: OrderedDict[str, TwostepError] = OrderedDict()  # by lease id
        self._encoder = Encoder(engine.runner, config.layout, config.wire)
        self._publisher = Publisher(engine, self._encoder, self._on_chunk, observer or TransferLedger(), lease_ttl_s=config.lease_ttl_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Leases that still hold something."""
        return len(self._table)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest lease that still holds something; 0: there is none."""
        oldest = next(iter(self._jobs.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.submitted_at

    async def start(self) -> None:
        await self.outlets.transports.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="lease-sweep")

    async def close(self) -> None:
        """Aborts what is left and waits until it is freed. The transports go on. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        self.abort_all(Unavailable("the prefill worker is stopping; another one will do"))
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- a job's life -------------------------------------------------------------------------------------------------

    def open(self, request: EngineRequest, *, num_decode_cached_tokens: int, life_s: float, tenant: str = "") -> Job:
        """Queues the prompt and opens its lease. Raises Unavailable (no transport), ResourceExhausted and InvalidRequest, and then
        holds nothing."""
        size = self.config.layout.block_size
        if num_decode_cached_tokens > len(request.token_ids):
            raise InvalidRequest(f"num_decode_cached_tokens is {num_decode_cached_tokens}; give {len(request.token_ids)} at most")
        life_s = min(life_s, self.config.max_life_s)
        # A decode worker of another block size may hold a part of a block of ours.
        first, count = num_decode_cached_tokens // size, -(-len(request.token_ids) // size)
        self.outlets.check_size((count - first) * self._block_bytes)
        ticket = self._ticket(request, life_s, tenant)
        self._engine.submit(request, hold=True)
        try:
            lease = self._table.open(ticket.lease_id, now=time.monotonic(), ttl_s=self.config.lease_ttl_s, max_life_s=life_s)
        except TwostepError:
            self._engine.cancel(request.seq_id)
            raise
        job = Job(
            request=request,
            ticket=ticket,
            lease=lease,
            block_size=size,
            first_block=first,
            num_blocks=count,
        )
        self._jobs[job.lease_id] = self._by_seq[job.seq_id] = job
        self._refusals.pop(job.lease_id, None)
        return job

    def ended_error(self, job: Job) -> TwostepError:
        """What a reader of a lease that has ended is told."""
        if (refusal := self._refusals.get(job.lease_id)) is not None:
            return refusal
        why = f": {job.error.message}" if job.error is not None else ""
        return Unavailable(f"the lease ended ({job.lease.state.name} {job.lease.reason}{why}); prefill again")

    @property
    def _block_bytes(self) -> int:
        return self._engine.runner.kv_shape.block_bytes

    def find(self, ticket: Ticket) -> Job:
        """The job of a ticket that verifies. Raises what Ticket.verify raises, and if its lease has ended Unavailable, or what is wrong
        with the request."""
        self._verify(ticket)
        job = self._job_of(ticket)
        if job is None:
            if (refusal := self._refusals.get(ticket.lease_id)) is not None:
                raise refusal
            raise Unavailable("the lease of this ticket has ended and what it held is free; prefill again")
        return job

    def _job_of(self, ticket: Ticket) -> Job | None:
        """Of exactly this ticket: a request that used its id again has another lease by the same name."""
        job = self._jobs.get(ticket.lease_id)
        return job if job is not None and job.ticket == ticket else None

    def watched(self, job: Job, offered: Sequence[str], wires: Sequence[str] = ()) -> KvTransport:
        """The transport by which the job is published, chosen by the first reader, as is the form of its blocks (job.wire). `offered`:
        those that work for this one, best first; `wires`: forms that it takes besides raw. Raises Unavailable and Incompatible, and then
        changes nothing."""
        if job.outlet is None:
            job.outlet = self.outlets.choose(offered, job.wanted_blocks * self._block_bytes)
            job.wire = self._encoder.choose(job.outlet.transport, wires)
            job.plan = self._plan(job, job.outlet.transport)
            if job.started:
                self._start_publisher(job)
        elif offered and job.outlet.name not in offered:
            raise Unavailable(f"the lease is published by {job.outlet.name}, this reader takes {', '.join(offered)}; prefill again")
        elif job.wire != RAW and job.wire not in wires:
            raise Unavailable(f"the lease is published as {job.wire}, this reader takes {', '.join((RAW, *wires))}; prefill again")
        return job.outlet.transport

    def _plan(self, job: Job, transport: KvTransport) -> ChunkPlan:
        """Groups of layers where the steps tell of them."""
        runner, sizes = self._engine.runner, COPIED_OUT if transport.copies_out else IN_PLACE
        return ChunkPlan(
            first_block=job.first_block,
            num_blocks=job.wanted_blocks,
            block_bytes=self._block_bytes,
            num_layers=runner.kv_shape.num_layers if runner.marks_layers else 1,
            step_blocks=max(1, self._engine.max_num_batched_tokens // runner.kv_shape.block_size),
            sizes=ChunkSizes.of(self.config.chunk_bytes) if self.config.chunk_bytes else sizes,
        )

    def acknowledge(self, ticket: Ticket, event: FetchProgress | Commit | Abort) -> Acknowledged:
        """Applies what the decode worker says. Raises what Ticket.verify raises but for expiry, and InvalidRequest (a commit before all
        was published). A lease that is forgotten was RELEASED, as far as the sender of a late word is concerned; but a reader that asks
        whether it may use what it read is refused, since nobody remembers."""
        self._verify(ticket, expired_too=True)
        job = self._job_of(ticket)
        if job is None and ticket.lease_id in self._jobs:
            return Acknowledged(LeaseState.RELEASED, "the ticket's lease ended, and its name is another one's now; prefill again")
        if isinstance(event, Commit) and job is not None and not job.lease.copies_out:
            event = replace(event, now_in_pool=tuple(self._engine.generations(job.lease.source_blocks)))
        try:
            transition = self._table.apply(ticket.lease_id, event, now=time.monotonic())
        except NotFound:
            return Acknowledged(LeaseState.RELEASED, "the lease was forgotten long ago; prefill again")
        if job is not None:
            self._settle(job, transition)
        return Acknowledged(transition.lease.state, transition.refusal)

    def renew(self, job: Job) -> None:
        """The decode worker watches: it is alive, and waits for us."""
        self._apply(job, FetchProgress())

    def abort(self, job: Job, reason: str, error: TwostepError | None = None) -> None:
        """Ends the lease if it has not ended, and frees all of it, in the background. `error` is what Run shall raise."""
        if not job.lease.state.ended:
            job.error = job.error or error
            if isinstance(job.error, _FINAL_ERRORS):
                self._refusals[job.lease_id] = job.error
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            self._apply(job, Abort(reason))

    def abort_all(self, error: TwostepError) -> None:
        for job in list(self._jobs.values()):
            self.abort(job, error.message, error)

    # ---- the engine's steps ---------------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        for progress in output.progress:
            job = self._by_seq.get(progress.seq_id)
            if job is not None and not job.lease.state.ended:
                job.on_progress(progress, output.began_at)
                self._start_publisher(job)
        for token in output.tokens:
            job = self._by_seq.get(token.seq_id)
            if job is not None and not job.lease.state.ended:
                job.on_token(token)
                if token.finish_reason is not None:
                    self.abort(job, "the first token ended the request")
        for failure in output.failures:
            job = self._by_seq.get(failure.seq_id)
            if job is not None:
                self.abort(job, failure.message, failure.as_error())

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        """While a step runs: what of it is done already."""
        for each in progress:
            job = self._by_seq.get(each.seq_id)
            if job is not None and not job.lease.state.ended:
                job.on_layers(each)
                self._start_publisher(job)

    def _start_publisher(self, job: Job) -> None:
        """Once it is known by which transport."""
        if job.publisher is not None or job.outlet is None:
            return
        self._apply(job, PublisherStarted(job.outlet.transport.copies_out))
        if job.lease.publishing:
            job.publisher = asyncio.create_task(self._publish(job), name=f"publish {job.seq_id}", context=job.context.copy())

    async def _publish(self, job: Job) -> None:
        """Publishes all of it and says so to the lease. Cancelling leaves that to the canceller."""
        assert job.plan is not None
        try:
            await self._publisher.run(job)
        except TwostepError as error:
            job.error = error
            self._apply(job, PublisherStopped())
            return
        self._apply(job, PublisherStopped(job.plan.num_chunks))

    def _on_chunk(self, job: Job, info: ChunkInfo) -> None:
        # To the lease first: who watches may be told only of what a commit may name.
        self._apply(job, ChunkPublished(info.index, info.source_blocks, info.generations))
        job.on_chunk(info)
        self.bytes_published += info.num_bytes
        if not info.first_layer:
            self.blocks_published += info.num_blocks

    # ---- lease events and actions ---------------------------------------------------------------------------------------

    def _apply(self, job: Job, event: Event) -> None:
        self._settle(job, self._table.apply(job.lease_id, event, now=time.monotonic()))

    def _settle(self, job: Job, transition: Transition) -> None:
        before, job.lease = job.lease, transition.lease
        for action in transition.actions:
            match action:
                case Action.RELEASE_BLOCKS:
                    # Held after the first token; before it, still queued or running.
                    if not self._engine.release(job.seq_id):
                        self._engine.cancel(job.seq_id)
                case Action.CANCEL_PUBLISHER:
                    self._spawn(self._stop_publisher(job), job)
                case Action.DROP_OBJECTS:
                    self._spawn(self._drop(job), job)
        if job.lease.finished and self._jobs.pop(job.lease_id, None) is not None:
            del self._by_seq[job.seq_id]
            if job.outlet is not None:
                job.outlet.give_back(job.promised_bytes)
            if job.lease.state is LeaseState.RELEASED:
                self.blocks_skipped += job.first_block
        # Not for a mere renewal: each watcher renews when it wakes, and would wake the others for ever.
        if (before.state, before.num_chunks, before.finished) != (job.lease.state, job.lease.num_chunks, job.lease.finished):
            job.changed()

    async def _stop_publisher(self, job: Job) -> None:
        assert job.publisher is not None, "only a running publisher is cancelled"
        job.publisher.cancel()
        await asyncio.wait([job.publisher])
        self._apply(job, PublisherStopped())

    async def _drop(self, job: Job) -> None:
        try:
            if job.outlet is not None:
                await job.outlet.transport.drop(job.lease_id)
        finally:
            # Whatever went wrong there, the transport's own time limit frees the rest; the lease must not wait for it.
            self._apply(job, Freed())

    def _spawn(self, work: Coroutine[object, object, None], job: Job) -> None:
        task = asyncio.create_task(work, context=job.context.copy())
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
                job = self._jobs[lease.lease_id]
                job.context.run(log.warning, "lease %s expired: %s", lease.lease_id, lease.reason)
                job.error = job.error or Unavailable(f"the hand-over ended ({lease.reason}); try again")
                self._settle(job, transition)

    # ---- tickets --------------------------------------------------------------------------------------------------------

    def _ticket(self, request: EngineRequest, life_s: float, tenant: str) -> Ticket:
        request_id, _, attempt = request.seq_id.rpartition("/")
        return Ticket(
            worker_id=self.config.worker_id,
            address=self._address(),
            epoch=self.config.epoch,
            request_id=request_id,
            attempt=int(attempt),
            layout=self.layout_fingerprint,
            expires_unix_ms=time.time_ns() // 1_000_000 + int(life_s * 1000),
            tenant=tenant,
        ).signed(self._secret)

    def probed(self, request: ProbePass) -> Sequence[KvTransport]:
        """The transports that a reader may try now. Raises what ProbePass.verify raises."""
        request.verify(self._secret, worker_id=self.config.worker_id, epoch=self.config.epoch)
        return self.outlets.transports.ready

    def _verify(self, ticket: Ticket, *, expired_too: bool = False) -> None:
        ticket.verify(
            self._secret,
            worker_id=self.config.worker_id,
            epoch=self.config.epoch,
            layout=self.layout_fingerprint,
            now_unix_ms=0 if expired_too else None,
        )
