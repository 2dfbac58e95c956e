"""Publishes a hand-over's chunks as its blocks become final, by the transport that its first reader has chosen.

Each transport has a budget, of which a hand-over reserves all that it needs before its first chunk is published, first come, first served,
and gives it back once it holds nothing any more: hand-overs that each held a part and waited for the rest would wait for each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field

from kv_transfer.chunking import ChunkPlan, ChunkRange
from kv_transfer.lease import Lease
from kv_transfer.pool_side import PoolSide
from kv_transfer.telemetry import CopyClock, Direction, TransferRecord, TransferTelemetry, reason_of
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ChunkInfo, TransportEnd
from kv_transfer.transports import TransportTable
from kv_transfer.waiting import FifoGate
from kv_transfer.wire_encoding import RAW
from twostep.block_order import BlockOrder
from twostep.engine.types import EngineRequest, LayerProgress, PrefillProgress, PromptScores, TokenOutput
from twostep.errors import Incompatible, InternalError, InvalidRequest, NotFound, TwostepError, Unavailable

log = logging.getLogger(__name__)

# Chunks of one sequence on their way out at once: puts from several threads overlap.
_MAX_PUBLISHING = 6


@dataclass(slots=True, eq=False, kw_only=True)
class HandOver:
    """One attempt: its sequence, its lease and what of it is published. The engine's steps and the publisher change
    it, Run and Watch wait for that (all on one event loop).

    order                       in which its blocks are counted
    first_block .. num_blocks   the sequence's blocks that are published; those before are on the decode worker already: as the first
                                Watch says, before that as the router thinks
    final_blocks                blocks, from the sequence's start, whose KV does not change any more
    step_blocks, step_layers    the same of the first layers, while a step is under way
    published                   chunks in the order in which they became ready
    scores                      log probabilities of the prompt that Run has not sent yet
    """

    request: EngineRequest
    lease: Lease
    order: BlockOrder
    first_block: int
    num_blocks: int
    submitted_at: float = field(default_factory=time.monotonic)
    final_blocks: int = 0
    step_blocks: int = 0
    step_layers: int = 0
    num_cached_tokens: int = 0
    first_token: TokenOutput | None = None
    published: list[ChunkInfo] = field(default_factory=list)
    scores: deque[PromptScores] = field(default_factory=deque)
    publisher: asyncio.Task[None] | None = None
    # Chosen by the first Watch, with how its blocks travel; nothing is published before. The plan before is for what it will likely choose.
    transport: TransportEnd | None = None
    plan: ChunkPlan
    wire: str = RAW
    # Set aside in the transport's budget for all that is to be published.
    reserved_bytes: int = 0
    # Why it failed, where that is not the router's own doing.
    error: TwostepError | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    publish_s: float = 0.0
    # Waiting for the budget; copying; and from the first final block on.
    budget_s: float = 0.0
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
    def computed(self) -> bool:
        return self.first_token is not None

    @property
    def ticket(self) -> Ticket:
        return self.lease.ticket

    @property
    def lease_id(self) -> str:
        return self.lease.lease_id

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
        """`began_at` is when the step began that computed it."""
        if progress.first_scheduled or not self._started_at:
            self._started_at = max(self.submitted_at, began_at)
            self.queue_s = self._started_at - self.submitted_at
            self.num_cached_tokens = progress.num_cached_tokens
        self.final_blocks = max(self.final_blocks, self._num_full(progress.num_computed_tokens))
        self.changed()

    def on_layers(self, progress: LayerProgress) -> None:
        whole = progress.num_computed_tokens >= len(self.request.token_ids)
        num_blocks = self.num_blocks if whole else self._num_full(progress.num_computed_tokens)
        # Progress of the step before that comes late is known.
        if (num_blocks, progress.num_layers) > (self.step_blocks, self.step_layers):
            self.step_blocks, self.step_layers = num_blocks, progress.num_layers
            self.changed()

    def _num_full(self, num_tokens: int) -> int:
        """Returns how many blocks so many tokens fill."""
        return self.order.before(num_tokens // self.order.block_size)

    def on_scores(self, scores: PromptScores) -> None:
        self.scores.append(scores)
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
        """Wakes all that wait in wait_change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float | None = None) -> None:
        """Waits until something changes, or `timeout_s` passes. Look first, then wait: between the two there must be no await."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass


@dataclass(slots=True, eq=False)
class _Budget:
    """One transport's."""

    waiting: FifoGate
    reserved_bytes: int = 0


