"""Sends the requests and notes what comes. In open loop nothing waits for an answer: who is late is the server, or it is said here.

The life of a request:

 1. the dispatcher (open loop) or a user (closed loop) takes the next session of the workload;
 2. its first request is prepared, then slept for until its time;
 3. it is sent on a task of its own; `RouterTarget.ask` notes when each message arrives;
 4. the session's next turn is prepared once the answer is there, and sent after the time to think;
 5. when nothing more is to be sent, those under way are waited for (each has the target's own timeout).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import Distribution
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.target import RequestFailed, RouterTarget
from twostep.lab.bench.serve.workloads import BenchSession

_LAG_INTERVAL_S = 0.02
# The event loop gets a turn at least this often while requests are due at once.
_BURST = 16
# Somebody who is refused does not ask again within the same millisecond.
_AFTER_FAILURE_S = 0.05
# More requests at once are not sent but counted as errors: it keeps a rate that no server can hold from filling this process' memory.
MAX_IN_FLIGHT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long a run is. Either `duration_s` or `num_requests` ends it. After a duration load goes on, unmeasured, as long as the warm-up,
    so that the last measured requests have neighbours too."""

    duration_s: float = 0.0  # measured: after the warm-up. 0: `num_requests` decides.
    num_requests: int = 0  # sessions that come after the warm-up
    warmup_s: float = 0.0  # requests before this are not measured

    def __post_init__(self) -> None:
        if (self.duration_s > 0) == (self.num_requests > 0):
            raise InvalidRequest("a run ends after a duration or after a number of requests: give one of the two")

    def measures(self, scheduled_s: float) -> bool:
        return self.warmup_s <= scheduled_s < (self.warmup_s + self.duration_s if self.duration_s else math.inf)

    def over(self, at_s: float, num_measured: int) -> bool:
        return at_s >= self.end_s or bool(self.num_requests and num_measured >= self.num_requests)

    @property
    def end_s(self) -> float:
        """Nothing is sent from here on."""
        return 2 * self.warmup_s + self.duration_s if self.duration_s else math.inf


