"""Values that owners keep in Redis for a time, within budgets of bytes: of each owner, and of all together.

    {prefix}:value:{owner}:{name}   a value, until it expires
    {prefix}:index:{owner}          hash: name -> "expiry bytes", in Unix milliseconds by Redis' clock
    {prefix}:bytes                  hash: a minute of expiry -> bytes of all values that expire in that minute

A new value takes the place of its owner's oldest ones where it would exceed a budget. It never takes that of another owner's: without room
it is not kept. Each script runs alone in Redis, so that the figures hold for all writers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostep.cluster.shared_connection import Command

# What Redis takes for a value beside its bytes, about.
VALUE_BYTES = 512
# Scripts read an owner's whole index.
MAX_NAMES = 1024
# Of Redis' own bound (`maxmemory`): workers, keys and figures have the rest.
_SHARE = 0.5

# KEYS: index, bytes. ARGV: prefix of values, then what each script says.
_COMMON = """
local index, minutes, prefix = KEYS[1], KEYS[2], ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(number) return string.format('%.0f', number) end
local function count(expiry, bytes)
    local minute = text(math.ceil(expiry / 60000))
    local there = tonumber(redis.call('HGET', minutes, minute) or 0) + bytes
    if there > 0 then redis.call('HSET', minutes, minute, text(there)) else redis.call('HDEL', minutes, minute) end
end
local function entry(name, told)
    local expiry, bytes = string.match(told, '^(%d+) (%d+)$')
    return {name = name, expiry = tonumber(expiry), bytes = tonumber(bytes)}
end
local function outlive(key, ms)
    if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, text(ms)) end
end
local function drop(each)
    redis.call('HDEL', index, each.name)
    if each.expiry > now - 60000 then count(each.expiry, -each.bytes) end
    return redis.call('DEL', prefix .. each.name)
end
"""
# ARGV: ..., name, value, ms to live, bytes that it counts, most of the owner, most of all, most names.
_KEEP = (
    _COMMON
    + """
local name, life, bytes, most, most_in_all, most_names = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
    tonumber(ARGV[7]), tonumber(ARGV[8])
