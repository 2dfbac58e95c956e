"""A KV agent's session as its worker sees it, without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kv_pairs import in_s

from kv_transfer.agent_session import AgentSession
from kv_transfer.ring import SharedMemory
from twostep.errors import Unavailable


async def test_every_call_of_an_ended_session_is_unavailable(tmp_path: Path) -> None:
    """Also the second step of a transfer that held a slot when the session ended: the source is lost, which is no bug of ours."""
    helper = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    ring = SharedMemory.create(tmp_path, 8192)
    session = AgentSession("kv:w:1:1", ring, tmp_path / "agent.sock", helper)
    slot = await session.take_slot(4096, deadline=in_s(1))
    await session.close()
    for call in (
        session.put("lease", 0, slot, ttl_s=1),
        session.fetch("kv:p:1:1", "lease", 0, slot, deadline=in_s(1)),
        session.drop("lease"),
        session.status(),
        session.take_slot(4096, deadline=in_s(1)),
    ):
        with pytest.raises(Unavailable):
            await call
    session.give_back(slot)
    ring.unlink()
