"""Publishes one lease's chunks as its blocks become final, by the transport that its first reader has chosen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_transfer.chunking import ChunkRange
from kv_transfer.observer import Direction, Transfer, TransferObserver, reason_of
from kv_transfer.transport import ChunkInfo
from kv_transfer.wire_encoding import RAW
from prefill_worker.encoder import Encoder
from prefill_worker.job import Job
from twostep.engine.engine import Engine
from twostep.errors import InternalError, NotFound, TwostepError

log = logging.getLogger(__name__)

# Chunks of one sequence on their way out at once: puts from several threads overlap.
_MAX_PUBLISHING = 6


class Publisher:
    def __init__(
        self,
        engine: Engine,
        encoder: Encoder,
        on_chunk: Callable[[Job, ChunkInfo], None],
        observer: TransferObserver,
        *,
        lease_ttl_s: float,
    ) -> None:
        """`on_chunk` is called with each chunk that is published, in the order in which they become so."""
        self._engine = engine
        self._encoder = encoder
        self._on_chunk = on_chunk
        self._observer = observer
        self._lease_ttl_s = lease_ttl_s

    async def run(self, job: Job) -> None:
        """Returns when all is published. Raises TwostepErrors only, but for being cancelled: nothing reads the blocks then any more."""
        assert job.plan is not None
        job.publisher_started_at = time.monotonic()
        try:
            await self._take_room(job)
            job.room_s = time.monotonic() - job.publisher_started_at
            room = asyncio.Semaphore(_MAX_PUBLISHING)
            async with asyncio.TaskGroup() as chunks:
                while True:
                    # Asked for again each time: the engine may exchange a block until it is final.
                    try:
                        blocks = self._engine.block_ids(job.seq_id)
                    except NotFound:
                        # It failed, and the engine is about to tell why: that ends the lease, and cancels this.
                        await job.wait_change()
                        continue
                    for chunk in job.plan.take(job.final_blocks, step_blocks=job.step_blocks, step_layers=job.step_layers):
                        chunks.create_task(self._publish(job, chunk, blocks, room))
                    if job.plan.done and job.first_token is not None:
                        break
                    await job.wait_change()
        except (TwostepError, ExceptionGroup) as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            log.warning("publishing %s failed: %s", job.seq_id, first, exc_info=None if isinstance(first, TwostepError) else first)
            failure = first if isinstance(first, TwostepError) else InternalError(f"publishing failed: {first!r}")
            self._tell(job, reason_of(failure))
            raise failure from error
        except asyncio.CancelledError:
            self._tell(job, "cancelled")
            raise
        self._tell(job)

    async def _take_room(self, job: Job) -> None:
        """Of the transport's budget, for all of the lease. Raises ResourceExhausted."""
        assert job.outlet is not None
        num_bytes = job.wanted_blocks * self._engine.runner.kv_shape.block_bytes
        # What the decode worker holds whole waits for nobody.
        if num_bytes:
            await job.outlet.take(num_bytes, deadline=self._deadline(job))
            job.promised_bytes = num_bytes

    def _deadline(self, job: Job) -> float:
        return min(job.lease.hard_deadline, time.monotonic() + self._lease_ttl_s)

    async def _publish(self, job: Job, chunk: ChunkRange, blocks: Sequence[int], room: asyncio.Semaphore) -> None:
        assert job.outlet is not None
        transport = job.outlet.transport
        block_ids = blocks[chunk.first_block : chunk.stop_block]
        # The lease decides; the transport's own time only catches what a lost lease would leave.
        ttl_s = 2 * self._lease_ttl_s
        async with room:
            deadline = self._deadline(job)
            with job.copying.running():
                if job.wire != RAW:
                    info = await self._encoder.publish(transport, job.lease_id, chunk, block_ids, ttl_s=ttl_s, deadline=deadline)
                else:
                    info = await transport.publish(
                        job.lease_id, chunk.index, chunk.first_block, block_ids, layers=chunk.layers, ttl_s=ttl_s, deadline=deadline
                    )
        if not transport.copies_out:
            # What the reader will say that it read. The lease's sequence owns the blocks: they cannot change now.
            info = replace(info, source_blocks=tuple(block_ids), generations=tuple(self._engine.generations(block_ids)))
        self._on_chunk(job, info)

    def _tell(self, job: Job, failure: str = "") -> None:
        assert job.outlet is not None
        self._observer.transfer(
            Transfer(
                transport=job.outlet.name,
                direction=Direction.PUBLISH,
                num_bytes=job.num_bytes,
                num_chunks=len(job.published),
                num_blocks=job.published_blocks,
                queue_s=job.room_s,
                copy_s=job.copying.summed_s,
                busy_s=job.copying.busy_s,
                total_s=time.monotonic() - job.publisher_started_at,
                exposed_s=job.publish_s,
                failure=failure,
                request_id=job.seq_id,
            )
        )
