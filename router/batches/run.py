"""One run of a batch, from where the last one stopped to its end or this router's:

    1. a number of its own, and the state that the run before left                        store.begin_run
    2. the input is looked through; what is wrong with it ends the batch                  store.read_input
    3. what no run has answered is asked, so many requests at once, each try on disk
       before it begins, each answer before the next is asked                             _answer_all
    4. answers of all runs go into an output file and an error file, in the input's order    store.publish
    5. the state that clients see at last                                                 store.end, store.close

A run that is cancelled, loses its lease, or fails to write stops wherever it is: the next begins at 1.

A request that was being tried when a router died is asked again alone: no other such request of any batch runs beside it on that router.
If a router dies once more meanwhile, the request has failed.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from router.batches.disk import Threads
from router.batches.journal import NO_USAGE, AnswerRecord, GroupWriter, LeftRecord, Record, Results, TryRecord, Usage
from router.batches.lines import InputLine, answered, body_bytes, unanswered
from router.batches.records import AnswerCounts, BatchRequest, BatchStatus, RunState, owner_of
from router.batches.store import BatchStore
from router.request.targets import Expired
from twostep.errors import (
    DataLoss,
    DeadlineExceeded,
    Incompatible,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    TwostepError,
    Unavailable,
)
from twostep.metrics.batches import BatchMetrics

_FIRST_S = 0.5
_LONGEST_S = 30.0
# Of what need not get better.
MAX_FAILURES = 3
# A request whose workers are lost each time may be why.
MAX_LOSSES = 8
# The second time it was the only suspect.
MAX_DEATHS = 2


def retry_s(error: Exception, num_before: int, draw: float) -> float | None:
    """Returns the seconds until the next try, after `num_before` failed ones and this one; None: the error is the answer. `draw` is in 0 to
    1. Having no room is not the request's fault, and waited out however long it takes."""
    wait_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(num_before, 16)) * (0.5 + draw / 2)
    if isinstance(error, ResourceExhausted):
        return max(wait_s, (error.retry_after_s or 0.0) * (1.0 + draw / 4))
    if isinstance(error, Expired):
        return wait_s
    if isinstance(error, Unavailable):
        return wait_s if num_before + 1 < MAX_LOSSES else None
    if isinstance(error, (DeadlineExceeded, Incompatible, DataLoss, InternalError)) or not isinstance(error, TwostepError):
        return wait_s if num_before + 1 < MAX_FAILURES else None
    return None


# How often it looks for a cancel and says how far it is.
_LOOK_S = 1.0
_MAX_PASSES = 3


class Answered(NamedTuple):
    """`body` is JSON, of which `usage` is a part."""

    body: bytes
    usage: Mapping[str, Any]


class Endpoints(Protocol):
    """Answers requests."""

    def answer(self, asked: BatchRequest, body: bytes, request_id: str) -> AbstractAsyncContextManager[Answered]:
        """Has a request, which is JSON, answered in the name of whoever made the batch. The answer's memory is free once the context ends.
        Entering raises whatever the endpoint does."""
        ...

    def failure(self, error: Exception) -> tuple[int, bytes]:
        """Returns how the endpoint would have refused: the status of its answer, and its body, which is JSON."""
        ...

    def ready(self) -> bool:
        """Returns whether asking makes sense now."""
        ...


class LeaseLost(Exception):
    """Another router may run the batch by now."""


class RouterLeaving(Exception):
    """This router goes; another may go on with the batch."""