if bytes > most or bytes > most_in_all then return 0 end
local before = redis.call('HGET', index, name)
if before then drop(entry(name, before)) end
local kept, of_owner, flat = {}, 0, redis.call('HGETALL', index)
for i = 1, #flat, 2 do
    local each = entry(flat[i], flat[i + 1])
    if each.expiry <= now then drop(each) else
        kept[#kept + 1] = each
        of_owner = of_owner + each.bytes
    end
end
local in_all, ends = 0, redis.call('HGETALL', minutes)
for i = 1, #ends, 2 do
    if tonumber(ends[i]) * 60000 <= now then redis.call('HDEL', minutes, ends[i]) else in_all = in_all + ends[i + 1] end
end
table.sort(kept, function(one, other) return one.expiry < other.expiry end)
local num = 0
while of_owner + bytes > most or in_all + bytes > most_in_all or #kept - num >= most_names do
    num = num + 1
    if num > #kept then return 0 end
    of_owner = of_owner - kept[num].bytes
    in_all = in_all - kept[num].bytes
end
for i = 1, num do drop(kept[i]) end
redis.call('SET', prefix .. name, ARGV[3], 'PX', life)
redis.call('HSET', index, name, text(now + life) .. ' ' .. text(bytes))
count(now + life, bytes)
outlive(index, life)
outlive(minutes, life + 60000)
return 1
"""
)
# ARGV: ..., ms that they live on (0: as they would), bytes at most, names.
_RECALL = (
    _COMMON
    + """
local life, num_bytes, found = tonumber(ARGV[2]), 0, {}
for i = 4, #ARGV do num_bytes = num_bytes + redis.call('STRLEN', prefix .. ARGV[i]) end
if num_bytes > tonumber(ARGV[3]) then return num_bytes end
for i = 4, #ARGV do
    local told = redis.call('HGET', index, ARGV[i])
    found[i - 3] = told and redis.call('GET', prefix .. ARGV[i])
    if found[i - 3] and life > 0 then
        local each = entry(ARGV[i], told)
        count(each.expiry, -each.bytes)
        count(now + life, each.bytes)
        redis.call('HSET', index, each.name, text(now + life) .. ' ' .. text(each.bytes))
        redis.call('PEXPIRE', prefix .. each.name, life)
        outlive(index, life)
        outlive(minutes, life + 60000)
    end
end
return found
"""
)
# ARGV: ..., names; none: all of the owner's.
_FORGET = (
    _COMMON
    + """
local names, num = {unpack(ARGV, 2)}, 0
if #names == 0 then
    local flat = redis.call('HGETALL', index)
    for i = 1, #flat, 2 do names[#names + 1] = flat[i] end
end
for _, name in ipairs(names) do
    local told = redis.call('HGET', index, name)
    if told then num = num + drop(entry(name, told)) end
end
return num
"""
)


class Answering(Protocol):
    """See twostep.cluster.shared_connection.SharedConnection."""

    async def ask(self, commands: Sequence[Command]) -> Sequence[object]: ...


class TooLarge(Exception):
    """The values that were asked for come to `num_bytes` together."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class KeptValues:
    """All calls raise RedisError, OSError and TimeoutError, and leave deadlines to their callers."""

    def __init__(self, redis: Answering, prefix: str, *, ttl_s: float, total_bytes: int, owner_share: float = 1.0) -> None:
        """`owner_share`: of the budget of all, what one owner may have."""
        self._redis, self._prefix = redis, prefix
        self._ttl_ms = round(ttl_s * 1e3)
        self._owner_share, self._configured_bytes = owner_share, total_bytes
        self.total_bytes = total_bytes

    async def look(self) -> None:
        """Lowers the budget of all to what Redis has room for. Call it now and then: its configuration may change."""
        [reply] = await self._redis.ask([("INFO", "memory")])
        text = reply.decode("ascii", "replace") if isinstance(reply, bytes) else ""
        found = dict(line.partition(":")[::2] for line in text.splitlines()).get("maxmemory", "")
        most = int(found) if found.isdigit() else 0
        self.total_bytes = min(self._configured_bytes, int(most * _SHARE)) if most else self._configured_bytes

    async def keep(self, owner: str, name: str, value: bytes) -> bool:
        """Returns whether there was room."""
        of_owner = int(self.total_bytes * self._owner_share)
        bounds = (self._ttl_ms, len(value) + VALUE_BYTES, of_owner, self.total_bytes, MAX_NAMES)
        return bool(await self._run(_KEEP, owner, name, value, *map(str, bounds)))

    async def recall(self, owner: str, names: Sequence[str], *, most_bytes: int, renew: bool) -> list[bytes | None]:
        """Returns the values of the names, None for those that are not there. `renew`: they live as long as new ones. Raises TooLarge for
        more than `most_bytes` together."""
        found = await self._run(_RECALL, owner, str(self._ttl_ms if renew else 0), str(most_bytes), *names)
        if not isinstance(found, list):
            assert isinstance(found, int), found
            raise TooLarge(found)
        return [value if isinstance(value, bytes) else None for value in found]

    async def forget(self, owner: str, names: Sequence[str] = ()) -> int:
        """Removes values, all of the owner's where no name is given. Returns how many there were."""
        num = await self._run(_FORGET, owner, *names)
        assert isinstance(num, int), num
        return num

    async def _run(self, script: str, owner: str, *words: str | bytes) -> object:
        keys = (f"{self._prefix}:index:{owner}", f"{self._prefix}:bytes", f"{self._prefix}:value:{owner}:")
        [reply] = await self._redis.ask([("EVAL", script, "2", *keys, *words)])
        if isinstance(reply, Exception):
            raise reply
        return reply
