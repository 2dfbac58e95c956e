"""Epochs: numbers that tell the lives of a worker apart and say which is later. Redis gives them out, whatever the machines' clocks say.

An epoch is Redis' time in microseconds, or one more than the largest that was ever given out if that is not less. So it grows when Redis'
clock goes back, on this server or the one that a failover leads to; and when Redis has lost everything, as long as its clock goes on. Where
neither holds, a worker's new life may have a smaller epoch than one before it: routers then ask the worker itself
(router/workers/registry.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.connection import connect, public, refuse_cluster
from twostep.errors import SetupError

EPOCH_KEY = "twostep:v1:epoch"
# In JSON, and in Redis' scripts, numbers are exact up to here. What is larger is no epoch.
MAX_EPOCH = 1 << 53

_AGAIN_S = 0.2
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
    """An epoch that nobody has had, larger than `after`. Raises RedisError, OSError."""
    return int(await cast(Awaitable[bytes], redis.eval(_NEXT, 1, EPOCH_KEY, str(after), str(MAX_EPOCH))))


async def first_epoch(url: str, timeout_s: float = 10.0) -> int:
    """That of a process that starts. Tries for `timeout_s`. Raises SetupError: nobody answers, or not a Redis that can be used."""
    give_up = time.monotonic() + timeout_s
    redis = connect(url)
    try:
        while True:
            try:
                await refuse_cluster(redis)
                return await next_epoch(redis)
            except (RedisError, OSError) as error:
                if time.monotonic() >= give_up:
                    raise SetupError(
                        f"no Redis at {public(url)} that takes what it is told ({error}); start one, or give another --redis-url"
                    ) from error
            await asyncio.sleep(_AGAIN_S)
    finally:
        await redis.aclose()
