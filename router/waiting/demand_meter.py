"""Counts what is asked of this router and how well it is answered, and writes it to Redis for the autoscaler (twostep/cluster/demand.py).

One pipelined round trip a second, beside the requests and never on their way. Windows are of Redis' clock. Without Redis serving goes
on; what was counted meanwhile is written later if it is of this window or the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from router.request.job import RequestJob
from router.request.report import RequestReport
from router.request.targets import Reason, Targets
from twostep.cluster.demand import TTL_S, DemandTotals, demand_key, signed_totals, window_of
from twostep.cluster.exchange import RedisExchange
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import Signer
from twostep.request_class import RequestClass

# Windows that are still written: what came in the last moments of one is told in the next.
_NUM_WINDOWS = 2


class DemandMeter(RedisExchange):
    """Keeps this router's totals by window. Requests that name no targets are held to `default`; batch requests that name none, to nothing.
    `num_queued` is asked at every exchange: requests that wait in this router."""

    lost = "what is asked of this router cannot be told to the autoscaler (%s)"
    found = "what is asked of this router is told to the autoscaler again"

    def __init__(
        self, redis: Redis, router_id: str, signer: Signer, default: Targets, num_queued: Callable[[], int], clock: SharedClock
    ) -> None:
        self._redis, self._router_id, self._signer = redis, router_id, signer
        self._default = default
        self._num_queued = num_queued
        self._clock = clock
        self._totals: dict[int, Counter[str]] = {}
        self._left = False

    def arrived(self, job: RequestJob) -> None:
        """Counts a request before it is known whether it will be served."""
        totals = self._now()
        totals["requests"] += 1
        totals["prompt_tokens"] += len(job.prompt) + len(job.resumed)
        totals["promised"] += job.targets.ttft_s is not None and job.request_class is not RequestClass.BATCH

    def ended(self, report: RequestReport, refused: Reason | None, cancelled: bool) -> None:
        """Counts a request that arrived, however it ended. `refused`: why no worker ever began."""
        job = report.job
        if job is None or not report.offered:
            return
        totals = self._now()
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
        missed = held_to.missed(report.ttft_s, report.tpot_s, report.longest_gap_s)
        if held_to.ttft_s is not None:
            totals["ttft_total"] += 1
            totals["ttft_met"] += Reason.TARGET_TTFT not in missed
        if held_to.tpot_s is not None and report.tpot_s is not None:
            totals["tpot_total"] += 1
            totals["tpot_met"] += Reason.TARGET_TPOT not in missed

    def totals(self, *, left: bool = False) -> Mapping[int, DemandTotals]:
        """Returns what to write now, by window: that no request came is worth writing too. `left`: for the last time. Forgets older
        windows."""
        window, queued = window_of(self._clock.unix()), self._num_queued()
        current = range(window - _NUM_WINDOWS + 1, window + 1)
        for old in [known for known in self._totals if known not in current]:
            del self._totals[old]
        return {each: DemandTotals(**self._of(each), queued=queued, left=int(left)) for each in current}

    def _now(self) -> Counter[str]:
        return self._of(window_of(self._clock.unix()))

    def _of(self, window: int) -> Counter[str]:
        return self._totals.setdefault(window, Counter())

    async def run(self) -> None:
        """Writes until cancelled, and then once more, that this router leaves: one that only falls silent may have been cut off."""
        try:
            await super().run()
        finally:
            self._left = True
            await self.exchange()

    async def _exchange(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for window, totals in self.totals(left=self._left).items():
            pipeline.hset(demand_key(window), self._router_id, signed_totals(self._signer, window, self._router_id, totals))
            pipeline.expire(demand_key(window), TTL_S)
        self._clock.set((await pipeline.execute())[0])
