"""Attacks through Redis: somebody who can write there, without the deployment's secret; and a Redis that takes no more writes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from attack import TEXT, Attack, Target, post, session_of

from router.access.sources import KEYS, VERSION
from twostep.cluster.connection import connect
from twostep.cluster.records import WORKERS_KEY, WorkerRecord, claim_key, prefix_key, worker_key
from twostep.cluster.scaling import DECISION_KEY
from twostep.keys.api_keys import make_key

_POLLS_S = 2.0
_SERVED_S = 30.0


@asynccontextmanager
async def _redis(target: Target) -> AsyncIterator[Any]:
    client = connect(target.redis_url)
    try:
        yield client
    finally:
        await client.aclose()


async def _ask(target: Target, key: str) -> int:
    """The status of a short completion."""
    async with asyncio.timeout(_SERVED_S), session_of(target, key) as http:
        return (await post(http, TEXT, {"model": target.model, "prompt": "one two three", "max_tokens": 2}))[0]


async def _is_served(target: Target) -> None:
    status = await _ask(target, target.api_key)
    assert status == 200, f"an ordinary request got {status}"


async def _records(client: Any) -> dict[str, bytes]:
    names = sorted(name.decode() for name in await client.smembers(WORKERS_KEY))
    return {name: text for name in names if (text := await client.get(worker_key(name))) is not None}


async def _copied_records(target: Target) -> str:
    """Records of the workers, with the attacker's own address and an epoch that none is above."""
    called = 0

    async def caught(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal called
        called += 1
        writer.close()

    trap = await asyncio.start_server(caught, "127.0.0.1", 0)
    address = f"127.0.0.1:{trap.sockets[0].getsockname()[1]}"
    async with _redis(target) as client:
        records = await _records(client)
        made = []
        for name, text in records.items():
            mac = json.loads(text)["mac"]
            record = dataclasses.replace(WorkerRecord.from_json(text), address=address)
            for epoch in (record.epoch, record.epoch + 1, 1 << 62):
                for twin in (name, f"{name}-twin-{epoch}"):
                    forged = json.dumps({**dataclasses.asdict(dataclasses.replace(record, worker_id=twin, epoch=epoch)), "mac": mac})
                    await client.set(worker_key(twin), forged, px=4000)
                    await client.sadd(WORKERS_KEY, twin)
                    made += [twin] if twin != name else []
        for _ in range(3):
            await asyncio.sleep(_POLLS_S / 3)
            await _is_served(target)
        if made:
            await client.delete(*map(worker_key, made))
            await client.srem(WORKERS_KEY, *made)
    trap.close()
    assert called == 0, f"the attacker's address was called {called} times"
    return f"{len(records)} workers copied: nobody called the copies"


async def _own_key(target: Target) -> str:
    """An API key that was only written to Redis."""
    told, key = make_key()
    async with _redis(target) as client:
        before = await client.get(VERSION)
        await client.hset(KEYS, key.id, key.to_json())
        await client.set(VERSION, "attacked")
        await asyncio.sleep(_POLLS_S)
        status = await _ask(target, told)
        await client.hdel(KEYS, key.id)
        await (client.delete(VERSION) if before is None else client.set(VERSION, before))
    assert status == 401, f"a key of the attacker's own was answered {status}"
    return "401"


async def _junk(target: Target) -> str:
    """Names, records, sets and decisions of absurd sizes and kinds."""
    async with _redis(target) as client:
        records = await _records(client)
        await client.eval("for i = 1, 100000 do redis.call('SADD', KEYS[1], 'junk' .. i) end", 1, WORKERS_KEY)
        await client.set(worker_key("huge"), b"{" * (40 << 20))
        await client.sadd(WORKERS_KEY, "huge", "list", b"n" * (1 << 20))
        await client.lpush(worker_key("list"), "x")
        await client.set(DECISION_KEY, b"[" * (8 << 20), ex=60)
        lives = [prefix_key(name, WorkerRecord.from_json(text).epoch) for name, text in records.items()]
        await client.delete(*lives)
        for key in lives:
            await client.set(key, "no set", px=2000)
        for _ in range(4):
            await _is_served(target)
            await asyncio.sleep(_POLLS_S / 4)
        await client.delete(worker_key("huge"), worker_key("list"), DECISION_KEY)
        await client.srem(WORKERS_KEY, "huge", "list", b"n" * (1 << 20))
    return "served"


async def _claims(target: Target) -> str:
    """Claims of the workers' ids, in another's name: their heartbeats stop, and they serve on."""
    async with _redis(target) as client:
        names = list(await _records(client))
        for name in names:
            await client.set(claim_key(name), "attacker 1 127.0.0.1:1", px=15_000)
        # Longer than records last, and than a router keeps a worker that says nothing.
        for _ in range(8):
            await asyncio.sleep(1.0)
            await _is_served(target)
        await client.delete(*map(claim_key, names))
    return f"{len(names)} ids taken: served"


async def _memory_full(target: Target) -> str:
    """Redis answers reads and refuses writes."""
    async with _redis(target) as client:
        before = (await client.config_get("maxmemory"))["maxmemory"]
        await client.config_set("maxmemory", "1")
        try:
            for _ in range(10):
                await asyncio.sleep(1.0)
                await _is_served(target)
        finally:
            await client.config_set("maxmemory", before)
        await asyncio.sleep(_POLLS_S)
        await _is_served(target)
    return "served"


ATTACKS = (
    Attack("redis: copied records with another address", _copied_records, short=True),
    Attack("redis: an API key of one's own", _own_key, short=True),
    Attack("redis: absurd names, records, sets", _junk),
    Attack("redis: others' ids claimed", _claims),
    Attack("redis: memory full", _memory_full),
)
