"""Sends the requests and notes what comes. In open loop nothing waits for an answer: who is late is the server, or it is said here.

The life of a request:

 1. the dispatcher (open loop) or a user (closed loop) takes the next session of the workload;
 2. its first request is prepared, then slept for until its time;
 3. it is sent on a task of its own; `LoadTarget.ask` notes when each message arrives;
 4. the session's next turn is prepared once the answer is there, and sent after the time to think;
 5. when nothing more is to be sent, those under way are waited for (each has the target's own timeout).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twostep.errors import InvalidRequest, TwostepError
from twostep.lab.bench.serve.metrics import Distribution
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.target import Exchange, LoadTarget, RequestFailed
from twostep.lab.bench.serve.workloads import BenchSession, SessionTurn, num_quoted

_LAG_INTERVAL_S = 0.02
# The event loop gets a turn at least this often while requests are due at once.
_BURST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long a run is. Either `duration_s` or `num_requests` ends it."""

    duration_s: float = 0.0  # measured: after the warm-up. 0: `num_requests` decides.
    num_requests: int = 0  # sessions that come after the warm-up
    warmup_s: float = 0.0  # requests before this are not measured
    cooldown_s: float = 0.0
    """After the duration load goes on for this long, unmeasured, so that the last measured requests have neighbours too."""
    max_in_flight: int = 10_000  # more than this at once are not sent but counted as errors: the generator's bound, far above any server's

    def __post_init__(self) -> None:
        if (self.duration_s > 0) == (self.num_requests > 0):
            raise InvalidRequest("a run ends after a duration or after a number of requests: give one of the two")
        if min(self.warmup_s, self.cooldown_s, self.duration_s, self.num_requests) < 0 or self.max_in_flight < 1:
            raise InvalidRequest("warm-up, cool-down, duration and number of requests are 0 or more, the most in flight 1 or more")

    def measures(self, scheduled_s: float) -> bool:
        return self.warmup_s <= scheduled_s < (self.warmup_s + self.duration_s if self.duration_s else math.inf)

    @property
    def end_s(self) -> float:
        """Nothing is sent from here on."""
        return self.warmup_s + self.duration_s + self.cooldown_s if self.duration_s else math.inf


