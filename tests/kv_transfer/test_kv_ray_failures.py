"""What the ray transport does when parts of it die: agents, the worker, all of Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from kv_pairs import SOON_S, TTL_S, Side, check_store_empty, in_s, make_store, ray_side, rings_left, running, wait_for_stats, wait_until
from local_ray import LocalRay

from kv_transfer.ray import agent_session
from kv_transfer.ray import transport as ray_transport
from kv_transfer.ray.agent_session import AgentSession, reach
from kv_transfer.ray.answer_timeouts import AnswerTimeouts
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import SetupError, Unavailable

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 64 << 10


# How often the sides below have looked for Ray.
tries = [0]


async def counted(address: str, within_s: float) -> None:
    tries[0] += 1
    await reach(address, within_s)


def make_side(ray: LocalRay, worker_id: str, *, fill: bool = True) -> Side:
    return ray_side(ray, make_store(BLOCK, fill=fill), worker_id=worker_id, connect=counted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept_sides(local_ray: LocalRay) -> AsyncIterator[tuple[Side, Side]]:
    prefill, decode = make_side(local_ray, "p"), make_side(local_ray, "d", fill=False)
    async with running(prefill, decode):
        yield prefill, decode


@pytest_asyncio.fixture(loop_scope="module")
async def sides(kept_sides: tuple[Side, Side]) -> tuple[Side, Side]:
    """A prefill's and a decode's, which every test finds well again after the one before. Each has lease names of its own."""
    for side in kept_sides:
        await wait_until(lambda side=side: side.transport.ready)
    kept_sides[1].store.blocks[:] = 0
    return kept_sides


def session_of(side: Side) -> AgentSession:
    assert isinstance(side.transport, RayTransport)
    assert side.transport.session is not None
    return side.transport.session


def stopped_agents_are_kept(patch: pytest.MonkeyPatch) -> None:
    """However long a test stops an agent, its worker does not take it for one that hangs."""
    patch.setattr(agent_session, "_POLL_TIMEOUT_S", 1000.0)
    patch.setattr(agent_session, "_GRACE_S", 1000.0)
    patch.setattr(AnswerTimeouts, "timeout_s", lambda *_: 1000.0)


async def publish(side: Side, lease: str, blocks: list[int]) -> ChunkInfo:
    return await side.transport.publish(lease, 0, 0, blocks, ttl_s=TTL_S, deadline=in_s(SOON_S))


@pytest.mark.parametrize("victim", ["helper", "actor"])
async def test_killed_source_is_unavailable_and_comes_back_under_a_new_name(sides: tuple[Side, Side], victim: str) -> None:
    prefill, decode = sides
    session = session_of(prefill)
    chunk = await publish(prefill, f"{victim} killed a", [0, 1])
    blocked = asyncio.create_task(prefill.transport.publish(f"{victim} killed b", 0, 0, [0] * 1024, ttl_s=TTL_S, deadline=in_s(1000)))
    await asyncio.sleep(0.05)
    os.kill(session.process.pid if victim == "helper" else session.actor_pid, signal.SIGKILL)

    async def fetched_again_and_again() -> None:
        while True:  # the object may be had for a moment yet
            await decode.transport.fetch(session.endpoint, f"{victim} killed a", chunk, [0, 1], deadline=in_s(1000))

    # Long before their deadlines.
    for call in (fetched_again_and_again(), blocked):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(call, SOON_S)
    await wait_until(lambda: prefill.transport.ready and prefill.transport.endpoint != session.endpoint)
    chunk = await publish(prefill, f"{victim} killed c", [7])
    await decode.transport.fetch(prefill.transport.endpoint, f"{victim} killed c", chunk, [7], deadline=in_s(SOON_S))
    np.testing.assert_array_equal(decode.store.blocks[7], prefill.store.blocks[7])
    assert not psutil.pid_exists(session.actor_pid)
    await prefill.transport.drop(f"{victim} killed c")
    assert (await prefill.transport.stats()).num_objects == 0


async def test_own_agent_lost_while_fetching(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_agents_are_kept(monkeypatch)
    prefill, decode = sides
    chunk = await publish(prefill, "own agent a", [0, 1])
    source, own = session_of(prefill), session_of(decode)
    os.kill(source.actor_pid, signal.SIGSTOP)  # so that the fetch hangs
    fetching = asyncio.create_task(decode.transport.fetch(source.endpoint, "own agent a", chunk, [0, 1], deadline=in_s(1000)))
    await asyncio.sleep(0.2)
    os.kill(own.actor_pid, signal.SIGKILL)
    async with asyncio.timeout(SOON_S):  # long before its deadline
        with pytest.raises(Unavailable):
            await fetching
    os.kill(source.actor_pid, signal.SIGCONT)
    await wait_until(lambda: decode.transport.ready and decode.transport.endpoint != own.endpoint)
    await decode.transport.fetch(source.endpoint, "own agent a", chunk, [0, 1], deadline=in_s(SOON_S))
    await prefill.transport.drop("own agent a")


async def test_hanging_source_ends_at_the_deadline_and_a_cancelled_slot_is_not_reused_early(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_agents_are_kept(monkeypatch)
    prefill, decode = sides
    chunk = await publish(prefill, "hanging source a", [0, 1])
    source, own = session_of(prefill), session_of(decode)
    os.kill(source.actor_pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        # Nothing else would end it.
        with pytest.raises(Unavailable):
            await decode.transport.fetch(source.endpoint, "hanging source a", chunk, [0, 1], deadline=in_s(0.5))
        assert time.monotonic() - start > 0.4
        assert own.ring_used_bytes == 0
        cancelled = asyncio.create_task(decode.transport.fetch(source.endpoint, "hanging source a", chunk, [0, 1], deadline=in_s(1000)))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert own.ring_used_bytes == chunk.num_bytes
    finally:
        os.kill(source.actor_pid, signal.SIGCONT)
    await wait_until(lambda: own.ring_used_bytes == 0)
    assert not decode.store.blocks.any()
    await wait_for_stats(prefill.transport, num_objects=1)
    await prefill.transport.drop("hanging source a")


async def test_hanging_agent_is_replaced(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side, _ = sides
    session = session_of(side)
    os.kill(session.actor_pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(agent_session, "_PUT_S", 0.5)
        with pytest.raises(Unavailable):
            await publish(side, "hanging agent a", [0])
    await wait_until(lambda: side.transport.ready and side.transport.endpoint != session.endpoint)
    await publish(side, "hanging agent b", [0])
    await side.transport.drop("hanging agent b")


_TESTS = str(Path(__file__).parents[1])
_WORKER = """
import asyncio, sys, time
import numpy as np
from pathlib import Path
from kv_transfer.ray.answer_timeouts import AnswerTimeouts
from kv_transfer.ray.transport import RayTransport
sys.path.append(sys.argv[3])
from one_sided import ArrayStore

