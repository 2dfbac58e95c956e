"""One load, ready to be put on a router at any rate: workload, arrivals and extent together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.runner import Extent, LoadRunner, RunProgress, RunResult
from twostep.lab.bench.serve.summary import Windows
from twostep.lab.bench.serve.target import RouterTarget, TargetModel
from twostep.lab.bench.serve.workloads import BenchSession, MultiTurn, PromptContent, RequestTrace, Workload


@dataclass(frozen=True, slots=True)
class Users:
    """Closed loop: so many users, each of whom asks again when answered."""

    count: int


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """The times of the trace, so many times as fast."""

    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    workload: Workload
    arrivals: Arrivals | Users | TraceTimes
    extent: Extent
    seed: str
    max_model_len: int = 0  # longer sessions are cut to it; 0: what the router tells

    def __post_init__(self) -> None:
        if self.rate is not None and math.isinf(self.rate) and self.extent.duration_s:
            raise InvalidRequest("a rate of inf sends all requests at once: say how many with --num-requests instead of a duration")

    @property
    def rate(self) -> float | None:
        """Sessions per second; None: no such thing is given."""
        return self.arrivals.rate if isinstance(self.arrivals, Arrivals) else None

    @property
    def label(self) -> str:
        match self.arrivals:
            case Users(count):
                return f"{count} users"
            case TraceTimes(speed=speed):
                return f"trace at {speed:.3g} times its speed"
            case Arrivals(rate=rate):
                return f"{rate:.4g} requests/s (Poisson)"

    def at_rate(self, rate: float) -> ServeLoad:
        """The same at another rate. Raises InvalidRequest where there is none to set."""
        if not isinstance(self.arrivals, Arrivals):
            raise InvalidRequest("neither users that wait for their answers nor a trace's own times have a rate to vary: give --rate")
        return replace(self, arrivals=replace(self.arrivals, rate=rate))

    def sessions(self, served: TargetModel, run: str) -> Iterator[BenchSession]:
        """Lengths depend on the seed alone, and are the same for every run; what the prompts say differs from run to run, so that none
        finds another's in a cache."""
        content = PromptContent(f"{self.seed}/{run}", served.alphabet, served.quotations)
        length = min((n for n in (self.max_model_len, served.max_model_len) if n), default=0)
        return (session.fitted(length) for session in self.workload.sessions(content, random.Random(f"lengths/{self.seed}")))

    def num_measured(self) -> int | None:
        """Requests that will be measured, where that can be known before."""
        if isinstance(self.workload, MultiTurn) or not isinstance(self.arrivals, Arrivals):
            return None
        if self.extent.num_requests:
            most = len(self.workload.requests) if isinstance(self.workload, RequestTrace) else self.extent.num_requests
            return min(most, self.extent.num_requests)
        return sum(map(self.extent.measures, self.arrivals.within(self.seed, self.extent.end_s)))

    async def put_on(
        self,
        target: RouterTarget,
        served: TargetModel,
        run: str,
        progress: RunProgress,
        stop: Callable[[RequestRecord], bool] | None = None,
    ) -> tuple[RunResult, Windows]:
        """Runs it once. Returns when the last answer is there, or when `stop` says that there is no point in going on."""
        sessions = self.sessions(served, run)
        runner = LoadRunner(target=target, extent=self.extent, run=run, progress=progress, stop=stop)
        match self.arrivals:
            case Users(count):
                result = await runner.closed_loop(sessions, count)
            case TraceTimes(speed=speed):
                result = await runner.open_loop((s.arrival_s / speed, s) for s in sessions)
            case Arrivals() as arrivals:
                length_s = self.extent.end_s
                times = arrivals.times(self.seed) if math.isinf(length_s) else chain(arrivals.within(self.seed, length_s), (length_s,))
                result = await runner.open_loop(zip(times, sessions, strict=False))
        if self.extent.duration_s and not result.exhausted and not result.stopped:
            windows = Windows.of_duration(self.extent.warmup_s, self.extent.duration_s)
        else:
            windows = Windows.of_requests(result.records, open_loop=not isinstance(self.arrivals, Users))
        return result, windows
