"""The `ray` transport, worker's side: keeps a KV agent alive, and moves chunks between the pool and the ring they share.

    publish   1 room in the budget   2 slot of the ring   3 pool -> slot, checksum (thread)   4 agent: slot -> object store
    fetch     1 slot of the ring     2 agent: source's object store -> this node's, or the slot     3 from there -> pool, checksum (thread)

Ray may be away at any time: `ready` turns False, calls raise Unavailable, and a new agent is started once Ray answers again. An agent that
does not answer in time is waited for no longer either, but kept for a while: it may only be slow (kv_transfer.ray.agent_session).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np

from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.ray.agent_session import AgentConfig, AgentSession, RingSlot, reach
from kv_transfer.ray.ring import Pin, default_ring_bytes, default_ring_dir
from kv_transfer.transport import PROBE_BYTES, BlockStore, Bytes, ChunkInfo, ProbeTiming, TransportStats, probe_pattern
from kv_transfer.waiting import finish
from twostep.errors import ResourceExhausted, SetupError, TwostepError, Unavailable

log = logging.getLogger(__name__)

_NUM_THREADS = 8
_MAX_SOCKET_PATH = 107
_CONNECT_S = 1.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 4.0
_RETRY_PUT_S = 0.02
_SWEEP_S = 0.2
# A fetch that has less time left once it has a slot, or less than half of what it began with, is not tried: that it would then be late
# says nothing about the source.
_LEAST_FETCH_S = 5.0


class RayTransport(CopyingTransport):
    """See kv_transfer.transport for the contract.

    `ray_address` is host:port of the GCS; token authentication comes from the environment (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).
    `pin` is the Runner's `pin_host`: the ring is pinned where that helps.
    `ring_bytes` 0: see default_ring_bytes, with `on_gpu` for a store on a GPU.
    `run_dir` is private to this worker and short; `ring_dir` (default /dev/shm) and `run_dir` must be visible to Ray's worker processes.
    `budget_bytes` bounds what this worker keeps published; 0 is 70 % of the node's object store: divide it where workers share a node.
    `launch` starts an agent under a name of its own, the config's and a number.
    """

    name = "ray"

    def __init__(
        self,
        store: BlockStore,
        block_bytes: int,
        *,
        worker_id: str,
        epoch: int,
        ray_address: str,
        run_dir: Path,
        num_layers: int = 1,
        ring_bytes: int = 0,
        budget_bytes: int = 0,
        ring_dir: Path | None = None,
        pin: Pin | None = None,
        on_gpu: bool = False,
        start_timeout_s: float = 60.0,
        launch: Callable[[AgentConfig, str, int], Awaitable[AgentSession]] = AgentSession.launch,
        connect: Callable[[str, float], Awaitable[None]] = reach,
    ) -> None:
        ring_dir = ring_dir or default_ring_dir(run_dir)
        ring_bytes = ring_bytes or default_ring_bytes(ring_dir, on_gpu=on_gpu)
        if block_bytes > ring_bytes:
            raise SetupError(
                f"a block of {block_bytes} bytes does not fit a ring of {ring_bytes}; make --kv-ring-bytes larger or --block-size smaller"
            )
        if len(os.fsencode(run_dir / "agent-1000000.sock")) > _MAX_SOCKET_PATH:
            raise SetupError(f"{run_dir} is too long for a unix socket in it; give a run directory of at most 88 bytes")
        super().__init__(store, block_bytes, num_layers, num_threads=_NUM_THREADS, sweep_s=_SWEEP_S)
        self._name_prefix = f"kv:{worker_id}:{epoch}"
        self._config = AgentConfig(
            ray_address=ray_address,
            run_dir=run_dir,
            ring_dir=ring_dir,
            ring_bytes=ring_bytes,
            budget_bytes=budget_bytes,
            start_timeout_s=start_timeout_s,
            pin=pin,
            on_gpu=on_gpu,
        )
        self._launch = launch
        self._connect = connect
        self._session: AgentSession | None = None
        self._num_launched = 0
        self._why_not_ready = "the KV agent is starting"
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return self._session.endpoint if self._session is not None else ""

    @property
    def ready(self) -> bool:
        return self._session is not None and not self._session.silence

    @property
    def why_not_ready(self) -> str:
        return self._why_not_ready if self._session is None else self._session.silence

    @property
    def max_lease_bytes(self) -> int:
        return self._session.book.budget_bytes if self._session is not None else 0

    @property
    def session(self) -> AgentSession | None:
        """The present agent, for those who look after processes."""
        return self._session

    async def start(self) -> None:
        """Returns at once; `ready` turns True some seconds later. Raises SetupError if the run directory cannot be made."""
        try:
            self._config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot make the run directory {self._config.run_dir}: {error.strerror}; give another one") from error
        self._threads.start()
        self._supervisor = asyncio.create_task(self._supervise(), name="kv-agent-supervisor")

    async def close(self) -> None:
        self._why_not_ready = "the ray transport is closed"
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._threads.close()

    async def _publish(
        self, lease_id: str, index: int, num_bytes: int, fill: Callable[[Bytes], int], *, ttl_s: float, deadline: float
    ) -> int:
        session = self._running_session()

        async def make() -> tuple[bool, int]:
            slot = await session.take_slot(num_bytes, deadline=deadline)
            try:
                digest = await self._threads.run(fill, slot.bytes)
                await finish(session.use(slot, self._put(session, lease_id, index, slot, ttl_s=ttl_s, deadline=deadline)))
            finally:
                session.give_back(slot)
            return True, digest

        return await session.book.publish(lease_id, index, num_bytes, make, ttl_s=ttl_s, deadline=deadline)

    @asynccontextmanager
    async def _fetched(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> AsyncIterator[Bytes]:
        session = self._running_session()
        async with self._slot_in_time(session, chunk.num_bytes, deadline=deadline) as slot:
            await session.use(slot, session.fetch(endpoint, lease_id, chunk.index, slot, deadline=deadline))
            yield slot.bytes

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        """Measures the path from a source: its agent puts a known pattern into its object store for this one call; `seconds` holds that,
        the pull and the copy into the ring."""
        session = self._running_session()
        num_bytes = max(1, min(PROBE_BYTES, self._config.ring_bytes // 4))
        async with self._slot_in_time(session, num_bytes, deadline=deadline) as slot:
            start = time.monotonic()
            await session.use(slot, session.probe(endpoint, slot, deadline=deadline))
            seconds = max(time.monotonic() - start, 1e-6)
            if not await self._threads.run(np.array_equal, slot.bytes, probe_pattern(num_bytes)):
                raise Unavailable(f"a probe of {num_bytes} bytes from {endpoint} arrived altered; look at the machines' memory")
        return ProbeTiming(num_bytes=num_bytes, seconds=seconds)

    async def drop(self, lease_id: str) -> None:
        session = self._session
        if session is None:
            return
        session.book.drop(lease_id)
        try:
            await finish(session.drop(lease_id))
        except TwostepError as error:
            log.debug("lease %s was not dropped at the KV agent, whose time limit will: %s", lease_id, error.message)

    async def stats(self) -> TransportStats:
        """Returns what the agent holds; nothing if there is none."""
        nothing = TransportStats(num_leases=0, num_objects=0, stored_bytes=0)
        if self._session is None:
            return nothing
        try:
            status = await self._session.status()
        except TwostepError:
            return nothing
        return TransportStats(num_leases=status.num_leases, num_objects=status.num_objects, stored_bytes=status.stored_bytes)

    async def _put(self, session: AgentSession, lease_id: str, index: int, slot: RingSlot, *, ttl_s: float, deadline: float) -> None:
        """Hands a chunk to the agent. The agent's own book may free a lease a moment later than ours: a full agent is asked again until the
        deadline."""
        while True:
            try:
                return await session.put(lease_id, index, slot, ttl_s=ttl_s)
            except ResourceExhausted:
                if time.monotonic() + _RETRY_PUT_S >= deadline:
                    raise
                await asyncio.sleep(_RETRY_PUT_S)

    @asynccontextmanager
    async def _slot_in_time(self, session: AgentSession, num_bytes: int, *, deadline: float) -> AsyncIterator[RingSlot]:
        """Lends a slot to fetch into. Raises as `take_slot`, and ResourceExhausted where waiting for it left too little time."""
        start = time.monotonic()
        slot = await session.take_slot(num_bytes, deadline=deadline)
        try:
            left_s = deadline - time.monotonic()
            if left_s < min(_LEAST_FETCH_S, (deadline - start) / 2):
                raise ResourceExhausted(
                    f"a fetch waited so long for a slot of this worker's own ring that {max(0.0, left_s):.1f} s were left; try again, or "
                    "make --kv-ring-bytes larger"
                )
            yield slot
        finally:
            session.give_back(slot)

    def _running_session(self) -> AgentSession:
        if self._session is None or not self.ready:
            raise Unavailable(f"KV transfer over Ray is not ready: {self.why_not_ready}; try another worker, or later")
        return self._session

    # ---- one agent after another ----------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            session = await self._try_launch()
            if session is None:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            backoff_s = _FIRST_BACKOFF_S
            try:
                self._session = session
                self._why_not_ready = ""
                log.info("KV agent %s is ready, budget %d bytes", session.endpoint, session.book.budget_bytes)
                why = await session.wait_lost()
                self._say_not_ready(f"KV agent {session.endpoint} was lost: {why}")
            finally:
                self._session = None
                await session.close()

    async def _try_launch(self) -> AgentSession | None:
        """Tries once, bounded in time. Returns None, with the reason in the log, if there is no agent."""
        try:
            # An agent costs a second of CPU to find out that Ray is away; a connection costs nothing.
            await self._connect(self._config.ray_address, _CONNECT_S)
            self._num_launched += 1
            return await self._launch(self._config, f"{self._name_prefix}:{self._num_launched}", self._num_launched)
        except (TwostepError, OSError) as error:
            self._say_not_ready(str(error))
            return None

    def _say_not_ready(self, why: str) -> None:
        """Logs why it is not ready, once for each change, not for each try."""
        if why != self._why_not_ready:
            log.warning("KV transfer over Ray is not ready: %s", why)
            self._why_not_ready = why

    async def _sweep(self) -> None:
        """Makes our book of what the agent holds forget what the agent drops by itself."""
        if self._session is not None:
            self._session.book.expire(for_good=False)
