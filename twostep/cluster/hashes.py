"""Hashes in Redis that several processes write, read in part where somebody has filled them beyond all reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from redis.asyncio.client import Pipeline

# Fields beyond, and values longer than this, are not read: a random part of them where there are more.
MAX_FIELDS = 16384
MAX_VALUE_BYTES = 4096

# KEYS: hashes. ARGV: fields at most, bytes of a field's name or value.
_READ = """
local found, longest = {}, tonumber(ARGV[2])
for i, key in ipairs(KEYS) do
    local size = redis.pcall('HLEN', key)
    local all = {}
    if type(size) == 'number' and size > 0 then
        if size <= tonumber(ARGV[1]) then all = redis.call('HGETALL', key)
        else all = redis.call('HRANDFIELD', key, ARGV[1], 'WITHVALUES') end
    end
    local kept = {}
    for j = 1, #all, 2 do
        if #all[j] <= longest and #all[j + 1] <= longest then
            kept[#kept + 1] = all[j]
            kept[#kept + 1] = all[j + 1]
        end
    end
    found[i] = kept
end
return found
"""


def read_hashes(pipeline: Pipeline, keys: Sequence[str], *, max_fields: int = MAX_FIELDS) -> None:
    """Adds one command, whose reply hashes_in takes apart. What is no hash is an empty one."""
    pipeline.eval(_READ, len(keys), *keys, str(max_fields), str(MAX_VALUE_BYTES))


def hashes_in(reply: Sequence[Sequence[bytes]]) -> Iterator[dict[bytes, bytes]]:
    """Returns the hashes in the order of their keys."""
    for flat in reply:
        yield dict(zip(flat[::2], flat[1::2], strict=True))
