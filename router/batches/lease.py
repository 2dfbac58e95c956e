"""Who runs a batch: one router at a time, by a key in Redis that lapses with it.

    twostep:v1:batch:{id}   who runs it; lapses LEASE_S after it was renewed last

A lease says who should; that two runs do no harm where it fails (a stopped process, a Redis that forgot) is the store's doing, which gives
every run files of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

LEASE_S = 10.0
# Before others may take it, its holder knows that it has lapsed.
_MARGIN = 0.2

# KEYS[1]: the lease; ARGV: its holder, milliseconds.
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end"
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class Lease:
    """Held from its making on, for as long as it is renewed."""

    def __init__(self, redis: Redis, key: str, holder: str, lease_s: float) -> None:
        self._redis, self._key, self._holder = redis, key, holder
        self._lease_s = lease_s
        self._until = 0.0

    @property
    def renew_s(self) -> float:
        """How often."""
        return self._lease_s / 4

    @property
    def held(self) -> bool:
        return time.monotonic() < self._until

    async def acquire(self) -> bool:
        """False: another router has it. Raises RedisError, OSError."""
        asked = time.monotonic()
        if not await self._redis.set(self._key, self._holder, nx=True, px=int(self._lease_s * 1000)):
            return False
        self._until = asked + self._lease_s * (1 - _MARGIN)
        return True

    async def renew(self) -> None:
        """Once; never raises for what Redis does. A Redis that has lost the lease is asked for another."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(self.renew_s):
                renewed = await self._redis.eval(_RENEW, 1, self._key, self._holder, str(int(self._lease_s * 1000)))
            if renewed:
                self._until = asked + self._lease_s * (1 - _MARGIN)
            elif not (self.held and await self.acquire()):
                self._until = 0.0
        except (RedisError, OSError, TimeoutError):
            return  # until it lapses

    async def release(self) -> None:
        """Others need not wait. Never raises for what Redis does."""
        self._until = 0.0
        try:
            await self._redis.eval(_RELEASE, 1, self._key, self._holder)
        except (RedisError, OSError):
            return  # it lapses


class Leases:
    def __init__(self, redis: Redis, router_id: str, lease_s: float) -> None:
        self._redis = redis
        self._router_id = router_id
        self._lease_s = lease_s

    async def take(self, name: str) -> Lease | None:
        """None: it is another's, or Redis cannot be asked."""
        lease = Lease(self._redis, f"twostep:v1:batch:{name}", f"{self._router_id}:{secrets.token_hex(8)}", self._lease_s)
        try:
            return lease if await lease.acquire() else None
        except (RedisError, OSError):
            return None

    async def take_for(self, name: str, seconds: float) -> bool:
        """Nobody does it again for so long, whoever does it now."""
        try:
            return bool(await self._redis.set(f"twostep:v1:batch:{name}", self._router_id, nx=True, ex=int(seconds)))
        except (RedisError, OSError):
            return False