async def main():
    store = ArrayStore(np.ones((8, 1 << 20), np.uint8))
    transport = RayTransport(store, 1 << 20, worker_id="w", epoch=1, ray_address=sys.argv[1], run_dir=Path(sys.argv[2]))
    await transport.start()
    while not transport.ready:
        await asyncio.sleep(0.02)
    await transport.publish("a", 0, 0, range(8), ttl_s=600, deadline=time.monotonic() + 60)
    assert "ray" not in sys.modules
    print(transport.session.process.pid, transport.session.actor_pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_killed_worker_leaves_no_process_no_object_and_no_ring(local_ray: LocalRay) -> None:
    run_dir = local_ray.directory / "killed"
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", _WORKER, local_ray.address, str(run_dir), _TESTS, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        helper, actor = map(int, (await worker.stdout.readline()).split())
        assert psutil.Process(actor).nice() == psutil.Process(worker.pid).nice(), "a busy machine starves no agent"
        async with asyncio.timeout(SOON_S):
            # Ray takes a second to free those of other tests.
            while (usage := await asyncio.to_thread(local_ray.store_usage)).num_objects != 1:
                pass
        assert usage.num_bytes >= 8 << 20
    finally:
        worker.kill()
        await worker.communicate()
    await wait_until(lambda: not psutil.pid_exists(helper) and not psutil.pid_exists(actor))
    await check_store_empty(local_ray)
    # Others on this machine may be making one, or losing one, at this moment; one that nobody has stays.
    await wait_until(lambda: not rings_left())


async def test_ray_lost_and_back(
    local_ray: LocalRay, sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "kv_transfer")
    monkeypatch.setattr(ray_transport, "_FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(ray_transport, "_MAX_BACKOFF_S", 0.2)
    side, other = sides
    endpoint = side.transport.endpoint
    await publish(side, "ray lost a", [0])
    local_ray.kill()
    try:
        await wait_until(lambda: not side.transport.ready)
        assert side.transport.endpoint == ""
        with pytest.raises(Unavailable):
            await publish(side, "ray lost b", [0])
        await side.transport.drop("ray lost a")
        assert (await side.transport.stats()).num_objects == 0
        before = tries[0]
        await wait_until(lambda: tries[0] >= before + 12)
        said = [r for r in caplog.records if "not ready" in r.message]
        # Each of the two sides, once for each change.
        assert 2 <= len(said) <= 6, [r.message for r in said]
    finally:
        await asyncio.to_thread(local_ray.start)
    await wait_until(lambda: side.transport.ready and other.transport.ready)
    assert side.transport.endpoint != endpoint
    await publish(side, "ray lost c", [0])
    await side.transport.drop("ray lost c")


async def test_without_ray_start_returns_at_once(short_dir: Path) -> None:
    asked = asyncio.Event()

    async def for_ever(address: str, within_s: float) -> None:
        asked.set()
        await asyncio.sleep(1000)

    store, run_dir = make_store(64, fill=True), short_dir / "run"
    transport = RayTransport(store, 64, worker_id="w", epoch=1, ray_address="127.0.0.1:1", run_dir=run_dir, connect=for_ever)
    await transport.start()
    await asyncio.wait_for(asked.wait(), SOON_S)
    assert oct((short_dir / "run").stat().st_mode)[-3:] == "700"
    with pytest.raises(Unavailable):
        await transport.publish("a", 0, 0, [0], ttl_s=1, deadline=in_s(1))
    await transport.drop("a")
    await transport.close()
    assert not transport.ready


async def test_closed_in_the_midst_of_a_search_for_ray_it_leaves_nothing(
    local_ray: LocalRay, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something listens where Ray should be, and never answers: an agent goes on asking it for a minute."""
    # The worker's own look whether anybody is there is the first to connect, and connects once.
    monkeypatch.setattr(ray_transport, "_CONNECT_S", 1000.0)
    connected: list[asyncio.StreamWriter] = []
    host = local_ray.address.rpartition(":")[0]
    silent = await asyncio.start_server(lambda _, writer: connected.append(writer), host, 0)
    address, run_dir = f"{host}:{silent.sockets[0].getsockname()[1]}", short_dir / "run"
    transport = RayTransport(make_store(64, fill=True), 64, worker_id="searching", epoch=1, ray_address=address, run_dir=run_dir)
    try:
        await transport.start()
        await wait_until(lambda: len(connected) >= 2)
        (agent,) = agents_of("searching")
        assert not transport.ready
        await asyncio.wait_for(transport.close(), SOON_S)
        assert not transport.ready
        assert agents_of("searching") == []
        assert not agent.is_running()
        assert list(run_dir.iterdir()) == []
    finally:
        for writer in connected:
            writer.transport.abort()
        silent.close()
        await silent.wait_closed()
    # Others on this machine may be making one, or losing one, at this moment; one that nobody has stays.
    await wait_until(lambda: not rings_left())


def agents_of(worker_id: str) -> list[psutil.Process]:
    """Helper processes that this one has."""
    found = []
    for child in psutil.Process().children():
        # One that ends at this moment has no words.
        with suppress(psutil.NoSuchProcess):
            if any(f"kv:{worker_id}:" in word for word in child.cmdline()):
                found.append(child)
    return found


async def test_agent_that_cannot_join_says_why(
    local_ray: LocalRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/dev/null")
    side = make_side(local_ray, "without-token")
    await side.transport.start()
    await wait_until(lambda: "AuthenticationError" in caplog.text)
    assert not side.transport.ready
    await side.transport.close()
    assert agents_of("without-token") == []
    # Others on this machine may be making one, or losing one, at this moment; one that nobody has stays.
    await wait_until(lambda: not rings_left())


async def test_configuration_errors(tmp_path: Path, short_dir: Path) -> None:
    store = make_store(8192, fill=True)
    with pytest.raises(SetupError, match="ring"):
        RayTransport(store, 8192, worker_id="w", epoch=1, ray_address="127.0.0.1:1", run_dir=short_dir, ring_bytes=4096)
    with pytest.raises(SetupError, match="too long"):
        RayTransport(store, 8192, worker_id="w", epoch=1, ray_address="127.0.0.1:1", run_dir=tmp_path / ("x" * 100))
