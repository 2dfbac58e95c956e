"""One attempt on the prefill worker: its sequence, its lease and what of it is published."""

from __future__ import annotations

import asyncio
import time
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from kv_transfer.chunking import ChunkPlan
from kv_transfer.copy_clock import CopyClock
from kv_transfer.lease import Lease
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ChunkInfo
from kv_transfer.wire_encoding import RAW
from prefill_worker.outlet import Outlet
from twostep.engine.types import EngineRequest, LayerProgress, PrefillProgress, TokenOutput
from twostep.errors import TwostepError


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """State that the engine's steps and the publisher change, and Run and Watch wait on (all on one event loop).

    first_block .. num_blocks   the sequence's blocks that are published; those before are on the decode worker already
    final_blocks                blocks, from the sequence's start, whose KV does not change any more
    step_blocks, step_layers    the same of the first layers, while a step is under way
    published                   chunks in the order in which they became ready
    """

    request: EngineRequest
    ticket: Ticket
    lease: Lease
    block_size: int
    first_block: int
    num_blocks: int
    submitted_at: float = field(default_factory=time.monotonic)
    final_blocks: int = 0
    step_blocks: int = 0
    step_layers: int = 0
    num_cached_tokens: int = 0
    first_token: TokenOutput | None = None
    published: list[ChunkInfo] = field(default_factory=list)
    publisher: asyncio.Task[None] | None = None
    # Chosen by the first Watch; nothing is published before.
    outlet: Outlet | None = None
    plan: ChunkPlan | None = None
    # How its blocks travel, chosen with it.
    wire: str = RAW
    # Of its budget, set aside for all that is to be published.
    promised_bytes: int = 0
    # Why it failed, where that is not the router's own doing.
    error: TwostepError | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    publish_s: float = 0.0
    # Waiting for room in the budget; copying; and from the first final block on.
    room_s: float = 0.0
    copying: CopyClock = field(default_factory=CopyClock)
    publisher_started_at: float = 0.0
    # Of the call that brought it: what is done for it elsewhere logs as its own.
    context: Context = field(default_factory=copy_context)
    _started_at: float = 0.0
    _first_token_at: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def seq_id(self) -> str:
        return self.request.seq_id

    @property
    def lease_id(self) -> str:
        return self.ticket.lease_id

    @property
    def started(self) -> bool:
        """A step has computed some of it, or is about to."""
        return self._started_at > 0 or self.step_layers > 0

    @property
    def wanted_blocks(self) -> int:
        return self.num_blocks - self.first_block

    @property
    def published_blocks(self) -> int:
        return sum(chunk.num_blocks for chunk in self.published if not chunk.first_layer)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.published)

    def on_progress(self, progress: PrefillProgress, began_at: float) -> None:
        """`began_at`: when the step began that computed it."""
        if progress.first_scheduled or not self._started_at:
            self._started_at = max(self.submitted_at, began_at)
            self.queue_s = self._started_at - self.submitted_at
            self.num_cached_tokens = progress.num_cached_tokens
        self.final_blocks = max(self.final_blocks, progress.num_computed_tokens // self.block_size)
        self.changed()

    def on_layers(self, progress: LayerProgress) -> None:
        whole = progress.num_computed_tokens >= len(self.request.token_ids)
        num_blocks = self.num_blocks if whole else progress.num_computed_tokens // self.block_size
        # What is told late, of the step before, is known.
        if (num_blocks, progress.num_layers) > (self.step_blocks, self.step_layers):
            self.step_blocks, self.step_layers = num_blocks, progress.num_layers
            self.changed()

    def on_token(self, token: TokenOutput) -> None:
        self.first_token = token
        self.final_blocks = self.num_blocks
        self._first_token_at = time.monotonic()
        self.prefill_s = self._first_token_at - (self._started_at or self.submitted_at)
        self.changed()

    def on_chunk(self, chunk: ChunkInfo) -> None:
        self.published.append(chunk)
        if self._first_token_at:
            self.publish_s = time.monotonic() - self._first_token_at
        self.changed()

    def changed(self) -> None:
        """Wakes everybody in wait_change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float | None = None) -> None:
        """Until something changes, or `timeout_s` passes. Look first, then wait: between the two there must be no await."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
