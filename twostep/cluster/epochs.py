"""Epochs: numbers that tell the lives of a worker apart and say which is later. Redis gives them out, whatever the machines' clocks say.

An epoch is Redis' time in microseconds, or one more than the largest that was ever given out if that is not less. So it grows when Redis'
clock goes back, on this server or the one that a failover leads to; and when Redis has lost everything, as long as its clock goes on. Where
neither holds, a worker's new life may have a smaller epoch than one before it: routers then ask the worker itself
(router/workers/registry.py).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from redis.asyncio import Redis

from twostep.cluster.connection import at_start, connect

EPOCH_KEY = "twostep:v1:epoch"
# In JSON, and in Redis' scripts, numbers are exact up to here. What is larger is no epoch.
MAX_EPOCH = 1 << 53

# KEYS[1] may be of any type if nobody of ours has written it.
_NEXT = """
local now = redis.call('TIME')
local last = redis.pcall('GET', KEYS[1])
last = type(last) == 'string' and tonumber(last) or 0
if not (last >= 0 and last < tonumber(ARGV[2]) / 2) then last = 0 end
local epoch = math.max(now[1] * 1000000 + now[2], last + 1, tonumber(ARGV[1]) + 1)
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
return string.format('%.0f', epoch)
"""


async def next_epoch(redis: Redis, after: int = 0) -> int:
    """Returns an epoch that nobody has had, larger than `after`. Raises RedisError, OSError."""
    return int(await cast(Awaitable[bytes], redis.eval(_NEXT, 1, EPOCH_KEY, str(after), str(MAX_EPOCH))))


async def first_epoch(url: str, timeout_s: float = 10.0) -> int:
    """Returns that of a process that starts. Raises SetupError: for `timeout_s` no Redis that can be used answers."""
    async with connect(url) as redis:
        return await at_start(redis, timeout_s, lambda: next_epoch(redis))