@dataclass(slots=True)
class RunProgress:
    """A run while it runs."""

    elapsed_s: float = 0.0
    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    none_to_come: bool = False  # no session begins any more: those that have are waited for

    @property
    def in_flight(self) -> int:
        return self.num_sent - self.num_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    records: list[RequestRecord]  # in the order in which they were sent
    wall_s: float
    cpu_s: float  # CPU time of this process, all threads
    stopped: bool  # it was ended before its time, for it could no longer pass, or because it was interrupted
    interrupted: bool  # by Ctrl-C
    exhausted: bool  # the workload ended before the run did
    loop_lag_s: Distribution  # how late the event loop was at its own appointments: every recorded time may be late by as much

    @property
    def cpu_share(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else math.nan


class _StopRun(Exception):
    """Raised by a request's task to end all others."""


@dataclass(slots=True)
class LoadRunner:
    """One run; make a new one for the next."""

    target: RouterTarget
    extent: Extent
    run: str  # its name: what differs in it shares no cached prefixes
    progress: RunProgress = field(default_factory=RunProgress)
    stop: Callable[[RequestRecord], bool] | None = None
    """Asked after every request that ended; True ends the run, and what is under way is cancelled and counts as not answered."""
    _records: list[RequestRecord] = field(default_factory=list)
    _start: float = 0.0
    _exhausted: bool = False

    async def open_loop(self, schedule: Iterator[tuple[float, BenchSession]]) -> RunResult:
        """`schedule`: times since the start, ascending, each with what comes then."""
        return await self._measured(self._dispatch(schedule))

    async def closed_loop(self, sessions: Iterator[BenchSession], num_users: int) -> RunResult:
        """Each user takes the next session when done with the one before."""
        return await self._measured(self._users(sessions, num_users))

    async def _measured(self, load: Coroutine[Any, Any, None]) -> RunResult:
        lags: list[float] = []
        stopped = interrupted = False
        with _quiet_collector():
            cpu, self._start = time.process_time(), time.perf_counter()
            watch = asyncio.create_task(self._watch(lags))
            try:
                await load
            except* _StopRun:
                stopped = True
            except* asyncio.CancelledError:
                # The first Ctrl-C cancels this task (asyncio.Runner), the second ends the process: what was answered until then is told.
                stopped = interrupted = True
                cancelled = asyncio.current_task()
                assert cancelled is not None
                cancelled.uncancel()
            finally:
                watch.cancel()
            wall, cpu = self._clock(), time.process_time() - cpu
        return RunResult(
            records=self._records,
            wall_s=wall,
            cpu_s=cpu,
            stopped=stopped,
            interrupted=interrupted,
            exhausted=self._exhausted,
            loop_lag_s=Distribution.of(lags),
        )

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    async def _watch(self, lags: list[float]) -> None:
        while True:
            due = self._clock() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            now = self._clock()
            lags.append(max(0.0, now - due))
            self.progress.elapsed_s = now

    async def _dispatch(self, schedule: Iterator[tuple[float, BenchSession]]) -> None:
        burst = num_measured = 0
        async with asyncio.TaskGroup() as tasks:
            for number, (at, session) in enumerate(schedule):
                if self.extent.over(at, num_measured):
                    break
                num_measured += self.extent.measures(at)
                prepared = self._prepared(session)
                delay = at - self._clock()
                burst = 0 if delay > 0 else burst + 1
                if delay > 0 or burst % _BURST == 0:
                    await asyncio.sleep(max(0.0, delay))
                tasks.create_task(self._session(number, session, at, prepared))
            else:
                self._exhausted = True
            self.progress.none_to_come = True

    async def _users(self, sessions: Iterator[BenchSession], num_users: int) -> None:
        numbered = enumerate(sessions)
        num_measured = 0

        async def user() -> None:
            nonlocal num_measured
            while not self.extent.over(self._clock(), num_measured):
                number, session = next(numbered, (-1, None))
                if session is None:
                    self._exhausted = True
                    break
                prepared = self._prepared(session)
                now = self._clock()
                num_measured += self.extent.measures(now)
                if not await self._session(number, session, now, prepared):
                    await asyncio.sleep(_AFTER_FAILURE_S)
            self.progress.none_to_come = True

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_users):
                tasks.create_task(user())

    def _prepared(self, session: BenchSession) -> Any:
        first = session.turns[0]
        return self.target.prepare(first.prompt, first.output_tokens, self.run)

    async def _session(self, number: int, session: BenchSession, at: float, prepared: Any) -> bool:
        """False: one of its requests failed."""
        said = session.turns[0].prompt
        for i, turn in enumerate(session.turns):
            record = RequestRecord(
                index=len(self._records),
                session=number,
                turn=i,
                scheduled_s=at,
                measured=self.extent.measures(at),
                prompt_tokens=len(said),
                max_tokens=turn.output_tokens,
            )
            self._records.append(record)
            more = session.turns[i + 1 :]
            answer = await self._request(record, prepared, keep=bool(more))
            if not record.completed or not more:
                break
            at = self._clock() + more[0].think_s
            if at >= self.extent.end_s:
                break
            said = said + answer + more[0].prompt
            prepared = self.target.prepare(said, more[0].output_tokens, self.run)
            await asyncio.sleep(max(0.0, at - self._clock()))
        return record.completed

    async def _request(self, record: RequestRecord, prepared: Any, *, keep: bool) -> array[int]:
        """Returns the answer, if it is to be kept; the record says whether it failed."""
        progress, answer = self.progress, array("I")
        if progress.in_flight >= MAX_IN_FLIGHT:
            record.error, record.message = "not sent", f"{progress.in_flight} requests were under way: more would say nothing of the server"
            progress.num_failed += 1
            return answer
        progress.num_sent += 1
        try:
            answer = await self.target.ask(prepared, record, self._clock, keep=keep)
        except RequestFailed as failure:
            record.error, record.message, record.retry_after_s = failure.kind, failure.message, failure.retry_after_s
            progress.num_failed += 1
        except asyncio.CancelledError:
            record.error, record.message = "stopped", "the run was stopped before the answer's end"
            raise
        finally:
            progress.num_ended += 1
        if self.stop is not None and self.stop(record):
            raise _StopRun
        return answer


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keeps the garbage collector from looking at everything again and again: its pauses would count as the server's."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
