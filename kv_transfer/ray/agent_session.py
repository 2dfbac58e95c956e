"""One KV agent, as its worker sees it: helper process, ring, unix socket, and what it holds. Ends once, and is replaced.

    answers   it is asked twice a second; once a call waits, also whether its object store takes anything
    silent    an answer is overdue (1.5 s; longer where answers are slow), or its network is gone: calls that wait for it get Unavailable,
              and no more are made. It keeps all it holds, and is back with its next answer: a false alarm costs those who waited a
              new attempt, and nothing else
    lost      it has ended, or owed an answer for 10 s: another one is started

The worker never imports ray: everything Ray does happens in the helper and in the actor that it owns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from kv_transfer.object_book import ObjectBook
from kv_transfer.ray.answer_timeouts import AnswerTimeouts
from kv_transfer.ray.child import Child
from kv_transfer.ray.ring import Pin, SharedMemory
from kv_transfer.slots import SlotAllocator
from kv_transfer.transport import PROBE_LEASE
from kv_transfer.waiting import FifoGate
from twostep.errors import InvalidRequest, TwostepError, Unavailable, error_from_grpc
from twostep.process.ending import how_it_ended, oom_kills
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

# A call to the agent is given up so long after the agent itself should have: then the agent hangs, and is replaced.
_GRACE_S = 5.0
_PUT_S = 10.0
_POLL_S = 0.5
_POLL_TIMEOUT_S = 10.0
# Time is counted in pieces of this event loop's own: if it was itself held up, no peer was slow.
_PIECE_S = 0.25
_SILENT_S = 1.5
_MOST_SILENT_S = 8.0
# So long nothing at all may come from another agent while something is waited for.
_STALLED_S = 2.0
_MOST_STALLED_S = 10.0
# To Ray's head, and for an answer of this node's object store, where a source is silent already.
_CONNECT_S = 0.5
_STOP_S = 3.0
# For the memory of the store's first bytes: 4 GiB take a second or two.
_STORE_S = 60.0
# More is not pinned, and takes no memory before it is used: what is on its way at once lies at the store's beginning.
_PINNED_STORE_BYTES = 4 << 30
_WHOLE_STORE = 1 << 62
_MAX_NEAR = 64
_MEET_S = 5.0
_STDERR_LINES = 20

T = TypeVar("T")


@dataclass(slots=True)
class _Near:
    """An agent on this node, which is asked directly. `stub` is None until that is known, or if it is not one."""

    channel: Any = None
    stub: Any = None

    async def close(self) -> None:
        """Lets go of what is being read there."""
        self.stub = None
        if self.channel is not None:
            await self.channel.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How to start an agent. `budget_bytes` 0: 70 % of the node's object store."""

    ray_address: str
    run_dir: Path
    ring_dir: Path
    ring_bytes: int
    budget_bytes: int
    start_timeout_s: float
    pin: Pin | None = None
    on_gpu: bool = False


@dataclass(slots=True, eq=False)
class RingSlot:
    """A part of the ring, uint8 [num_bytes], until `AgentSession.give_back`. `call` is the agent's that uses it. What was fetched may lie
    in the object store instead: then `bytes` is there, and the call `hold` keeps it there."""

    offset: int
    bytes: npt.NDArray[np.uint8]
    call: asyncio.Task[None] | None = None
    hold: Any = None


