"""The `nixl` transport: across hosts, from one registered pool to another, one-sided.

    publish   1 checksum of the blocks where they lie (thread)
    fetch     piece by piece, several at once:
              1 slot of the arena   2 agent: peer's pool -> slot, one descriptor for each run of blocks   3 agent: slot -> pool, summed
              then the sums compared

The source's process takes no part in a fetch: it keeps the blocks until the lease ends. Pool and arena are registered once, for good. A
read cannot be stopped, so it lands in a slot of the arena and never in the pool: a fetch that gives up (deadline, cancel, a dead peer)
leaves its slot in quarantine until the read has ended, and the target's blocks may be given out again at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_transfer.checksums import chunk_sum
from kv_transfer.nixl.agent import NixlAgent, NixlPeer, NixlRead
from kv_transfer.nixl.endpoint import Descriptors, NixlEndpoint, laid_out
from kv_transfer.nixl.memory import Landing, NixlMemory
from kv_transfer.pool_transport import InPlaceTransport, check_arrived
from kv_transfer.slots import ArenaSlot, StagingArena
from kv_transfer.transport import ChunkInfo, ProbeTiming
from kv_transfer.waiting import FifoGate, finish
from twostep.engine.batch import LayerRange
from twostep.errors import InvalidRequest, SetupError, Unavailable
from twostep.worker.edge import EdgeParts

_NUM_THREADS = 4
_SWEEP_S = 0.1
# After an error the library no longer says when the last byte has landed: so long its memory is let alone. A copy takes milliseconds.
_GRACE_S = 2.0
_PROBE_READS = 4


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of the source's pool, those of ours that they go to, which bytes of each, and how many that are together."""

    far: Sequence[int]
    near: Sequence[int]
    part: slice
    num_bytes: int


