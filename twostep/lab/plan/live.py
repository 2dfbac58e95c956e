"""Records of the workers that are registered in Redis now, with the curves they publish."""

from __future__ import annotations

import redis

from twostep.cluster.records import WORKERS_KEY, WorkerRecord, worker_key
from twostep.errors import SetupError

_TIMEOUT_S = 5.0


def registered_workers(url: str) -> list[WorkerRecord]:
    """Raises SetupError if Redis does not answer or no worker is there; InvalidRequest for records of another version."""
    try:
        client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        with client:
            members = client.smembers(WORKERS_KEY)
            names = sorted(member.decode() if isinstance(member, bytes) else member for member in members)
            raw = client.mget([worker_key(name) for name in names]) if names else []
    except (redis.RedisError, ValueError, OSError) as error:
        raise SetupError(f"no Redis answers at {url}: {error}; give the URL that the workers have") from error
    records = [WorkerRecord.from_json(text) for text in raw if text is not None]
    if not records:
        raise SetupError(f"no worker is registered at {url}; start some, or give --preset or --curve")
    return records
