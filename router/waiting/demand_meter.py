"""Counts what is asked of this router and how well it is answered, and writes it to Redis for the autoscaler (twostep/cluster/demand.py).

One pipelined round trip a second, beside the requests and never on their way. Windows are of Redis' clock. Without Redis serving goes
on; what was counted meanwhile is written later if it is of this window or the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.request.job import RequestJob
from router.request.report import RequestReport
from router.request.targets import Reason, Targets
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import EXCHANGE_S
from twostep.cluster.demand import TTL_S, DemandTotals, demand_key, signed_totals, window_of
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import Signer
from twostep.request_class import RequestClass

log = logging.getLogger(__name__)

_SYNC_S = 1.0
_TIMEOUT_S = EXCHANGE_S
# Windows that are still written: what came in the last moments of one is told in the next.
_NUM_WINDOWS = 2


class DemandBook:
    """Pure: this router's totals by window. Requests that name no targets are held to `default`; batch requests that name none, to
    nothing."""

    def __init__(self, default: Targets) -> None:
        self._default = default
        self._totals: dict[int, Counter[str]] = {}

    def arrived(self, job: RequestJob, window: int) -> None:
        """Counts a request before it is known whether it will be served."""
        totals = self._of(window)
        totals["requests"] += 1
        totals["prompt_tokens"] += len(job.prompt) + len(job.resumed)

    def ended(self, report: RequestReport, *, refused: Reason | None, cancelled: bool, window: int) -> None:
        """Counts a request that arrived, however it ended. `refused`: why no worker ever began."""
        job = report.job
        if job is None or not report.offered:
            return
        totals = self._of(window)
        if refused is not None:
            totals["refused"] += 1
        if report.first_token_at is not None:
            totals["started"] += 1
            totals["started_prompt_tokens"] += report.num_prompt_tokens
            totals["cached_tokens"] += report.cached_tokens
            totals["uncached_squares"] += (report.num_prompt_tokens - report.cached_tokens) ** 2
            totals["ended"] += 1
            totals["output_tokens"] += max(0, report.num_output_tokens)
        # The beginning of one that is resumed came from another router; one that was cancelled was not waited for.
        if cancelled or job.resumed:
            return
        held_to = job.targets if job.targets or job.request_class is RequestClass.BATCH else self._default
        missed = held_to.missed(report.ttft_s, report.tpot_s)
        if held_to.ttft_s is not None:
            totals["ttft_total"] += 1
            totals["ttft_met"] += Reason.TARGET_TTFT not in missed
        if held_to.tpot_s is not None and report.tpot_s is not None:
            totals["tpot_total"] += 1
            totals["tpot_met"] += Reason.TARGET_TPOT not in missed

    def totals(self, window: int, *, queued: int, left: bool = False) -> Mapping[int, DemandTotals]:
        """Returns what to write now, by window: that no request came is worth writing too. `left`: for the last time. Forgets older
        windows."""
        current = range(window - _NUM_WINDOWS + 1, window + 1)
        for old in [known for known in self._totals if known not in current]:
            del self._totals[old]
        return {each: DemandTotals(**self._of(each), queued=queued, left=int(left)) for each in current}

    def _of(self, window: int) -> Counter[str]:
        return self._totals.setdefault(window, Counter())


class DemandMeter:
    """`num_queued` is asked at every exchange: requests that wait in this router."""

    def __init__(
        self,
        redis: Redis,
        router_id: str,
        signer: Signer,
        default: Targets,
        num_queued: Callable[[], int],
        clock: SharedClock,
    ) -> None:
        self._redis = redis
        self._signer = signer
        self._clock = clock
        self._router_id = router_id
        self._book = DemandBook(default)
        self._num_queued = num_queued
        self._connected = True

    @property
    def connected(self) -> bool:
        """False while Redis does not answer."""
        return self._connected

    def arrived(self, job: RequestJob) -> None:
        self._book.arrived(job, window_of(self._clock.unix()))

    def ended(self, report: RequestReport, *, refused: Reason | None, cancelled: bool) -> None:
        """See DemandBook."""
        self._book.ended(report, refused=refused, cancelled=cancelled, window=window_of(self._clock.unix()))

    async def run(self) -> None:
        """Writes until cancelled, and then once more, that this router leaves: one that only falls silent may have been cut off."""
        try:
            while True:
                await self.exchange()
                end_if_cancelled()
                await asyncio.sleep(_SYNC_S)
        finally:
            await self.exchange(left=True)

    async def exchange(self, *, left: bool = False) -> None:
        """Writes once; never raises for what Redis does."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for window, totals in self._book.totals(window_of(self._clock.unix()), queued=self._num_queued(), left=left).items():
            field: Mapping[Any, Any] = {self._router_id: signed_totals(self._signer, window, self._router_id, totals)}
            pipeline.hset(demand_key(window), mapping=field)
            pipeline.expire(demand_key(window), TTL_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._clock.told((await pipeline.execute())[0])
        except (RedisError, OSError, TimeoutError) as error:
            if self._connected:
                self._connected = False
                log.warning("what is asked of this router cannot be told to the autoscaler (%s)", str(error) or type(error).__name__)
            return
        if not self._connected:
            self._connected = True
            log.warning("what is asked of this router is told to the autoscaler again")
