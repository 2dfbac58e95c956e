"""KV agents without Ray: the real actor within this process, over an object store that is a file mapped once for all of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kv_transfer.ray import agent_actor
from kv_transfer.ray.agent_actor import KvAgent
from kv_transfer.ray.agent_session import AgentConfig, AgentSession
from kv_transfer.ray.child import Child
from kv_transfer.ray.ring import SharedMemory
from kv_transfer.slots import SlotAllocator

_STORE_BYTES = 256 << 20
# Less Ray keeps elsewhere.
_LEAST_BYTES = 8 << 10
_FREED = 0xEE


class Store:
    """Memory behind a file without a name. What is free again is overwritten: whoever still reads it finds out."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("store")
        os.truncate(self.descriptor, _STORE_BYTES)
        self.memory = SharedMemory(Path(), self.descriptor, _STORE_BYTES).bytes
        self.slots = SlotAllocator(_STORE_BYTES)
        self.most_used = 0

    def put(self, data: Any) -> Ref:
        return Ref(self, np.asarray(data))

    def overwrite(self) -> None:
        self.memory[: self.most_used] = _FREED

    def close(self) -> None:
        os.close(self.descriptor)


class Ref:
    """An object of the store. It is there as long as this or a view of it."""

    def __init__(self, store: Store, data: Any) -> None:
        self._store = store
        self._offset = store.slots.allocate(data.nbytes) if data.nbytes >= _LEAST_BYTES else None
        self._data = data.copy() if self._offset is None else store.memory[self._offset : self._offset + data.nbytes]
        self._data[:] = data
        store.most_used = max(store.most_used, (self._offset or 0) + data.nbytes)
        # What numpy makes a view of, which keeps this alive.
        address, _ = self._data.__array_interface__["data"]
        self.__array_interface__ = self._data.__array_interface__ | {"data": (address, True)}

    def __del__(self) -> None:
        if self._offset is not None:
            self._data[:] = _FREED
            self._store.slots.free(self._offset)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return np.asarray(self)


class RayOfOneProcess:
    """The part of Ray that the actor uses: its store, and other actors by name."""

    def __init__(self, patch: pytest.MonkeyPatch, *, shown: bool = True) -> None:
        """`shown`: workers can map the store."""
        self._actors: dict[str, KvAgent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = Store()
        patch.setattr(
            agent_actor, "ray", SimpleNamespace(put=self._store.put, get=np.asarray if shown else np.array, get_actor=self._handle)
        )

    def launcher(self, clock: Callable[[], float]) -> Callable[[AgentConfig, str, int], Awaitable[AgentSession]]:
        """Returns a `launch` for a RayTransport."""

        async def launch(config: AgentConfig, endpoint: str, number: int) -> AgentSession:
            ring, socket = SharedMemory.create(config.ring_dir, config.ring_bytes), config.run_dir / f"agent-{number}.sock"
            interval = sys.getswitchinterval()
            actor = KvAgent(str(ring.path), str(socket), endpoint, config.budget_bytes, clock=clock)
            sys.setswitchinterval(interval)  # which it takes for its own process
            ring.unlink()
            await actor.serve()
            self._actors[endpoint] = actor
            helper = await Child.start(["cat"])
            task = asyncio.create_task(self._run(endpoint, actor, helper))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            session = AgentSession(endpoint, ring, socket, helper, config.ray_address, clock=clock)
            session.book.budget_bytes = config.budget_bytes
            session.map_store(config.pin, on_gpu=config.on_gpu)
            return session

        return launch

    async def ended(self) -> None:
        """Waits for the actors, whose transports are closed."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._store.close()

    async def _run(self, endpoint: str, actor: KvAgent, helper: Child) -> None:
        """An actor dies with its helper."""
        running = asyncio.create_task(actor.run())
        await helper.wait()
        running.cancel()
        del self._actors[endpoint]
        await actor.stop()
        # It takes its objects along. (No test has those of another meanwhile.)
        self._store.overwrite()

    def _handle(self, endpoint: str, namespace: str) -> Any:
        if endpoint not in self._actors:
            raise ValueError(f"no actor {endpoint}")

        async def call(method: str, **given: Any) -> Any:
            return await getattr(self._actors[endpoint], method)(**given)

        remote = {name: SimpleNamespace(remote=partial(call, name)) for name in ("fetch", "neighbour", "probe")}
        return SimpleNamespace(**remote)
