"""A KV agent's session as its worker sees it, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kv_pairs import in_s, make_store

from kv_transfer.ray.agent_session import AgentSession
from kv_transfer.ray.child import Child
from kv_transfer.ray.ring import SharedMemory
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import ResourceExhausted, Unavailable
from twostep.worker.life import until


async def test_every_call_of_an_ended_session_is_unavailable(tmp_path: Path) -> None:
    """Also the second step of a transfer that held a slot when the session ended: the source is lost, which is no bug of ours."""
    helper = await Child.start(["cat"])
    ring = SharedMemory.create(tmp_path, 8192)
    session = AgentSession("kv:w:1:1", ring, tmp_path / "agent.sock", helper)
    slot = await session.take_slot(4096, deadline=in_s(60))
    await session.close()
    for call in (
        session.put("lease", 0, slot, ttl_s=1),
        session.fetch("kv:p:1:1", "lease", 0, slot, deadline=in_s(60)),
        session.drop("lease"),
        session.status(),
        session.take_slot(4096, deadline=in_s(60)),
    ):
        with pytest.raises(Unavailable):
            await call
    session.give_back(slot)
    ring.unlink()


async def test_the_ring_is_unpinned_once_nobody_uses_it(tmp_path: Path) -> None:
    """A copy may be under way to a slot that is still taken when the agent is lost."""
    said: list[str] = []

    def pin(memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        said.append(f"pinned {memory.size}")
        return lambda: said.append("unpinned")

    session = await piped_session(tmp_path)
    await session.pin_ring(pin)
    slot = await session.take_slot(4096, deadline=in_s(60))
    closing = asyncio.create_task(session.close())
    done, _ = await asyncio.wait([closing], timeout=0.3)
    assert not done
    assert said == ["pinned 8192"]
    session.give_back(slot)
    await closing
    assert said == ["pinned 8192", "unpinned"]
    await session.close()
    assert len(said) == 2


async def test_a_ring_that_cannot_be_pinned_is_used_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted")

    session = await piped_session(tmp_path)
    await session.pin_ring(refuse)
    assert "not pinned" in caplog.text
    session.give_back(await session.take_slot(4096, deadline=in_s(60)))
    await session.close()


async def test_a_fetch_that_waited_too_long_for_a_slot_blames_its_own_ring(tmp_path: Path, short_dir: Path) -> None:
    """Unavailable would take the transport out of use for this source, which was not even asked."""
    store, session = make_store(64, fill=True), await piped_session(tmp_path)
    transport = RayTransport(store, 64, worker_id="w", epoch=1, ray_address="127.0.0.1:1", run_dir=short_dir, ring_bytes=8192)
    transport._session = session
    chunk = ChunkInfo(index=0, first_block=0, num_blocks=1, num_bytes=64, checksum=0)
    slot, deadline = await session.take_slot(8192, deadline=in_s(60)), in_s(1)
    late = [
        asyncio.ensure_future(call)
        for call in (
            transport.fetch("kv:p:1:1", "lease", chunk, [0], deadline=deadline),
            transport.fetch_bytes("kv:p:1:1", "lease", chunk, deadline=deadline),
            transport.probe("kv:p:1:1", deadline=deadline),
        )
    ]
    await asyncio.sleep(0.6)
    session.give_back(slot)
    for error in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(error, ResourceExhausted), error
        assert "ring" in error.message
    assert session.ring_used_bytes == 0
    # With time left it is the source, or the agent, that is not there.
    with pytest.raises(Unavailable):
        await transport.fetch("kv:p:1:1", "lease", chunk, [0], deadline=in_s(60))
    await session.close()
    await transport.close()


async def piped_session(directory: Path) -> AgentSession:
    """Of an agent that only waits for the end of its input."""
    helper = await Child.start(["cat"])
    ring = SharedMemory.create(directory, 8192)
    ring.unlink()
    return AgentSession("kv:w:1:1", ring, directory / "agent.sock", helper)


async def test_a_worker_killed_while_its_agent_starts_leaves_no_ring(tmp_path: Path) -> None:
    ring = tmp_path / "twostep-1.ring"
    ring.write_bytes(bytes(4096))
    words = ["--address", "127.0.0.1:1", "--endpoint", "kv:w:1:1", "--socket", str(tmp_path / "s"), "--ring", str(ring)]
    helper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kv_transfer.ray.agent", *words, "--budget-bytes", "1", "--start-timeout", "60"),
        stdin=asyncio.subprocess.PIPE,
    )
    assert helper.stdin is not None
    helper.stdin.close()  # as the kernel does it for a worker that is gone
    async with asyncio.timeout(120):
        assert await helper.wait() == 0
    assert not ring.exists()


async def test_a_child_is_told_to_end_by_its_input_and_says_how_it_ended() -> None:
    child = await Child.start(["sh", "-c", "echo ready; read line; echo gone >&2; exit 7"])
    assert await child.stdout.readline() == b"ready\n"
    assert child.returncode is None
    child.close_stdin()
    child.close_stdin()
    assert await asyncio.wait_for(child.wait(), 60) == 7
    assert (await child.stdout.read(), await child.stderr.read()) == (b"", b"gone\n")
    child.kill()


async def test_a_child_that_does_not_listen_is_killed() -> None:
    child = await Child.start(["sleep", "1000"])
    child.kill()
    assert await asyncio.wait_for(child.wait(), 60) == -9


async def test_a_child_that_cannot_be_begun_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        await Child.start(["/nowhere/to/be/found"])


async def test_a_session_leaves_no_pipe_open(tmp_path: Path) -> None:
    """Whatever else still holds the other ends: a process that the helper has begun."""
    before = open_pipes()
    child = await Child.start(["sh", "-c", "sleep 1000 & echo $!; read line"])
    sleeper = int(await child.stdout.readline())
    ring = SharedMemory.create(tmp_path, 8192)
    try:
        session = AgentSession("kv:w:1:1", ring, tmp_path / "agent.sock", child)
        assert len(open_pipes() - before) == 3
        await session.close()
        assert child.returncode is not None
        # A transport closes in the loop's next rounds.
        assert await until(lambda: not open_pipes() - before, 60)
    finally:
        os.kill(sleeper, signal.SIGKILL)
        ring.unlink()


def open_pipes() -> set[tuple[int, str]]:
    """Of this process."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith("pipe:"):
                found.add((int(path.name), target))
    return found