class AgentSession:
    """Made by `launch`, ended by `close`; every call of an ended session raises Unavailable. Belongs to one event loop."""

    def __init__(
        self,
        endpoint: str,
        ring: SharedMemory,
        socket_path: Path,
        process: Child,
        ray_address: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: by which leases end."""
        self.endpoint = endpoint
        self.process = process
        self.actor_pid = 0
        self.book: ObjectBook[bool] = ObjectBook(0, check=self.check_alive, clock=clock)
        self._ring = ring
        self._slots = SlotAllocator(ring.num_bytes)
        self._slots_freed = FifoGate("a slot of the KV agent's ring")
        self._socket_path = socket_path
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._stderr_reader = asyncio.create_task(self._read_stderr(), name="kv-agent-stderr")
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path}")
        self._stub: Any = kv_pb2_grpc.KvAgentStub(self._channel)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._suspicion = asyncio.Event()
        self._ray_address = ray_address
        self._oom_kills = oom_kills()
        self._silence: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cut_off = False
        self._waiting: dict[object, float] = {}  # calls under way, by when they began
        self._own_timeouts = AnswerTimeouts(least_s=_SILENT_S, most_s=_MOST_SILENT_S)
        self._source_timeouts = AnswerTimeouts(least_s=_STALLED_S, most_s=_MOST_STALLED_S)
        self._unused = asyncio.Event()  # no slot is taken
        self._unused.set()
        self._late_calls: set[asyncio.Task[None]] = set()  # given up, and still using their slots
        self._unpins: list[Callable[[], None]] = []
        # The object store's first bytes, once they are mapped.
        self._store: SharedMemory | None = None
        self._store_identity = ""
        self._near: OrderedDict[str, _Near] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()

    @classmethod
    async def launch(cls, config: AgentConfig, endpoint: str, number: int) -> AgentSession:
        """Starts an agent and waits until it serves, at most `start_timeout_s`. Raises Unavailable, and SetupError for the ring."""
        ring = SharedMemory.create(config.ring_dir, config.ring_bytes)
        socket_path = config.run_dir / f"agent-{number}.sock"
        session: AgentSession | None = None
        try:
            socket_path.unlink(missing_ok=True)
            process = await Child.start(
                [
                    *(sys.executable, "-P", "-m", "kv_transfer.ray.agent"),
                    *("--address", config.ray_address, "--endpoint", endpoint),
                    *("--socket", str(socket_path), "--ring", str(ring.path)),
                    *("--budget-bytes", str(config.budget_bytes), "--start-timeout", str(config.start_timeout_s)),
                ]
            )
            session = cls(endpoint, ring, socket_path, process, config.ray_address)
            if config.pin is not None:
                await session.pin_ring(config.pin)
            await session._wait_ready(config.start_timeout_s)
            session.map_store(config.pin, on_gpu=config.on_gpu)
        except BaseException:
            if session is not None:
                await session.close()
            raise
        finally:
            ring.unlink()
        return session

    async def wait_lost(self) -> str:
        """Watches the agent until it has to be replaced, and says why."""
        exited: asyncio.Future[Any] = asyncio.ensure_future(self.process.wait())
        try:
            while True:
                why = await self._look(exited)
                if why:
                    return why
        finally:
            exited.cancel()

    async def _look(self, exited: asyncio.Future[Any]) -> str:
        """Asks once and pauses, at most until a sign that something is wrong. Says why the agent is lost; empty if it is not."""
        began = time.monotonic()
        # A call has been under way for so long that the object store may be what holds it up.
        waits_long = bool(self._waiting) and began - next(iter(self._waiting.values())) >= _POLL_S
        asking = asyncio.ensure_future(self.status(try_store=waits_long))
        try:
            waited_s = 0.0
            while not asking.done():
                await asyncio.wait({exited, self._lost, asking}, timeout=_PIECE_S, return_when=asyncio.FIRST_COMPLETED)
                if why := self._why_lost(exited):
                    return why
                waited_s += _PIECE_S
                if not asking.done() and waited_s >= self._own_timeouts.timeout_s(self.endpoint, began):
                    self._fall_silent("it does not answer, or its object store does not")
            try:
                asking.result()
            except TwostepError as error:
                return f"its actor does not answer: {error.message}"
        finally:
            asking.cancel()
        now = time.monotonic()
        self._own_timeouts.answered(self.endpoint, now - began, now)
        if not self._cut_off or await self._reaches_ray():
            self._answer_again()
        suspected: asyncio.Future[Any] = asyncio.ensure_future(self._suspicion.wait())
        try:
            await asyncio.wait({exited, suspected, self._lost}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            suspected.cancel()
        self._suspicion.clear()
        return self._why_lost(exited)

    def _why_lost(self, exited: asyncio.Future[Any]) -> str:
        if self._lost.done():
            return self._lost.result()
        if exited.done():
            return f"its helper process {how_it_ended(self.process.returncode, oom_kills_before=self._oom_kills)}{self._last_words()}"
        return ""

    @property
    def silence(self) -> str:
        """Says why nothing should be asked of it now; empty if it answers."""
        return self._silence.result() if self._silence.done() else ""

    def _fall_silent(self, why: str) -> None:
        if not self._silence.done():
            log.warning("KV agent %s: %s; hand-overs take another way until it is back", self.endpoint, why)
            self._silence.set_result(why)

    def _answer_again(self) -> None:
        self._cut_off = False
        if self._silence.done():
            log.info("KV agent %s answers again", self.endpoint)
            self._silence = asyncio.get_running_loop().create_future()

    async def use(self, slot: RingSlot, call: Coroutine[Any, Any, None]) -> None:
        """Waits for a call to the agent that uses the slot. Raises what it raises; Unavailable once the agent is silent. The call goes on
        then, as it does if this is cancelled, and keeps the slot until it ends."""
        silence = self._silence
        slot.call = asyncio.create_task(call)
        # A caller that was cancelled meanwhile does not look at it.
        slot.call.add_done_callback(lambda call: call.cancelled() or call.exception())
        waited: set[asyncio.Future[Any]] = {slot.call, silence}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not slot.call.done():
            raise Unavailable(f"Ray's KV agent is away: {silence.result()}; prefill again")
        slot.call.result()

    async def _look_at_own_side(self, endpoint: str) -> None:
        """Is called when nothing came from a source. Falls silent if that is for want of an object store, or of a network, on this side."""
        reaches, answers = await asyncio.gather(self._reaches_ray(), _in_time(self.status(try_store=True)))
        if not reaches:
            self._cut_off = True
            self._fall_silent(f"neither {endpoint} nor Ray's head can be reached from here")
        elif not answers:
            self._fall_silent("its object store does not answer")

    async def _reaches_ray(self) -> bool:
        return await _in_time(reach(self._ray_address, _CONNECT_S))

    async def close(self) -> None:
        """Ends the helper, and with it the actor and its objects; what waits for them gets Unavailable. Idempotent."""
        if not self._lost.done():
            self._lost.set_result("it was closed")
        self.book.drop_all()
        self._slots_freed.pump()
        self.process.close_stdin()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self._channel.close()
        self._stderr_reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._stderr_reader
        self.process.close()
        self._socket_path.unlink(missing_ok=True)
        if self._late_calls:
            await asyncio.wait(self._late_calls)
        while self._background:
            await asyncio.wait(self._background)
        for near in self._near.values():
            await near.close()
        await self._unpin()

    async def take_slot(self, num_bytes: int, *, deadline: float) -> RingSlot:
        """Raises ResourceExhausted at the deadline, InvalidRequest if the ring is too small for it at all, Unavailable."""
        if num_bytes > self._ring.num_bytes:
            raise InvalidRequest(
                f"a chunk of {num_bytes} bytes does not fit the ring of {self._ring.num_bytes}; make the ring larger or chunks smaller"
            )

        def attempt() -> int | None:
            self.check_alive()
            return self._slots.allocate(num_bytes)

        offset = await self._slots_freed.take(attempt, deadline=deadline)
        self._unused.clear()
        return RingSlot(offset, self._ring.bytes[offset : offset + num_bytes])

    def give_back(self, slot: RingSlot) -> None:
        """Frees it, at once or when a call of the agent's that uses it and was given up has ended. Nothing else reads or writes it."""
        call, slot.call = slot.call, None
        if call is not None and not call.done():
            self._late_calls.add(call)
            call.add_done_callback(self._late_calls.discard)
            call.add_done_callback(lambda _: self.give_back(slot))
            return
        if slot.hold is not None:
            slot.hold.cancel()
        self._slots.free(slot.offset)
        self._slots_freed.pump()
        if not self._slots.used_bytes:
            self._unused.set()

    @property
    def ring_used_bytes(self) -> int:
        return self._slots.used_bytes

    async def put(self, lease_id: str, chunk: int, slot: RingSlot, *, ttl_s: float) -> None:
        """Raises what the agent's error says."""
        request = kv_pb2.AgentPutRequest(lease_id=lease_id, chunk=chunk, offset=slot.offset, num_bytes=slot.bytes.size, ttl_s=ttl_s)
        await self._call(lambda: self._stub.Put(request, timeout=_PUT_S))

    async def fetch(self, endpoint: str, lease_id: str, chunk: int, slot: RingSlot, *, deadline: float) -> None:
        """The slot's bytes are the chunk, or garbage; no other process writes them any more when this ends. (If the agent dies meanwhile,
        the object store may: a checksum has to come after the last use.) It ends before the deadline if nothing at all has come from that
        source for a while."""
        while True:
            began, before = time.monotonic(), self._source_timeouts.num_answers(endpoint)
            answer_s = self._source_timeouts.timeout_s(endpoint, began)
            try:
                await self._fetch(endpoint, lease_id, chunk, slot, timeout_s=min(deadline - began, answer_s))
            except Unavailable:
                now = time.monotonic()
                if now - began < answer_s or now >= deadline:
                    raise
                if self._source_timeouts.num_answers(endpoint) != before:
                    # Slow, but not dead: others came.
                    continue
                await self._look_at_own_side(endpoint)
                raise Unavailable(f"nothing came from Ray's KV agent {endpoint} for {answer_s:.1f} s; prefill again") from None
            self._came(endpoint, began)
            return

    async def probe(self, endpoint: str, slot: RingSlot, *, deadline: float) -> None:
        """Fills the slot with the source's pattern. Takes all the time there is, so that the timeout of a slow source is learned."""
        began = time.monotonic()
        await self._fetch(endpoint, PROBE_LEASE, 0, slot, timeout_s=deadline - began)
        self._came(endpoint, began)

    def _came(self, endpoint: str, began: float) -> None:
        now = time.monotonic()
        self._source_timeouts.answered(endpoint, now - began, now)

    async def _fetch(self, endpoint: str, lease_id: str, chunk: int, slot: RingSlot, *, timeout_s: float) -> None:
        timeout_s = max(0.001, timeout_s)
        request = kv_pb2.AgentFetchRequest(
            endpoint=endpoint,
            lease_id=lease_id,
            chunk=chunk,
            offset=slot.offset,
            num_bytes=slot.bytes.size,
            timeout_s=timeout_s,
            store_bytes=0 if self._store is None else self._store.num_bytes,
        )
        self.check_alive()
        if self._store is None:
            await self._call(lambda: self._stub.Fetch(request, timeout=timeout_s + _GRACE_S))
            return
        if (near := self._near_agent(endpoint)).stub is not None:
            if await self._fetch_near(near, request, slot):
                return
            request.near = False
        slot.hold = self._stub.Hold(request, timeout=timeout_s + _GRACE_S)
        self._found(slot, await self._call(slot.hold.read))

    def _found(self, slot: RingSlot, answer: kv_pb2.AgentFetchResponse) -> bool:
        """Returns whether it is in the store."""
        if self._store is None or not answer.HasField("store_offset"):
            return False
        slot.bytes = self._store.bytes[answer.store_offset : answer.store_offset + slot.bytes.size]
        return True

    async def _fetch_near(self, near: _Near, request: kv_pb2.AgentFetchRequest, slot: RingSlot) -> bool:
        """Asks the source's agent itself. Returns False if Ray has to be asked; raises what the agent's error says, and Unavailable after
        `timeout_s`."""
        request.near = True
        slot.hold = near.stub.Hold(request, timeout=request.timeout_s + _GRACE_S)
        try:
            async with asyncio.timeout(request.timeout_s):
                return self._found(slot, await slot.hold.read())
        except TimeoutError:
            raise Unavailable(f"KV agent {request.endpoint} did not answer in {request.timeout_s:.1f} s; prefill again") from None
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                near.stub = None
            elif code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise error_from_grpc(code.name, error.details() or code.name) from None
            return False
        except asyncio.CancelledError:
            self._check_cancelled()
            raise

    def _near_agent(self, endpoint: str) -> _Near:
        """Says at once what is known. Who is met for the first time is asked meanwhile; names are never used twice."""
        near = self._near.get(endpoint)
        if near is None:
            near = self._near[endpoint] = _Near()
            self._spawn(self._meet(endpoint, near))
            if len(self._near) > _MAX_NEAR:
                self._spawn(self._near.popitem(last=False)[1].close())
        self._near.move_to_end(endpoint)
        return near

    async def _meet(self, endpoint: str, near: _Near) -> None:
        request = kv_pb2.AgentNeighbourRequest(endpoint=endpoint, timeout_s=_MEET_S)
        timeout_s = _MEET_S + _GRACE_S
        try:
            neighbour: kv_pb2.AgentNeighbourResponse = await self._call(
                lambda: self._stub.Neighbour(request, timeout=timeout_s), counts=False
            )
        except TwostepError as error:
            log.debug("%s is asked through Ray: %s", endpoint, error.message)
            return
        if neighbour.socket and self._store is not None and neighbour.identity == self._store_identity:
            near.channel = grpc.aio.insecure_channel(f"unix:{neighbour.socket}")
            near.stub = kv_pb2_grpc.KvAgentStub(near.channel)

    async def drop(self, lease_id: str) -> None:
        await self._call(lambda: self._stub.Drop(kv_pb2.AgentDropRequest(lease_id=lease_id), timeout=_GRACE_S))

    async def status(self, *, try_store: bool = False) -> kv_pb2.AgentStatusResponse:
        request = kv_pb2.AgentStatusRequest(try_store=try_store)
        return await self._call(lambda: self._stub.Status(request, timeout=_POLL_TIMEOUT_S), counts=False)

    def check_alive(self) -> None:
        """Raises Unavailable."""
        if self._lost.done():
            raise Unavailable(f"Ray's KV agent is gone: {self._lost.result()}; prefill again")

    async def _call(self, begin: Callable[[], Awaitable[T]], *, counts: bool = True) -> T:
        """Makes one RPC. Raises TwostepErrors only; a call that outlives its own deadline ends the session. `counts`: somebody waits for
        it."""
        self.check_alive()
        call = object()
        if counts:
            self._waiting[call] = time.monotonic()
        try:
            return await begin()
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                # Perhaps a chunk's source is away, perhaps this agent: look at once.
                self._suspicion.set()
                raise Unavailable(f"Ray's KV agent does not serve: {error.details() or code.name}; prefill again") from None
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                if not self._lost.done():
                    self._lost.set_result("it hangs")
                raise Unavailable("Ray's KV agent hangs and is being replaced; prefill again") from None
            raise error_from_grpc(code.name, error.details() or code.name) from None
        except asyncio.CancelledError:
            self._check_cancelled()
            raise
        finally:
            self._waiting.pop(call, None)

    def _check_cancelled(self) -> None:
        """Raises Unavailable if it was not the caller that was cancelled: closing a channel cancels its calls."""
        task = asyncio.current_task()
        if self._lost.done() and (task is None or not task.cancelling()):
            self.check_alive()

    def map_store(self, pin: Pin | None, *, on_gpu: bool) -> None:
        """Begins to; what is fetched meanwhile, or if that fails, comes through the ring."""
        self._spawn(self._map_store(pin, on_gpu=on_gpu))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _map_store(self, pin: Pin | None, *, on_gpu: bool) -> None:
        request = kv_pb2.AgentStoreRequest(num_bytes=_PINNED_STORE_BYTES if on_gpu else _WHOLE_STORE, take_memory=on_gpu)
        try:
            reply: kv_pb2.AgentStoreResponse = await self._call(lambda: self._stub.Store(request, timeout=_STORE_S), counts=False)
            if not reply.path:
                raise OSError("its raylet does not show it; give worker and node one process namespace and one user")
            store = SharedMemory.open(Path(reply.path), num_bytes=reply.num_bytes, identity=reply.identity)
        except (TwostepError, OSError) as error:
            log.warning("the object store is not mapped, so that KV is copied once more on its way: %s", error)
            return
        if pin is not None:
            await self._pin(store, "the object store", pin)
        self._store, self._store_identity = store, reply.identity

    async def pin_ring(self, pin: Pin) -> None:
        await self._pin(self._ring, "the KV agent's ring", pin)

    async def _pin(self, memory: SharedMemory, what: str, pin: Pin) -> None:
        try:
            self._unpins.append(await asyncio.to_thread(pin, memory.bytes))
        except RuntimeError as error:
            log.warning("%s is not pinned, so that KV is copied once more on its way: %s", what, error)

    async def _unpin(self) -> None:
        """Waits until no copy can be under way: a slot is given back when its copy has ended."""
        unpins, self._unpins = self._unpins, []
        if not unpins:
            return
        await self._unused.wait()
        for unpin in unpins:
            try:
                await asyncio.to_thread(unpin)
            except RuntimeError as error:
                log.warning("memory of the KV agent's stays pinned: %s", error)

    async def _wait_ready(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise Unavailable(f"the KV agent did not start in {timeout_s:g} s{self._last_words()}; look at Ray") from None
        try:
            said: dict[str, Any] = json.loads(line or b"{}")
        except ValueError:
            said = {"error": repr(line[:200])}
        if not said.get("ready"):
            raise Unavailable(f"the KV agent did not start: {str(said.get('error', 'it ended'))[:300]}{self._last_words()}; look at Ray")
        self.book.budget_bytes = int(said["budget_bytes"])
        self.actor_pid = int(said["actor_pid"])

    async def _read_stderr(self) -> None:
        # In pieces, not lines: a line has no bound.
        while piece := await self.process.stderr.read(4096):
            self._stderr.extend(line for line in piece.decode("utf-8", "replace").splitlines() if line.strip())

    def _last_words(self) -> str:
        return f" (its last words: {self._stderr[-1][:300]})" if self._stderr else ""


async def _in_time(call: Coroutine[Any, Any, object]) -> bool:
    """Returns whether a call that is short where all is well succeeds."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            await call
    except (TimeoutError, TwostepError):
        return False
    return True


async def reach(ray_address: str, within_s: float) -> None:
    """Makes a connection to Ray's head and nothing more. Raises Unavailable."""
    host, _, port = ray_address.rpartition(":")
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        raise Unavailable(f"Ray does not answer at {ray_address}") from None
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
