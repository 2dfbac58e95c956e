"""The autoscaler's last decision, as the router's status shows it: read from Redis every other second. Nothing that is served waits for it
or depends on it.

read        a decision's age is reckoned from when it was first seen, so that neither a decision with a wrong instant nor clocks that
            differ keep an old one young
away        Redis does not answer: the last decision stays, and gets old
gone        it expires in Redis an hour after it was made (twostep/cluster/scaling.py). It is remembered for a day: who looks in the morning
            sees that nobody has decided since midnight. Of an autoscaler that was before the router started nothing is known then
unreadable  damaged, or of a version too far away: why is kept beside the last decision that could be read, and logged once
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from twostep.autoscaler.memory import Memory
from twostep.cluster.exchange import RedisExchange
from twostep.cluster.scaling import DECISION_KEY, DECISION_TTL_S, MAX_DECISION_BYTES, ScalingRecord
from twostep.cluster.signed import Signer
from twostep.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_BYTES = MAX_DECISION_BYTES
# Intervals without a decision after which an autoscaler that does not say so itself is taken for gone.
STALE_INTERVALS = 4
# Beyond what a poll may be late.
_LEAST_STALE_S = 10.0
REMEMBERED_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDecision:
    """`record` None: none could be read. `made_at`: by the watch's clock. `switches`: role switches that were under way then, by worker id
    the role to take. `problem`: why what lies in Redis now cannot be read; empty: it can, or there is nothing."""

    record: ScalingRecord | None = None
    made_at: float = 0.0
    switches: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def age_s(self, at: float) -> float:
        return max(0.0, at - self.made_at)

    def stale(self, at: float) -> bool:
        """Says whether the autoscaler decides no more."""
        if self.record is None:
            return False
        stale_s = self.record.stale_s if self.record.stale_s > 0 else STALE_INTERVALS * self.record.interval_s
        return self.age_s(at) >= min(max(_LEAST_STALE_S, stale_s), DECISION_TTL_S)


def heard(before: SeenDecision | None, text: bytes, signer: Signer, now_s: float, at: float) -> SeenDecision | None:
    """Returns what is known once `text` was read from Redis, of MAX_BYTES and one more at most; empty: there is nothing. None: no
    autoscaler has decided anything of late. `now_s`: by Redis' clock; `at`: by the watch's. Pure."""
    seen = before or SeenDecision()
    if at - seen.made_at > REMEMBERED_S:
        seen = SeenDecision()
    if not text:
        return None if seen.record is None else replace(seen, problem="")
    if len(text) > MAX_BYTES:
        problem = f"{DECISION_KEY} has more than {MAX_BYTES} bytes; delete it, and the next decision takes its place"
        return replace(seen, problem=problem)
    try:
        record = ScalingRecord.from_redis(text, signer)
    except InvalidRequest as error:
        return replace(seen, problem=error.message)
    same = seen.record is not None and (seen.record.order, seen.record.at_s) == (record.order, record.at_s)
    made_at = seen.made_at if same else at - max(0.0, now_s - record.at_s)
    return SeenDecision(record=record, made_at=made_at, switches=_switches(record))


def _switches(record: ScalingRecord) -> Mapping[str, str]:
    """Returns the switches of roles. Those under way stand in the policy's memory. Where that is of another version, this decision's own
    are known."""
    if not isinstance(record.memory, str):
        return record.switches
    try:
        return {worker_id: role for worker_id, (role, _) in Memory.from_json(record.memory).switching.items()}
    except InvalidRequest:
        return record.switches


class ScalingWatch(RedisExchange):
    """`signer` of decisions. `clock` in seconds, does not go back. If Redis is away, the registry says so: the last decision stands,
    and gets old."""

    every_s = 2.0

    def __init__(self, redis: Redis, signer: Signer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._signer = signer
        self._clock = clock
        self.seen: SeenDecision | None = None  # None: no autoscaler has decided anything of late
        # As it was read last, and is not parsed again.
        self._text: bytes | None = None

    async def _exchange(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.getrange(DECISION_KEY, 0, MAX_BYTES)
        try:
            (seconds, micros), text = await pipeline.execute()
        except ResponseError as error:
            problem = f"Redis does not give it: {error}; delete the key {DECISION_KEY}, or see that the router may read it"
            self._text = None
            self._learn(replace(self.seen or SeenDecision(), problem=problem))
            return
        if not text or text != self._text:
            self._learn(heard(self.seen, text, self._signer, seconds + micros / 1e6, self._clock()))
            self._text = text

    def _learn(self, seen: SeenDecision | None) -> None:
        before, now = self.seen.problem if self.seen else "", seen.problem if seen else ""
        self.seen = seen
        if now and now != before:
            log.warning("the autoscaler's decision cannot be read: %s", now)
        elif before and not now:
            log.info("the autoscaler's decision can be read again, or is gone")
