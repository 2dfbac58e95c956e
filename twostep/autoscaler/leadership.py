"""Who leads: one replica holds a lease in Redis, with a token that grows each time it changes hands.

    renew     takes the lease if nobody has it, or makes it last longer if it is this replica's own
    held      until a moment before it runs out, reckoned from before the last renewal was sent: without Redis it ends by itself, and never
              later here than there
    commit    writes a decision, if the lease is still this one: in one step of Redis, so that a leader that was stopped for a while
              and does not know that it leads no more cannot write over its successor's

Whatever acts on the cluster does so while `held`. Redis may lose everything: the token goes on from the largest that the new holder has
seen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.scaling import DECISION_KEY, DECISION_TTL_S, LEASE_KEY, TOKEN_KEY, ScalingRecord
from twostep.cluster.signed import Signer

log = logging.getLogger(__name__)

# Of the lease that is left unused at its end: clocks do not run equally fast, and what was begun should be over.
_MARGIN = 0.1
_LEAST_TIMEOUT_S = 1.0

_TAKE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local last = redis.pcall('GET', KEYS[2])
last = type(last) == 'string' and tonumber(last) or 0
if not (last >= 0 and last < 2^48) then last = 0 end
local token = math.max(last, tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%d', token))
redis.call('SET', KEYS[1], string.format('%d', token) .. ':' .. ARGV[1], 'PX', ARGV[2])
return token
"""
_RENEW = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end return redis.call('PEXPIRE', KEYS[1], ARGV[2])"
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Leadership:
    """Calls take no longer than until the next renewal is due, and raise nothing for what Redis does. `signer` of decisions. `clock` in
    seconds, does not go back."""

    def __init__(self, redis: Redis, holder: str, signer: Signer, *, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._holder = holder
        self._signer = signer
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._clock = clock
        self._token = 0
        self._largest_seen = 0
        self._until = -float("inf")
        self._reachable = True

    @property
    def held(self) -> bool:
        return self._token > 0 and self._clock() < self._until

    @property
    def token(self) -> int:
        """Returns that of the lease that is held, or was; 0: none ever was, or it is lost."""
        return self._token

    @property
    def reachable(self) -> bool:
        """False while Redis does not answer."""
        return self._reachable

    @property
    def renew_every_s(self) -> float:
        """Two renewals may fail, and the third still comes in time."""
        return self._ttl_ms / 1000 / 4

    def saw(self, token: int) -> None:
        """Notes the token of another replica's decision: tokens given out from now on are larger."""
        self._largest_seen = max(self._largest_seen, token)

    async def renew(self) -> bool:
        """True: it is held now."""
        sent = self._clock()
        if self._token:
            kept = await self._run(_RENEW, [LEASE_KEY], [self._value, self._ttl_ms])
            if kept is None:
                return self.held
            if kept:
                self._until = sent + self._usable_s
                return True
            self._lose("another replica has taken it, or Redis has forgotten it")
        token = await self._run(_TAKE, [LEASE_KEY, TOKEN_KEY], [self._holder, self._ttl_ms, self._largest_seen])
        if token:
            self._token, self._until = int(token), sent + self._usable_s
            self.saw(self._token)
            log.info("%s leads now, token %d", self._holder, self._token)
        return self.held

    async def commit(self, record: ScalingRecord) -> bool:
        """Whether the decision stands. False: the lease is not held any more, or Redis is away; then nothing may be done about it."""
        if not self.held or record.token != self._token:
            return False
        said = self._signer.sign_object(record.to_json())
        written = await self._run(_COMMIT, [LEASE_KEY, DECISION_KEY], [self._value, said, DECISION_TTL_S])
        if written == 0:
            self._lose("the lease has gone to another replica")
        return bool(written) and self.held

    async def release(self) -> None:
        """So that another replica need not wait for its end."""
        if self._token:
            value = self._value
            # First, or a renewal that takes it anew meanwhile would be forgotten.
            self._token, self._until = 0, -float("inf")
            await self._run(_RELEASE, [LEASE_KEY], [value])

    @property
    def _value(self) -> str:
        return f"{self._token}:{self._holder}"

    @property
    def _usable_s(self) -> float:
        return self._ttl_ms / 1000 * (1 - _MARGIN)

    def _lose(self, why: str) -> None:
        log.warning("%s does not lead any more: %s", self._holder, why)
        self._token, self._until = 0, -float("inf")

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> int | None:
        """None: Redis did not answer."""
        try:
            async with asyncio.timeout(max(_LEAST_TIMEOUT_S, self.renew_every_s)):
                reply = await self._redis.eval(script, len(keys), *keys, *arguments)
        except (RedisError, OSError, TimeoutError) as error:
            if self._reachable:
                self._reachable = False
                log.warning("Redis does not answer (%s): whoever leads does so until the lease ends", str(error) or type(error).__name__)
            return None
        if not self._reachable:
            self._reachable = True
            log.warning("Redis answers again")
        return int(reply)
