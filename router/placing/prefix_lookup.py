"""From a prompt to what each worker holds of it: unit hashes under the workers' keys, asked of the index."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from router.request.job import Job
from router.workers.pool import WorkerPool
from router.workers.prefix_index import NO_HINTS, CachedPrefix, PrefixIndex, WorkerLife
from twostep.cluster.records import LayoutRecord
from twostep.prefix import derive_key, prefix_hashes

# Hashing so many tokens takes about a millisecond: more is done in a thread.
_MAX_INLINE_TOKENS = 16384


class PrefixLookup:
    def __init__(self, index: PrefixIndex, secret: bytes, hash_unit: int) -> None:
        self._index = index
        self._secret = secret
        self._unit = hash_unit

    async def cached_tokens(self, job: Job, pool: WorkerPool) -> Mapping[WorkerLife, CachedPrefix]:
        """Tokens of the job's prompt that workers hold; empty without an answer in time."""
        # The last token is always computed: its logits are what the first new token is sampled from.
        usable = len(job.prompt) - 1
        if usable < self._unit:
            return NO_HINTS
        records = [record for record in pool.records() if record.ready and not record.draining]
        keys = {record.layout: self._key(job, record.layout) for record in records}
        hashes: dict[bytes, Sequence[bytes]] = {}
        for key in set(keys.values()):
            if usable <= _MAX_INLINE_TOKENS:
                hashes[key] = prefix_hashes(key, job.prompt[:usable], self._unit)
            else:
                hashes[key] = await asyncio.to_thread(prefix_hashes, key, job.prompt[:usable], self._unit)
        tiered = {WorkerLife.of(r) for r in records if r.num_host_blocks}
        return await self._index.lookup({WorkerLife.of(r): hashes[keys[r.layout]] for r in records}, tiered)

    def _key(self, job: Job, layout: LayoutRecord) -> bytes:
        return derive_key(
            self._secret,
            tenant=job.tenant,
            salt=job.cache_salt,
            model_fingerprint=layout.model_fingerprint,
            dtype=layout.dtype,
            quantization=layout.quantization,
        )
