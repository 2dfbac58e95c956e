"""Reads the workers' records from Redis in one bounded round trip: filling it with names, or making one record as large as Redis allows,
costs a reader a few megabytes at most. Nothing is written on the way: this works on a server that takes no writes.

Names without a record are taken out of the set apart (tidy), on the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis

from twostep.cluster.records import MAX_RECORD_BYTES, MAX_WORKERS, WORKER_PREFIX, WORKERS_KEY

# All records of workers that the reader did not know before.
_MAX_NEW_BYTES = 4 << 20
_MAX_NAME_BYTES = 256

# KEYS: workers. ARGV: prefix of their keys, names at most, bytes of a record, of a name, of all new records; then the names known before.
_LOOK = """
local longest, room = tonumber(ARGV[3]), tonumber(ARGV[5])
local function read(name)
    local size = redis.pcall('STRLEN', ARGV[1] .. name)
    if type(size) ~= 'number' or size > longest then return '' end
    if size == 0 then return false end
    return redis.call('GET', ARGV[1] .. name)
end
local known, records = {}, {}
for i = 6, #ARGV do
    known[ARGV[i]] = true
    records[i - 5] = read(ARGV[i])
end
local listed = redis.pcall('SRANDMEMBER', KEYS[1], ARGV[2])
local names, more, empty = {}, {}, 0
if type(listed) == 'table' and not listed.err then
    for _, name in ipairs(listed) do
        if not known[name] then
            local record = #name <= tonumber(ARGV[4]) and read(name)
            if record then
                room = room - #record
                if room < 0 then break end
                names[#names + 1] = name
                more[#more + 1] = record
            else
                empty = empty + 1
            end
        end
    end
end
return {records, names, more, empty}
"""
# KEYS: workers. ARGV: prefix of their keys, names at most.
_TIDY = """
local listed = redis.call('SRANDMEMBER', KEYS[1], ARGV[2])
for _, name in ipairs(listed) do
    if redis.call('EXISTS', ARGV[1] .. name) == 0 then redis.call('SREM', KEYS[1], name) end
end
return 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerListing:
    """`records` as they stand in Redis, by names: of those known before and of others. A record that is too large, or no text, is empty.
    `num_empty`: names seen without a record."""

    records: dict[str, bytes]
    num_empty: int


async def look(redis: Redis, known: Sequence[str]) -> WorkerListing:
    """Reads all of `known`, and of the others as many as there is room for: a random part, where there are more. Raises RedisError,
    OSError."""
    bounds = (str(MAX_WORKERS), str(MAX_RECORD_BYTES), str(_MAX_NAME_BYTES), str(_MAX_NEW_BYTES))
    asked = redis.eval(_LOOK, 1, WORKERS_KEY, WORKER_PREFIX, *bounds, *known[:MAX_WORKERS])
    old, names, new, num_empty = await cast(Awaitable[tuple[list[bytes | None], list[bytes], list[bytes], int]], asked)
    found = {name: record for name, record in zip(known, old, strict=False) if record is not None}
    found |= {name.decode(errors="replace"): record for name, record in zip(names, new, strict=True)}
    return WorkerListing(records=found, num_empty=num_empty)


async def tidy(redis: Redis) -> None:
    """Takes names without a record out of the set, a part of them. One that lives is named again by its next heartbeat. Raises RedisError,
    OSError."""
    await cast(Awaitable[int], redis.eval(_TIDY, 1, WORKERS_KEY, WORKER_PREFIX, str(MAX_WORKERS)))
