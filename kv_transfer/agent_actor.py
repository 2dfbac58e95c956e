"""The KV agent's actor as Ray and other workers know it. A reader imports the class by this module's name before it calls another worker's
agent, of whatever version: name and methods are what workers of different versions have in common, and do not move with the code."""

from __future__ import annotations

from typing import Any

from kv_transfer.ray.agent_actor import KvAgent


class KvAgentActor:
    """An async actor. Only strs, ints and refs cross Ray's protocol."""

    def __init__(self, ring_path: str, socket_path: str, endpoint: str, budget_bytes: int) -> None:
        self._agent = KvAgent(ring_path, socket_path, endpoint, budget_bytes)

    async def serve(self) -> int:
        """Serves its worker, and returns this process's id."""
        return await self._agent.serve()

    async def run(self) -> None:
        """Never returns: its caller learns of the actor's death."""
        await self._agent.run()

    async def fetch(self, lease_id: str, chunk: int) -> list[Any]:
        """Answers another agent: a ref of the chunk, or nothing."""
        return await self._agent.fetch(lease_id, chunk)

    async def neighbour(self) -> list[Any]:
        """Answers another agent: where this one's unix socket is, and the identity of its object store; or nothing."""
        return await self._agent.neighbour()

    async def probe(self, num_bytes: int) -> list[Any]:
        """Answers another agent: a ref of the probe pattern, or nothing."""
        return await self._agent.probe(num_bytes)