class BatchRun:
    def __init__(
        self,
        store: BatchStore,
        threads: Threads,
        asked: BatchRequest,
        *,
        endpoints: Endpoints,
        held: Callable[[], bool],
        gate: asyncio.Semaphore,
        alone: asyncio.Lock,
        metrics: BatchMetrics,
        look_s: float = _LOOK_S,
        wall: Callable[[], float] = time.time,
        late: Callable[[], float] = time.time,
    ) -> None:
        """`held`: whether this router has the lease. `gate`: for the requests of all batches; `alone`: for those of all batches that a
        router may have died of. `wall`: what time it is; `late`: what time it
        is at least, for what cannot be undone."""
        self._store, self._threads, self._asked = store, threads, asked
        self._id, self._owner = asked.id, owner_of(asked.tenant)
        self._endpoints, self._held, self._gate, self._alone = endpoints, held, gate, alone
        self._look_s, self._wall, self._late = look_s, wall, late
        self._metrics = metrics
        self.status = BatchStatus.VALIDATING
        self._tally = AnswerCounts()
        self._writer = GroupWriter(self._write)
        self._leaving = False
        self._has_tried = False
        self._state: RunState

    def leave(self) -> None:
        """Begins no further requests: run() raises Left once those under way are answered."""
        self._leaving = True

    async def run(self) -> None:
        """Runs to the batch's end. Raises LeaseLost, Left, TwostepError (the disk)."""
        self._state = await self._threads.short(self._store.begin_run, self._owner, self._id)
        # Clients do not see it fall back.
        self._tally, self.status = self._state.tally, self._state.status
        if not self._state.status.final:
            try:
                await self._to_the_end()
            except BaseException:
                await self._leave()
                raise
        await self._threads.short(self._store.close, self._owner, self._id)

    async def _to_the_end(self) -> None:
        found = await self._threads.long(self._store.read_input, self._asked)
        if found.errors:
            await self._become(BatchStatus.FAILED, errors=found.errors)
            return
        end = await self._why_end()
        if end is None:
            await self._become(BatchStatus.IN_PROGRESS, total=len(found.lines))
            end = await self._answer_all(found.lines)
        if end is not None:
            await self._give_up(found.lines, end)
        await self._become(BatchStatus.FINALIZING, total=len(found.lines))
        results = await self._results()
        self._check_lease()
        output, errors = await self._threads.long(self._store.publish, self._asked, self._state.epoch, found.lines, results)
        await self._become(end or BatchStatus.COMPLETED, output_file_id=output, error_file_id=errors)

    async def _leave(self) -> None:
        """Notes that the tries under way ended with this run, and not with its router."""
        if self._has_tried:
            with suppress(TwostepError):
                await self._write([LeftRecord()])

    # ---- requests ----------------------------------------------------------------------------------------------------------------

    async def _answer_all(self, lines: list[InputLine]) -> BatchStatus | None:
        """Answers all requests that have no answer yet. Returns why it stopped before that; None: there is an answer to each."""
        for _ in range(_MAX_PASSES):
            results = await self._results()
            pending, deaths = results.unanswered(lines), results.deaths
            if not pending:
                return None
            deadly = [line for line in pending if deaths[line.custom_id] >= MAX_DEATHS]
            await self._write_unanswered([_no_answer(line, *_DEADLY) for line in deadly])
            for suspect in (True, False):
                asked = [line for line in pending if line not in deadly and bool(deaths[line.custom_id]) is suspect]
                end = await self._ask(asked, alone=suspect)
                if end is not None:
                    return end
        results = await self._results()
        await self._write_unanswered(
            [_no_answer(line, "data_loss", "the answer was lost on disk, again and again") for line in results.unanswered(lines)]
        )
        return None

    async def _results(self) -> Results:
        results = await self._threads.long(self._store.results, self._owner, self._id, self._state.epoch)
        self._tally = results.tally
        return results

    async def _ask(self, lines: list[InputLine], *, alone: bool) -> BatchStatus | None:
        """Answers requests, several at a time, until none is left, or there is a reason to stop. `alone`: one at a time, on this router."""
        pending = deque(lines)

        async def work() -> None:
            while pending and not self._leaving:
                async with self._alone if alone else nullcontext():
                    if not self._leaving:
                        await self._answer(pending.popleft())

        async def work_together() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(1 if alone else self._store.files.config.concurrency, len(pending))):
                        group.create_task(work())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            if pending:
                raise RouterLeaving(self._id)

        workers = asyncio.create_task(work_together())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((workers, watch), return_when=asyncio.FIRST_COMPLETED)
            if workers.done():
                workers.result()
                return None
            return watch.result()
        finally:
            for task in (workers, watch):
                task.cancel()
            await asyncio.wait((workers, watch))
            for task in (workers, watch):
                if not task.cancelled():
                    task.exception()  # of the other one; the first is raised

    async def _watch(self) -> BatchStatus:
        """Returns why to stop. Raises LeaseLost."""
        noted = self._tally
        while True:
            await asyncio.sleep(self._look_s)
            end = await self._why_end()
            if end is not None:
                return end
            if self._tally != noted:
                noted = self._tally
                await self._become(BatchStatus.IN_PROGRESS)

    async def _why_end(self) -> BatchStatus | None:
        self._check_lease()
        if await self._threads.short(self._store.is_over, self._owner, self._id):
            raise LeaseLost(self._id)
        if await self._threads.short(self._store.is_cancelled, self._owner, self._id):
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if self._late() >= self._asked.expires else None

    async def _answer(self, line: InputLine) -> None:
        """Asks for one answer, however often it takes. The answer is on disk when it returns."""
        request_id = uuid.uuid4().hex
        await self._until_it_makes_sense()
        self._has_tried = True
        await self._writer.write(TryRecord(line.custom_id))
        request = await self._threads.short(self._store.read_request, self._asked, line)
        if request.body.get("stream"):
            error = InvalidRequest("stream is not for batches, whose answers come whole; leave it out")
            await self._keep(self._failed(line, request_id, error))
            return
        body = await self._threads.short(body_bytes, request.body)
        num_failed = 0
        while True:
            async with AsyncExitStack() as held:
                try:
                    async with self._gate:
                        answer = await held.enter_async_context(self._endpoints.answer(self._asked, body, request_id))
                except Exception as error:  # noqa: BLE001  # the answer says what, or it is tried again
                    wait_s = retry_s(error, num_failed, random.random())
                    entry = None if wait_s is not None else self._failed(line, request_id, error)
                else:
                    payload = answered(request_id, line.custom_id, 200, answer.body)
                    wait_s, entry = None, AnswerRecord(line.custom_id, True, usage_of(answer.usage), payload)
                if entry is not None:
                    await self._keep(entry)
                    return
            assert wait_s is not None, "it is tried again"
            num_failed += 1
            self._metrics.retries.inc()
            await asyncio.sleep(wait_s)
            await self._until_it_makes_sense()

    async def _until_it_makes_sense(self) -> None:
        """Waits for workers, and for room for answers. Raises RouterLeaving."""
        while not (self._endpoints.ready() and await self._threads.short(self._store.files.has_room, self._owner)):
            if self._leaving:
                raise RouterLeaving(self._id)
            await asyncio.sleep(self._look_s)

    async def _keep(self, entry: AnswerRecord) -> None:
        await self._writer.write(entry)
        self._tally = self._tally.plus(entry.ok, entry.usage)
        self._metrics.requests["ok" if entry.ok else "failed"].inc()

    def _failed(self, line: InputLine, request_id: str, error: Exception) -> AnswerRecord:
        if isinstance(error, DeadlineExceeded):
            return _no_answer(line, "request_timeout", error.message, request_id)
        status, body = self._endpoints.failure(error)
        return AnswerRecord(line.custom_id, False, NO_USAGE, answered(request_id, line.custom_id, status, body))

    async def _give_up(self, lines: list[InputLine], end: BatchStatus) -> None:
        """Writes down that what has no answer gets none."""
        code, message = _REASONS[end]
        pending = (await self._results()).unanswered(lines)
        for start in range(0, len(pending), 1000):
            await self._write_unanswered([_no_answer(line, code, message) for line in pending[start : start + 1000]])

    # ---- disk --------------------------------------------------------------------------------------------------------------------

    async def _write(self, entries: Sequence[Record]) -> None:
        await self._threads.short(self._store.record, self._owner, self._id, self._state.epoch, entries)

    async def _write_unanswered(self, entries: list[AnswerRecord]) -> None:
        if not entries:
            return
        await self._write(entries)
        self._metrics.requests["unanswered"].inc(len(entries))

    async def _become(self, status: BatchStatus, **changes: Any) -> None:
        self._check_lease()
        self._state = self._state.to(status, int(self._wall()), tally=self._tally, **changes)
        write = self._store.end if status.final else self._store.write_state
        await self._threads.short(write, self._owner, self._id, self._state)
        self.status = status
        if status.final:
            self._metrics.ended[status.value].inc()

    def _check_lease(self) -> None:
        if not self._held():
            raise LeaseLost(self._id)


_DEADLY = (
    "router_lost",
    f"{MAX_DEATHS} routers ended without notice while they worked on this request, and no other can be why; look into their logs, and "
    "change the request",
)
_REASONS = {
    BatchStatus.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was answered"),
    BatchStatus.EXPIRED: (
        "batch_expired",
        "the batch's completion window was over before this request was answered; send it in another batch",
    ),
}


def _no_answer(line: InputLine, code: str, message: str, request_id: str = "") -> AnswerRecord:
    return AnswerRecord(line.custom_id, False, NO_USAGE, unanswered(request_id or uuid.uuid4().hex, line.custom_id, code, message))


def usage_of(usage: Mapping[str, Any]) -> Usage:
    return (
        usage.get("prompt_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        usage.get("completion_tokens", 0),
        (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )
