"""One request's life over its attempts.

1. ask which workers hold how much of the prompt (at most 2 ms)
2. refuse it if it cannot be served within its targets; else place it on a pair, or on a decode worker alone; reserve on decode, and run on
   prefill beside that where it is likely to be taken, else after it; a refusal: the next placement. All full: wait in the queue for
   workers. No worker there, or no transport between them: wait a moment for it to come back
3. tokens flow into the output until the last one
4. a worker lost on the way: begin again, with the tokens already received behind the prompt, on other workers if there are any
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from router.placing.placement import NoPlacement, Placement, PlacementRequest, Shortage, Snapshot, place
from router.request.cleanup import Cleanup
from router.request.job import RequestJob
from router.request.output import Output
from router.request.report import RequestReport
from router.request.targets import Expired, refusal
from router.request.vector import VectorOutput
from router.serving.attempt import Attempt
from router.serving.embedding import EmbeddingAttempt
from router.serving.worker_calls import AttemptFailed, WorkerRefused
from router.waiting.fair_queue import QueueEntry
from router.waiting.queues import WorkerQueue
from router.workers.pool import DecodeLink, WorkerPool
from router.workers.prefix_index import NO_HINTS, NOT_CACHED, CachedPrefix, PrefixIndex, WorkerLife
from twostep.cluster.prediction import RECENT_S
from twostep.cluster.records import WorkerRecord
from twostep.errors import ContextExceeded, DeadlineExceeded, Incompatible, InternalError, TwostepError, Unavailable
from twostep.request_class import RequestClass
from twostep.sampling_params import newer_parameters

log = logging.getLogger(__name__)

Decide = Callable[[Snapshot, PlacementRequest], Placement | NoPlacement]


@dataclass(slots=True, eq=False)
class _Dispatch:
    """One request under way. `entry`: in the queue for workers. `lost`: workers that earlier attempts were lost by."""

    job: RequestJob
    entry: QueueEntry
    output: Output | VectorOutput
    report: RequestReport
    num_begun: int = 0
    lost: set[WorkerLife] = field(default_factory=set)
    cached: Mapping[WorkerLife, CachedPrefix] = field(default_factory=lambda: NO_HINTS)

    def demand(self) -> PlacementRequest:
        """Returns what is still to be done. Of the time to the first token, what is left; nothing is promised for it once the client has
        tokens."""
        job, done, targets = self.job, self.output.next_position, self.job.targets
        waited_s = time.monotonic() - job.arrived
        return PlacementRequest(
            request_id=job.request_id,
            num_tokens=len(job.prompt) + done,
            max_new_tokens=0 if job.pooling is not None else job.sampling.max_tokens - done,
            request_class=job.request_class,
            ttft_ms=None if targets.ttft_s is None or done else max(0.0, 1e3 * (targets.ttft_s - waited_s)),
            tpot_ms=None if targets.tpot_s is None else 1e3 * targets.tpot_s,
            gap_ms=None if targets.gap_s is None else 1e3 * targets.gap_s,
            embeds=job.pooling is not None,
            num_prompt_tokens=len(job.prompt),
            speculate=job.sampling.speculate,
        )


@dataclass(frozen=True, slots=True)
class _NotNow:
    """A round in which no worker took the request. `full`: one would have, with more room. `held`: that is because of what waits there
    already, and no worker has refused."""

    full: bool
    held: bool
    shortage: Shortage
    reason: str

    def raise_if_hopeless(self) -> None:
        """Raises if waiting for a moment would not help."""
        if self.shortage is Shortage.TOO_LARGE:
            raise ContextExceeded(self.reason)
        if self.shortage is Shortage.INCOMPATIBLE and not self.full:
            raise Incompatible(self.reason)


@dataclass(slots=True)
class _Refusals:
    """The workers to pass over in one round. `prompts`: those that would not compute the prompt; they may still take its KV."""

    workers: set[WorkerLife] = field(default_factory=set)
    prompts: set[WorkerLife] = field(default_factory=set)
    # Some were not even asked: enough of this router's prompts wait there.
    held: bool = False
    full: bool = False
    reason: str = ""

    def add(self, refused: WorkerRefused, *, computing: WorkerLife) -> None:
        (self.prompts if refused.life == computing and refused.declined else self.workers).add(refused.life)
        self.full = self.full or refused.full
        self.reason = refused.error.message


class Dispatcher:
    def __init__(
        self,
        pool: WorkerPool,
        prefixes: PrefixIndex,
        cleanup: Cleanup,
        queue: WorkerQueue,
        decide: Decide = place,
        *,
        max_attempts: int = 3,
        no_worker_grace_s: float = 3.0,
        staged_steps: int = 4,
    ) -> None:
        """`decide`: router.placing.placement.place, or what does the same and remembers it. `staged_steps`: this router's prompts may queue
        on a worker for so many of its steps (batch: half as many); 0: for any number."""
        self._decide = decide
        self._pool = pool
        self._prefixes = prefixes
        self._cleanup = cleanup
        self._queue = queue
        self._max_attempts, self._no_worker_grace_s, self._staged_steps = max_attempts, no_worker_grace_s, staged_steps
        self._absent_since: float | None = None

    async def serve(self, job: RequestJob, entry: QueueEntry, output: Output | VectorOutput, report: RequestReport) -> None:
        """Fills `output` to its end or failure. Cancelling it frees everything on both sides, in the background."""
        try:
            async with asyncio.timeout(job.remaining_s()):
                await self._attempts(_Dispatch(job, entry, output, report))
            output.end()
        except TimeoutError:
            output.fail(time_is_up(placed=report.placed))
        except TwostepError as error:
            output.fail(error)
        except Exception:  # a bug here must end the one request that met it, and say where to look
            log.exception("request %s", job.request_id)
            output.fail(InternalError(f"internal error; look for request {job.request_id} in the router's log"))
        finally:
            if report.placed:
                self._queue.settle(entry, len(job.prompt) + output.next_position)

    async def _attempts(self, request: _Dispatch) -> None:
        job, output, report = request.job, request.output, request.report
        while True:
            attempt = await self._begin(request)
            try:
                await attempt.finish()
                return
            except AttemptFailed as failed:
                if not failed.retryable:
                    raise failed.error from failed
                if not job.migrate and output.next_position > len(job.resumed):
                    raise _not_migrated(job, output, failed) from failed
                log.warning("request %s, attempt %d of %d: %s", job.request_id, report.attempts, self._max_attempts, failed)
                if report.attempts >= self._max_attempts:
                    raise Unavailable(f"given up after {report.attempts} attempts, the last one: {failed}; repeat the request") from failed
                request.lost.add(failed.life)
                report.attempts += 1
            finally:
                attempt.close()
                # Only what was really held wakes those who wait for workers: a refused attempt would wake itself.
                self._queue.release()

    async def _begin(self, request: _Dispatch) -> Attempt | EmbeddingAttempt:
        """Returns an attempt that its workers have accepted. Raises Refused if the request's targets cannot be met."""
        if not request.job.computes_all:
            request.cached = await self._prefixes.cached_tokens(request.job, self._pool.records())
        entry, queue = request.entry, self._queue
        if request.report.placed:
            # It goes on: charged already, and with nothing left to refuse.
            entry = replace(entry, num_tokens=0, lapses=None)
        self._refuse(request, queue_s=queue.queue_s(entry))
        if not queue.num_queued:
            self._absent_since = None
            begun = await self._round(request)
            if not isinstance(begun, _NotNow):
                return self._begun(begun, entry, request)
            begun.raise_if_hopeless()
        async with queue.place(entry):
            with request.report.waiting():
                await queue.turn(entry)
            while True:
                self._refuse(request)
                begun = await self._round(request)
                if not isinstance(begun, _NotNow):
                    self._absent_since = None
                    return self._begun(begun, entry, request)
                begun.raise_if_hopeless()
                if begun.full:
                    self._absent_since = None
                elif self._absent_for_s() >= self._no_worker_grace_s:
                    raise Unavailable(begun.reason)
                with request.report.waiting():
                    await queue.again(entry, refused=not begun.held)

    def _begun(self, attempt: Attempt | EmbeddingAttempt, entry: QueueEntry, request: _Dispatch) -> Attempt | EmbeddingAttempt:
        self._queue.took(entry)
        request.report.placed = True
        return attempt

    def _refuse(self, request: _Dispatch, *, queue_s: float = 0.0) -> None:
        """Raises Refused if the best placement there is would not keep what was promised. Workers that have not measured themselves are
        not reckoned with, batch requests wait, and an answer that was begun goes on."""
        job = request.job
        if not job.targets or job.request_class is RequestClass.BATCH or request.output.next_position:
            return
        demand = request.demand()
        placed = self._place(demand, request.cached, _Refusals(), frozenset())
        if isinstance(placed, NoPlacement) or placed.decode.curve is None or (placed.prefill is not None and placed.prefill.curve is None):
            return
        attainable = placed.attainable
        if not attainable:
            # To one that came now?
            ttft_ms = None if job.targets.ttft_s is None else 1e3 * job.targets.ttft_s
            anew = self._place(replace(demand, ttft_ms=ttft_ms), request.cached, _Refusals(), frozenset())
            attainable = isinstance(anew, Placement) and anew.attainable
        waited_s = time.monotonic() - job.arrived
        refused = refusal(job.targets, waited_s=waited_s, queue_s=queue_s, placed=placed, attainable=attainable)
        if refused is not None:
            raise refused

    async def _round(self, request: _Dispatch) -> Attempt | EmbeddingAttempt | _NotNow:
        """Asks placement after placement, the best first, each worker that refuses no more in this round. The two of a pair are asked at
        the same time where the decode worker is likely to take it."""
        job, demand = request.job, request.demand()
        refusals = self._held_back(job.request_class)
        lacking = self._lacking(job)
        refusals.workers |= lacking
        while True:
            placed = self._place(demand, request.cached, refusals, request.lost)
            if isinstance(placed, NoPlacement):
                if lacking and isinstance(self._place(demand, request.cached, _Refusals(workers=lacking), frozenset()), NoPlacement):
                    asked = " and ".join(sorted(newer_parameters(job.sampling))) or "embeddings"
                    message = f"the workers that are there are of a version that does not know {asked}; upgrade them, or do without"
                    raise Incompatible(message)
                reason = f"{placed.reason}: {refusals.reason}" if refusals.reason else placed.reason
                held = refusals.held and isinstance(self._place(demand, request.cached, _Refusals(), request.lost), Placement)
                return _NotNow(refusals.full or held, held and not refusals.reason, placed.shortage, reason)
            begun = await self._try(request, placed, refusals)
            if begun is not None:
                log.debug("request %s: %s", job.request_id, placed.reason)
                request.report.metrics.placements.labels(placed.path, placed.computing.role, placed.ground.value).inc()
                return begun

    async def _try(self, request: _Dispatch, placed: Placement, refusals: _Refusals) -> Attempt | EmbeddingAttempt | None:
        """Returns an attempt that these workers have accepted. None: one of them refuses, as `refusals` says."""
        job, output, held = request.job, request.output, request.cached
        request.num_begun += 1
        computing = WorkerLife.of(placed.computing)
        there = held.get(computing, NOT_CACHED).num_tokens
        attempt: Attempt | EmbeddingAttempt
        decode = None
        if isinstance(output, VectorOutput):
            worker = self._pool.prefill[computing]
            attempt = EmbeddingAttempt(
                job, request.num_begun, worker=worker, output=output, report=request.report, on_computed=self._queue.release
            )
            beginning = attempt.begin(there)
        else:
            prefill = None if placed.prefill is None else self._pool.prefill[computing]
            decode = self._pool.decode[WorkerLife.of(placed.decode)]
            attempt = Attempt(
                job,
                request.num_begun,
                prefill=prefill,
                decode=decode,
                output=output,
                report=request.report,
                cleanup=self._cleanup,
                on_computed=self._queue.release,
            )
            beside = prefill is not None and _likely_taken(len(job.prompt) + output.next_position, prefill.record, decode)
            beginning = attempt.begin(there, held.get(decode.life, NOT_CACHED).num_tokens if beside else None)
        request.report.begin_attempt(placed)
        begun = False
        try:
            await beginning
            begun = True
        except WorkerRefused as refused:
            log.debug("request %s: %s", job.request_id, refused)
            if decode is not None and refused.full and refused.life == decode.life:
                decode.full_at = time.monotonic()
            refusals.add(refused, computing=computing)
        finally:
            if not begun:
                attempt.close()
        return attempt if begun else None

    def _held_back(self, request_class: RequestClass) -> _Refusals:
        """Returns the workers that have enough of this router's prompts waiting, running ones included: what else there is waits here,
        where classes and tenants take turns. Batch requests never queue long before what comes after them."""
        refusals = _Refusals()
        steps = self._staged_steps if request_class is not RequestClass.BATCH else -(-self._staged_steps // 2)
        if steps:
            refusals.prompts |= self._pool.behind(steps)
            refusals.held = bool(refusals.prompts)
        return refusals

    def _lacking(self, job: RequestJob) -> set[WorkerLife]:
        """Returns the workers that would ignore a parameter of this request, or make no embedding."""
        if job.pooling is not None:
            return {WorkerLife.of(record) for record in self._pool.records() if not record.embeds}
        asked = newer_parameters(job.sampling)
        return {WorkerLife.of(record) for record in self._pool.records() if not asked <= {*record.sampling}} if asked else set()

    def _absent_for_s(self) -> float:
        """Returns how long there has been no worker to ask. All who wait share one grace: the queue does not add up its members'."""
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since

    def _place(
        self, demand: PlacementRequest, cached: Mapping[WorkerLife, CachedPrefix], refusals: _Refusals, lost: Set[WorkerLife]
    ) -> Placement | NoPlacement:
        """Picks workers for the next attempt. Workers that lost an earlier attempt are asked again only if there are no others."""
        pool = self._pool
        placed = self._decide(pool.snapshot(cached, excluded=refusals.workers | lost, no_prompts=refusals.prompts), demand)
        if lost and isinstance(placed, NoPlacement) and placed.shortage is Shortage.EXCLUDED:
            return self._decide(pool.snapshot(cached, excluded=refusals.workers, no_prompts=refusals.prompts), demand)
        return placed


def _likely_taken(num_tokens: int, prefill: WorkerRecord, decode: DecodeLink) -> bool:
    """Returns whether a reservation for so many tokens is likely to succeed, and both workers take Run beside it. What the decode worker
    says of its load is a second old: there must be room for the prompt twice, and who refused since is asked first."""
    record, load = decode.record, decode.record.load
    num_seqs = max(load.num_running + load.num_reserved, len(decode.users))
    return (
        prefill.cached_at_watch
        and record.cached_at_watch
        and time.monotonic() - decode.full_at > RECENT_S
        and num_seqs < record.max_num_seqs
        and load.num_free_blocks >= 2 * record.layout.blocks_of(num_tokens)
    )


def time_is_up(*, placed: bool) -> DeadlineExceeded:
    """`placed`: workers had begun with it."""
    if placed:
        return DeadlineExceeded("the request's time is up; allow more, or ask for fewer tokens")
    return Expired("the request's time is up, and there was no room for it until now; allow more, or repeat it later")


def _not_migrated(job: RequestJob, output: Output | VectorOutput, failed: AttemptFailed) -> Unavailable:
    sent = output.next_position - len(job.resumed)
    return Unavailable(
        f"{failed}; {sent} tokens were sent and the request declined migration (no_migration). To go on, send it again with all tokens "
        "of the answer so far as resume_token_ids and the seed of the metadata x-twostep-seed; or repeat it from the start"
    )
