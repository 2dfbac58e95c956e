"""Redis at the start of a router: later it may come and go."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.connection import refuse_cluster
from twostep.errors import SetupError


async def wait_for_redis(redis: Redis, timeout_s: float) -> None:
    """Until it answers. Raises SetupError."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            await redis.ping()
            await refuse_cluster(redis)
            return
        except (RedisError, OSError) as error:
            if time.monotonic() >= give_up_at:
                raise SetupError(
                    f"no Redis answers at --redis-url within {timeout_s:g} s ({error}); start one (`redis-server`, or `twostep up` "
                    "brings its own), or give another --redis-url"
                ) from error
        await asyncio.sleep(0.2)
