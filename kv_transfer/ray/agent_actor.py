"""The KV agent's actor (kv_transfer/agent_actor.py): the code that runs inside a Ray worker process.

    its worker    ──gRPC over a unix socket──▶ Put, Hold, Drop, Status       bytes lie in the ring, or in the store, where it is mapped
    other workers ──the same, on its node────▶ Hold, near                    bytes lie in the store, which they have mapped too
    other agents  ──actor call by name───────▶ fetch(lease_id, chunk)        answered with [ref], in-band, or []

It owns every object it puts, so its death frees them all. Only strs, ints and refs cross Ray's protocol.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import ray
from ray.exceptions import RayError

from kv_transfer.object_book import ObjectBook
from kv_transfer.ray.ring import SharedMemory
from kv_transfer.ray.store_file import StoreFile, find_store
from kv_transfer.transport import PROBE_BYTES, PROBE_LEASE, Bytes, probe_pattern
from kv_transfer.waiting import finish
from twostep.errors import DataLoss, InvalidRequest, NotFound, ResourceExhausted, Unavailable
from twostep.rpc.guard import Guard
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc

NAMESPACE = "twostep"
# Calls of other agents and of the worker that run at once; a worker's ring bounds its own far below that.
MAX_CONCURRENCY = 256

# A copy of a chunk is bound by one processor: what several hand-overs, or one in a hurry, want at once.
_NUM_THREADS = 16
# Looks other agents up by their names, so many at once.
_NUM_LOOKUPS = 4
_SWEEP_S = 0.2
# Less is kept by Ray in the process itself, and never gets to the object store.
_TRIAL_BYTES = 256 << 10
_COLLECT_EVERY = 25
_SWITCH_S = 0.0005
_MAX_PEERS = 256
_MAX_RPCS = 512

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Published:
    """An object of ours. `view` is its memory in the store, where that is mapped and it lies there."""

    ref: Any
    view: Bytes | None


class KvAgent(kv_pb2_grpc.KvAgentServicer):
    """An async actor: its methods run on one event loop, and everything that may block runs in threads."""

    def __init__(
        self, ring_path: str, socket_path: str, endpoint: str, budget_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # How long a thread may keep the interpreter from the event loop; Python's own 5 ms are longer than a chunk takes.
        sys.setswitchinterval(_SWITCH_S)
        self._ring = SharedMemory.open(Path(ring_path))
        self._socket_path = socket_path
        self._endpoint = endpoint
        self._book: ObjectBook[Published] = ObjectBook(budget_bytes, clock=clock)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-agent")
        self._lookups = ThreadPoolExecutor(_NUM_LOOKUPS, thread_name_prefix="kv-agent-lookup")
        # Apart from the others, which may all be waiting for sources.
        self._store_trial = ThreadPoolExecutor(1, thread_name_prefix="kv-agent-store")
        self._peers: OrderedDict[str, Any] = OrderedDict()
        self._store: StoreFile | None = None
        # Probes take memory that no budget counts: one at a time.
        self._probing = asyncio.Semaphore(1)

    async def serve(self) -> int:
        """Opens the unix socket (0600) and returns this process's id."""
        server = grpc.aio.server(interceptors=[Guard(_MAX_RPCS)])
        kv_pb2_grpc.add_KvAgentServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{self._socket_path}")
        await server.start()
        os.chmod(self._socket_path, 0o600)
        self._server = server
        return os.getpid()

    async def stop(self) -> None:
        """Ends the service, where the process goes on."""
        await self._server.stop(None)

    async def run(self) -> None:
        """Drops leases whose time is up. Never returns: its caller learns of the actor's death."""
        sweeps = 0
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._book.expire()
            sweeps += 1
            # A call that failed may leave its ref in a ring of exception and frames, and an idle process would never look for that.
            if sweeps % _COLLECT_EVERY == 0:
                gc.collect()

    async def fetch(self, lease_id: str, chunk: int) -> list[Any]:
        """Answers another agent. The ref travels inside the answer: Ray then keeps count of who borrows it."""
        published = self._book.get(lease_id, chunk)
        return [] if published is None else [published.ref]

    async def neighbour(self) -> list[Any]:
        """Answers another agent: where its worker may ask this one directly, [socket path, the store's identity]; or nothing."""
        store = await self._look_for_store()
        return [] if store is None else [self._socket_path, store.identity]

    async def probe(self, num_bytes: int) -> list[Any]:
        """Answers another agent: the probe pattern, put for the caller alone. Freed once the caller lets go of it."""
        if not 0 < num_bytes <= PROBE_BYTES:
            return []
        async with self._probing:
            return [await self._in_thread(lambda: ray.put(probe_pattern(num_bytes)))]

    # ---- the worker's calls: protobuf in and out; the Guard in front of them maps errors to statuses -----------------------------------

    async def Put(self, request: kv_pb2.AgentPutRequest, context: Any) -> kv_pb2.AgentPutResponse:
        """Copies a slot of the ring into the object store. The copy is over when this returns or raises."""
        data = self._slot(request.offset, request.num_bytes)
        entry = self._book.reserve(request.lease_id, request.chunk, request.num_bytes, ttl_s=request.ttl_s)
        if entry is None:
            raise ResourceExhausted(f"the KV agent's budget of {self._book.budget_bytes} bytes is used up; wait for leases to end")
        try:
            self._book.fill(entry, await self._in_thread(self._put, data))
        except BaseException as error:
            self._book.cancel(entry)
            if isinstance(error, RayError):
                raise Unavailable(f"Ray did not take the chunk ({_first_line(error)}); prefill again") from error
            raise
        return kv_pb2.AgentPutResponse(stored_bytes=self._book.stats.stored_bytes)

    async def Fetch(self, request: kv_pb2.AgentFetchRequest, context: Any) -> kv_pb2.AgentFetchResponse:
        """Copies a chunk of another agent into a slot of the ring, for a worker that has not mapped the store."""
        request.near, request.store_bytes = False, 0
        async with aclosing(self.Hold(request, context)) as answers:
            return await anext(answers)

    async def Hold(self, request: kv_pb2.AgentFetchRequest, context: Any) -> AsyncGenerator[kv_pb2.AgentFetchResponse, None]:
        """Has a chunk of another agent brought into this node's object store. Says where it lies there, and holds it until the worker ends
        the call; or copies it into a slot of the ring, which is not written any more when this answers or raises."""
        if request.near:
            async for response in self._hold_near(request):
                yield response
            return
        slot = self._slot(request.offset, request.num_bytes)
        deadline = time.monotonic() + request.timeout_s
        try:
            async with asyncio.timeout(request.timeout_s):
                peer = await self._peer(request.endpoint)
                # By name: an agent of another version may be of a class that cannot be imported here, and then Ray takes nothing else.
                if request.lease_id == PROBE_LEASE:
                    refs = await peer.probe.remote(num_bytes=request.num_bytes)
                else:
                    refs = await peer.fetch.remote(lease_id=request.lease_id, chunk=request.chunk)
        except TimeoutError:
            raise Unavailable(f"Ray's KV agent {request.endpoint} did not answer in {request.timeout_s:.1f} s; prefill again") from None
        except Exception as error:  # while a peer dies Ray raises more than its own errors, and all of it means the same here
            self._peers.pop(request.endpoint, None)
            raise _source_lost(request.endpoint, error) from error
        if not refs:
            raise _not_here(request)
        try:
            # Not ray.get: one that waits keeps all else of this process from the object store, for a second each time.
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                view = await refs.pop()
            if not isinstance(view, np.ndarray) or view.dtype != np.uint8 or view.shape != slot.shape:
                raise DataLoss("the object is not the chunk that was announced; prefill again")
            offset = None if self._store is None else self._store.offset_of(view, request.store_bytes)
            if offset is None:
                await self._in_thread(np.copyto, slot, view)
            yield kv_pb2.AgentFetchResponse(store_offset=offset)
            if offset is not None:
                await asyncio.Event().wait()  # for the end of the call
        except DataLoss:
            raise
        except Exception as error:
            raise _source_lost(request.endpoint, error) from error
        finally:
            # The view pins the object's memory.
            refs.clear()
            view = None

    async def _hold_near(self, request: kv_pb2.AgentFetchRequest) -> AsyncIterator[kv_pb2.AgentFetchResponse]:
        """Says where a chunk of our own lies in the store, and holds it until the call ends."""
        if request.endpoint != self._endpoint:
            raise Unavailable(f"KV agent {request.endpoint} is not here any more, {self._endpoint} is; prefill again")
        if request.lease_id == PROBE_LEASE:
            async with self._probing:
                published: Published | None = await self._in_thread(lambda: self._put(probe_pattern(min(request.num_bytes, PROBE_BYTES))))
        else:
            published = self._book.get(request.lease_id, request.chunk)
        if published is None:
            raise _not_here(request)
        offset = None
        if published.view is not None and self._store is not None and published.view.size == request.num_bytes:
            offset = self._store.offset_of(published.view, request.store_bytes)
        yield kv_pb2.AgentFetchResponse(store_offset=offset)
        if offset is not None:
            await asyncio.Event().wait()  # for the end of the call

    async def Drop(self, request: kv_pb2.AgentDropRequest, context: Any) -> kv_pb2.AgentDropResponse:
        return kv_pb2.AgentDropResponse(objects=self._book.drop(request.lease_id))

    async def Status(self, request: kv_pb2.AgentStatusRequest, context: Any) -> kv_pb2.AgentStatusResponse:
        """Says what is held. With `try_store` it hangs for as long as this node's object store does."""
        if request.try_store:
            await asyncio.get_running_loop().run_in_executor(self._store_trial, ray.put, np.zeros(_TRIAL_BYTES, np.uint8))
        stats = self._book.stats
        return kv_pb2.AgentStatusResponse(
            endpoint=self._endpoint,
            num_leases=stats.num_leases,
            num_objects=stats.num_objects,
            stored_bytes=stats.stored_bytes,
            budget_bytes=self._book.budget_bytes,
        )

    async def Store(self, request: kv_pb2.AgentStoreRequest, context: Any) -> kv_pb2.AgentStoreResponse:
        """Says where this node's object store can be mapped, if it can. Raises ResourceExhausted where its memory is not to be had."""
        store = await self._look_for_store()
        if store is None:
            return kv_pb2.AgentStoreResponse()
        num_bytes = min(request.num_bytes, store.num_bytes)
        if request.take_memory:
            try:
                await asyncio.get_running_loop().run_in_executor(self._store_trial, store.take_memory, num_bytes)
            except OSError as error:
                raise ResourceExhausted(f"no {num_bytes} bytes for the object store: {error.strerror}; make /dev/shm larger") from error
        return kv_pb2.AgentStoreResponse(path=str(store.path), identity=store.identity, num_bytes=num_bytes)

    async def Neighbour(self, request: kv_pb2.AgentNeighbourRequest, context: Any) -> kv_pb2.AgentNeighbourResponse:
        """Asks another agent, which may be of a version that knows no such question."""
        found: list[Any] = []
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.timeout_s):
                    peer = await self._peer(request.endpoint)
                    found = await peer.neighbour.remote() if hasattr(peer, "neighbour") else []
        except Exception as error:  # as in Hold
            raise _source_lost(request.endpoint, error) from error
        return kv_pb2.AgentNeighbourResponse(socket=found[0], identity=found[1]) if found else kv_pb2.AgentNeighbourResponse()

    async def _look_for_store(self) -> StoreFile | None:
        if self._store is None:
            self._store = await asyncio.get_running_loop().run_in_executor(self._store_trial, _find_store)
        return self._store

    def _put(self, data: Bytes) -> Published:
        """Puts an object into the store. Blocks while it is copied."""
        ref = ray.put(data)
        if self._store is None:
            return Published(ref, None)
        # It does not wait: the object is here. What is small Ray keeps elsewhere.
        view = ray.get(ref)
        return Published(ref, view if self._store.offset_of(view, self._store.num_bytes) is not None else None)

    async def _peer(self, endpoint: str) -> Any:
        """Returns the handle of another agent's actor; names are never used twice, so it is kept. Raises ValueError if there is none."""
        handle = self._peers.get(endpoint)
        if handle is None:
            # Without a GCS this takes a minute. Nothing waits for its end: it touches no memory of ours.
            handle = await asyncio.get_running_loop().run_in_executor(self._lookups, ray.get_actor, endpoint, NAMESPACE)
            self._peers[endpoint] = handle
            if len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
        return handle

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Ends when the thread's work ends, cancelled or not."""

        async def work() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

        return await finish(work())

    def _slot(self, offset: int, num_bytes: int) -> Bytes:
        """Raises InvalidRequest for one that lies outside of the ring."""
        if not 0 < num_bytes <= self._ring.num_bytes or offset + num_bytes > self._ring.num_bytes:
            raise InvalidRequest(f"slot {offset}+{num_bytes} lies outside the ring of {self._ring.num_bytes} bytes")
        return self._ring.bytes[offset : offset + num_bytes]


def _find_store() -> StoreFile | None:
    """Finds the node's object store. Blocks for as long as the store does."""
    return find_store(ray.get(ray.put(np.zeros(_TRIAL_BYTES, np.uint8))), (os.getppid(), os.getpid()))


def _not_here(request: kv_pb2.AgentFetchRequest) -> NotFound:
    return NotFound(f"chunk {request.chunk} of lease {request.lease_id} is not at {request.endpoint}; the lease ended: prefill again")


def _source_lost(endpoint: str, error: Exception) -> Unavailable:
    return Unavailable(f"Ray's KV agent {endpoint} is gone ({type(error).__name__}: {_first_line(error)}); prefill again")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
