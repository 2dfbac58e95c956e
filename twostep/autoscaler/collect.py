"""One look at Redis: what is asked of the deployment, who serves it, and what was decided last. Three round trips as a rule:

    1  the time
    2  what routers metered in the last windows by that time, the last decision
    3  the records of all workers
    4  the same again two heartbeats later, where workers that were there the last time are not now: a Redis that came back empty has
       nobody's record for a second, and a cluster does not lose its workers within one. Or where nobody was known, and there is no
       decision to go on from: until nobody is new, three times at most

Redis' clock is the clock of all replicas: instants of decisions mean the same to each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.autoscaler.fleet import Fleet
from twostep.autoscaler.model import Observation, Traffic
from twostep.cluster.connection import EXCHANGE_S
from twostep.cluster.demand import MAX_ROUTERS, Demand, DemandTotals, demand_key, demand_of, said_in, windows_to_read
from twostep.cluster.hashes import hashes_in, read_hashes
from twostep.cluster.look import look
from twostep.cluster.records import HEARTBEAT_S, WorkerRecord
from twostep.cluster.scaling import DECISION_KEY, MAX_DECISION_BYTES, ScalingRecord
from twostep.cluster.signed import DECISIONS, DEMAND, RECORDS, Signer
from twostep.errors import InvalidRequest, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret

_TIMEOUT_S = EXCHANGE_S
LOOK_AGAIN_S = 2 * HEARTBEAT_S
_MOST_LOOKS = 3
# Of the requests whose lengths say how unlike prompts are; below, it is taken to be what it usually is.
_FEW = 8
# Names of routers in one line of the log.
_MOST_TOLD = 8

log = logging.getLogger(__name__)


class NothingMetered(Unavailable):
    """No router has said what is asked of it: that is not the same as nothing."""


class NobodyKnown(Unavailable):
    """Workers are registered, and none of them is one of this deployment: that is not the same as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """`decision`: the last one that stands; None: there is none, or none that is understood here. `num_refused`: records of workers that
    do not belong here, or are not understood."""

    now_s: float
    records: Sequence[WorkerRecord]
    demand: Demand
    decision: ScalingRecord | None
    num_refused: int = 0