@dataclass(slots=True)
class RunProgress:
    """A run while it runs."""

    elapsed_s: float = 0.0
    num_sent: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    none_to_come: bool = False  # no session begins any more: those that have are waited for

    @property
    def in_flight(self) -> int:
        return self.num_sent - self.num_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    records: list[RequestRecord]  # in the order in which they were sent
    start: float  # time.perf_counter() at the run's start, which all recorded times count from
    wall_s: float
    cpu_s: float  # CPU time of this process, all threads
    stopped: bool  # it was ended before its time, for it could no longer pass
    exhausted: bool  # the workload ended before the run did
    loop_lag_s: Distribution  # how late the event loop was at its own appointments: every recorded time may be late by as much

    @property
    def cpu_share(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else math.nan


@dataclass(slots=True)
class LoadRunner:
    """One run; make a new one for the next."""

    target: LoadTarget
    extent: Extent
    run: str  # its name: what differs in it shares no cached prefixes
    progress: RunProgress = field(default_factory=RunProgress)
    stop: Callable[[RequestRecord], bool] | None = None
    """Asked after every request that ended; True ends the run, and what is under way is cancelled and counts as not answered."""
    _records: list[RequestRecord] = field(default_factory=list)
    _start: float = 0.0
    _exhausted: bool = False
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def open_loop(self, schedule: Iterator[tuple[float, BenchSession]]) -> RunResult:
        """`schedule`: times since the start, ascending, each with what comes then."""
        return await self._measured(self._dispatch(schedule))

    async def closed_loop(self, sessions: Iterator[BenchSession], num_users: int) -> RunResult:
        """Each user takes the next session when done with the one before."""
        if num_users < 1:
            raise InvalidRequest(f"{num_users} users: give at least 1")
        return await self._measured(self._users(sessions, num_users))

    async def _measured(self, load: Coroutine[Any, Any, None]) -> RunResult:
        lags: list[float] = []
        with _quiet_collector():
            cpu, self._start = time.process_time(), time.perf_counter()
            watch = asyncio.create_task(self._watch(lags))
            try:
                await self._until_stopped(load)
            finally:
                watch.cancel()
            wall, cpu = self._clock(), time.process_time() - cpu
        self.progress.elapsed_s = wall
        return RunResult(
            records=self._records,
            start=self._start,
            wall_s=wall,
            cpu_s=cpu,
            stopped=self._stopped.is_set(),
            exhausted=self._exhausted,
            loop_lag_s=Distribution.of(lags),
        )

    async def _until_stopped(self, load: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(load)
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.is_set():
                running.cancel()
                await asyncio.wait((running,))
            if not running.cancelled():
                _raise_single(running)
        finally:
            # Also when this command is interrupted itself.
            running.cancel()
            stopped.cancel()

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
                if at >= self.extent.end_s or (self.extent.num_requests and num_measured >= self.extent.num_requests):
                    break
                num_measured += self.extent.measures(at)
                prepared = self.target.prepare((), session.turns[0], self.run)
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
            while True:
                now = self._clock()
                if now >= self.extent.end_s or (self.extent.num_requests and num_measured >= self.extent.num_requests):
                    break
                number, session = next(numbered, (-1, None))
                if session is None:
                    self._exhausted = True
                    break
                prepared = self.target.prepare((), session.turns[0], self.run)
                now = self._clock()
                num_measured += self.extent.measures(now)
                if not await self._session(number, session, now, prepared):
                    # Somebody who is refused does not ask again within the same millisecond.
                    await asyncio.sleep(0.05)
            self.progress.none_to_come = True

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_users):
                tasks.create_task(user())

    async def _session(self, number: int, session: BenchSession, at: float, prepared: object) -> bool:
        """False: one of its requests failed."""
        history: list[Exchange] = []
        last = len(session.turns) - 1
        for i, turn in enumerate(session.turns):
            record = RequestRecord(
                index=len(self._records),
                session=number,
                turn=i,
                scheduled_s=at,
                measured=self.extent.measures(at),
                prompt_tokens=self.target.num_prompt_tokens(history, turn),
                max_tokens=turn.output_tokens,
            )
            self._records.append(record)
            exchange = await self._request(turn, record, prepared, keep=i < last or turn.passage_tokens is not None)
            if exchange is None or i == last:
                break
            history.append(exchange)
            following = session.turns[i + 1]
            at = self._clock() + following.think_s
            if at >= self.extent.end_s:
                break
            prepared = self.target.prepare(history, following, self.run)
            await asyncio.sleep(max(0.0, at - self._clock()))
        return record.completed

    async def _request(self, turn: SessionTurn, record: RequestRecord, prepared: object, *, keep: bool) -> Exchange | None:
        """None: it failed, or nothing was to be kept."""
        progress = self.progress
        if progress.in_flight >= self.extent.max_in_flight:
            record.error, record.message = "not sent", f"{progress.in_flight} requests were under way: more would say nothing of the server"
            progress.num_failed += 1
            return None
        progress.num_sent += 1
        try:
            answer = await self.target.ask(prepared, record, self._clock, keep=keep)
        except RequestFailed as failure:
            record.error, record.message, record.retry_after_s = failure.kind, failure.message, failure.retry_after_s
            progress.num_failed += 1
            return None
        except asyncio.CancelledError:
            record.error, record.message = "stopped", "the run was stopped before the answer's end"
            raise
        finally:
            progress.num_ended += 1
            progress.num_tokens += record.output_tokens
            if self.stop is not None and self.stop(record):
                self._stopped.set()
        if answer is None:
            return None
        if turn.passage_tokens is not None and answer.token_ids:
            record.quoted_tokens = num_quoted(turn, answer.token_ids)
        return Exchange(turn, answer)


def _raise_single(task: asyncio.Task[None]) -> None:
    """Raises an error that a group of tasks wraps as it is, if it has something to say to the user."""
    try:
        task.result()
    except ExceptionGroup as group:
        ours, _ = group.split(TwostepError)
        first = ours.exceptions[0] if ours else None
        if isinstance(first, TwostepError):
            raise first from None
        raise


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keeps the garbage collector from looking at everything again and again: its pauses would count as the server's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
