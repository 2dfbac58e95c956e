"""Tests of the ray transport when parts of it die: agents, the worker, all of Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from kv_pairs import SOON_S, Pair, Shape, Side, check_store_empty, ray_side, rings_left, running, wait_until
from local_ray import LocalRay

from kv_transfer.ray import transport as ray_transport
from kv_transfer.ray.agent_session import reach
from twostep.errors import SetupError, Unavailable

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 64 << 10


# How often the sides below have looked for Ray.
tries = [0]


async def counted(address: str, within_s: float) -> None:
    tries[0] += 1
    await reach(address, within_s)


def make_side(ray: LocalRay, worker_id: str) -> Side:
    return ray_side(ray.directory, worker_id, Shape(layer_bytes=BLOCK), ray_address=ray.address, connect=counted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept_pair(local_ray: LocalRay) -> AsyncIterator[Pair]:
    pair = Pair(make_side(local_ray, "p"), make_side(local_ray, "d"))
    pair.prefill.fill(7)
    async with running(pair.prefill, pair.decode):
        yield pair


@pytest_asyncio.fixture(loop_scope="module")
async def pair(kept_pair: Pair, request: pytest.FixtureRequest) -> Pair:
    """Which every test finds well again after the one before. Each has lease names of its own."""
    for side in (kept_pair.prefill, kept_pair.decode):
        await wait_until(lambda side=side: side.transport.ready)
    return replace(kept_pair, salt=request.node.name)


@pytest.mark.parametrize("victim", ["helper", "actor"])
async def test_killed_source_is_unavailable_and_comes_back_under_a_new_name(pair: Pair, victim: str) -> None:
    source = pair.prefill.transport
    session, endpoint = source.session, source.endpoint
    chunk = await pair.publish("a", 0, [0, 1])
    blocked = asyncio.create_task(pair.publish("b", 0, [0] * 1024, within_s=1000))
    await asyncio.sleep(0.05)
    os.kill(session.process.pid if victim == "helper" else session.actor_pid, signal.SIGKILL)

    async def fetched_again_and_again() -> None:
        while True:  # the object may be had for a moment yet
            await pair.fetch("a", chunk, [0, 1], within_s=1000, endpoint=endpoint)

    # Long before their deadlines.
    for call in (fetched_again_and_again(), blocked):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(call, SOON_S)
    await wait_until(lambda: source.ready and source.endpoint != endpoint)
    await pair.fetch("c", await pair.publish("c", 0, [7]), [7])
    np.testing.assert_array_equal(pair.decode.read([7]), pair.prefill.read([7]))
    assert not psutil.pid_exists(session.actor_pid)
    await pair.drop("c")
    assert (await source.stats()).num_objects == 0


_TESTS = str(Path(__file__).parents[1])
_WORKER = """
import asyncio, sys, time
import numpy as np
from pathlib import Path
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
    run_dir, rings = local_ray.directory / "killed", set(rings_left())
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
    await wait_until(lambda: rings.issuperset(rings_left()))


async def test_ray_lost_and_back(
    local_ray: LocalRay, pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "kv_transfer")
    monkeypatch.setattr(ray_transport, "_FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr(ray_transport, "_MAX_BACKOFF_S", 0.2)
    source, endpoint = pair.prefill.transport, pair.prefill.transport.endpoint
    await pair.publish("a", 0, [0])
    local_ray.kill()
    try:
        await wait_until(lambda: not source.ready)
        assert source.endpoint == ""
        with pytest.raises(Unavailable):
            await pair.publish("b", 0, [0])
        await pair.drop("a")
        assert (await source.stats()).num_objects == 0
        before = tries[0]
        await wait_until(lambda: tries[0] >= before + 12)
        said = [r for r in caplog.records if "not ready" in r.message]
        # Each of the two sides, once for each change.
        assert 2 <= len(said) <= 6, [r.message for r in said]
    finally:
        await asyncio.to_thread(local_ray.start)
    await wait_until(lambda: source.ready and pair.decode.transport.ready)
    assert source.endpoint != endpoint
    await pair.publish("c", 0, [0])
    await pair.drop("c")


async def test_without_ray_start_returns_at_once(short_dir: Path) -> None:
    asked = asyncio.Event()

    async def for_ever(address: str, within_s: float) -> None:
        asked.set()
        await asyncio.sleep(1000)

    pair = Pair(*[ray_side(short_dir, "w", Shape(), connect=for_ever)] * 2)
    transport = pair.prefill.transport
    await transport.start()
    await asyncio.wait_for(asked.wait(), SOON_S)
    assert modes_in(short_dir) == ["700"]
    with pytest.raises(Unavailable):
        await pair.publish("a", 0, [0], within_s=1)
    await pair.drop("a")
    await transport.close()
    assert not transport.ready


async def test_closed_in_the_midst_of_a_search_for_ray_it_leaves_nothing(
    local_ray: LocalRay, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something listens where Ray should be, and never answers: an agent goes on asking it for a minute."""
    rings = set(rings_left())
    # The worker's own look whether anybody is there is the first to connect, and connects once.
    monkeypatch.setattr(ray_transport, "_CONNECT_S", 1000.0)
    connected: list[asyncio.StreamWriter] = []
    host = local_ray.address.rpartition(":")[0]
    silent = await asyncio.start_server(lambda _, writer: connected.append(writer), host, 0)
    address = f"{host}:{silent.sockets[0].getsockname()[1]}"
    transport = ray_side(short_dir, "searching", Shape(), ray_address=address).transport
    try:
        await transport.start()
        await wait_until(lambda: len(connected) >= 2)
        (agent,) = agents_of("searching")
        assert not transport.ready
        await asyncio.wait_for(transport.close(), SOON_S)
        assert not transport.ready
        assert agents_of("searching") == []
        assert not agent.is_running()
        assert modes_in(short_dir) == ["700"], "there is more than its run directory"
    finally:
        for writer in connected:
            writer.transport.abort()
        silent.close()
        await silent.wait_closed()
    # Others on this machine may be making one, or losing one, at this moment; one that nobody has stays.
    await wait_until(lambda: rings.issuperset(rings_left()))


def modes_in(directory: Path) -> list[str]:
    """Returns the modes of all that is in it, however deep."""
    return [oct(path.stat().st_mode)[-3:] for path in directory.rglob("*")]


def agents_of(worker_id: str) -> list[psutil.Process]:
    """Helper processes that this one has."""
    found = []
    for child in psutil.Process().children():
        # One that ends at this moment has no words.
        with suppress(psutil.NoSuchProcess):
            if any(f"kv:{worker_id}:" in word for word in child.cmdline()):
                found.append(child)
    return found


async def test_configuration_errors(tmp_path: Path, short_dir: Path) -> None:
    with pytest.raises(SetupError, match="ring"):
        ray_side(short_dir, "w", Shape(), ring_bytes=2048)
    with pytest.raises(SetupError, match="too long"):
        ray_side(tmp_path / ("x" * 100), "w", Shape())
