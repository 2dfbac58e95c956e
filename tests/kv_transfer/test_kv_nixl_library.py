"""The nixl transport over the library itself, host memory to host memory, where the package is installed; and processes that are killed
or stopped while they are read."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import nixl_source
import numpy as np
import pytest

from kv_transfer.nixl.memory import HostMemory
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import DataLoss, TwostepError, Unavailable

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the nixl package is not installed")

# Over TCP a read needs the source's process, so that a stopped one stops it. Other paths within a host do not.
TCP = {"engine_config": "TLS=tcp"}
LARGE = (64, 1 << 20)


@asynccontextmanager
async def transport_of(pool: np.ndarray, *, arena_bytes: int = 1 << 20, **params: str) -> AsyncIterator[NixlTransport]:
    transport = NixlTransport(HostMemory(pool, arena_bytes=arena_bytes, probe_bytes=1 << 20), backend_params=params)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@contextmanager
def other_process(num_blocks: int, block_bytes: int, **params: str) -> Iterator[tuple[subprocess.Popen[str], str, ChunkInfo]]:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, nixl_source.__file__, json.dumps(params), str(num_blocks), str(block_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    try:
        assert process.stdout is not None
        endpoint, fields = json.loads(process.stdout.readline())
        yield process, endpoint, ChunkInfo(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    finally:
        process.kill()
        process.communicate()


def within(seconds: float) -> float:
    return time.monotonic() + seconds


async def arena_holds(transport: NixlTransport, *, anything: bool, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while bool(transport.arena.used_bytes) is not anything:
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.001)
    return True


@pytest.mark.parametrize("block_bytes", [8, 4104, 60_008])
async def test_blocks_of_odd_sizes_arrive_within_a_process_and_both_ways(block_bytes: int) -> None:
    rng = np.random.default_rng(block_bytes)
    pools = [rng.integers(0, 256, (32, block_bytes), np.uint8) for _ in range(2)]
    async with transport_of(pools[0]) as a, transport_of(pools[1]) as b:
        for index, (source, reader) in enumerate(((a, b), (b, a), (a, a))):
            far, near = rng.permutation(32)[:18].reshape(2, 9).tolist()
            wanted = pools[0 if source is a else 1][far].copy()
            chunk = await source.publish(f"l{index}", 0, 0, far, ttl_s=600, deadline=within(60))
            await reader.fetch(source.endpoint, f"l{index}", chunk, near, deadline=within(60))
            np.testing.assert_array_equal(pools[0 if reader is a else 1][near], wanted)
        assert a.arena.used_bytes == b.arena.used_bytes == 0


async def test_another_process_is_probed_and_read() -> None:
    pool = np.zeros((8, 5000), np.uint8)
    with other_process(8, 5000) as (_, endpoint, chunk):
        async with transport_of(pool) as reader:
            probe = await reader.probe(endpoint, deadline=within(60))
            assert probe.num_bytes == 1 << 20
            assert probe.bytes_per_s > 1e6
            with pytest.raises(DataLoss):
                await reader.fetch(
                    endpoint, "a", ChunkInfo(**{**_fields(chunk), "checksum": chunk.checksum ^ 1}), range(8), deadline=within(60)
                )
            await reader.fetch(endpoint, "a", chunk, range(8), deadline=within(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(8, 5000))


async def test_a_source_killed_in_mid_read_is_unavailable_and_another_is_read() -> None:
    pool = np.zeros(LARGE, np.uint8)
    async with transport_of(pool, arena_bytes=256 << 20, **TCP) as reader:
        with other_process(*LARGE, **TCP) as (process, endpoint, chunk):
            await reader.probe(endpoint, deadline=within(60))
            reads = [asyncio.create_task(reader.fetch(endpoint, "a", chunk, range(64), deadline=within(60))) for _ in range(2)]
            assert await arena_holds(reader, anything=True)
            process.kill()
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
            # One that was quicker than the kill is no failure, both are no test.
            assert any(isinstance(o, Unavailable) for o in outcomes), outcomes
            assert all(o is None or isinstance(o, Unavailable) for o in outcomes), outcomes
            with pytest.raises(Unavailable):
                await reader.fetch(endpoint, "a", chunk, range(64), deadline=within(60))
        assert await arena_holds(reader, anything=False)
        with other_process(*LARGE, **TCP) as (_, endpoint, chunk):
            await reader.fetch(endpoint, "a", chunk, range(64), deadline=within(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(*LARGE))


async def test_a_stopped_source_costs_its_calls_their_deadline_and_nothing_later() -> None:
    pool = np.zeros(LARGE, np.uint8)
    async with transport_of(pool, arena_bytes=256 << 20, **TCP) as reader:
        with other_process(*LARGE, **TCP) as (process, endpoint, chunk):
            await reader.probe(endpoint, deadline=within(60))
            read = asyncio.create_task(reader.fetch(endpoint, "a", chunk, range(64), deadline=within(1.0)))
            assert await arena_holds(reader, anything=True)
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable, match="deadline"):
                await read
            assert reader.arena.quarantined_bytes == chunk.num_bytes
            with pytest.raises(Unavailable, match="have not ended"):
                await reader.fetch(endpoint, "a", chunk, range(64), deadline=within(60))
            pool[:] = 7  # somebody else's by now
            process.send_signal(signal.SIGCONT)
            assert await arena_holds(reader, anything=False)
            assert (pool == 7).all()
            await reader.fetch(endpoint, "a", chunk, range(64), deadline=within(60))
            np.testing.assert_array_equal(pool, nixl_source.contents(*LARGE))


async def test_a_source_that_is_gone_is_unavailable_at_once() -> None:
    with other_process(4, 64) as (process, endpoint, chunk):
        process.kill()
        process.wait()
        async with transport_of(np.zeros((4, 64), np.uint8)) as reader:
            for call in (reader.fetch(endpoint, "a", chunk, range(4), deadline=within(60)), reader.probe(endpoint, deadline=within(60))):
                with pytest.raises(TwostepError) as caught:
                    await call
                assert isinstance(caught.value, Unavailable)


def _fields(chunk: ChunkInfo) -> dict[str, object]:
    return {name: getattr(chunk, name) for name in ChunkInfo.__dataclass_fields__}
