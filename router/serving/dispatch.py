"""One request's life over its attempts.

1. ask which workers hold how much of the prompt (at most 2 ms)
2. refuse it if it cannot be served within its targets; else place it on a pair, or on a decode worker alone; reserve on decode, run on
   prefill; a refusal: the next placement. All full: wait in the queue for room. Nobody there, or no transport between them: wait a
   moment for it to come back
3. tokens flow into the output until the last one
4. a worker lost on the way: begin again, with the tokens already received behind the prompt, on other workers if there are any
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from router.placing.placement import Demand, NoPlacement, Placement, Shortage, Snapshot, place
from router.placing.prefix_lookup import PrefixLookup
from router.request.cleanup import Cleanup
from router.request.job import Job
from router.request.output import Output
from router.request.report import Report
from router.request.targets import Expired, Targets, refusal
from router.serving.attempt import Attempt
from router.serving.losses import AttemptFailed, WorkerRefused
from router.waiting.fair_queue import AGEING_S, Claim
from router.waiting.room import Room
from router.workers.pool import WorkerPool
from router.workers.prefix_index import NOT_CACHED, CachedPrefix, WorkerLife
from twostep.errors import ContextExceeded, DeadlineExceeded, Incompatible, InternalError, TwostepError, Unavailable
from twostep.request_class import RequestClass

log = logging.getLogger(__name__)

Decide = Callable[[Snapshot, Demand], Placement | NoPlacement]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`staged_steps`: of so many steps this router's prompts may queue on a worker (batch: half as many); 0: of any number."""

    max_attempts: int = 3
    no_worker_grace_s: float = 3.0
    staged_steps: int = 4
    ageing_s: float = AGEING_S