_TALKATIVE_RAY = {
    "ray/__init__.py": "def init(**_):\n    print('(raylet) a node marked dead', flush=True)\n    raise ConnectionError('no cluster')\n",
    "ray/exceptions.py": "class RayError(Exception): pass\n",
    "ray/util/__init__.py": "",
    "ray/util/scheduling_strategies.py": "class NodeAffinitySchedulingStrategy: pass\n",
}


async def test_what_ray_prints_is_not_taken_for_the_agents_word(tmp_path: Path) -> None:
    """Ray tells its drivers on stdout of nodes that it has lost, in the midst of their start."""
    for name, text in _TALKATIVE_RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    flags = ("--address", "h:1", "--endpoint", "e", "--socket", "s", "--ring", str(tmp_path / "ring"), "--budget-bytes", "1")
    helper = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kv_transfer.ray.agent", *flags, "--start-timeout", "1"),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert helper.stdout is not None
    assert helper.stderr is not None
    try:
        # Its standard input stays open meanwhile: at its end it would end.
        said, complaints = await asyncio.wait_for(asyncio.gather(helper.stdout.read(), helper.stderr.read()), 120)
    finally:
        with suppress(ProcessLookupError):
            helper.kill()
        await helper.wait()
    assert json.loads(said) == {"ready": False, "error": "ConnectionError: no cluster"}
    assert b"marked dead" in complaints