class Publisher:
    """Publishes the hand-overs of one worker. Belongs to one event loop."""

    def __init__(
        self,
        pool: PoolSide,
        transports: TransportTable[TransportEnd],
        on_chunk: Callable[[HandOver, ChunkInfo], None],
        telemetry: TransferTelemetry,
        *,
        block_bytes: int,
        wire: str,
        lease_ttl_s: float,
    ) -> None:
        """`on_chunk` is called with each chunk that is published, in the order in which they become so. `wire`: the form in which blocks
        travel to readers that take it, where they are copied out."""
        self._pool = pool
        self._transports = transports
        self._budgets: dict[str, _Budget] = {}
        self._block_bytes = block_bytes
        self._wire = wire
        self._on_chunk = on_chunk
        self._telemetry = telemetry
        self._lease_ttl_s = lease_ttl_s

    # ---- transports and their budgets -----------------------------------------------------------------------------------------

    def check_size(self, num_bytes: int) -> None:
        """Raises Unavailable (no transport is ready) and InvalidRequest (none could ever hold so much at once)."""
        ready = self._transports.ready
        if not ready:
            raise Unavailable(
                f"no KV transport is ready on this worker (it has {', '.join(self._transports.names)}); they come back by themselves, "
                "try another worker"
            )
        if not any(_fits(transport, num_bytes) for transport in ready):
            most = max(transport.max_lease_bytes for transport in ready)
            raise InvalidRequest(
                f"the prompt's KV cache takes {num_bytes} bytes and this worker hands over {most} at most; shorten the prompt, "
                "or raise --kv-budget-bytes (and the object store)"
            )

    def choose(self, offered: Sequence[str], wires: Sequence[str], num_bytes: int) -> tuple[TransportEnd, str]:
        """Returns the reader's first transport that can be used here, and the form in which blocks travel by it to a reader that takes
        `wires` besides raw. `offered` empty: any that copies out, which asks nothing of the reader but to fetch. Raises Incompatible
        (nothing in common, ever) and Unavailable."""
        names = offered or [transport.name for transport in self._transports if transport.copies_out]
        known = [transport for name in names if (transport := self._transports.get(name)) is not None]
        for transport in known:
            if transport.ready and _fits(transport, num_bytes):
                return transport, self._wire if self._wire in wires and transport.copies_out else RAW
        if not known:
            raise Incompatible(
                f"the decode worker fetches by {', '.join(names) or 'nothing'}, this worker publishes by "
                f"{', '.join(self._transports.names)}; align --kv-transfer"
            )
        raise Unavailable(
            f"of the KV transports in common ({', '.join(transport.name for transport in known)}) none is ready or large enough on the "
            "prefill worker; they come back by themselves"
        )

    async def _reserve(self, hand_over: HandOver) -> None:
        """Takes the whole hand-over's part of the transport's budget. Raises ResourceExhausted at its deadline."""
        transport = hand_over.transport
        num_bytes = hand_over.wanted_blocks * self._block_bytes
        assert transport is not None
        if not num_bytes:
            # The decode worker holds all of it.
            return
        budget = self._budgets.setdefault(transport.name, _Budget(FifoGate(f"published KV of the {transport.name} transport")))

        def attempt() -> bool | None:
            most = transport.max_lease_bytes
            if most and budget.reserved_bytes + num_bytes > most:
                return None
            budget.reserved_bytes += num_bytes
            return True

        await budget.waiting.take(attempt, deadline=self._deadline(hand_over))
        hand_over.reserved_bytes = num_bytes

    def give_back(self, hand_over: HandOver) -> None:
        """Gives back what it had reserved: it holds nothing any more."""
        if hand_over.transport is not None and (budget := self._budgets.get(hand_over.transport.name)) is not None:
            budget.reserved_bytes -= hand_over.reserved_bytes
            hand_over.reserved_bytes = 0
            budget.waiting.pump()

    # ---- publishing -----------------------------------------------------------------------------------------------------------

    async def run(self, hand_over: HandOver) -> None:
        """Returns when all is published. Raises TwostepErrors only, but for being cancelled: nothing reads the blocks then any more."""
        hand_over.publisher_started_at = time.monotonic()
        try:
            await self._reserve(hand_over)
            hand_over.budget_s = time.monotonic() - hand_over.publisher_started_at
            at_once = asyncio.Semaphore(_MAX_PUBLISHING)
            async with asyncio.TaskGroup() as chunks:
                while True:
                    for chunk in hand_over.plan.take(
                        hand_over.final_blocks, step_blocks=hand_over.step_blocks, step_layers=hand_over.step_layers
                    ):
                        chunks.create_task(self._publish(hand_over, chunk, at_once))
                    if hand_over.plan.done and hand_over.first_token is not None:
                        break
                    await hand_over.wait_change()
        except (TwostepError, ExceptionGroup) as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            log.warning("publishing %s failed: %s", hand_over.seq_id, first, exc_info=None if isinstance(first, TwostepError) else first)
            failure = first if isinstance(first, TwostepError) else InternalError(f"publishing failed: {first!r}")
            self._report(hand_over, reason_of(failure))
            raise failure from error
        except asyncio.CancelledError:
            self._report(hand_over, "cancelled")
            raise
        self._report(hand_over)

    def _deadline(self, hand_over: HandOver) -> float:
        return min(hand_over.lease.hard_deadline, time.monotonic() + self._lease_ttl_s)

    async def _publish(self, hand_over: HandOver, chunk: ChunkRange, at_once: asyncio.Semaphore) -> None:
        transport = hand_over.transport
        assert transport is not None
        # The lease decides; the transport's own time only catches what a lost lease would leave.
        ttl_s = 2 * self._lease_ttl_s
        async with at_once:
            try:
                with hand_over.copying.running():
                    info = await self._pool.publish(
                        transport.name,
                        hand_over.lease_id,
                        hand_over.seq_id,
                        chunk,
                        wire=hand_over.wire,
                        ttl_s=ttl_s,
                        deadline=self._deadline(hand_over),
                    )
            except NotFound:
                # It failed, and the engine is about to say why: that ends the lease, and cancels this.
                await asyncio.Event().wait()
                raise
        self._on_chunk(hand_over, info)

    def _report(self, hand_over: HandOver, failure: str = "") -> None:
        assert hand_over.transport is not None
        self._telemetry.transfer(
            TransferRecord(
                transport=hand_over.transport.name,
                direction=Direction.PUBLISH,
                num_bytes=hand_over.num_bytes,
                num_chunks=len(hand_over.published),
                num_blocks=hand_over.published_blocks,
                queue_s=hand_over.budget_s,
                copy_s=hand_over.copying.summed_s,
                busy_s=hand_over.copying.busy_s,
                total_s=time.monotonic() - hand_over.publisher_started_at,
                exposed_s=hand_over.publish_s,
                failure=failure,
                request_id=hand_over.seq_id,
            )
        )


def _fits(transport: TransportEnd, num_bytes: int) -> bool:
    """Returns whether so much could ever be published under one lease."""
    return not transport.max_lease_bytes or num_bytes <= transport.max_lease_bytes