@dataclass(frozen=True, slots=True)
class _NotNow:
    """A round in which nobody took the request. `full`: somebody would have, with more room. `held`: that is because of what waits there
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
    """Of one round. `workers`: ask them no more. `local`: decode workers that would not compute the prompt; they may still take its KV."""

    workers: set[WorkerLife] = field(default_factory=set)
    local: set[WorkerLife] = field(default_factory=set)
    # Those of them that were not even asked: enough of this router's prompts wait there.
    held: bool = False
    full: bool = False
    reason: str = ""

    def add(self, refused: WorkerRefused, *, local: bool) -> None:
        (self.local if local and refused.declined else self.workers).add(refused.life)
        self.full = self.full or refused.full
        self.reason = refused.error.message


class Dispatcher:
    def __init__(
        self, pool: WorkerPool, prefixes: PrefixLookup, cleanup: Cleanup, room: Room, config: DispatchConfig, decide: Decide = place
    ) -> None:
        """`decide`: router.placing.placement.place, or what does the same and remembers it."""
        self._decide = decide
        self._pool = pool
        self._prefixes = prefixes
        self._cleanup = cleanup
        self._room = room
        self._config = config
        self._absent_since: float | None = None

    async def serve(self, job: Job, output: Output, report: Report) -> None:
        """Fills `output` to its end or failure. Cancelling it frees everything on both sides, in the background."""
        claim = Claim.of(job, ageing_s=self._config.ageing_s)
        try:
            async with asyncio.timeout(job.remaining_s()):
                await self._attempts(job, claim, output, report)
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
                self._room.settle(claim, len(job.prompt) + output.next_position)

    async def _attempts(self, job: Job, claim: Claim, output: Output, report: Report) -> None:
        lost: set[WorkerLife] = set()
        numbers = itertools.count(1)
        while True:
            attempt = await self._begin(job, claim, output, report, numbers, lost)
            try:
                await attempt.finish()
                return
            except AttemptFailed as failed:
                if not failed.retryable:
                    raise failed.error from failed
                if not job.migrate and output.next_position > len(job.resumed):
                    raise _not_migrated(job, output, failed) from failed
                log.warning("request %s, attempt %d of %d: %s", job.request_id, report.attempts, self._config.max_attempts, failed)
                if report.attempts >= self._config.max_attempts:
                    raise Unavailable(f"given up after {report.attempts} attempts, the last one: {failed}; repeat the request") from failed
                lost.add(failed.life)
                report.attempts += 1
            finally:
                attempt.close()
                # Only what was really held wakes those who wait for room: a refused attempt would wake itself.
                self._room.release()

    async def _begin(
        self, job: Job, claim: Claim, output: Output, report: Report, numbers: itertools.count[int], lost: Set[WorkerLife]
    ) -> Attempt:
        """An attempt that its workers have accepted. Raises Refused if the request's targets cannot be met."""
        cached = await self._prefixes.cached_tokens(job, self._pool)
        if report.placed:
            # It goes on: charged already, and with nothing left to refuse.
            claim = replace(claim, num_tokens=0, lapses=None)
        self._refuse(job, output, cached, queue_s=self._room.queue_s(claim))
        if not self._room.num_queued:
            self._absent_since = None
            begun = await self._round(job, output, report, numbers, lost, cached)
            if isinstance(begun, Attempt):
                return self._begun(begun, claim, report)
            begun.raise_if_hopeless()
        async with self._room.place(claim):
            await self._room.turn(claim)
            while True:
                self._refuse(job, output, cached)
                begun = await self._round(job, output, report, numbers, lost, cached)
                if isinstance(begun, Attempt):
                    self._absent_since = None
                    return self._begun(begun, claim, report)
                begun.raise_if_hopeless()
                if begun.full:
                    self._absent_since = None
                elif self._absent_for_s() >= self._config.no_worker_grace_s:
                    raise Unavailable(begun.reason)
                await self._room.again(claim, refused=not begun.held)

    def _begun(self, attempt: Attempt, claim: Claim, report: Report) -> Attempt:
        self._room.took(claim)
        report.placed = True
        return attempt

    def _refuse(self, job: Job, output: Output, cached: Mapping[WorkerLife, CachedPrefix], *, queue_s: float = 0.0) -> None:
        """Raises Refused if the best placement there is would not keep what was promised. Workers that have not measured themselves are
        not reckoned with, batch requests wait, and an answer that was begun goes on."""
        targets = Targets(ttft_s=job.ttft_s, tpot_s=job.tpot_s)
        if not targets or job.request_class is RequestClass.BATCH or output.next_position:
            return
        placed = self._place(_demand(job, output), cached, _Refusals(), frozenset())
        if isinstance(placed, NoPlacement) or placed.decode.curve is None or (placed.prefill is not None and placed.prefill.curve is None):
            return
        attainable = placed.attainable
        if not attainable:
            # To one that came now?
            anew = self._place(_demand(replace(job, arrived=time.monotonic()), output), cached, _Refusals(), frozenset())
            attainable = isinstance(anew, Placement) and anew.attainable
        waited_s = time.monotonic() - job.arrived
        refused = refusal(targets, waited_s=waited_s, queue_s=queue_s, placed=placed, attainable=attainable)
        if refused is not None:
            raise refused

    def _held_back(self, request_class: RequestClass) -> _Refusals:
        """Workers that have enough of this router's prompts waiting, running ones included: what else there is waits here, where classes
        and tenants take turns. Batch requests never queue long before what comes after them."""
        refusals = _Refusals()
        steps = self._config.staged_steps if request_class is not RequestClass.BATCH else -(-self._config.staged_steps // 2)
        if steps:
            refusals.workers |= {life for life, link in self._pool.prefill.items() if link.queued_tokens >= steps * link.record.step_tokens}
            refusals.local |= {life for life, link in self._pool.decode.items() if link.queued_tokens >= steps * link.record.step_tokens}
            refusals.held = bool(refusals.workers or refusals.local)
        return refusals

    def _absent_for_s(self) -> float:
        """How long there has been nobody to ask. One grace for all who wait: the queue does not add up its members'."""
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since

    async def _round(
        self,
        job: Job,
        output: Output,
        report: Report,
        numbers: itertools.count[int],
        lost: Set[WorkerLife],
        cached: Mapping[WorkerLife, CachedPrefix],
    ) -> Attempt | _NotNow:
        """Asks placement after placement, the best first, each worker that refuses no more in this round."""
        demand = _demand(job, output)
        refusals = self._held_back(job.request_class)
        while True:
            placed = self._place(demand, cached, refusals, lost)
            if isinstance(placed, NoPlacement):
                reason = f"{placed.reason}: {refusals.reason}" if refusals.reason else placed.reason
                held = refusals.held and isinstance(self._place(demand, cached, _Refusals(), lost), Placement)
                return _NotNow(refusals.full or held, held and not refusals.reason, placed.shortage, reason)
            prefill = None if placed.prefill is None else self._pool.prefill[WorkerLife.of(placed.prefill)]
            decode = self._pool.decode[WorkerLife.of(placed.decode)]
            attempt = Attempt(
                job,
                next(numbers),
                prefill=prefill,
                decode=decode,
                output=output,
                report=report,
                cleanup=self._cleanup,
                on_computed=self._room.release,
            )
            begun = False
            try:
                await attempt.begin(cached.get((prefill or decode).life, NOT_CACHED).num_tokens)
                begun = True
            except WorkerRefused as refused:
                log.debug("request %s: %s", job.request_id, refused)
                refusals.add(refused, local=prefill is None)
            finally:
                if not begun:
                    attempt.close()
            if begun:
                log.debug("request %s: %s", job.request_id, placed.reason)
                report.metrics.placements.labels("local" if prefill is None else "handed_over").inc()
                return attempt

    def _place(
        self, demand: Demand, cached: Mapping[WorkerLife, CachedPrefix], refusals: _Refusals, lost: Set[WorkerLife]
    ) -> Placement | NoPlacement:
        """Workers that lost an earlier attempt are asked again only if there is nobody else."""
        placed = self._decide(self._snapshot(cached, refusals.workers | lost, refusals.local), demand)
        if lost and isinstance(placed, NoPlacement) and placed.shortage is Shortage.EXCLUDED:
            return self._decide(self._snapshot(cached, refusals.workers, refusals.local), demand)
        return placed

    def _snapshot(self, cached: Mapping[WorkerLife, CachedPrefix], excluded: Set[WorkerLife], not_local: Set[WorkerLife]) -> Snapshot:
        snapshot = self._pool.snapshot(cached, excluded)
        if not not_local:
            return snapshot
        decode = [
            replace(c, record=replace(c.record, local_prefill=False)) if WorkerLife.of(c.record) in not_local else c
            for c in snapshot.decode
        ]
        return replace(snapshot, decode=decode)


def _demand(job: Job, output: Output) -> Demand:
    """What is still to be done. Of the time to the first token, what is left; nothing is promised for it once the client has tokens."""
    waited_s = time.monotonic() - job.arrived
    answered = output.next_position > 0
    return Demand(
        request_id=job.request_id,
        num_tokens=len(job.prompt) + output.next_position,
        max_new_tokens=job.sampling.max_tokens - output.next_position,
        request_class=job.request_class,
        ttft_ms=None if job.ttft_s is None or answered else max(0.0, 1e3 * (job.ttft_s - waited_s)),
        tpot_ms=None if job.tpot_s is None else 1e3 * job.tpot_s,
    )


def time_is_up(*, placed: bool) -> DeadlineExceeded:
    """`placed`: workers had begun with it."""
    if placed:
        return DeadlineExceeded("the request's time is up; allow more, or ask for fewer tokens")
    return Expired("the request's time is up, and there was no room for it until now; allow more, or repeat it later")


def _not_migrated(job: Job, output: Output, failed: AttemptFailed) -> Unavailable:
    sent = output.next_position - len(job.resumed)
    return Unavailable(
        f"{failed}; {sent} tokens were sent and the request declined migration (no_migration). To go on, send it again with all tokens "
        "of the answer so far as resume_token_ids and the seed of the metadata x-twostep-seed; or repeat it from the start"
    )