class NixlTransport(InPlaceTransport):
    """See kv_transfer.transport for the contract."""

    name = "nixl"
    why_not_ready = "its agent does not run"

    def __init__(
        self,
        memory: NixlMemory,
        *,
        num_layers: int = 1,
        piece_bytes: int = 0,
        backend_params: dict[str, str] | None = None,
        grace_s: float = _GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`piece_bytes`: about how much is read at once; 0: a quarter of the arena. `backend_params`: of NIXL's UCX backend. The
        environment (UCX_TLS, UCX_NET_DEVICES, ...) is the library's own. Raises SetupError."""
        if memory.block_bytes > memory.arena.num_bytes:
            raise SetupError(f"a block of {memory.block_bytes} bytes does not fit an arena of {memory.arena.num_bytes}; lower --block-size")
        super().__init__(
            memory.num_blocks,
            memory.block_bytes,
            num_layers,
            num_threads=_NUM_THREADS,
            sweep_s=_SWEEP_S,
            enter=memory.enter_thread,
            clock=clock,
        )
        self._memory = memory
        self._piece_bytes = piece_bytes or memory.arena.num_bytes // 4
        self._agent = NixlAgent(
            f"twostep-{secrets.token_hex(8)}",
            [memory.pool, memory.arena, memory.probe],
            enter_thread=memory.enter_thread,
            backend_params=backend_params or {},
        )
        self._grace_s = grace_s
        # For those who look after memory too.
        self.arena = StagingArena(memory.arena.num_bytes)
        # By peer: no reader waits behind one that does not answer.
        self._rooms: dict[str, FifoGate] = {}
        # Peers' reads that have not ended though their deadline has passed.
        self._overdue: Counter[str] = Counter()

    @classmethod
    def of_worker(cls, parts: EdgeParts) -> NixlTransport:
        """Raises SetupError."""
        if importlib.util.find_spec("nixl") is None:
            raise SetupError("the nixl package is not installed; pip install 'twostep[nixl]'")
        runner = parts.model.runner
        return cls(NixlMemory.of_runner(runner), num_layers=runner.kv_shape.num_layers)

    @property
    def ready(self) -> bool:
        return self._threads.running and self._agent.running

    async def start(self) -> None:
        """Raises SetupError."""
        await asyncio.to_thread(self._agent.start)
        pool, probe = self._memory.pool, self._memory.probe
        endpoint = NixlEndpoint(
            agent=self._agent.name,
            memory=pool.memory,
            device=pool.device,
            pool_address=pool.address,
            num_blocks=self._memory.num_blocks,
            block_bytes=self._memory.block_bytes,
            probe_address=probe.address,
            probe_bytes=probe.num_bytes,
            metadata=self._agent.metadata,
        )
        self.endpoint = str(endpoint)
        self._threads.start()

    async def close(self) -> None:
        self.endpoint = ""
        await asyncio.to_thread(self._agent.close)
        await self._threads.close()
        self._book.drop_all()

    # ---- the source's side ------------------------------------------------------------------------------------------------

    async def _checksum(self, block_ids: Sequence[int], layers: LayerRange | None, *, deadline: float) -> int:
        return chunk_sum(await self._threads.run(self._memory.block_sums, block_ids, self._part(layers)))

    # ---- the reader's side --------------------------------------------------------------------------------------------------

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> float:
        source = NixlEndpoint.parse(endpoint)
        pieces = self._pieces(chunk.source_blocks, self._check_fetch(chunk, block_ids, source), self._part(chunk.layers))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._fetch_piece(source, piece, deadline)) for piece in pieces]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        landings = [task.result() for task in tasks]
        check_arrived(chunk, chunk_sum([value for landing in landings for value in landing.sums]))
        return sum(landing.seconds for landing in landings)

    def _pieces(self, far: Sequence[int], near: Sequence[int], part: slice) -> list[_Piece]:
        """Returns what is read at once: several make one chunk, so that one lands while another is on its way."""
        each = part.stop - part.start
        at_once = max(1, self._piece_bytes // each)
        count = -(-len(far) // at_once)
        cuts = [len(far) * n // count for n in range(count + 1)] if count else []
        return [_Piece(far[start:stop], near[start:stop], part, (stop - start) * each) for start, stop in pairwise(cuts)]

    async def _fetch_piece(self, source: NixlEndpoint, piece: _Piece, deadline: float) -> Landing:
        far = source.of_blocks(piece.far, piece.part)
        slot = await self._take(source, piece.num_bytes, deadline)
        landing = Landing(self._memory, slot.offset, piece.near, piece.part)
        await self._read(source, far, slot, deadline, landing)
        self._give_back(slot)
        return landing

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        """Takes the best of a few reads of the peer's probe region; the first one connects."""
        source = NixlEndpoint.parse(endpoint)
        self._threads.check()
        far = source.of_probe
        slot = await self._take(source, source.probe_bytes, deadline)
        best = float("inf")
        for _ in range(_PROBE_READS):
            start = time.perf_counter()
            await self._read(source, far, slot, deadline)
            best = min(best, time.perf_counter() - start)
        try:
            await self._threads.run(self._memory.check_probe, slot.offset, source.probe_bytes)
        finally:
            self._give_back(slot)
        return ProbeTiming(num_bytes=source.probe_bytes, seconds=best)

    async def _take(self, source: NixlEndpoint, num_bytes: int, deadline: float) -> ArenaSlot:
        if num_bytes > self.arena.num_bytes:
            raise InvalidRequest(
                f"{num_bytes} bytes do not fit the arena of {self.arena.num_bytes} that nixl reads land in; use another --kv-transfer"
            )

        def attempt() -> ArenaSlot | None:
            if self._overdue[source.agent]:
                raise Unavailable(f"reads from {source.agent} over nixl have not ended by their deadline; prefill on another worker")
            return self.arena.take(source.agent, num_bytes)

        room = self._rooms.setdefault(source.agent, FifoGate("the arena that nixl reads land in"))
        try:
            return await room.take(attempt, deadline=deadline)
        finally:
            if not room.num_waiting and self._rooms.get(source.agent) is room:
                del self._rooms[source.agent]

    async def _read(self, source: NixlEndpoint, far: Descriptors, slot: ArenaSlot, deadline: float, landing: Landing | None = None) -> None:
        """Fills the slot and lets it land. If that fails the slot is given back, once the read has ended. Raises Unavailable."""
        arena = self._memory.arena
        near = laid_out(arena.address + slot.offset, far[:, 1], arena.device)
        read = NixlRead(NixlPeer(source.agent, source.metadata), near, arena.memory, far, source.memory, landing)
        self._agent.start_read(read)
        ended = asyncio.wrap_future(read.ended)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await asyncio.shield(ended)
        except (TimeoutError, asyncio.CancelledError) as why:
            overdue = isinstance(why, TimeoutError)
            if read.abandon():
                self._quarantine(slot, ended, overdue=overdue)
                if not overdue:
                    raise
                raise Unavailable(f"{source.agent} did not let itself be read over nixl by the deadline; prefill again") from None
            # It is being written into our pool this moment.
            try:
                await finish(_outcome(ended))
            except BaseException:
                self._quarantine(slot, ended)
                raise
            if not overdue:
                self._give_back(slot)
                raise
        except BaseException:
            self._quarantine(slot, ended)
            raise

    def _quarantine(self, slot: ArenaSlot, read: asyncio.Future[None], *, overdue: bool = False) -> None:
        self.arena.quarantine(slot)
        self._overdue[slot.owner] += overdue
        self._pump()

        def ended(read: asyncio.Future[None]) -> None:
            self._overdue[slot.owner] -= overdue
            self._overdue += Counter()  # forgets those at zero
            if not read.cancelled() and read.exception() is None:
                self._give_back(slot)
            else:
                read.get_loop().call_later(self._grace_s, self._give_back, slot)

        read.add_done_callback(ended)

    def _give_back(self, slot: ArenaSlot) -> None:
        self.arena.give_back(slot)
        self._pump()

    def _pump(self) -> None:
        for room in self._rooms.values():
            room.pump()


async def _outcome(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)