class ObservationCollector:
    """`clock`: instead of Redis' own, seconds since 1970. `span_s`: over which the load is averaged."""

    def __init__(
        self,
        redis: Redis,
        fleet: Fleet,
        secret: DeploymentSecret,
        *,
        span_s: float,
        clock: Callable[[], float] | None = None,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._redis = redis
        self._fleet = fleet
        self._of_records, self._of_decisions, self._of_demand = (Signer(secret, each) for each in (RECORDS, DECISIONS, DEMAND))
        self._span_s = span_s
        self._clock = clock
        self._look_again_s = look_again_s
        self._known: dict[str, WorkerRecord] = {}
        # Names of records that were there at the last look and do not count.
        self._refused: set[str] = set()
        self._lengths = Traffic()
        self._silent: tuple[str, ...] = ()

    async def look(self) -> ClusterSnapshot:
        """Raises Unavailable without Redis."""
        with _redis():
            return await self._look()

    async def decision(self) -> tuple[float, ScalingRecord | None]:
        """Now, and the decision that stands. One round trip. Raises Unavailable without Redis."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.getrange(DECISION_KEY, 0, MAX_DECISION_BYTES)
        with _redis():
            async with asyncio.timeout(_TIMEOUT_S):
                replies = await pipeline.execute()
        return self._now(replies[0]), self._decision(replies[1])

    def observation(self, look: ClusterSnapshot, asked: Mapping[str, int] | None, *, switching: Collection[str] = ()) -> Observation:
        """Returns what the policy is to see of `look`. `asked`: pods that each Deployment has by the last decision, registered or not;
        None: there is no decision. `switching`: workers that change their role now. Raises NothingMetered, NobodyKnown."""
        if look.demand.seconds <= 0:
            raise NothingMetered("no router has said of late what is asked of it")
        if look.num_refused and not look.records:
            raise NobodyKnown(f"{look.num_refused} workers are registered and none of them counts; the warnings before say why")
        traffic = self._lengths = traffic_of(look.demand, self._lengths)
        return Observation(
            now_s=look.now_s,
            traffic=traffic,
            workers=self._fleet.views(look.records, look.now_s),
            pods=self._fleet.pods(look.records, asked, look.now_s, switching=switching),
        )

    async def _look(self) -> ClusterSnapshot:
        known = list(self._known)
        async with asyncio.timeout(_TIMEOUT_S):
            now_s = self._now(await self._redis.time())
            windows = windows_to_read(now_s)
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.getrange(DECISION_KEY, 0, MAX_DECISION_BYTES)
            read_hashes(pipeline, [demand_key(window) for window in windows], max_fields=MAX_ROUTERS)
            text, hashes = await pipeline.execute()
        fields = {window: said_in(self._of_demand, window, said) for window, said in zip(windows, hashes_in(hashes), strict=True)}
        decision = self._decision(text)
        self._refused.clear()
        found = await self._look_at(known)
        missing = [name for name, record in self._known.items() if name not in found and not record.draining]
        for _ in range(1 if missing else _MOST_LOOKS if decision is None and not known else 0):
            await asyncio.sleep(self._look_again_s)
            before = len(found)
            found |= await self._look_at([*found, *missing])
            if len(found) == before:
                break
        self._known = found
        demand = demand_of(fields, now_s=now_s, span_s=self._span_s)
        if new := [name for name in demand.silent if name not in self._silent]:
            log.warning(
                "%s %s silent and did not say so before: nobody is taken away as long as what is asked there may be missing; look whether "
                "Redis is reached from there, and whether its clock is right",
                ", ".join(new[:_MOST_TOLD]),
                "is" if len(new) == 1 else "are",
            )
        self._silent = demand.silent
        return ClusterSnapshot(
            now_s=now_s,
            records=tuple(found.values()),
            demand=demand,
            decision=decision,
            num_refused=len(self._refused),
        )

    async def _look_at(self, known: Sequence[str]) -> dict[str, WorkerRecord]:
        async with asyncio.timeout(_TIMEOUT_S):
            return self._read((await look(self._redis, known)).records)

    def _read(self, texts: Mapping[str, bytes]) -> dict[str, WorkerRecord]:
        found = {}
        for name, text in sorted(texts.items()):
            try:
                record = WorkerRecord.from_json(self._of_records.read_object(text))
            except (InvalidRequest, Unauthenticated) as error:
                self._fleet.refuse(name, error.message)
                self._refused.add(name)
                continue
            if (counted := self._fleet.take(name, record)) is not None:
                found[name] = counted
            else:
                self._refused.add(name)
        return found

    def _decision(self, text: bytes) -> ScalingRecord | None:
        try:
            return ScalingRecord.from_redis(text, self._of_decisions)
        except InvalidRequest:
            return None

    def _now(self, reply: Any) -> float:
        if self._clock is not None:
            return self._clock()
        seconds, microseconds = reply
        return int(seconds) + int(microseconds) / 1e6


@contextmanager
def _redis() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis does not answer: {str(error) or type(error).__name__}") from error


def traffic_of(demand: Demand, before: Traffic) -> Traffic:
    """Lengths of the last windows; where those say nothing, of all that are kept; where these do not either, as they were `before`."""
    recent, kept = demand.recent, demand.kept
    lengths = {}
    for name, total, count in (
        ("prompt", "prompt_tokens", "requests"),
        ("cached", "cached_tokens", "started_prompt_tokens"),
        ("output", "output_tokens", "ended"),
    ):
        counted = next((each for each in (asdict(recent), asdict(kept)) if each[count]), None)
        lengths[name] = None if counted is None else counted[total] / counted[count]
    prompt_tokens = before.prompt_tokens if lengths["prompt"] is None else lengths["prompt"]
    cached_share = _share(before.cached_tokens, before.prompt_tokens) if lengths["cached"] is None else min(1.0, lengths["cached"])
    return Traffic(
        requests_per_s=recent.requests / demand.seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens * (cached_share or 0.0),
        output_tokens=before.output_tokens if lengths["output"] is None else lengths["output"],
        refused_per_s=recent.refused / demand.seconds,
        queued_requests=demand.queued,
        ttft_met=_share(recent.ttft_met, recent.ttft_total),
        tpot_met=_share(recent.tpot_met, recent.tpot_total),
        silent_routers=len(demand.silent),
        prompt_scv=_scv(recent, kept, before.prompt_scv),
        promised=_share(recent.promised, recent.requests) or 0.0,
    )


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None


def _scv(recent: DemandTotals, kept: DemandTotals, before: float) -> float:
    """Squared coefficient of variation of what prompts have to be computed of."""
    for totals in (recent, kept):
        mean = (totals.started_prompt_tokens - totals.cached_tokens) / max(1, totals.started)
        if totals.started >= _FEW and mean > 0:
            return max(0.0, totals.uncached_squares / totals.started / mean**2 - 1)
    return before
